"""The cost of collectives equals closed forms where latencies and rates are stated."""

import math

import pytest
from collective_machines import ALPHA, BETA, group, link, machine, mesh, ring, switch, torus

from topo_opt.collectives import CollectiveModel
from topo_opt.errors import InputError
from topo_opt.topology import Topology

SIZES = (1.0, 4096.0, 1e6, 3.7e8)


def seconds(topology: Topology, kind: str, nbytes: float, algorithm: str, groups=None) -> float:
    count = len(topology.compute)
    model = CollectiveModel(topology, library=None)
    return model.cost(kind, nbytes, groups or group(count), algorithm).seconds


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("count", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("build", [ring, switch, mesh])
def test_ring(build, count, nbytes):
    topology = build(count)
    hop = ALPHA + nbytes / (count * BETA)
    assert seconds(topology, "all_reduce", nbytes, "ring") == pytest.approx(2 * (count - 1) * hop, rel=1e-9)
    assert seconds(topology, "all_gather", nbytes, "ring") == pytest.approx((count - 1) * hop, rel=1e-9)
    assert seconds(topology, "reduce_scatter", nbytes, "ring") == pytest.approx((count - 1) * hop, rel=1e-9)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("count", [3, 4, 8, 9, 16])
def test_ring_in_both_directions(count, nbytes):
    hop = ALPHA + nbytes / (2 * count * BETA)
    assert seconds(ring(count), "all_reduce", nbytes, "multi-ring") == pytest.approx(
        2 * (count - 1) * hop, rel=1e-9
    )


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_switch(count, nbytes):
    topology, rounds = switch(count), math.log2(count)
    part = (count - 1) * nbytes / (count * BETA)
    whole = nbytes / BETA
    expected = {
        ("all_reduce", "one-shot"): ALPHA + (count - 1) * whole,
        ("all_reduce", "two-shot"): 2 * (ALPHA + part),
        ("all_reduce", "recursive doubling"): rounds * (ALPHA + whole),
        ("all_reduce", "halving and doubling"): 2 * rounds * ALPHA + 2 * part,
        ("all_reduce", "binomial tree"): 2 * rounds * (ALPHA + whole),
        ("broadcast", "binomial tree"): rounds * (ALPHA + whole),
        ("all_gather", "recursive doubling"): rounds * ALPHA + part,
        ("reduce_scatter", "recursive halving"): rounds * ALPHA + part,
        ("all_gather", "direct"): ALPHA + part,
        ("reduce_scatter", "direct"): ALPHA + part,
        ("all_to_all", "direct"): ALPHA + part,
    }
    for (kind, algorithm), time in expected.items():
        assert seconds(topology, kind, nbytes, algorithm) == pytest.approx(time, rel=1e-9), (kind, algorithm)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_full_mesh(count, nbytes):
    topology = mesh(count)
    assert seconds(topology, "all_reduce", nbytes, "one-shot") == pytest.approx(ALPHA + nbytes / BETA)
    two = 2 * (ALPHA + nbytes / (count * BETA))
    assert seconds(topology, "all_reduce", nbytes, "two-shot") == pytest.approx(two)
    assert seconds(topology, "all_to_all", nbytes, "direct") == pytest.approx(ALPHA + nbytes / (count * BETA))


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 5), (4, 8)])
def test_hierarchical_on_a_torus(rows, columns, nbytes):
    """Reduce-scatter in rows, all-reduce of the parts in columns, all-gather in rows; rings in one direction."""
    model = CollectiveModel(torus(rows, columns), library=None)
    row = tuple(tuple(f"gpu{r * columns + c}" for c in range(columns)) for r in range(rows))
    column = tuple(zip(*row))
    parts = [
        model.cost("reduce_scatter", nbytes, row, "ring").seconds,
        model.cost("all_reduce", nbytes / columns, column, "ring").seconds,
        model.cost("all_gather", nbytes, row, "ring").seconds,
    ]
    closed = 2 * (columns - 1) * (ALPHA + nbytes / (columns * BETA))
    closed += 2 * (rows - 1) * (ALPHA + nbytes / (columns * rows * BETA))
    assert sum(parts) == pytest.approx(closed, rel=1e-9)
    # The whole as one algorithm is found too; its stages may use better algorithms than rings in one direction.
    name = f"hierarchical {columns}x{rows}"
    both = 2 * (columns - 1) * (ALPHA + nbytes / (2 * columns * BETA))
    both += 2 * (rows - 1) * (ALPHA + nbytes / (2 * columns * rows * BETA))
    found = model.cost("all_reduce", nbytes, group(rows * columns), name).seconds
    assert found <= both * (1 + 1e-9)
    if nbytes > 1e6:
        assert found == pytest.approx(both, rel=0.05)


