"""runtime.collective_call: where parts lie that come from a group, and that what is dense arrives in place. The group is played by the test."""

import pytest
import torch

from topo_opt.runtime import collective_call
from topo_opt.runtime.collective_call import CollectiveCall
from topo_opt.runtime.plan import CollectiveStep

N = 2


def call(kind, source, target, *, order=(0, 1), dim=0, to=0):
    """The collective of rank 0, whose group gives what `exchange` makes of (received, given); the received tensors."""
    step = CollectiveStep(kind=kind, src=0, dst=1, axes=("x",), combiner="add", dim=dim, source=to)
    made = CollectiveCall(lambda work: None, None, list(order), step, source, target)
    seen = []

    def played(exchange):
        def run(received, given, **_):
            seen.append(received)
            exchange(received, given)

        return run

    return made, seen, played


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    "shape, dim, in_place", [((3, 4), 0, True), ((1, 3, 4), 1, True), ((2, 3), 1, False)]
)
def test_all_gather(shape, dim, in_place, order, monkeypatch):
    parts = [torch.randn(shape), torch.randn(shape)]
    target = torch.empty([s * (N if d == dim else 1) for d, s in enumerate(shape)])
    made, seen, played = call("all_gather", parts[order.index(0)], target, order=order, dim=dim)
    by_place = [parts[order.index(place)] for place in range(N)]
    monkeypatch.setattr(
        collective_call, "_all_gather", played(lambda r, g: r.copy_(torch.stack(by_place).reshape(r.shape)))
    )
    made()
    assert torch.equal(target, torch.cat(parts, dim))
    assert (seen[0].data_ptr() == target.data_ptr()) == (in_place and order == (0, 1))


@pytest.mark.parametrize(
    "shape, dim, to, in_place", [((4, 3), 0, 1, False), ((1, 2, 6), 2, 1, True), ((1, 4, 6, 5), 1, 2, False)]
)
def test_all_to_all(shape, dim, to, in_place, monkeypatch):
    """Parts along `dim` go out, what comes in lies along `to`."""
    given = [torch.randn(shape) for _ in range(N)]
    pieces = [g.chunk(N, dim)[0] for g in given]
    target = torch.empty(torch.cat(pieces, to).shape)
    made, seen, played = call("all_to_all", given[0], target, dim=dim, to=to)

    def exchange(received, sent):
        assert torch.equal(sent[1], given[0].chunk(N, dim)[1])
        received.copy_(torch.stack(pieces))

    monkeypatch.setattr(collective_call.dist, "all_to_all_single", played(exchange))
    made()
    assert torch.equal(target, torch.cat(pieces, to))
    assert (seen[0].data_ptr() == target.data_ptr()) == in_place
