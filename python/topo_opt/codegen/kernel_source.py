"""What a code generator hands over: one kernel as Python source, with everything needed to launch it."""

from __future__ import annotations

import ast
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from topo_opt.runtime.plan import Exchange

PARAM_KINDS = ("arg", "result", "scratch")
BOXES: Literal["boxes"] = "boxes"
TURNS: Literal["turns"] = "turns"
"""Roles of the scratch of a kernel that exchanges with other ranks, which are the names of its parameters too."""


@dataclass(frozen=True)
class Param:
    """One runtime parameter of a kernel: a pointer, or a tensor descriptor made on the host.

    `kind` says what `index` counts: "arg" (argument of the kernel function), "result" (its result) or
    "scratch" (`KernelSource.scratch`). A `topo.inout` result and its argument are the same buffer, so a
    kernel may name either or both.
    """

    name: str
    kind: str
    index: int
    dtype: str
    """Triton element type: "bf16", "fp32", "i64", "i1" (stored as a byte), ..."""
    descriptor: Mapping[str, Any] | None = None
    """{"shape": [...], "strides": [...], "block": [...]} in elements: the parameter is a tensor descriptor, of two tensors with "beside",
    the name of the other one's pointer (`runtime.plan.Descriptor`)."""


@dataclass(frozen=True)
class Scratch:
    """A buffer beside the operands that the plan provides, temporary where it has no role.

    A `zeroed` one is zero when the kernel starts, and the kernel leaves it zero: all launches of a program share it.
    `boxes` and `turns` (of a kernel with an `Exchange`) belong to the kernel for as long as the program is loaded: int64 words with the
    place of this rank among those that exchange, 0 as long as it should wait for them, and the addresses of their boxes; and
    whose turn it is among the sets of a box, for every program.
    """

    dtype: str
    """Triton element type."""
    numel: int
    zeroed: bool = False
    role: Literal["", "boxes", "turns"] = ""


@dataclass(frozen=True)
class KernelSource:
    """One generated kernel. The launch passes `params` in order, then `constexprs` by name."""

    name: str
    """Name of the `@triton.jit` function in `source`."""
    source: str
    """A complete Python file."""
    params: tuple[Param, ...]
    grid: tuple[int, int, int]
    num_warps: int = 4
    num_stages: int = 1
    constexprs: Mapping[str, int] = field(default_factory=dict)
    scratch: tuple[Scratch, ...] = ()
    pdl: bool = False
    """Launched with programmatic dependent launch (the source then waits by `gdc_wait`)."""
    exchange: Exchange | None = None
    taken: int | None = None
    """With `exchange`: the argument that is added up over devices. A kernel that gives a result has the boxes of the one that takes it."""
    family: str = ""
    """"loops", "gemm", ...: for reports."""

    def problems(self) -> list[str]:
        """Everything that would make the launch impossible, as sentences; empty when there is nothing."""
        found = []
        if not self.name.isidentifier():
            found.append(f"kernel name {self.name!r} is not an identifier")
        if len(self.grid) != 3 or min(self.grid) < 1:
            found.append(f"grid {self.grid} is not three positive numbers")
        elif self.grid[0] > 2**31 - 1 or max(self.grid[1:]) > 65535:
            found.append(f"grid {self.grid} is over CUDA's limits (2147483647, 65535, 65535)")
        if self.num_warps not in (1, 2, 4, 8, 16, 32):
            found.append(f"num_warps is {self.num_warps}, not a power of two up to 32")
        if self.pdl and "gdc_wait()" not in self.source:
            found.append("it is launched dependently but never waits for the kernel before it")
        for p in self.params:
            if p.kind not in PARAM_KINDS:
                found.append(f"parameter {p.name} has kind {p.kind!r}, not one of {', '.join(PARAM_KINDS)}")
            if p.kind == "scratch" and not 0 <= p.index < len(self.scratch):
                found.append(f"parameter {p.name} asks for scratch {p.index} of {len(self.scratch)}")
        expected = [p.name for p in self.params] + list(self.constexprs)
        try:
            defined = {n.name: n for n in ast.parse(self.source).body if isinstance(n, ast.FunctionDef)}
        except SyntaxError as error:
            return [*found, f"the source does not parse: {error}"]
        if self.name not in defined:
            found.append(f"the source does not define {self.name}")
        elif sorted(actual := [a.arg for a in defined[self.name].args.args]) != sorted(expected):
            found.append(f"{self.name} takes ({', '.join(actual)}), the launch gives ({', '.join(expected)})")
        elif actual[: len(self.params)] != expected[: len(self.params)]:
            found.append(f"{self.name} takes ({', '.join(actual)}) in another order than params")
        return found

    def digest(self) -> str:
        """sha256 over all fields: the key of compile caches."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def programs(self) -> int:
        """Number of program instances of one launch."""
        return math.prod(self.grid)
