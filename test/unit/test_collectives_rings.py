"""Orders of rings, and trees."""

from itertools import permutations

import networkx as nx
import numpy as np
import pytest
from collective_machines import group, link, machine, mesh

from topo_opt import topology
from topo_opt.collectives import CollectiveModel, trees
from topo_opt.collectives.rings import best_order


def hops(cost, order):
    return [cost[a, b] for a, b in zip(order, (*order[1:], order[0]))]


@pytest.mark.parametrize("seed", range(20))
def test_small_orders_are_the_best_of_all(seed):
    """The dearest hop, then the sum, are least; also with hops that don't exist and with different ways there and back."""
    random = np.random.default_rng(seed)
    n = int(random.integers(3, 8))
    cost = random.integers(1, 6, (n, n)).astype(float)
    cost[random.random((n, n)) < 0.3] = np.inf
    found = best_order(cost)
    every = [(0, *rest) for rest in permutations(range(1, n))]
    best = min((max(hops(cost, o)), sum(hops(cost, o))) for o in every)
    if best[0] == np.inf:
        assert found is None
    else:
        assert (max(hops(cost, found)), sum(hops(cost, found))) == best


@pytest.mark.parametrize(
    "graph",
    [
        nx.cycle_graph(32),
        nx.grid_2d_graph(4, 5),
        nx.grid_2d_graph(6, 6),
        nx.grid_2d_graph(5, 5, periodic=True),
        nx.grid_2d_graph(8, 8, periodic=True),
        nx.hypercube_graph(5),
    ],
)
def test_cycles_over_neighbours_are_found(graph):
    """Where a Hamiltonian cycle over links exists, the ring is one: no hop is longer than a link."""
    nodes = sorted(graph)
    lengths = dict(nx.all_pairs_shortest_path_length(graph))
    cost = np.array([[lengths[a][b] for b in nodes] for a in nodes], dtype=float)
    order = best_order(cost)
    assert sorted(order) == list(range(len(nodes))) and max(hops(cost, order)) == 1
    assert best_order(cost) == order


def test_rings_on_a_mesh_of_eight_use_three_cycles_both_ways():
    model = CollectiveModel(mesh(8), library=None)
    loads = model.cost("all_reduce", 8e6, group(8), "multi-ring").link_bytes
    assert len(loads) == 6 * 8 and len({round(nbytes) for nbytes in loads.values()}) == 1


def test_rings_cross_sockets_once_each_way():
    model = CollectiveModel(topology.load("l20-x8-pcie"), calibrated=False)
    cost = model.cost("all_gather", 8e6, (model.topology.compute,), "ring")
    crossing = {
        edge: n for edge, n in cost.link_bytes.items() if model.network.graph.edges[edge]["kind"] == "smp"
    }
    assert len(crossing) == 2 and max(crossing.values()) == pytest.approx(8e6 * 7 / 8)


def test_channels_of_uneven_links():
    """Two links between some pairs (twice the rate): rings take what their weakest link leaves."""
    rates = {(a, b): 50e9 if (a + b) % 2 else 25e9 for b in range(4) for a in range(b)}
    links = [link(f"gpu{a}", f"gpu{b}", rate) for (a, b), rate in rates.items()]
    model = CollectiveModel(machine(4, links), library=None)
    several = model.cost("all_reduce", 1e9, group(4), "multi-ring").seconds
    assert several < 0.55 * model.cost("all_reduce", 1e9, group(4), "ring").seconds


@pytest.mark.parametrize("n", range(2, 40))
def test_double_trees(n):
    """Both reach all ranks; an even number of ranks are each inside of one tree at most, an odd number but one."""
    both = trees.double(n)
    inside = []
    for parents in both:
        depth = trees.depths(parents)
        assert parents.count(-1) == 1 and max(depth) <= n.bit_length()
        inside.append({p for p in parents if p >= 0})
        assert all(list(parents).count(p) <= 2 for p in inside[-1])
    assert len(inside[0] & inside[1]) <= n % 2


@pytest.mark.parametrize("n", range(1, 20))
def test_binomial_trees(n):
    has = {0}
    for pairs in trees.binomial(n):
        assert all(a in has and b not in has for a, b in pairs)
        has |= {b for _, b in pairs}
    assert has == set(range(n)) and len(trees.binomial(n)) == (n - 1).bit_length()
