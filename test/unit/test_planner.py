"""The planner on graphs whose best plan is known in closed form, and against every plan there is."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from planner_graphs import Builder
from planner_prices import RingPrices

from topo_opt.errors import InputError
from topo_opt.sharding import collective
from topo_opt.sharding.cost import picoseconds
from topo_opt.sharding.cost_reshard import conversion
from topo_opt.sharding.pins import ShardingPin, resolve
from topo_opt.sharding.plan import Plan, PlanOptions, plan, plan_topology
from topo_opt.sharding.plan_functions import join
from topo_opt.sharding.plan_graph import PlanGraph
from topo_opt.sharding.plan_problem import Costs, build
from topo_opt.sharding.plan_result import collectives, idle, named, sharding_plan, sharding_plans
from topo_opt.sharding.rule import Factor
from topo_opt.sharding.solver import FORBIDDEN, solve
from topo_opt.sharding.spec import Mesh
from topo_opt.sharding.strategies import Layout, strategies
from topo_opt.topology import load


def _plan(graph: PlanGraph, prices: RingPrices, **options: object) -> Plan:
    return plan(graph, prices, prices.closeness(), PlanOptions(**options))  # type: ignore[arg-type]


def _mesh(prices: RingPrices, *shape: int) -> Mesh:
    count = 1
    for size in shape:
        count *= size
    return Mesh(tuple(zip("xyz", shape)), prices.devices[:count])


def _kinds(made: Plan) -> list[tuple[str, tuple[int, ...]]]:
    return [(c.step.kind, c.step.axes) for c in collectives(made)]


def _sharding(made: Plan, name: str) -> tuple[tuple[str, ...], ...]:
    number = next(i for i, v in enumerate(made.graph.values) if v.name == name)
    return named(made.fit.layouts[number], made.mesh).dims


# On a ring an all-reduce is a reduce-scatter and an all-gather; what lies between may then be split.
ONE_SUM = ([("all_reduce", (0,))], [("reduce_scatter", (0,)), ("all_gather", (0,))])


def _mlp(rows: int, width: int, hidden: int) -> PlanGraph:
    b = Builder()
    x = b.argument("x", rows, width, kind="input")
    up, down = b.argument("up", hidden, width), b.argument("down", width, hidden)
    h = b.pointwise(b.product(x, up))
    y = b.product(h, down)
    return b.graph(b.pointwise(y, x))


def test_mlp_of_one_row_is_column_then_row_with_one_all_reduce() -> None:
    prices = RingPrices()
    graph = _mlp(1, 4096, 16384)
    made = _plan(graph, prices, mesh=_mesh(prices, 8), whole_results=True)
    assert _sharding(made, "up") == (("x",), ()) and _sharding(made, "down") == ((), ("x",))
    assert _kinds(made) in ONE_SUM
    # Closed form: each device reads an eighth of both matrices and of the hidden row, writes that row twice and reads it
    # twice, reads the whole of x and writes the whole of y; the addition is split.
    weights = 2 * 4096 * 16384 * 2 / 8
    rows = 2 * (4096 + 4 * 16384 / 8 + 4096) + 2 * 3 * 4096 / 8
    reduce = 2 * 7 * (prices.latency + 8192 / 8 / prices.rate)
    assert made.seconds == pytest.approx((weights + rows) / prices.memory_bytes_per_s + reduce, rel=1e-6)


def test_mlp_of_many_rows_splits_the_rows() -> None:
    prices = RingPrices()
    made = _plan(_mlp(1 << 20, 256, 1024), prices, mesh=_mesh(prices, 8))
    assert not _kinds(made)
    assert _sharding(made, "x") == (("x",), ()) and _sharding(made, "up") == ((), ())


def test_mlp_on_two_axes_splits_rows_over_one_and_columns_over_the_other() -> None:
    # Matrices so large that they fit only in halves, rows so many that splitting them is worth it.
    prices = RingPrices(size=4, capacity=3 * 4096 * 16384)
    made = _plan(_mlp(4096, 4096, 16384), prices, mesh=_mesh(prices, 2, 2), memory_limit=240_000_000)
    axes = {a for dims in (_sharding(made, "up"), _sharding(made, "down")) for d in dims for a in d}
    rows = _sharding(made, "pointwise 1")[0]
    assert rows and axes and not axes & set(rows)
    assert _kinds(made) in ([("reduce_scatter", (0,))], [("reduce_scatter", (1,))])
    assert made.fit.memory.total <= 240_000_000


def _attention(rows: int, width: int, heads: int) -> PlanGraph:
    b = Builder()
    depth = width // heads
    x = b.argument("x", rows, width, kind="input")
    q, k, v = (b.project(x, b.argument(n, heads, depth, width)) for n in "qkv")
    y = b.merge(b.attention(q, k, v), b.argument("o", width, heads, depth))
    return b.graph(b.pointwise(y, x))


def test_attention_of_few_rows_splits_heads_with_one_all_reduce() -> None:
    prices = RingPrices()
    made = _plan(_attention(16, 4096, 32), prices, mesh=_mesh(prices, 8), whole_results=True)
    assert [_sharding(made, n)[0] for n in "qkv"] == [("x",)] * 3
    assert _sharding(made, "o") == ((), ("x",), ())
    assert _kinds(made) in ONE_SUM


def test_attention_of_many_rows_gathers_keys_and_values_only() -> None:
    prices = RingPrices(rate=20e9)
    made = _plan(_attention(8192, 1024, 8), prices, mesh=_mesh(prices, 8))
    kinds = [kind for kind, _ in _kinds(made)]
    assert _sharding(made, "q") == ((), (), ())
    assert set(kinds) <= {"all_gather", "all_to_all"} and len(kinds) <= 4


def test_small_operands_are_replicated() -> None:
    b = Builder()
    x = b.argument("x", 1, 64, kind="input")
    scale = b.argument("scale", 1, 64)
    prices = RingPrices()
    made = _plan(
        b.graph(b.pointwise(b.pointwise(x, scale), scale)), prices, mesh=_mesh(prices, 8), whole_results=True
    )
    assert not _kinds(made)
    assert _sharding(made, "pointwise 1") == ((), ())


def test_slow_links_carry_no_collective_of_every_layer() -> None:
    prices = RingPrices(size=4, islands=2, slow_rate=1e9, slow_latency=500e-6)
    b = Builder()
    x = b.argument("x", 1, 4096, kind="input")
    for layer in range(6):
        h = b.pointwise(b.product(x, b.argument(f"{layer}.up", 16384, 4096)))
        x = b.pointwise(b.product(h, b.argument(f"{layer}.down", 4096, 16384)), x)
    made = _plan(b.graph(x), prices)
    for one in collectives(made):
        groups = made.problem.costs.groups(one.step.axes)
        assert all(len({prices.island(d) for d in g}) == 1 for g in groups), one
    assert made.seconds < _plan(b.graph(x), prices, mesh=_mesh(prices, 8)).seconds


def test_throughput_prefers_replicas_of_a_small_model() -> None:
    prices = RingPrices(latency=50e-6)
    made = _plan(_mlp(1, 1024, 4096), prices, objective="throughput")
    assert len(made.mesh.devices) == 1 and made.replicas == 8
    assert made.pace_seconds == pytest.approx(made.seconds / 8)


def test_stages_are_taken_where_links_are_slow_and_memory_is_short() -> None:
    prices = RingPrices(size=1, islands=4, slow_latency=2e-3, capacity=200_000_000)
    b = Builder()
    x = b.argument("x", 1, 4096, kind="input")
    for layer in range(8):
        x = b.product(x, b.argument(f"{layer}.weight", 4096, 4096))
    made = _plan(b.graph(x), prices)
    assert made.stages is not None and len(made.mesh.devices) == 1
    assert all(held <= made.limit for held in made.stages.memory)
    single = _plan(b.graph(x), prices, mesh=_mesh(prices, 1), memory_limit=10**12)
    sends = (len(made.stages.starts) - 1) * (prices.slow_latency + 8192 / prices.slow_rate)
    assert made.seconds == pytest.approx(single.seconds + sends, rel=1e-9)
    with pytest.raises(InputError, match="pipeline"):
        sharding_plan(made)


# -- Every plan there is -------------------------------------------------------------------------------------------------


def _random_graph(rng: random.Random) -> PlanGraph:
    b = Builder()
    rows, widths = rng.choice([1, 4, 6]), [rng.choice([4, 6, 8]) for _ in range(2)]
    live = [b.argument("x", rows, widths[0], kind="input")]
    for step in range(rng.randint(1, 3)):
        source = rng.choice(live)
        width = b.values[source].shape[1]
        same = [v for v in live if b.values[v].shape == b.values[source].shape]
        if rng.random() < 0.6:
            live.append(b.product(source, b.argument(f"w{step}", rng.choice(widths), width)))
        else:
            live.append(b.pointwise(source, rng.choice(same)))
    return b.graph(live[-1])


def _brute_force(graph: PlanGraph, prices: RingPrices, mesh: Mesh) -> int:
    """The least cost over all strategies of all operations and all layouts that a value may lie in, from their definitions."""
    costs, sizes = Costs(mesh, prices), mesh.shape
    choices = [strategies(op, sizes) for op in graph.ops]
    problem = build(graph, costs)

    def convert(source: Layout, target: Layout, nbytes: int) -> int:
        steps = conversion(source, target, sizes)
        if steps is None:
            return FORBIDDEN
        return sum(
            picoseconds(prices.collective(s.kind, -(-nbytes // s.share), costs.groups(s.axes)).seconds)
            for s in steps
        )

    best = FORBIDDEN
    for chosen in itertools.product(*choices):
        total = 0
        for i, strategy in enumerate(chosen):
            own, table = costs.strategies(graph, i)
            total += int(table[own.index(strategy)])
        for number, value in enumerate(graph.values):
            made = [] if value.producer < 0 else [chosen[value.producer].results[0]]
            taken = [chosen[op].operands[position] for op, position in value.uses]
            if problem.value_variables[number] < 0:
                total += sum(convert(made[0], t, value.nbytes) for t in taken)
                continue
            total += min(
                sum(convert(m, lies, value.nbytes) for m in made)
                + sum(convert(lies, t, value.nbytes) for t in taken)
                for lies in problem.value_layouts[number]
            )
        best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_cheaper(seed: int) -> None:
    rng = random.Random(seed)
    prices = RingPrices(
        size=rng.choice([2, 4]),
        islands=2,
        rate=rng.choice([1e6, 1e9]),
        latency=rng.choice([1e-9, 1e-6]),
        slow_rate=1e5,
        memory_bytes_per_s=1e8,
        ops_per_s=rng.choice([1e7, 1e9]),
    )
    mesh = _mesh(prices, *rng.choice([(2,), (4,), (2, 2)]))
    graph = _random_graph(rng)
    found = solve(build(graph, Costs(mesh, prices)).problem)
    assert found.cost == _brute_force(graph, prices, mesh)


# -- What cannot be ------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    prices = RingPrices(capacity=1_000_000)
    with pytest.raises(
        InputError, match=r"'main' does not fit: the smallest plan, on 8 devices, takes 33\.\d+ MB"
    ) as e:
        _plan(_mlp(1, 4096, 16384), prices, stages=False)
    assert "allow 33." in str(e.value) and "900.00 kB" in str(e.value)


def test_a_pin_that_does_not_divide_names_the_nearest_number() -> None:
    prices = RingPrices()
    pins = (ShardingPin.parse("up=x,_"),)
    with pytest.raises(InputError, match=r"dimension 0 of 'up'.* does not divide into 8 parts") as e:
        _plan(_mlp(1, 64, 100), prices, mesh=_mesh(prices, 8), pins=pins)
    assert "the nearest number that divides 100 is 5" in str(e.value)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("nothing.*=x,_", "no tensor matches 'nothing.\\*'"),
        ("up=x", "has 1 dimensions, 'up' is \\[128, 64\\]"),
        ("up=q,_", "splits over 'q'"),
        ("up=x,x", "uses an axis twice"),
    ],
)
def test_faulty_pins(pin: str, message: str) -> None:
    prices = RingPrices()
    with pytest.raises(InputError, match=message):
        _plan(_mlp(1, 64, 128), prices, mesh=_mesh(prices, 8), pins=(ShardingPin.parse(pin),))


@pytest.mark.parametrize("text", ["up", "=x", "up=", "up=x y,_"])
def test_pins_of_another_form(text: str) -> None:
    with pytest.raises(InputError):
        ShardingPin.parse(text)


def test_pins_are_kept() -> None:
    prices = RingPrices()
    pins = (ShardingPin.parse("up=_,x"), ShardingPin.parse("down=x,?"))
    made = _plan(_mlp(1, 4096, 16384), prices, mesh=_mesh(prices, 8), pins=pins)
    assert _sharding(made, "up") == ((), ("x",)) and _sharding(made, "down") == (("x",), ())
    free = _plan(_mlp(1, 4096, 16384), prices, mesh=_mesh(prices, 8))
    assert made.seconds > free.seconds


def test_a_pin_of_an_operator_is_about_its_result_alone() -> None:
    """What is computed on the way, such as a bias in its storage type, bears the operator's name and has other dimensions."""
    prices, b = RingPrices(), Builder()
    x, weight = b.argument("x", 64, 4096, kind="input"), b.argument("weight", 16384, 4096)
    bias = b.pointwise(b.argument("bias", 16384))
    graph = b.graph(b.product(x, weight))
    for value in (graph.values[bias], graph.values[graph.ops[-1].results[0]]):
        value.name = "linear"
    found = resolve((ShardingPin.parse("linear=_,x"),), graph, _mesh(prices, 8))
    assert list(found) == [graph.ops[-1].results[0]]
    for wrong in ("linear=x", "lin*=_,_,x"):
        with pytest.raises(InputError, match="dimensions, 'linear' is"):
            resolve((ShardingPin.parse(wrong),), graph, _mesh(prices, 8))


