"""Keys, the cache, the search and what a choice rests on, with made-up times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch_mlir import ir
from tuning_samples import FakeMeasurer, device, only_kernel, product, sum_of_squares

from topo_opt.codegen.tile_order import neighbours
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.tiles import default_tile
from topo_opt.errors import InputError, UnsupportedError
from topo_opt.tuning import cache, search_space
from topo_opt.tuning.arguments_data import Signature
from topo_opt.tuning.cache import Store, open_store
from topo_opt.tuning.key import Key, canonical, key_of, without_sizes
from topo_opt.tuning.measure import Case
from topo_opt.tuning.records import Entry, Rejected, Timed, file_content, read_content
from topo_opt.tuning.search import SHORT, Problem, Search
from topo_opt.tuning.settings import Settings, device_id
from topo_opt.tuning.subjects import Subject
from topo_opt.tuning.tuner import tune

HERE = device_id(device().model)


def key(m: int = 6, n: int = 200, element: str = "f32") -> Key:
    module = sum_of_squares(m, n, element)
    return key_of(only_kernel(module))


def entry(of: Key, us: float = 5.0, tile=None, **changes) -> Entry:
    found = Entry(
        of, HERE, {"torch": "1", "triton": "2"}, "short", (Timed(tile or {"x": 2, "r": 256, "warps": 1}, us),)
    )
    return replace(found, **changes)


# -- keys ---------------------------------------------------------------------------------------------------------


def test_sizes_change_the_text_and_not_the_structure():
    small, large = key(6, 200), key(6, 400)
    assert small.structure == large.structure and small.text != large.text
    assert (small.sizes, large.sizes) == ((6, 200, 6), (6, 400, 6))
    assert small.distance(large) == 1.0
    assert key(6, 200) == small


def test_types_and_broadcasts_are_structure():
    assert key().structure != key(element="bf16").structure
    assert key().distance(key(element="bf16")) == float("inf")
    assert without_sizes("tensor<1x8xf32>") != without_sizes("tensor<4x8xf32>")


def test_names_and_tiles_are_not_part_of_a_key():
    text = "func @k_1(%arg0: tensor<4xf32>) attributes {topo.kernel = {rows = 3, tile = {x = 1 : i64}}} {call @b}"
    other = "func @k_2(%arg0: tensor<4xf32>) attributes {topo.kernel = {rows = 3}} {call @c}"
    assert canonical(text) == canonical(other)
    assert without_sizes("%12 = d3 4.000000e+00 : bf16, 0xFF, -7") == "%12 = d3 # : bf16, #, #"


def test_what_the_kernel_in_front_writes_is_not_part_of_a_key():
    def attention(index: str, marks: str) -> ir.Module:
        return ir.Module.parse(
            f"""func.func private @k(%q: tensor<2x4xf32>, %k: tensor<8x4xf32>{index}) -> tensor<2x4xf32>
            attributes {{topo.kernel = {{family = "attention", pdl = true, settled = array<i64: {marks}, tile = {{n = 16 : i64}}}}}}
            {{ return %q : tensor<2x4xf32> }}"""
        )

    with ir.Context(), ir.Location.unknown():
        alone = attention("", "0>")
        behind = attention(
            ", %at: tensor<1xi64>", "0, 2>, written = [array<i64: 0, 2, 0>, array<i64: 1, 2, 0>]"
        )
        keys = [key_of(module.body.operations[0].operation) for module in (alone, behind)]
    assert keys[0] == keys[1] and keys[0].sizes == (2, 4, 8, 4, 2, 4)


# -- the cache ----------------------------------------------------------------------------------------------------


def test_an_entry_is_found_again(tmp_path):
    store = open_store(HERE, tmp_path, shipped=False)
    made = entry(key(), versions=store.versions, rejected=(Rejected({"x": 1}, "a race"),))
    store.put(made)
    assert open_store(HERE, tmp_path, shipped=False).exact(key()) == made
    assert store.remarks == []
    assert [p.suffix for p in tmp_path.rglob("*") if p.is_file()] == [".json"]


def test_other_versions_and_devices_are_no_hit(tmp_path):
    store = open_store(HERE, tmp_path, shipped=False)
    store.put(entry(key(), versions=store.versions))
    newer = Store(HERE, tmp_path, versions={**store.versions, "triton": "9"})
    assert newer.exact(key()) is None
    assert newer.same_kernel(key()) is not None
    elsewhere = Store("another", tmp_path, versions=store.versions)
    assert elsewhere.exact(key()) is elsewhere.same_kernel(key()) is elsewhere.nearest(key()) is None


def test_the_nearest_sizes_of_one_structure_are_taken(tmp_path):
    store = Store(HERE, tmp_path, [entry(key(6, 1600)), entry(key(6, 200, "bf16"))])
    store.put(entry(key(6, 800)))
    near = store.nearest(key(6, 200))
    assert near is not None and near.key.sizes == (6, 800, 6)
    assert store.nearest(key(6, 200, "f16")) is None
    assert store.nearest(key(6, 200 << 10)) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"schema": 9, "entries": []}', b'{"schema": 1, "entries": []}',
     b'{"schema": 1, "entries": [{"kernel": 3}]}', b"[" * 100_000],
)  # fmt: skip
def test_a_foreign_file_in_the_cache_is_ignored_with_a_remark(tmp_path, content):
    store = open_store(HERE, tmp_path, shipped=False)
    store.put(entry(key(), versions=store.versions))
    (file,) = (p for p in tmp_path.rglob("*.json"))
    file.write_bytes(content)
    assert store.exact(key()) is None and store.nearest(key(6, 400)) is None
    assert len(store.remarks) == 1 and "is ignored" in store.remarks[0]


@pytest.mark.parametrize(
    "fault",
    [{"timed": []}, {"depth": "deep"}, {"timed": [{"tile": {"x": "1"}, "us": 1}]}, {"timed": [{"tile": {"x": 1}, "us": -1}]},
     {"timed": [{"tile": {"x": True}, "us": 1}]}, {"sizes": [1.5]}, {"versions": [1]}],
)  # fmt: skip
def test_faults_in_entries_are_seen(fault):
    with pytest.raises(ValueError):
        Entry.of_json(entry(key()).as_json() | fault)


def test_a_cache_that_cannot_be_written_is_a_remark(tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    store = Store(HERE, place / "cache")
    store.put(entry(key()))
    assert "can't be written" in store.remarks[0]


def test_files_and_bundles_are_read_and_their_faults_are_errors(tmp_path):
    made = entry(key())
    cache.write_file(tmp_path / cache.FILE, [made])
    assert cache.read_file(tmp_path) == cache.read_file(tmp_path / cache.FILE) == [made]
    (tmp_path / cache.FILE).write_text("{}")
    with pytest.raises(InputError, match="no tuning data"):
        cache.read_file(tmp_path)
    with pytest.raises(InputError, match="No such file"):
        open_store(HERE, None, [tmp_path / "missing.json"])


def test_a_file_does_not_depend_on_the_order_of_its_entries():
    entries = [entry(key(6, n)) for n in (200, 400)]
    content = file_content(entries)
    assert content == file_content(entries[::-1])
    read = read_content(json.loads(json.dumps(content)))
    assert [e.key.sizes for e in read] == [(6, 200, 6), (6, 400, 6)]
    assert all(e in entries for e in read)
    (brief,) = file_content([replace(entries[0], timed=entries[0].timed * 3)], brief=True)["entries"]
    assert len(brief["timed"]) == 1


def test_shipped_data_is_well_formed():
    from importlib.resources import files

    folder = files("topo_opt.hw_topologies").joinpath("tuning")
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.name.endswith(".json"):
            name = file.name.removesuffix(".json")
            assert {e.device for e in cache.shipped_entries(name)} <= {name}


# -- search spaces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(1, 64), (6, 200), (4096, 1024), (3, 100_000)])
def test_spaces_start_with_the_default_and_have_code(m, n):
    module = sum_of_squares(m, n)
    with module.context, ir.Location.unknown():
        kernel = Kernel(only_kernel(module))
        tiles = search_space.candidates(kernel)
        assert tiles[0] == default_tile(kernel)
        assert 3 <= len(tiles) <= 40
        assert len({tuple(sorted(t.items())) for t in tiles}) == len(tiles)
        for tile in tiles[:12]:
            assert search_space.lower(kernel, tile).num_warps == tile["warps"]


def test_neighbours_differ_in_little_and_stay_within_limits():
    found = neighbours({"m": 16, "warps": 1, "stages": 1, "pack": 4})
    assert {"m": 32, "warps": 1, "stages": 1, "pack": 4} in found
    assert {"m": 32, "warps": 2, "stages": 1, "pack": 4} in found
    assert all(t["warps"] >= 1 and t["stages"] >= 1 and t["pack"] == 4 for t in found)


def test_a_tile_of_other_sizes_is_fitted_into_the_space():
    space = [{"x": 1, "warps": 4}, {"x": 4, "warps": 4}, {"x": 4, "k": 1}]
    assert search_space.fit({"x": 64, "warps": 4}, space) == {"x": 4, "warps": 4}
    assert search_space.fit({"m": 64}, space) is None


# -- the search ---------------------------------------------------------------------------------------------------


def problem(count: int = 5, symbol: str = "k", weight: float = 1.0, lower=lambda tile: None) -> Problem:
    case = Case(symbol, Signature((), ()), None)  # type: ignore[arg-type]
    return Problem(symbol, Key("t", "s", ()), case, [{"x": 1 << i} for i in range(count)], lower, weight)


def searched(answer, depth: str = "short", problems=None, lower=None):
    measurer = FakeMeasurer(lambda job: answer(job.tile["x"], job))
    wanted = problems or [problem(lower=lower or (lambda tile: None))]
    return Search(measurer, depth, 60.0).run(wanted), measurer


def test_the_fastest_candidate_wins_and_finalists_are_measured_again():
    found, measurer = searched(lambda x, job: {4: 5.0}.get(x, 10.0 + x))
    assert found["k"].ordered({"x": 1})[0] == Timed({"x": 4}, 5.0)
    assert found["k"].default_us == 11.0
    assert [j.tile["x"] for j in measurer.jobs if j.careful] == [4, 1, 2]


def test_the_longer_measurement_decides():
    found, _ = searched(lambda x, job: {(2, False): 1.0, (2, True): 9.0}.get((x, job.careful), 5.0 + x / 100))
    assert found["k"].ordered({"x": 1})[0].tile == {"x": 1}


def test_a_gain_within_the_noise_keeps_the_default():
    found, _ = searched(lambda x, job: 10.0 if x == 1 else 9.95)
    assert found["k"].ordered({"x": 1})[0].tile == {"x": 1}


def test_wrong_and_racy_candidates_are_rejected_with_their_reason():
    answers = {2: "result 0 is wrong", 4: "a race", 8: 3.0}
    found, _ = searched(lambda x, job: answers.get(x, 10.0))
    assert found["k"].ordered({"x": 1})[0].tile == {"x": 8}
    assert {r.tile["x"]: r.reason for r in found["k"].rejected.values()} == {
        2: "result 0 is wrong",
        4: "a race",
    }


def test_a_candidate_that_fails_as_finalist_is_out():
    found, _ = searched(lambda x, job: ("a race" if job.careful else 1.0) if x == 2 else 10.0)
    assert found["k"].ordered({"x": 1})[0].tile != {"x": 2}
    assert [r.reason for r in found["k"].rejected.values()] == ["a race"]


def test_tiles_without_code_are_rejected_and_not_measured():
    def lower(tile):
        if tile["x"] == 2:
            raise UnsupportedError("too wide")

    found, measurer = searched(lambda x, job: 10.0 + x, lower=lower)
    assert 2 not in {j.tile["x"] for j in measurer.jobs}
    assert [r.reason for r in found["k"].rejected.values()] == ["no code for it: too wide"]


def test_a_short_search_is_short_and_a_full_one_climbs():
    long = [problem(30)]
    _, measurer = searched(lambda x, job: 1e3 + x, "short", long)
    assert len({j.tile["x"] for j in measurer.jobs}) == SHORT
    peak = 1 << 6
    found, measurer = searched(lambda x, job: 10.0 + abs(x - peak), "full")
    assert {j.tile["x"] for j in measurer.jobs} >= {1, 2, 4, 8, 16, 32, 64}
    assert found["k"].ordered({"x": 1})[0].tile == {"x": peak}


def test_when_time_runs_out_heavy_kernels_have_been_measured():
    both = [problem(8, "light", 1.0), problem(8, "heavy", 2.0)]
    count = iter(range(100))
    found, _ = searched(lambda x, job: 1.0 if next(count) < 6 else None, problems=both)
    assert (len(found["heavy"].timed), len(found["light"].timed)) == (4, 2)
    assert (found["heavy"].skipped, found["light"].skipped) == (4, 6)


# -- choices ------------------------------------------------------------------------------------------------------


def chosen(module, settings: Settings, answer=None, store=None, calls=None):
    """The choice for the only kernel of a module; `answer` as `FakeMeasurer` takes it, None for a machine without GPU."""

    def find(_):
        if calls is not None:
            calls.append(1)
        return (FakeMeasurer(answer), "") if answer else (None, "there is no GPU here")

    with module.context, ir.Location.unknown():
        function = only_kernel(module)
        tuned = tune([Subject("k", function)], device(), settings, find=find, store=store)
        if tuned.mode != "off":
            tile = Kernel(function).attributes["tile"]
            assert dict(tuned.choices["k"].tile) == tile
    return tuned


def fastest(x: int):
    return lambda job: 2.0 if job.tile["x"] == x else 5.0


def test_the_cost_model_is_the_last_resort(tmp_path):
    tuned = chosen(sum_of_squares(), Settings("short", tmp_path, limit_s=9))
    assert tuned.choices["k"].basis == "model" and tuned.sources == {} and tuned.entries() == []
    assert tuned.notes == ["nothing was measured: there is no GPU here"]


def test_measured_then_cached_then_transferred(tmp_path):
    settings = Settings("short", tmp_path, limit_s=9)
    first = chosen(sum_of_squares(), settings, fastest(1))
    choice = first.choices["k"]
    assert (choice.basis, choice.tile["x"], choice.us, choice.default_us) == ("measured", 1, 2.0, 5.0)
    assert first.sources["k"].constexprs["XBLOCK"] == 1
    calls: list[int] = []
    second = chosen(sum_of_squares(), settings, fastest(2), calls=calls).choices["k"]
    assert (second.basis, second.tile, second.us, calls) == ("cache", choice.tile, 2.0, [])
    third = chosen(sum_of_squares(6, 256), settings).choices["k"]
    assert (third.basis, third.tile["x"], third.us) == ("transfer", 1, 2.0)
    assert "6x200x6" in third.note
    assert chosen(sum_of_squares(6, 256), Settings("off")).choices == {}


def test_sizes_far_apart_carry_nothing_over_where_nothing_estimates_a_tile(tmp_path):
    settings = Settings("short", tmp_path, limit_s=9)
    chosen(sum_of_squares(), settings, fastest(1))
    assert chosen(sum_of_squares(6, 300), settings).choices["k"].basis == "transfer"
    assert chosen(sum_of_squares(6, 400), settings).choices["k"].basis == "model"


@pytest.mark.parametrize("rows, basis", [(900, "transfer"), (600, "model")])
def test_a_tile_that_the_cost_model_is_against_does_not_carry_over(tmp_path, rows, basis):
    """With 900 of 1024 rows blocks of 128 x 256 are as many; with 600 they would leave more cores idle."""
    large = {"m": 128, "n": 256, "k": 64, "group": 8, "warps": 8, "stages": 3, "tma": 1}
    measured = product(1024, 4096, 4096)
    store = Store(HERE, tmp_path, [entry(key_of(only_kernel(measured)), tile=large)])
    choice = chosen(product(rows, 4096, 4096), Settings("short", tmp_path), store=store).choices["k"]
    assert choice.basis == basis and (choice.tile == large) == (basis == "transfer")


def test_a_full_search_does_not_rest_on_a_short_one(tmp_path):
    chosen(sum_of_squares(), Settings("short", tmp_path, limit_s=9), fastest(1))
    again = chosen(sum_of_squares(), Settings("full", tmp_path, limit_s=9), fastest(2)).choices["k"]
    assert (again.basis, again.tile["x"]) == ("measured", 2)
    calls: list[int] = []
    assert (
        chosen(sum_of_squares(), Settings("short", tmp_path), fastest(1), calls=calls).choices["k"].basis
        == "cache"
    )
    assert calls == []


def test_what_other_sizes_suggest_is_tried_first(tmp_path):
    module = sum_of_squares(64, 4096)
    far = {"x": 1, "r": 1024, "warps": 16}
    store = Store(HERE, tmp_path, [entry(key(64, 6000), tile=far)])
    order = []
    chosen(
        module, Settings("short", tmp_path, limit_s=9), lambda job: order.append(dict(job.tile)) or 5.0, store
    )
    with module.context:
        assert order[0] == default_tile(Kernel(only_kernel(sum_of_squares(64, 4096))))
    assert order[1] == far


def test_a_search_that_ran_out_of_time_is_not_cached(tmp_path):
    count = iter(range(100))
    tuned = chosen(
        sum_of_squares(), Settings("short", tmp_path, limit_s=9), lambda job: 5.0 if next(count) < 3 else None
    )
    assert "not tried, time ran out" in tuned.choices["k"].note
    assert not list(tmp_path.rglob("*.json"))


def test_when_everything_is_rejected_the_model_decides(tmp_path):
    tuned = chosen(sum_of_squares(), Settings("short", tmp_path, limit_s=9), lambda job: "a race")
    choice = tuned.choices["k"]
    assert choice.basis == "model" and "nothing could be measured: a race" in choice.note and choice.rejected


def test_data_of_other_versions_serves_where_nothing_can_be_measured(tmp_path):
    tile = {"x": 2, "r": 256, "warps": 2}
    store = Store(HERE, None, [entry(key(), tile=tile)])
    choice = chosen(sum_of_squares(), Settings("cache"), store=store).choices["k"]
    assert (choice.basis, choice.tile, choice.note) == ("data", tile, "measured with torch 1 triton 2")


def test_data_without_code_is_passed_over_and_named(tmp_path):
    store = Store(HERE, None, [entry(key(), tile={"nonsense": 2})])
    choice = chosen(sum_of_squares(), Settings("cache"), store=store).choices["k"]
    assert choice.basis == "model" and "no code for the tile {'nonsense': 2} of data" in choice.note


# -- options ------------------------------------------------------------------------------------------------------


def test_modes_follow_the_level_and_options_overrule(monkeypatch, tmp_path):
    assert [Settings.of(level).mode for level in range(4)] == ["off", "cache", "short", "full"]
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))
    assert Settings.of(0, "full") == Settings("full", tmp_path, (), 600.0)
    assert Settings.of(2, folder="here", limit_s=5) == Settings("short", Path("here"), (), 5.0)
    for wrong in ({"mode": "maximal"}, {"limit_s": 0.0}, {"limit_s": float("nan")}):
        with pytest.raises(InputError):
            Settings.of(2, **wrong)


# -- subjects -----------------------------------------------------------------------------------------------------


def test_calls_say_what_comes_from_memory():
    from topo_opt import dialects
    from topo_opt.tuning.subjects import subjects_of

    append = "func.func private @k_append(%c: tensor<4x2xf32>, %x: tensor<1x2xf32>) -> tensor<4x2xf32> attributes {{topo.inout = [array<i64: 0, 0>], {}}} {{ return %c : tensor<4x2xf32> }}"
    look = "func.func private @k_look(%c: tensor<8xf32>, %x: tensor<1x2xf32>) -> tensor<8xf32> attributes {{{}}} {{ return %c : tensor<8xf32> }}"
    text = """
    func.func @main(%cache: tensor<4x2xf32> {topo.kind = "buffer"}, %x: tensor<1x2xf32> {topo.kind = "input"}) -> tensor<8xf32>
        attributes {topo.function = "main"} {
      %0 = func.call @k_append(%cache, %x) : (tensor<4x2xf32>, tensor<1x2xf32>) -> tensor<4x2xf32>
      %1 = tensor.collapse_shape %0 [[0, 1]] : tensor<4x2xf32> into tensor<8xf32>
      %2 = func.call @k_look(%1, %x) : (tensor<8xf32>, tensor<1x2xf32>) -> tensor<8xf32>
      %3 = func.call @k_look(%2, %x) : (tensor<8xf32>, tensor<1x2xf32>) -> tensor<8xf32>
      return %3 : tensor<8xf32>
    }
    """
    kernel = 'topo.kernel = {family = "loops"}'
    module = ir.Module.parse(append.format(kernel) + look.format(kernel) + text, dialects.load(ir.Context()))
    found = {s.symbol: s for s in subjects_of(module.operation, device(), ["k_append", "k_look"])}
    assert {s: f.cold for s, f in found.items()} == {"k_append": {0}, "k_look": {0}}
    assert found["k_look"].weight > found["k_append"].weight
    assert [s.symbol for s in subjects_of(module.operation, device(), ["k_look"])] == ["k_look"]
