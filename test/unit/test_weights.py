"""Weights reach the runtime byte for byte, from the archive or packed, and no range leaves its file."""

import json

import pt2_samples
import pytest
import torch
from test_load import raw

from topo_opt import driver
from topo_opt.errors import InputError, TopoError, UntrustedError
from topo_opt.frontend.archive_scan import scan
from topo_opt.frontend.weights import pack, program_tensors, reference
from topo_opt.runtime.weights import Weights


def tensors_of(name):
    return program_tensors({"f": pt2_samples.export(name)})


def write(folder, source):
    """A bundle folder with nothing but weights."""
    folder.mkdir(exist_ok=True)
    (folder / "weights.json").write_text(json.dumps(source.table))
    if source.writer is not None:
        source.writer(folder / "weights.safetensors")
    return folder


def assert_same(weights, expected):
    assert set(weights) == set(expected)
    for name, value in expected.items():
        got = weights[name]
        assert (got.dtype, got.shape) == (value.dtype, value.shape), name
        assert torch.equal(raw(got), raw(value)), name


@pytest.fixture
def archive(tmp_path):
    return pt2_samples.save("mixed", tmp_path)


@pytest.fixture
def referring(tmp_path, archive):
    return write(tmp_path / "bundle", reference({"f": scan(archive)}, tmp_path / "bundle"))


@pytest.fixture
def packed(tmp_path):
    torch.manual_seed(7)
    return write(tmp_path / "packed", pack(tensors_of("mixed")))


def test_reference_to_the_archive(referring, archive):
    weights = Weights.open(referring)
    program = torch.export.load(archive)
    assert_same(weights, {**program.constants, **program.state_dict})
    assert weights["a.weight"].data_ptr() == weights["b.weight"].data_ptr()
    assert weights["view"].stride() == (16, 1)
    assert weights.fetch("nothing") is None


def test_table_is_deterministic_and_relative(tmp_path, archive):
    tables = [json.dumps(reference({"f": scan(archive)}, tmp_path / "b").table) for _ in range(2)]
    assert tables[0] == tables[1] and str(tmp_path) not in tables[0]


def test_packed(packed):
    weights = Weights.open(packed)
    torch.manual_seed(7)
    assert_same(weights, tensors_of("mixed"))
    assert weights["a.weight"].data_ptr() == weights["b.weight"].data_ptr()
    assert weights["transposed"].stride() == (1, 5)


@pytest.mark.parametrize(
    "value", [torch.randn(3, 5).t(), torch.randn(6, 8)[::2, 1:], torch.tensor(2.5), torch.randn(2, 0)]
)
def test_packing_keeps_values(value, tmp_path):
    tensors = {"w": value, "flag": torch.tensor([True, False, True]), "b": value.bfloat16()}
    assert_same(Weights.open(write(tmp_path / "b", pack(tensors))), tensors)


def test_packed_file_is_plain_safetensors(packed):
    from safetensors.torch import load_file

    expected = Weights.open(packed)
    for name, value in load_file(packed / "weights.safetensors").items():
        assert torch.equal(raw(value), raw(expected[name])) or expected[name].stride() != value.stride()
    assert load_file(packed / "weights.safetensors")["a.weight"].shape == (4, 4)


def test_packing_is_deterministic(tmp_path):
    tensors = tensors_of("mixed")
    files = []
    for names in (sorted(tensors), sorted(tensors, reverse=True)):
        folder = write(tmp_path / names[0], pack({name: tensors[name] for name in names}))
        files.append((folder / "weights.safetensors").read_bytes() + (folder / "weights.json").read_bytes())
    assert files[0] == files[1]


def test_absent_weights(tmp_path):
    source = pack({"w": torch.empty(2, 3, device="meta"), "b": torch.ones(2)})
    assert source.absent == ["w"]
    weights = Weights.open(write(tmp_path / "b", source))
    assert weights.fetch("w") is None and weights.ranges["w"].shape == (2, 3)
    with pytest.raises(InputError, match="exported without it"):
        weights["w"]
    assert torch.equal(weights["b"], torch.ones(2))