def test_a_pin_decides_about_the_mesh() -> None:
    """Hidden 100 divides by four devices and not by eight; a small model alone would stay on one."""
    prices = RingPrices()
    pins = (ShardingPin.parse("up=x,_"),)
    made = _plan(_mlp(1, 64, 100), prices, pins=pins, stages=False)
    assert made.mesh.shape[0] in (2, 4) and _sharding(made, "up") == (("x",), ())
    assert any("does not divide into 8 parts" in c.outcome for c in made.candidates)
    assert any("along which there is one device" in c.outcome for c in made.candidates)
    with pytest.raises(InputError, match="no tensor matches 'nothing'"):
        _plan(_mlp(1, 64, 100), prices, pins=(ShardingPin.parse("nothing=x,_"),))
    with pytest.raises(InputError, match="does not divide into"):
        _plan(_mlp(1, 64, 101), prices, pins=pins)


def test_what_idles_is_told() -> None:
    prices = RingPrices()
    given = _plan(_mlp(1, 63, 101), prices, mesh=_mesh(prices, 8))
    assert [subject for subject, _ in idle(given)] == ["x"]
    chosen = _plan(_mlp(1, 63, 101), prices, stages=False)
    assert chosen.devices == 1 and [subject for subject, _ in idle(chosen)] == ["devices"]
    assert not list(idle(_plan(_mlp(1, 4096, 16384), prices, mesh=_mesh(prices, 8))))


