"""Whether dependent launches are safe wherever a plan may have one: python benchmarks/dependent_launch.py [--replays N]

Kernels that are launched dependently stand first in a graph, after kernels that trigger early and write late, after kernels of
PyTorch, copies and memsets, after another stream, and before a kernel that overwrites what a slow one still reads. Each chain runs
eagerly and as a captured graph, again and again with other numbers and nothing in between, and every result is compared on the GPU.
Then a chain of small kernels is timed with and without dependent launch. Needs a GPU of compute capability 9.0, triton and torch.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NUMEL = 1 << 20
BLOCK = 1024
ROUNDS = 3000
"""Of a loop that keeps a program busy for some 10 us."""
CHAIN = 100


@triton.jit
def add(x, w, out, BLOCK: tl.constexpr):
    gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(w + i)
    gdc_wait()
    tl.store(out + i, tl.load(x + i) + a)


@triton.jit
def slow_add(x, w, out, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """As `add`, but it reads x and writes out long after it let the next kernel start."""
    gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait()
    spin = tl.load(w + i)
    for _ in range(ROUNDS):
        spin = spin * 0.5 + 1.0
    zero = tl.where(spin > 1e30, 1.0, 0.0)
    tl.store(out + i, tl.load(x + i + zero.to(tl.int32)) + tl.load(w + i) + zero)


@dataclass
class Bench:
    """Memory of a chain, and how its kernels are launched."""

    pdl: bool = True
    source: torch.Tensor = field(default_factory=lambda: torch.zeros(NUMEL, device="cuda"))
    w: torch.Tensor = field(default_factory=lambda: torch.randn(NUMEL, device="cuda"))
    t: torch.Tensor = field(default_factory=lambda: torch.zeros(NUMEL, device="cuda"))
    u: torch.Tensor = field(default_factory=lambda: torch.zeros(NUMEL, device="cuda"))
    out: torch.Tensor = field(default_factory=lambda: torch.zeros(NUMEL, device="cuda"))
    side: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)

    def add(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        add[(NUMEL // BLOCK,)](x, w, out, BLOCK=BLOCK, launch_pdl=self.pdl)

    def slow(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        slow_add[(NUMEL // BLOCK,)](x, w, out, ROUNDS=ROUNDS, BLOCK=BLOCK, launch_pdl=self.pdl)


def first(b: Bench) -> torch.Tensor:
    b.add(b.source, b.w, b.out)
    return b.source + b.w


def after_an_early_trigger(b: Bench) -> torch.Tensor:
    b.slow(b.source, b.w, b.t)
    b.add(b.t, b.w, b.out)
    return b.source + b.w + b.w


def after_a_kernel_of_torch(b: Bench) -> torch.Tensor:
    b.slow(b.source, b.w, b.t)
    torch.add(b.t, 1.0, out=b.u)
    b.add(b.u, b.w, b.out)
    return b.source + b.w + 1.0 + b.w


def after_a_copy(b: Bench) -> torch.Tensor:
    b.slow(b.source, b.w, b.t)
    b.u.copy_(b.t)
    b.add(b.u, b.w, b.out)
    return b.source + b.w + b.w


def after_a_memset(b: Bench) -> torch.Tensor:
    b.slow(b.source, b.w, b.t)
    b.t.zero_()
    b.add(b.t, b.w, b.out)
    return b.w.clone()


def after_another_stream(b: Bench) -> torch.Tensor:
    main = torch.cuda.current_stream()
    b.side.wait_stream(main)
    with torch.cuda.stream(b.side):
        b.slow(b.source, b.w, b.t)
    main.wait_stream(b.side)
    b.add(b.t, b.w, b.out)
    return b.source + b.w + b.w


def completion_is_transitive(b: Bench) -> torch.Tensor:
    b.slow(b.source, b.w, b.t)
    b.add(b.w, b.w, b.u)
    b.add(b.t, b.w, b.out)
    return b.source + b.w + b.w


def write_after_a_slow_read(b: Bench) -> torch.Tensor:
    b.add(b.source, b.w, b.t)
    b.slow(b.t, b.w, b.out)
    b.add(b.w, b.w, b.t)
    return b.source + b.w + b.w


CHAINS: tuple[Callable[[Bench], torch.Tensor], ...] = (
    first, after_an_early_trigger, after_a_kernel_of_torch, after_a_copy, after_a_memset, after_another_stream,
    completion_is_transitive, write_after_a_slow_read,
)  # fmt: skip


def wrong_elements(b: Bench, chain: Callable[[Bench], torch.Tensor], replays: int, graph: bool) -> int:
    """Elements that differ from what the chain means, over all replays."""
    expected = chain(b)  # compiles
    torch.cuda.synchronize()
    run: Callable[[], object] = lambda: chain(b)  # noqa: E731
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            chain(b)
        run = captured.replay
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    sources = [torch.randn(NUMEL, device="cuda") for _ in range(4)]
    for i in range(replays):
        b.source.copy_(sources[i % 4])
        run()
        result = b.out.clone()
        b.out.fill_(-1.0)
        expected = _meaning(chain, b)
        wrong += (~torch.isclose(result, expected, rtol=1e-5, atol=1e-5)).sum()
    return int(wrong.item())


def _meaning(chain: Callable[[Bench], torch.Tensor], b: Bench) -> torch.Tensor:
    """The result of a chain by PyTorch alone."""
    silent = _Silent(b)
    return chain(silent)  # type: ignore[arg-type]


class _Silent(Bench):
    """The same memory, with kernels that do nothing."""

    def __init__(self, b: Bench):
        spare = torch.empty_like(b.t)
        super().__init__(b.pdl, b.source, b.w, spare, spare, spare, b.side)

    def add(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        return None

    slow = add


def chain_us(pdl: bool) -> float:
    """Microseconds a kernel of a replayed chain of small ones takes."""
    b = Bench(pdl)
    small = (b.source[: 132 * BLOCK], b.w, b.t, b.u)

    def run() -> None:
        x, w, t, u = small
        for i in range(CHAIN):
            source, target = (x, t) if i == 0 else ((t, u) if i % 2 else (u, t))
            add[(132,)](source, w, target, BLOCK=BLOCK, launch_pdl=pdl)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CHAIN)
    return min(times)


def main() -> int:
    """Prints a line a chain; 1 when any result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replays", type=int, default=300)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    failed = 0
    for chain in CHAINS:
        for graph in (False, True):
            how = "in a graph" if graph else "eagerly"
            name = chain.__name__.replace("_", " ")
            try:
                wrong = wrong_elements(Bench(), chain, arguments.replays, graph)
                verdict = "right" if not wrong else f"{wrong} elements are WRONG"
            except RuntimeError as error:
                wrong, verdict = 1, f"FAILED: {str(error).splitlines()[0]}"
            failed += bool(wrong)
            print(f"{name}, {how}: {verdict}", flush=True)
    plain, dependent = chain_us(False), chain_us(True)
    print(f"a small kernel of a replayed chain takes {plain:.2f} us, launched dependently {dependent:.2f} us")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