def test_weights_by_name_from_another_file(tmp_path, referring):
    from safetensors.torch import save_file

    (tmp_path / "other").mkdir()
    save_file({"a.bias": torch.full((4,), 7.0), "more": torch.ones(1)}, tmp_path / "other" / "w.safetensors")
    for source in (tmp_path / "other", tmp_path / "other" / "w.safetensors"):
        weights = Weights.open(referring, source=source)
        assert torch.equal(weights["a.bias"], torch.full((4,), 7.0)) and "more" in set(weights)
        assert torch.equal(weights["scalar"], Weights.open(referring)["scalar"]), (
            "the rest is the bundle's own"
        )
        assert weights.fetch("nothing") is None
    with pytest.raises(InputError, match=r"no \.safetensors file"):
        Weights.open(referring, source=referring)
    (tmp_path / "bad.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match="cannot be read"):
        Weights.open(referring, source=tmp_path / "bad.safetensors")


def test_packed_file_without_a_table(packed):
    (packed / "weights.json").unlink()
    assert Weights.open(packed)["a.weight"].shape == (4, 4)


def test_moved_archive(tmp_path, referring, archive):
    moved = archive.rename(tmp_path / "moved.pt2")
    with pytest.raises(InputError, match=f"the weight file {archive} cannot be read: No such file") as info:
        Weights.open(referring)["a.bias"]
    assert (
        f"the bundle {referring} takes its weights from that file of {moved.stat().st_size} bytes"
        in info.value.message
    )
    assert (
        "was it moved, or the bundle? say where mixed.pt2 is (--weights PATH, weights=PATH)"
        in info.value.hint
    )
    assert Weights.open(referring, source=moved)["a.bias"].shape == (4,)
    (tmp_path / "there").mkdir()
    moved.rename(tmp_path / "there" / "mixed.pt2")
    assert Weights.open(referring, source=tmp_path / "there")["a.bias"].shape == (4,)


def test_a_bundle_that_was_moved_without_its_archive(tmp_path, referring, archive):
    (tmp_path / "far").mkdir()
    bundle = referring.rename(tmp_path / "far" / "bundle")
    with pytest.raises(InputError, match=f"the weight file {tmp_path}/far/mixed.pt2 cannot be read"):
        Weights.open(bundle)["a.bias"]
    assert Weights.open(bundle, source=archive)["a.bias"].shape == (4,)


def test_several_archives_that_were_moved(tmp_path):
    class One(torch.nn.Module):
        def __init__(self, name):
            super().__init__()
            self.register_buffer(name, torch.full((3,), float(len(name))))
            self.name = name

        def forward(self, x):
            return x + getattr(self, self.name)

    archives = {}
    for name in ("up", "down"):
        torch.export.save(
            torch.export.export(One(name), (torch.ones(3),), strict=False), tmp_path / f"{name}.pt2"
        )
        archives[name] = scan(tmp_path / f"{name}.pt2")
    bundle = write(tmp_path / "bundle", reference(archives, tmp_path / "bundle"))
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "down.pt2").rename(there / "down.pt2")
    one = Weights.open(bundle, source=there / "down.pt2")
    assert (one["up"][0], one["down"][0]) == (2, 4)
    (tmp_path / "up.pt2").rename(there / "up.pt2")
    both = Weights.open(bundle, source=there)
    assert (both["up"][0], both["down"][0]) == (2, 4)


def test_places_of_weights_that_cannot_be_meant(tmp_path, referring, packed, archive):
    with pytest.raises(InputError, match=r"nowhere.pt2, named as the place of the weights, is not there"):
        Weights.open(referring, source=tmp_path / "nowhere.pt2")
    with pytest.raises(InputError, match=r"has no \.safetensors file, nor mixed\.pt2"):
        Weights.open(referring, source=referring)
    with pytest.raises(
        InputError,
        match=r"mixed\.pt2 is named as the place of a model archive, and the bundle refers to none",
    ):
        Weights.open(packed, source=archive)


