"""One rank of a test of several processes: `python rank_worker.py SCENARIO FOLDER`, with the variables that torchrun sets.

Prints one line, which the test reads, and exits with 1 when an error of topo-opt was the end.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import topo_opt
from topo_opt.errors import TopoError

RANK = int(os.environ["RANK"])


def generate(folder: Path) -> None:
    """A prompt and three tokens with a cache that is split, against what the whole model gave."""
    program = topo_opt.load(folder / "bundle", "cpu", timeout_s=60)
    expected = torch.load(folder / "expected.pt")
    for name, arguments, logits in expected["calls"]:
        torch.testing.assert_close(program.call(name, *arguments), logits, rtol=1e-4, atol=1e-4)
    for name, value in expected["state"].items():
        torch.testing.assert_close(program.whole_state(name), value, rtol=1e-4, atol=1e-4)
    held = sum(t.numel() * t.element_size() for t in program.memory.tensors.values())
    assert not program.fallbacks
    print(f"rank {RANK} holds {held} bytes", flush=True)


def dies(folder: Path) -> None:
    """The second rank is gone after the first call."""
    program = topo_opt.load(folder / "bundle", "cpu")
    x = torch.ones(4, 16)
    program(x)
    if RANK == 1:
        os._exit(3)
    _failing(lambda: program(x))


def errs(folder: Path) -> None:
    """The second rank makes a mistake and stays."""
    program = topo_opt.load(folder / "bundle", "cpu")
    x = torch.ones(4, 16)
    program(x)
    _failing(lambda: program(torch.ones(5, 16) if RANK == 1 else x))


def wrong_weights(folder: Path) -> None:
    """The second rank is given a weight of another shape."""
    weights = torch.load(folder / "weights.pt")
    if RANK == 1:
        weights["down.weight"] = torch.zeros(32, 64)
    _failing(lambda: topo_opt.load(folder / "bundle", "cpu", weights=weights))


def _failing(work) -> None:
    start = time.monotonic()
    try:
        work()
    except TopoError as error:
        print(f"rank {RANK} after {time.monotonic() - start:.1f} s: {error.message}", flush=True)
        # Without the destructors of process groups, which wait for the other ranks.
        os._exit(1)
    print(f"rank {RANK} did not fail", flush=True)


if __name__ == "__main__":
    scenario = {"generate": generate, "dies": dies, "errs": errs, "wrong-weights": wrong_weights}[sys.argv[1]]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    scenario(Path(sys.argv[2]))
    dist.destroy_process_group()