def test_the_best_algorithm_changes_with_the_size():
    model = CollectiveModel(switch(8), library=None)
    small = model.cost("all_reduce", 1024, group(8))
    large = model.cost("all_reduce", 1e9, group(8))
    assert small.algorithm == "one-shot" and small.bottleneck is None and small.bottleneck_kind == "latency"
    assert large.algorithm in ("two-shot", "halving and doubling")
    assert large.bottleneck_kind == "nvlink" and "switch" in large.bottleneck
    assert [time for _, time in large.considered] == sorted(time for _, time in large.considered)
    assert large.considered[0] == (large.algorithm, large.seconds)
    assert "next" in large.why()


def test_bytes_of_every_link():
    model = CollectiveModel(switch(4), library=None)
    cost = model.cost("all_reduce", 4e6, group(4), "ring")
    assert len(cost.link_bytes) == 8
    assert all(nbytes == pytest.approx(6e6) for nbytes in cost.link_bytes.values())
    assert cost.steps == 6


def test_groups_share_links():
    """Two hosts, one link between them: four pairs across share it, two groups inside don't touch it."""
    links = [link(f"gpu{i}", f"s{i // 4}") for i in range(8)] + [link("s0", "s1")]
    model = CollectiveModel(machine(8, links, [("s0", "nvswitch"), ("s1", "nvswitch")]), library=None)
    across = tuple((f"gpu{i}", f"gpu{i + 4}") for i in range(4))
    one = model.cost("all_gather", 8e8, across[:1]).seconds
    four = model.cost("all_gather", 8e8, across)
    assert four.seconds == pytest.approx(4 * one, rel=1e-3)
    assert four.bottleneck in (("s0", "s1"), ("s1", "s0"))
    inside = (tuple(f"gpu{i}" for i in range(4)), tuple(f"gpu{i}" for i in range(4, 8)))
    assert ("s0", "s1") not in model.cost("all_gather", 8e8, inside).link_bytes


def test_a_ring_avoids_a_missing_link():
    """A full mesh without the link between gpu0 and gpu1: rings through other pairs cost what they cost with it."""
    links = [link(f"gpu{a}", f"gpu{b}") for b in range(6) for a in range(b) if (a, b) != (0, 1)]
    whole, cut = CollectiveModel(mesh(6), library=None), CollectiveModel(machine(6, links), library=None)
    args = ("all_reduce", 1e8, group(6), "ring")
    assert cut.cost(*args).seconds == pytest.approx(whole.cost(*args).seconds)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("all_sum", 8, group(2)), "'all_sum' is no collective"),
        (("all_reduce", -8, group(2)), "finite and not negative"),
        (("all_reduce", 8, (("gpu0", "gpu1"), ("gpu2",))), "same size"),
        (("all_reduce", 8, (("gpu0", "gpu0"),)), "'gpu0' is in two places"),
        (("all_reduce", 8, (("gpu0", "gpu9"),)), "no device 'gpu9'"),
        (("send", 8, (("gpu0", "gpu1", "gpu2"),)), "a group is the source and the target"),
        (("all_reduce", 8, group(2), "magic"), "no algorithm 'magic'"),
    ],
)
def test_errors(arguments, words):
    with pytest.raises(InputError, match=words):
        CollectiveModel(ring(4)).cost(*arguments)


def test_nothing_to_do_costs_nothing():
    model = CollectiveModel(ring(4))
    assert model.cost("all_reduce", 1e6, (("gpu0",), ("gpu1",))).seconds == 0.0
    assert model.cost("all_reduce", 0, group(4)).seconds == 0.0
