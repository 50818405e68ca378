"""runtime.caller_graphs: graphs for the same tensors again, never for tensors that happen to lie where others lay."""

import gc

import pytest
import torch

from topo_opt.runtime import caller_graphs
from topo_opt.runtime.caller_graphs import CallerGraphs

CPU = torch.device("cpu")


class Captures:
    """Stands for the executor: counts, and gives a graph that can be told from others."""

    def __init__(self, possible=True):
        self.asked, self.possible = [], possible

    def __call__(self, leaves):
        at = [t.data_ptr() for t in leaves]
        self.asked.append(at)
        return (lambda: at) if self.possible else None


def graphs_of(places=(0,), **options):
    captures = Captures(**options)
    return CallerGraphs(places, CPU, captures), captures


def test_the_second_call_with_the_same_tensors_has_a_graph():
    graphs, captures = graphs_of((0, 1))
    x, y = torch.ones(4), torch.ones(4)
    assert graphs.find([x, y]) is None and not captures.asked
    replay = graphs.find([x, y])
    assert replay() == [x.data_ptr(), y.data_ptr()] and graphs.find([x, y]) is replay
    assert graphs.find([y, x]) is None and len(captures.asked) == 1


def test_fresh_tensors_at_the_address_of_the_last_ones_are_not_captured():
    graphs, captures = graphs_of()
    memory = torch.ones(4)
    for _ in range(50):
        assert graphs.find([memory.view(4)]) is None
        gc.collect(0)
    assert not captures.asked


def test_another_tensor_where_a_captured_one_lies_is_as_good():
    graphs, _ = graphs_of()
    x = torch.ones(4)
    graphs.find([x])
    replay = graphs.find([x])
    assert graphs.find([x.view(4)]) is replay


def test_a_tensor_that_moved_is_another():
    graphs, captures = graphs_of()
    x = torch.ones(4)
    graphs.find([x])
    x.set_(torch.ones(4))
    assert graphs.find([x]) is None and not captures.asked


def test_the_same_address_read_in_another_order_is_copied():
    graphs, captures = graphs_of()
    x = torch.ones(4, 4)
    graphs.find([x])
    assert graphs.find([x]) is not None
    assert graphs.find([x.T]) is None
    for _ in range(3):
        assert graphs.find([torch.ones(4, 4).T]) is None
    assert len(captures.asked) == 1


def test_few_graphs_are_kept_the_latest_used():
    graphs, _ = graphs_of()
    many = [torch.ones(4) for _ in range(caller_graphs.KEPT + 1)]
    for x in many[:-1]:
        graphs.find([x]), graphs.find([x])
    assert graphs.find([many[0]]) is not None  # now the latest
    graphs.find([many[-1]]), graphs.find([many[-1]])
    assert len(graphs.kept) == caller_graphs.KEPT
    assert graphs.find([many[0]]) is not None and graphs.find([many[1]]) is None


def test_captures_come_to_an_end():
    graphs, captures = graphs_of()
    for _ in range(caller_graphs.MOST_CAPTURES + 5):
        x = torch.ones(4)
        graphs.find([x]), graphs.find([x])
        captures.asked[-1].append(x)  # its address is not given to another
    assert len({a[0] for a in captures.asked}) == caller_graphs.MOST_CAPTURES
    refused, captures = graphs_of(possible=False)
    for _ in range(6):
        assert refused.find([x]) is None
    assert len(captures.asked) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_no_tensor_is_kept_alive(count):
    import weakref

    graphs, _ = graphs_of(tuple(range(count)))
    tensors = [torch.ones(4) for _ in range(count)]
    graphs.find(tensors), graphs.find(tensors)
    watched = [weakref.ref(t) for t in tensors]
    del tensors
    gc.collect()
    assert all(w() is None for w in watched)
