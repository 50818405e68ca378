"""Every family of kernels under compute-sanitizer: python benchmarks/sanitize.py FOLDER [--prepare] [--tools memcheck,racecheck]

`--prepare` compiles a few small models into FOLDER, on any machine. Without it, on a machine with a GPU, each tool runs over each of
them in a process of its own: kernels are launched one by one (no graph), without PyTorch's memory cache so that an access outside a tensor is one
outside of its allocation, and results are compared with eager. Ends with exit code 0 only when no tool reports anything.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOOLS = ("memcheck", "racecheck")
TIMEOUT_S = 600
PROCESSES = 8
TEXT = 4000
"""Characters of a failed tool's output that are shown."""
TOLERANCE = 0.05
CACHE = 96


class Fused(nn.Module):
    """A function as a module with weights of the given shapes."""

    def __init__(self, function: Callable[..., Tensor], **weights: tuple[int, ...]):
        super().__init__()
        self.function = function
        for name, shape in weights.items():
            value = torch.randn(shape, generator=torch.Generator().manual_seed(1)) / shape[-1] ** 0.5
            self.register_parameter(name, nn.Parameter(value.bfloat16(), requires_grad=False))

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self, *args)


class Append(nn.Module):
    """A cache that keeps the rows it is given, and attention over it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, CACHE, 64, dtype=torch.bfloat16))

    def forward(self, x: Tensor, q: Tensor, at: Tensor) -> Tensor:
        self.keys.index_copy_(2, at, x)
        allowed = torch.arange(CACHE, device=q.device)[None, :] <= at[:, None]
        return F.scaled_dot_product_attention(q, self.keys, self.keys, attn_mask=allowed, enable_gqa=True)


def experts() -> nn.Module:
    """A small mixture of experts of transformers, its products grouped."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=128, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    )
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
    return block.bfloat16()


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the families of kernels that it is here for."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    families: tuple[str, ...]


def half(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()


CASES = {
    "norm": Case(lambda: Fused(lambda m, x: F.rms_norm(x, (1000,), m.w), w=(1000,)), lambda: (half(37, 1000),), ("loops",)),
    "long_softmax": Case(lambda: Fused(lambda m, x: x.softmax(-1)), lambda: (half(3, 20_000),), ("loops",)),
    "linear": Case(lambda: Fused(lambda m, x: F.gelu(F.linear(x, m.w)), w=(200, 136)), lambda: (half(130, 136),), ("gemm",)),
    "linear_large": Case(lambda: Fused(lambda m, x: F.linear(x, m.w), w=(512, 256)), lambda: (half(1024, 256),), ("gemm",)),
    "linear_few_rows": Case(lambda: Fused(lambda m, x: F.linear(x, m.w), w=(320, 1024)), lambda: (half(8, 1024),), ("gemm",)),
    "linear_one_row": Case(lambda: Fused(lambda m, x: F.linear(x, m.w), w=(321, 1000)), lambda: (half(1, 1000),), ("gemm",)),
    "prefill": Case(
        lambda: Fused(lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        lambda: (half(1, 4, 150, 64), half(1, 4, 150, 64), half(1, 4, 150, 64)),
        ("attention",),
    ),
    "decode": Case(Append, lambda: (half(1, 2, 1, 64), half(1, 8, 1, 64), torch.tensor([70])), ("attention", "update")),
    "scan": Case(lambda: Fused(lambda m, x: x.cumsum(1)), lambda: (torch.randn(5, 3000),), ("scan",)),
    "experts": Case(experts, lambda: (half(1, 48, 128),), ("experts", "group_rows", "top_k")),
    "experts_few_rows": Case(experts, lambda: (half(1, 2, 128),), ("experts", "top_k")),
    "siblings": Case(
        lambda: Fused(lambda m, x: torch.cat([F.linear(x, m.a).relu().sum(-1), F.linear(x, m.b).sum(-1)]), a=(96, 256), b=(160, 256)),
        lambda: (half(1, 256),),
        ("pack",),
    ),
}  # fmt: skip


def prepare(folder: Path) -> int:
    """Compiles all cases; 1 when one has not the families of kernels that it should have."""
    from topo_opt import driver
    from topo_opt.codegen.triton import FAMILIES
    from topo_opt.frontend.load import export_module
    from topo_opt.runtime.bundle import open_bundle

    missing = 0
    left = set(FAMILIES)
    for name, case in CASES.items():
        program = export_module(case.model().eval(), case.inputs(), None, None)
        driver.compile({"main": program}, driver.Options(), folder / name)
        found = sorted({k.family for k in open_bundle(folder / name).plan.kernels.values()})
        left -= set(found)
        lacking = [f for f in case.families if f not in found]
        missing += bool(lacking)
        print(
            f"{name}: {', '.join(found)}" + (f"; WITHOUT {', '.join(lacking)}" if lacking else ""), flush=True
        )
    if left:
        print(f"no case has a kernel of family {', '.join(sorted(left))}")
    return 1 if missing or left else 0


def run_all(folder: Path, names: Sequence[str]) -> int:
    """Runs every case twice, kernel by kernel, and compares with eager; 1 when a result is off."""
    from topo_opt.runtime import load

    wrong = 0
    for name in names:
        program = load(folder / name, "cuda", strict=True, graphs="off")
        inputs = [x.cuda() for x in CASES[name].inputs()]
        for _ in range(2):
            expected = program.run_aten("main", inputs, commit=False)
            got = program.call_flat("main", inputs)
            for a, b in zip(got, expected, strict=True):
                limit = TOLERANCE * b.abs().max().clamp_min(1.0).item()
                error = (a.double() - b.double()).abs().max().item()
                wrong += not error <= limit
                print(f"{name}: error {error:.3g}, allowed {limit:.3g}", flush=True)
    return 1 if wrong else 0


def under(tool: str, sanitizer: str, folder: Path, name: str) -> bool:
    """Whether a tool has nothing to say about a case; prints what it says, and where the tool itself gave up."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [
        sanitizer, "--tool", tool, "--kernel-name", "kns=k_", "--error-exitcode", "99", "--print-limit", "20",
        sys.executable, os.path.abspath(__file__), str(folder), "--run", "--cases", name,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        print(f"{tool} {name}: no end after {TIMEOUT_S} s", flush=True)
        return False
    text = done.stdout + done.stderr
    if done.returncode:
        print(text[-TEXT:])
    verdict = "the tool failed" if "Internal Sanitizer Error" in text else f"exit code {done.returncode}"
    print(f"{tool} {name}: {verdict if done.returncode else 'clean'}", flush=True)
    return done.returncode == 0


def main() -> int:
    """Prepares, or runs the tools."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prepare", action="store_true", help="compile the models, without a GPU")
    parser.add_argument("--run", action="store_true", help="run the models without a tool")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument(
        "--sanitizer", default=shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    )
    arguments = parser.parse_args()
    if arguments.prepare:
        return prepare(arguments.folder)
    names = arguments.cases.split(",")
    if arguments.run:
        return run_all(arguments.folder, names)
    # Compiled outside of the tools, which find everything in Triton's cache.
    if code := run_all(arguments.folder, names):
        return code
    if not os.access(arguments.sanitizer, os.X_OK):
        print(f"{arguments.sanitizer} is not there: install the CUDA toolkit, or give --sanitizer")
        return 2
    # Every case on its own, since a tool that stops at one would not get to the next.
    with ThreadPoolExecutor(PROCESSES) as pool:
        jobs = product(arguments.tools.split(","), names)
        clean = list(pool.map(lambda j: under(j[0], arguments.sanitizer, arguments.folder, j[1]), jobs))
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