def test_disconnected_devices_are_refused() -> None:
    prices = RingPrices(size=2, islands=2)
    near = {pair: rank for pair, rank in prices.closeness().items() if rank[0] == 0}
    with pytest.raises(InputError, match="no links lead from"):
        plan(_mlp(1, 64, 128), prices, near, PlanOptions())


def test_more_devices_than_there_are_is_an_error() -> None:
    with pytest.raises(InputError, match="9 devices, the topology has 8"):
        _plan(_mlp(1, 64, 128), RingPrices(), devices=9)


def test_memory_limit_is_kept_and_the_gap_bounds_the_loss() -> None:
    prices = RingPrices(size=4)
    b = Builder()
    x = b.argument("x", 1024, 1024, kind="input")
    for layer in range(6):
        x = b.product(x, b.argument(f"{layer}.w", 1024, 1024))
    graph = b.graph(x)
    free = _plan(graph, prices, mesh=_mesh(prices, 4))
    limit = free.fit.memory.total // 2
    made = _plan(graph, prices, mesh=_mesh(prices, 4), memory_limit=limit)
    assert made.fit.memory.total <= limit and made.seconds >= free.seconds
    assert made.fit.solution.bound >= free.fit.solution.cost
    assert 0 <= made.gap < 0.2


def test_uneven_factors_are_left_out() -> None:
    factors = (Factor(6, "parallel"), Factor(5, "parallel"), Factor(8, "reduction"))
    b = Builder()
    x, w = b.argument("x", 6, 8), b.argument("w", 5, 8)
    b.product(x, w)
    assert b.ops[0].rule.factors == factors
    assert {s.axes for s in strategies(b.ops[0], (4,))} == {(-1,), (2,)}
    assert {s.axes for s in strategies(b.ops[0], (2,))} == {(-1,), (0,), (2,)}


