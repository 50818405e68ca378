"""runtime.collective_call: where parts lie that come from a group, and that what is dense arrives in place.

The group is played by the test, and is one of gloo with two processes in the last ones.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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


# Kind, part of one rank, dimension that is cut or gathered, dimension along which an all-to-all joins.
OF_GLOO = [
    ("all_reduce", (3, 5), 0, 0),
    ("all_gather", (2, 3), 0, 0),
    ("all_gather", (2, 3), 1, 0),
    ("reduce_scatter", (4, 6), 1, 0),
    ("all_to_all", (1, 4, 6), 1, 2),
    ("all_to_all", (1, 4, 6), 2, 1),
]
DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64)


def as_rank(rank, meeting):
    """One of two processes: every collective in every type, against what is computed from both ranks' parts."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=N)
    generator = torch.Generator().manual_seed(0)
    for kind, shape, dim, to in OF_GLOO:
        for dtype in DTYPES:
            given = [torch.randint(0, 2, shape, generator=generator).to(dtype) for _ in range(N)]
            combiner = "or" if dtype == torch.bool else "add"
            total = (given[0] | given[1]) if dtype == torch.bool else given[0] + given[1]
            expected = {
                "all_reduce": lambda: total,  # noqa: B023
                "all_gather": lambda: torch.cat(given, dim),  # noqa: B023
                "reduce_scatter": lambda: total.chunk(N, dim)[rank],  # noqa: B023
                "all_to_all": lambda: torch.cat([g.chunk(N, dim)[rank] for g in given], to),  # noqa: B023
            }[kind]()
            target = torch.zeros_like(expected).contiguous()
            step = CollectiveStep(kind=kind, src=0, dst=1, axes=("x",), combiner=combiner, dim=dim, source=to)
            wait = lambda work: work.wait()  # noqa: E731
            CollectiveCall(wait, dist.group.WORLD, [0, 1], step, given[rank].clone(), target)()
            assert torch.equal(target, expected), (kind, dtype, target, expected)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_collective_call as t; "
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code + f"t.as_rank({rank}, {str(tmp_path / 'meeting')!r})"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(N)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
