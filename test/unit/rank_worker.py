"""The ranks of a test, a process each: `python rank_worker.py WORLD FOLDER SCENARIO,... ...`.

Each group of scenarios has ranks of its own, and all groups run at the same time: most of them wait for a limit. What rank r of group
g says is in the file said.g.r of the folder: behind a line with the name of each scenario one with what came of it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import triton.language  # noqa: F401  here, once, and not in every rank

import topo_opt
from topo_opt.errors import TopoError
from topo_opt.runtime.program import Program

RANK = 0
LIMIT_S = 3.0
"""Instead of 25 s, for scenarios in which somebody waits."""


def load(folder: Path, **options) -> Program:
    return topo_opt.load(folder / "bundle", "cpu", **options)


def generate(folder: Path) -> None:
    """A prompt and a token with a cache that is split, against what the whole model gave."""
    program = load(folder)
    expected = torch.load(folder / "expected.pt")
    for name, arguments, logits in expected["calls"]:
        torch.testing.assert_close(program.call(name, *arguments), logits, rtol=1e-4, atol=1e-4)
    for name, value in expected["state"].items():
        torch.testing.assert_close(program.whole_state(name), value, rtol=1e-4, atol=1e-4)
    held = sum(t.numel() * t.element_size() for t in program.memory.tensors.values())
    assert not program.fallbacks
    program.close()
    print(f"rank {RANK} holds {held} bytes", flush=True)


def checked(folder: Path) -> None:
    """What `topo-run --check` does on several ranks."""
    from topo_opt.tools.run_check import check_variant

    program = load(folder)
    for name, function in program.plan.functions.items():
        for variant in function.variants:
            result = check_variant(program, name, variant)
            assert result.passed and not result.fallback, result
    program.close()
    print("check passed", flush=True)


def in_second_call(act: Callable[[], object]) -> Callable[[Path], None]:
    """A call that all ranks make, and then one in whose place the second rank does something else."""

    def scenario(folder: Path) -> None:
        program, x = load(folder, timeout_s=LIMIT_S), torch.ones(4, 16)
        program(x)
        _failing(lambda: act() if RANK == 1 and act is not errs else program(errs() if RANK == 1 else x))

    return scenario


def errs() -> torch.Tensor:
    """An argument that is no argument of the model."""
    return torch.ones(5, 16)


def killed() -> None:
    time.sleep(0.5)  # what it is doing has been published
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGSTOP)


def elsewhere() -> None:
    """Works, but does not come."""
    until = time.monotonic() + LIMIT_S + 1
    while time.monotonic() < until:
        sum(range(10000))


def in_loading(act: Callable[[], object]) -> Callable[[Path], None]:
    """The second rank does something else while it reads a weight."""

    def scenario(folder: Path) -> None:
        weights = dict(torch.load(folder / "weights.pt"))

        class Reading(dict):
            def get(self, name, default=None):
                if RANK == 1 and name == "down.weight":
                    act()
                return super().get(name, default)

        _failing(lambda: load(folder, weights=Reading(weights), timeout_s=LIMIT_S))

    return scenario


def hangs() -> None:
    time.sleep(LIMIT_S + 2)


def works() -> None:
    """Takes longer than the limit, and gets on with it."""
    until = time.monotonic() + LIMIT_S + 1
    while time.monotonic() < until:
        sum(range(10000))


def out_of_memory() -> None:
    """This process may have no more memory than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        torch.ones(1 << 28)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def wrong_weights(folder: Path) -> None:
    """The second rank is given a weight of another shape."""
    weights = torch.load(folder / "weights.pt")
    if RANK == 1:
        weights["down.weight"] = torch.zeros(32, 64)
    _failing(lambda: load(folder, weights=weights))


def other_bundle(folder: Path) -> None:
    """The second rank has a bundle of something else."""
    _failing(lambda: topo_opt.load(folder / ("other" if RANK == 1 else "bundle"), "cpu"))


def no_bundle(folder: Path) -> None:
    """The second rank has none."""
    _failing(lambda: topo_opt.load(folder / ("none" if RANK == 1 else "bundle"), "cpu", timeout_s=LIMIT_S))


def never_loads(folder: Path) -> None:
    """The second rank is in the process group, and does not load."""
    _failing(lambda: time.sleep(LIMIT_S + 1) if RANK == 1 else load(folder, timeout_s=LIMIT_S))


def _failing(work: Callable[[], object]) -> None:
    start = time.monotonic()
    try:
        work()
    except TopoError as error:
        print(f"rank {RANK} after {time.monotonic() - start:.1f} s: {error}", flush=True)
    else:
        print(f"rank {RANK} did not fail", flush=True)


def together(name: str) -> None:
    """Ranks that are still there go on at the same time."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{RANK}", "")
    store.wait([f"{name}/{r}" for r in range(dist.get_world_size())])


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "generate": generate,
    "check": checked,
    "wrong-weights": wrong_weights,
    "other-bundle": other_bundle,
    "no-bundle": no_bundle,
    "never-loads": never_loads,
    **{f"call-{act.__name__}": in_second_call(act) for act in (errs, killed, stopped, elsewhere)},
    **{f"load-{act.__name__}": in_loading(act) for act in (killed, stopped, hangs, works, out_of_memory)},
}


def run_rank(rank: int, world: int, port: int, folder: Path, group: int, names: list[str]) -> None:
    """All scenarios of a group, one after the other, as one rank. `NAME:FOLDER` has its bundle in a folder in the folder."""
    global RANK
    RANK = rank
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    signal.alarm(230)  # in place of a test that has given up
    said = os.open(folder / f"said.{group}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid/{RANK}", str(os.getpid()))
    for name in names:
        print(f"-- {name}", flush=True)
        scenario, _, below = name.partition(":")
        SCENARIOS[scenario](folder / below)
        if name.endswith("-stopped") and RANK == 0:
            os.kill(int(store.get("pid/1")), signal.SIGCONT)
        if name.endswith("-killed"):
            return
        together(name)
    # The store ends with the first rank.
    store.set(f"out/{RANK}", "")
    if RANK == 0:
        store.wait([f"out/{r}" for r in range(dist.get_world_size())])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start_ranks(world: int, folder: Path, group: int, names: list[str]) -> list[int]:
    """Starts the ranks of a group as children, which have imported everything already."""
    children, port = [], free_port()
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run_rank(rank, world, port, folder, group, names)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                # Without the destructors of process groups, which wait for what the ranks of failed programs have left.
                os._exit(code)
        children.append(child)
    return children


def end_ranks(children: list[int], names: list[str]) -> bool:
    """Waits for the ranks of a group; whether those have ended well that should."""
    awaited = children[:1] if any(name.endswith("-killed") for name in names) else children
    codes = [os.waitpid(child, 0)[1] for child in awaited]
    for child in children[len(awaited) :]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not any(codes)


def main(world: int, folder: Path, groups: list[list[str]]) -> int:
    """Runs all groups; 0 when they have ended well."""
    started = [(start_ranks(world, folder, group, names), names) for group, names in enumerate(groups)]
    return int(not all([end_ranks(children, names) for children, names in started]))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), [group.split(",") for group in sys.argv[3:]]))