def test_of_plans_that_are_as_fast_the_one_with_fewest_devices_is_taken() -> None:
    b = Builder()
    x = b.argument("x", 1, 3, kind="input")
    prices = RingPrices()
    made = _plan(b.graph(b.pointwise(x)), prices)
    assert made.devices == 1 and made.mesh.devices == ("gpu0",)


def test_processes_on_a_cpu_share_what_work_there_is() -> None:
    mesh = Mesh((("t", 4),), ("0", "1", "2", "3"))
    made = plan_topology(_mlp(64, 512, 2048), load("cpu"), PlanOptions(mesh=mesh, whole_results=True))
    alone = plan_topology(_mlp(64, 512, 2048), load("cpu"), PlanOptions(mesh=Mesh((("t", 1),), ("0",))))
    # Four processes that split the work are as fast as one; that each does all of it would be four times as slow.
    assert _sharding(made, "up") != ((), ()) or _sharding(made, "x") != ((), ())
    assert alone.seconds <= made.seconds < 4 * alone.seconds


def test_plans_are_deterministic() -> None:
    prices = RingPrices(size=4, islands=2)
    first, second = (_plan(_attention(64, 512, 8), prices) for _ in range(2))
    assert first.mesh == second.mesh and first.fit.solution.choice == second.fit.solution.choice


