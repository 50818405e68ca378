"""The cost of collectives equals closed forms where latencies and rates are stated."""

import math

import pytest
from collective_machines import ALPHA, BETA, group, link, machine, mesh, ring, switch, torus

from topo_opt import topology
from topo_opt.collectives import CollectiveModel
from topo_opt.errors import InputError
from topo_opt.topology import Topology

SIZES = (1.0, 4096.0, 1e6, 3.7e8)


def seconds(machine_: Topology, kind: str, nbytes: float, algorithm: str, groups=None) -> float:
    count = len(machine_.compute)
    model = CollectiveModel(machine_, library=None)
    return model.cost(kind, nbytes, groups or group(count), algorithm).seconds


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("count", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("build", [ring, switch, mesh])
def test_ring(build, count, nbytes):
    built = build(count)
    hop = ALPHA + nbytes / (count * BETA)
    assert seconds(built, "all_reduce", nbytes, "ring") == pytest.approx(2 * (count - 1) * hop, rel=1e-9)
    assert seconds(built, "all_gather", nbytes, "ring") == pytest.approx((count - 1) * hop, rel=1e-9)
    assert seconds(built, "reduce_scatter", nbytes, "ring") == pytest.approx((count - 1) * hop, rel=1e-9)


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
    built, rounds = switch(count), math.log2(count)
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
        assert seconds(built, kind, nbytes, algorithm) == pytest.approx(time, rel=1e-9), (kind, algorithm)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_full_mesh(count, nbytes):
    built = mesh(count)
    assert seconds(built, "all_reduce", nbytes, "one-shot") == pytest.approx(ALPHA + nbytes / BETA)
    two = 2 * (ALPHA + nbytes / (count * BETA))
    assert seconds(built, "all_reduce", nbytes, "two-shot") == pytest.approx(two)
    assert seconds(built, "all_to_all", nbytes, "direct") == pytest.approx(ALPHA + nbytes / (count * BETA))


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


def test_without_peer_access_data_go_through_host_memory():
    """Two GPUs on one PCIe switch that can't reach each other: up to the host and down again, over the switch's uplink twice."""
    links = [
        link("gpu0", "sw", 25e9, kind="pcie"),
        link("gpu1", "sw", 25e9, kind="pcie"),
        link("sw", "bridge", 20e9, kind="pcie"),
        link("bridge", "numa", 100e9, kind="fabric"),
    ]
    nodes = [("sw", "pcie_switch"), ("bridge", "root_complex"), ("numa", "numa")]
    access = {"farthest": "LOC", "source": "test"}
    peers = CollectiveModel(machine(2, links, nodes), library=None)
    staged = CollectiveModel(machine(2, links, nodes, peer_access=access), library=None)
    assert ("sw", "bridge") not in peers.cost("all_gather", 2e8, group(2), "ring").link_bytes
    cost = staged.cost("all_gather", 2e8, group(2), "ring")
    for edge in (("gpu0", "sw"), ("sw", "gpu0"), ("gpu1", "sw"), ("sw", "gpu1")):
        assert cost.link_bytes[edge] == pytest.approx(1e8)
    for edge in (("sw", "bridge"), ("bridge", "sw"), ("bridge", "numa"), ("numa", "bridge")):
        assert cost.link_bytes[edge] == pytest.approx(2e8)
    assert cost.bottleneck in (("sw", "bridge"), ("bridge", "sw"))
    assert cost.seconds == pytest.approx(2e8 / 20e9 + 6 * ALPHA)
    limit = {**access, "staged_bytes_per_s": {"value": 5e9, "source": "test"}}
    limited = CollectiveModel(machine(2, links, nodes, peer_access=limit), library=None)
    found = limited.cost("all_gather", 2e8, group(2), "ring")
    assert found.seconds == pytest.approx(1e8 / 5e9 + 6 * ALPHA) and found.bottleneck_kind == "staged"


def test_peer_access_ends_at_a_class():
    """Peer access up to a host bridge: pairs of one socket are direct, the others staged."""
    model = CollectiveModel(topology.load("l20-x8-pcie"))
    near, far = model.network.route("gpu0", "gpu1"), model.network.route("gpu0", "gpu7")
    assert near.route_class == "pcie" and far.path_class == "SYS"
    assert sum(near.weights) < sum(far.weights)


def test_all_nics_of_a_cluster_are_used():
    model = CollectiveModel(topology.load("hgx-h100-x8-ib-x16"))
    cost = model.cost("all_reduce", 1 << 28, (tuple(model.topology.compute),))
    up = [nbytes for (a, b), nbytes in cost.link_bytes.items() if "nic" in a and "leaf" in b]
    # An eighth of what an all-reduce among the hosts sends at least.
    assert len(up) == 128 and max(up) <= 1.1 * 2 * (15 / 16) * (1 << 28) / 8
    assert "network" in cost.bottleneck_kind


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
