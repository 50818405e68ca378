"""The simulation of collectives: fair sharing by hand, agreement with the cost model, and bounds that hold for any schedule."""

import time

import numpy as np
import pytest
from collective_machines import ALPHA, BETA, group, link, machine, mesh, ring, switch, torus

from topo_opt import topology
from topo_opt.collectives import CollectiveModel, simulate
from topo_opt.collectives.flows import FairFlows, max_min

MACHINES = {
    "ring": ring(8),
    "odd ring": ring(5),
    "switch": switch(8),
    "mesh": mesh(6),
    "torus": torus(3, 4),
}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def test_fair_rates_by_hand():
    """Three flows: one over both links, one over each; links of 10 and 4. The narrow link gives 2 each, the rest is 8."""
    crossings = np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert max_min(crossings, np.array([10.0, 4.0]), [1, 1, 1]) == pytest.approx([2.0, 8.0, 2.0])
    assert max_min(crossings, np.array([10.0, 4.0]), [2, 0, 0]) == pytest.approx([2.0, 0.0, 0.0])


def test_flows_finish_in_the_order_of_their_bytes():
    flows = FairFlows(np.array([[1.0]]), np.array([10.0]))
    flows.start(0, 0, 10.0)
    flows.start(1, 0, 30.0)
    assert flows.until_next() == pytest.approx(2.0)
    assert flows.advance(2.0) == [0]
    assert flows.until_next() == pytest.approx(2.0)
    assert flows.advance(2.0) == [1]
    assert flows.until_next() == float("inf")


@pytest.mark.parametrize("nbytes", [64.0, 3e5, 2e8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MACHINES)
def test_agrees_with_the_model(name, kind, nbytes):
    """Within 3 per cent for every algorithm; trees, whose rounds overlap and whose chunks the model counts roughly, within 20."""
    topology_ = MACHINES[name]
    model = CollectiveModel(topology_, library=None)
    groups = group(len(topology_.compute))
    for candidate in model.candidates(kind, groups):
        cost = model.cost(kind, nbytes, groups, candidate.name)
        found = simulate(model, kind, nbytes, groups, candidate.name)
        rough = "tree" in cost.algorithm or (candidate.cost is None and name in ("ring", "torus"))
        assert found.seconds == pytest.approx(cost.seconds, rel=0.2 if rough else 0.03), candidate.name
        for edge, carried in cost.link_bytes.items():
            assert found.link_bytes[edge] == pytest.approx(carried)


@pytest.mark.parametrize("nbytes", [16384.0, 4e7])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["hgx-h100-x8", "mi300x-x8", "rtx4090-x8-pcie", "l20-x8-pcie"])
def test_agrees_on_real_machines(name, kind, nbytes):
    model = CollectiveModel(topology.load(name), calibrated=False)
    groups = (tuple(model.topology.compute),)
    cost = model.cost(kind, nbytes, groups)
    assert simulate(model, kind, nbytes, groups).seconds == pytest.approx(cost.seconds, rel=0.1)


@pytest.mark.parametrize("nbytes", [1e3, 1e7])
@pytest.mark.parametrize("name", MACHINES)
def test_never_below_the_bytes_over_the_rate(name, nbytes):
    model = CollectiveModel(MACHINES[name], library=None)
    for kind in KINDS:
        found = simulate(model, kind, nbytes, group(len(MACHINES[name].compute)))
        busiest = max(found.link_bytes.values()) / BETA
        assert found.seconds >= max(busiest, ALPHA) * (1 - 1e-9)


def test_groups_at_the_same_time_share_a_link():
    links = [link(f"gpu{i}", f"s{i // 4}") for i in range(8)] + [link("s0", "s1")]
    model = CollectiveModel(machine(8, links, [("s0", "nvswitch"), ("s1", "nvswitch")]), library=None)
    pairs = tuple((f"gpu{i}", f"gpu{i + 4}") for i in range(4))
    one = simulate(model, "all_gather", 4e8, pairs[:1]).seconds
    assert simulate(model, "all_gather", 4e8, pairs).seconds == pytest.approx(4 * one, rel=5e-3)


def test_measured_curves_have_no_part_in_it():
    machine_ = topology.load("h200-x2")
    groups = (("gpu0", "gpu1"),)
    plain = simulate(CollectiveModel(machine_, calibrated=False), "all_reduce", 1e6, groups)
    assert simulate(CollectiveModel(machine_), "all_reduce", 1e6, groups).seconds == plain.seconds


def test_ten_thousand_transfers_take_about_a_second():
    model = CollectiveModel(switch(64), library=None)
    model.cost("all_reduce", 1e8, group(64), "ring")
    start = time.process_time()
    found = simulate(model, "all_reduce", 1e8, group(64), "ring")
    assert found.transfers == 2 * 63 * 64
    assert time.process_time() - start < 1.6  # on a machine that others load as well