def test_functions_of_one_model_are_planned_together() -> None:
    prices = RingPrices()
    one, many = _mlp(1, 1024, 4096), _mlp(4096, 1024, 4096)
    joined = join([one, many])
    made = _plan(joined.graph, prices, mesh=_mesh(prices, 8))
    first, second = sharding_plans(made, joined)
    for name in ("up", "down"):
        a, b = (
            next(p.shardings[v.number] for v in f.values if v.name == name)
            for f, p in zip((one, many), (first, second))
        )
        assert a == b
    # The inputs are those of each function by itself, and together they cost no less than each at its best.
    assert sum(v.kind == "input" for v in joined.graph.values) == 2
    apart = [_plan(f, prices, mesh=_mesh(prices, 8)) for f in (one, many)]
    assert made.seconds >= sum(p.seconds for p in apart)
    alike = sharding_plan(apart[0]).shardings[1] == sharding_plan(apart[1]).shardings[1]
    assert alike == (made.seconds == pytest.approx(sum(p.seconds for p in apart)))


def test_functions_that_disagree_about_a_tensor_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"'up' is \[128, 32\] in 'main' and \[128, 64\] in another function"
    ):
        join([_mlp(1, 64, 128), _mlp(1, 32, 128)])


@pytest.mark.parametrize("seed", range(60))
def test_conversions_end_where_they_should(seed: int) -> None:
    """Steps, followed one by one, lead to the target; none makes a part that is not wanted."""
    rng = random.Random(seed)
    sizes = tuple(rng.choice([2, 3]) for _ in range(3))
    source, target = _random_layout(rng), _random_layout(rng)._replace(partial=())
    dims, pending = [list(d) for d in source.dims], set(source.pending)
    steps = conversion(source, target, sizes)
    assert steps is not None
    _cut(dims, target, pending)
    joined = False
    for step in steps:
        axes = list(step.axes)
        if not joined and step.kind not in ("all_reduce", "reduce_scatter"):
            _cut(dims, target, pending)
            joined = True
        parts = math.prod(sizes[a] for d in dims for a in d)
        if step.kind in ("all_reduce", "reduce_scatter"):
            assert set(axes) <= pending and step.share == parts
            pending -= set(axes)
        held = [d for d in dims if d[-len(axes) :] == axes]
        if step.kind in ("all_gather", "all_to_all"):
            assert len(held) == 1
            del held[0][-len(axes) :]
            assert step.share == (
                parts // math.prod(sizes[a] for a in axes) if step.kind == "all_gather" else parts
            )
        if step.kind in ("reduce_scatter", "all_to_all"):
            into = [
                d for d, want in zip(dims, target.dims) if list(want[len(d) : len(d) + len(axes)]) == axes
            ]
            assert into
            into[0].extend(axes)
    # What is left is cutting, which is free: every dimension is a beginning of what it should be.
    assert not pending
    assert all(list(want[: len(have)]) == have for have, want in zip(dims, target.dims))