def test_changed_archive(referring, archive):
    data = bytearray(archive.read_bytes())
    data[-40] ^= 1
    archive.write_bytes(data)
    with pytest.raises(
        InputError,
        match=rf"the weight file {archive} is not the one .* was compiled from: its fingerprint is \w{{12}}..., expected \w{{12}}",
    ) as info:
        Weights.open(referring)["a.bias"]
    assert "has it been written again? say where mixed.pt2 is" in info.value.hint
    archive.write_bytes(data[:-1])
    said = rf"{archive} has {len(data) - 1} bytes, the bundle {referring} was made with one of {len(data)}"
    with pytest.raises(InputError, match=said):
        Weights.open(referring)["a.bias"]


def test_missing_packed_file(packed):
    (packed / "weights.safetensors").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        Weights.open(packed)["a.bias"]


def test_bundle_without_weights(tmp_path):
    assert dict(Weights.open(tmp_path)) == {}


def _change(path, keys, value):
    document = json.loads(path.read_text())
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "keys, value, message",
    [
        (["version"], 2, "version 2"),
        (["files", 0, "path"], "../../etc/passwd", "not a file of the bundle"),
        (["files", 0, "bytes"], -1, "not a size"),
        (["tensors", "a.bias", "offset"], 1 << 40, "leaves its file"),
        (["tensors", "a.bias", "offset"], -16, "not a size"),
        (["tensors", "a.bias", "nbytes"], 12, "leaves its bytes"),
        (["tensors", "a.bias", "shape"], [400], "leaves its bytes"),
        (["tensors", "a.bias", "strides"], [9], "leaves its bytes"),
        (["tensors", "a.bias", "storage_offset"], 1, "leaves its bytes"),
        (["tensors", "a.bias", "file"], 5, "leaves its file"),
        (["tensors", "a.bias", "dtype"], "load", "wrong dtype"),
        (["tensors", "a.bias"], [], "malformed"),
        (["tensors"], [], "malformed"),
    ],
)
def test_malformed_tables(packed, keys, value, message):
    _change(packed / "weights.json", keys, value)
    with pytest.raises((UntrustedError, InputError), match=message):
        Weights.open(packed)


def test_functions_that_disagree(tmp_path):
    class One(torch.nn.Module):
        def __init__(self, size, constant):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(size))
            self.k = torch.tensor(constant)

        def forward(self, x):
            return x * self.w + self.k

    def program(size, constant):
        return torch.export.export(One(size, constant), (torch.ones(size),), strict=False)

    def archive(name, *args):
        torch.export.save(program(*args), tmp_path / f"{name}.pt2")
        return scan(tmp_path / f"{name}.pt2")

    same = {"a": archive("a", 2, [1.0]), "b": archive("b", 2, [1.0])}
    assert len(reference(same, tmp_path / "bundle").table["files"]) == 2
    with pytest.raises(TopoError, match=r"w is float32\[3\] in c\.pt2 and float32\[2\] in a\.pt2"):
        reference({"a": same["a"], "c": archive("c", 3, [1.0])}, tmp_path / "bundle")
    with pytest.raises(TopoError, match="the constant k has one value"):
        reference({"a": same["a"], "d": archive("d", 2, [2.0])}, tmp_path / "bundle")
    with pytest.raises(TopoError, match="the constant k of 'b' has another value"):
        program_tensors({"a": program(2, [1.0]), "b": program(2, [2.0])})


def _seeded(seed: int) -> torch.export.ExportedProgram:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
    return torch.export.export(module, (torch.zeros(2, 16),))


@pytest.mark.parametrize("saved", [False, True])
def test_functions_with_other_weights_under_the_same_names_are_refused(saved: bool, tmp_path) -> None:
    programs = {"a": _seeded(1), "b": _seeded(2), "c": _seeded(1)}
    sources: dict[str, object] = dict(programs)
    if saved:
        for name, program in programs.items():
            sources[name] = tmp_path / f"{name}.pt2"
            torch.export.save(program, sources[name])
    options = driver.Options(topology="cpu", tune="off")
    with pytest.raises(InputError, match=r"0\.weight .*(another in a\.pt2|another value elsewhere)"):
        driver.compile({n: sources[n] for n in "ab"}, options, tmp_path / "two")
    assert not (tmp_path / "two").exists()
    driver.compile({n: sources[n] for n in "ac"}, options, tmp_path / "same")
