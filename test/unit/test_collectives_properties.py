"""What must hold for the cost of collectives on any machine."""

import pytest
from collective_machines import ALPHA, BETA, group, link, machine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topo_opt.collectives import CollectiveModel, simulate
from topo_opt.errors import InputError
from topo_opt.topology import Topology

KINDS = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def machines(draw, scale: float = 1.0) -> tuple[Topology, Topology]:
    """A connected machine of 2 to 7 GPUs on 1 to 3 switches with some direct links, and the same with all rates times `scale`."""
    count = draw(st.integers(2, 7))
    switches = draw(st.integers(1, 3))
    rates = st.sampled_from([10e9, 25e9, 50e9, 400e9])
    ends = [(f"gpu{i}", f"s{draw(st.integers(0, switches - 1))}", draw(rates)) for i in range(count)]
    ends += [(f"s{i}", f"s{i + 1}", draw(rates)) for i in range(switches - 1)]
    pairs = [(a, b) for b in range(count) for a in range(b)]
    for a, b in draw(st.lists(st.sampled_from(pairs), unique=True, max_size=6)):
        ends.append((f"gpu{a}", f"gpu{b}", draw(rates)))
    nodes = [(f"s{i}", "nvswitch") for i in range(switches)]
    alphas = [draw(st.sampled_from([0.0, 1e-6, 5e-6])) for _ in ends]

    def build(factor: float) -> Topology:
        return machine(
            count, [link(a, b, rate * factor, alpha) for (a, b, rate), alpha in zip(ends, alphas)], nodes
        )

    return build(1.0), build(scale)


@SETTINGS
@given(machines(), KINDS, st.sampled_from(["nccl", None]), st.floats(1, 1e9), st.floats(1, 50))
def test_more_bytes_are_never_faster(pair, kind, library, nbytes, factor):
    model = CollectiveModel(pair[0], library=library)
    groups = group(len(pair[0].compute))
    less, more = (model.cost(kind, n, groups).seconds for n in (nbytes, nbytes * factor))
    assert less <= more * (1 + 1e-9)


@SETTINGS
@given(machines(scale=2.0), KINDS, st.sampled_from(["nccl", None]), st.floats(1, 1e9))
def test_more_bandwidth_is_never_slower(pair, kind, library, nbytes):
    groups = group(len(pair[0].compute))
    slow, fast = (CollectiveModel(t, library=library).cost(kind, nbytes, groups).seconds for t in pair)
    assert fast <= slow * (1 + 1e-9)


@SETTINGS
@given(
    st.permutations(range(6)), st.sampled_from(["all_reduce", "all_gather", "all_to_all"]), st.floats(1, 1e9)
)
def test_equal_devices_can_be_permuted(order, kind, nbytes):
    links = [link(f"gpu{i}", "switch") for i in range(6)]
    model = CollectiveModel(machine(6, links, [("switch", "nvswitch")]), library=None)
    shuffled = (tuple(f"gpu{i}" for i in order),)
    assert model.cost(kind, nbytes, shuffled).seconds == pytest.approx(
        model.cost(kind, nbytes, group(6)).seconds
    )


@SETTINGS
@given(machines(), KINDS, st.floats(1, 1e8))
def test_simulation_is_never_below_the_bytes_over_the_rate(pair, kind, nbytes):
    model = CollectiveModel(pair[0], library=None)
    found = simulate(model, kind, nbytes, group(len(pair[0].compute)))
    rates = {edge: model.network.graph.edges[edge]["bytes_per_s"] for edge in found.link_bytes}
    bound = max(found.link_bytes[edge] / rate for edge, rate in rates.items())
    assert found.seconds >= bound * (1 - 1e-6)


@SETTINGS
@given(machines(), KINDS, st.floats(1, 1e8))
def test_the_best_is_the_least_of_all(pair, kind, nbytes):
    model = CollectiveModel(pair[0], library=None)
    groups = group(len(pair[0].compute))
    best = model.cost(kind, nbytes, groups)
    each = [model.cost(kind, nbytes, groups, c.name).seconds for c in model.candidates(kind, groups)]
    assert best.seconds == min(each)
    n = len(groups[0])
    # What leaves a device: of a sum each element or what it adds to it. Of all sends of a sum, 2 (n - 1) an element, faster devices may do more.
    least = {"all_reduce": 1.0, "all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n}
    edges = model.network.graph.out_edges
    rates = [sum(edge["bytes_per_s"] for _, _, edge in edges(d, data=True)) for d in groups[0]]
    bounds = [least.get(kind, 0.0) * nbytes / rate for rate in rates]
    if kind == "all_reduce":
        bounds.append(2 * (n - 1) * nbytes / sum(rates))
    assert best.seconds >= max(bounds) * (1 - 1e-9)


def test_a_disconnected_device():
    topology = machine(3, [link("gpu0", "gpu1"), link("gpu1", "gpu2")])
    cut = topology.model_copy(update={"links": topology.links[:1]})
    with pytest.raises(InputError, match=r"no links from 'gpu[01]' to 'gpu2'"):
        CollectiveModel(cut).cost("all_reduce", 8, group(3))


def test_a_degraded_link_is_avoided():
    """One link of a full mesh at a hundredth of its rate: the ring goes round it."""
    links = [
        link(f"gpu{a}", f"gpu{b}", BETA / 100 if (a, b) == (0, 1) else BETA)
        for b in range(5)
        for a in range(b)
    ]
    cost = CollectiveModel(machine(5, links), library=None).cost("all_reduce", 1e8, group(5), "ring")
    assert ("gpu0", "gpu1") not in cost.link_bytes and ("gpu1", "gpu0") not in cost.link_bytes
    assert cost.seconds == pytest.approx(8 * (ALPHA + 1e8 / (5 * BETA)))