def test_what_is_priced_is_what_the_partitioner_emits() -> None:
    mesh = Mesh((("x", 2), ("y", 3), ("z", 2)), tuple(map(str, range(12))))
    rng = random.Random(0)
    for _ in range(1000):
        source, target = _random_layout(rng), _random_layout(rng)._replace(partial=())
        steps = conversion(source, target, mesh.shape)
        assert steps is not None
        priced = [(s.kind, {mesh.axes[a][0] for a in s.axes}) for s in steps]
        emitted = collective.steps(named(source, mesh), named(target, mesh))
        assert priced == [(s.kind, {*s.axes}) for s in emitted if s.kind != "all_slice"]


def _cut(dims: list[list[int]], target: Layout, pending: set[int]) -> None:
    for _ in range(3):
        for have, want in zip(dims, target.dims):
            used = pending | {a for d in dims for a in d}
            if list(want[: len(have)]) == have and len(want) > len(have) and want[len(have)] not in used:
                have.append(want[len(have)])


def _random_layout(rng: random.Random) -> Layout:
    dims: list[list[int]] = [[], []]
    partial = []
    for axis in rng.sample(range(3), 3):
        place = rng.choice([0, 1, None, "sum"])
        if place == "sum":
            partial.append(axis)
        elif place is not None:
            dims[place].append(axis)
    return Layout(tuple(map(tuple, dims)), tuple(sorted(partial)))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_leaves_nothing_is_refused(limit: int) -> None:
    with pytest.raises(InputError, match=f"may take {limit} bytes"):
        _plan(_mlp(1, 1024, 4096), RingPrices(), memory_limit=limit)
