"""Independent kernels as one launch: every member gets a range of programs.

    @k_pack(%x, %a, %b) { %0 = call @k_gemm_1(%x, %a); %1 = call @k_gemm_2(%x, %b); return %0, %1 }
        -->  if pid < 64: k_gemm_1(pid, ...)
             if pid >= 64: k_gemm_2(pid - 64, ...)

Members that are one function share a range and the code, with their arguments chosen by the number of the member:

    which = pid // 64;  of_in1 = in1;  if which == 1: of_in1 = in2;  k_gemm_1(pid % 64, in0, of_in1, ...)

The source holds the function of each member as its own family wrote it, with its program numbers as parameters. So a member
does exactly what it does alone, and it waits for the kernel before it where it would alone: each program runs one member.

Tests stand one after another, and members are inlined: Triton gives what is live in one of them the same shared memory as in another,
but not in the branches of `else`. Functions that are called share it, too; ptxas then waits for every product of a warp group
right behind it (its remark C7510), 13 % of a kernel of q, k and v of 8,192 rows.

`topo.kernel` of this family: `tile` (`warps`, that all members have; `stages`, the largest of theirs).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource, Param, Scratch
from topo_opt.codegen.triton import dependent_launch, f32_products, fast_functions
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.reductions import PRELUDE
from topo_opt.errors import UnsupportedError

_PROGRAM = re.compile(r"\btl\.program_id\((?:axis=)?([012])\)")
_PROGRAMS = re.compile(r"\btl\.num_programs\((?:axis=)?([012])\)")
_SHARED = frozenset(
    (*PRELUDE, *fast_functions.FUNCTIONS, *f32_products.FUNCTIONS, *dependent_launch.FUNCTIONS)
)
"""Functions that a file defines where a kernel in it names them."""


@dataclass(frozen=True)
class Member:
    """One call in a pack: the kernel function, the pack's argument for each of its own, and its first result's position."""

    func: ir.Operation
    arguments: tuple[int, ...]
    first_result: int


def is_pack(func: ir.Operation) -> bool:
    """Whether a function is a kernel of family `pack`."""
    if "topo.kernel" not in func.attributes:
        return False
    return ir.StringAttr(ir.DictAttr(func.attributes["topo.kernel"])["family"]).value == "pack"


def members_of(func: ir.Operation) -> list[Member]:
    """The calls in the body of a pack, in order.

    Raises:
        UnsupportedError: something else than calls on the pack's arguments, or results in another order.
    """
    table = ir.SymbolTable(func.operation.parent.operation)
    block = func.regions[0].blocks[0]
    position = {hash(a): i for i, a in enumerate(block.arguments)}
    found: list[Member] = []
    results: list[int] = []
    for view in block.operations:
        op = view.operation
        if op.name == "func.return":
            if [hash(v) for v in op.operands] != results:
                raise UnsupportedError("a pack that does not return the results of its members in order")
            continue
        if op.name != "func.call" or any(hash(v) not in position for v in op.operands):
            raise UnsupportedError(f"{op.name} in a pack, whose body is calls on its arguments")
        callee = table[ir.FlatSymbolRefAttr(op.attributes["callee"]).value].operation
        found.append(Member(callee, tuple(position[hash(v)] for v in op.operands), len(results)))
        results += [hash(r) for r in op.results]
    return found


def obstacle(source: KernelSource) -> str | None:
    """Why a kernel can't be a member of a pack; None when it can."""
    if source.exchange is not None:
        return "its boxes and turns are those of a kernel"
    try:
        text = _as_member(source, source.name)
    except UnsupportedError as error:
        return error.message
    names = {n.attr for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)}
    return "it asks for its program in another way" if names & {"program_id", "num_programs"} else None


def lower(kernel: Kernel) -> KernelSource:
    """The Triton kernel of a function of family `pack`."""
    from topo_opt.codegen.triton import lower_kernel

    members = members_of(kernel.func)
    sources = [lower_kernel(m.func, kernel.target) for m in members]
    if len({s.num_warps for s in sources}) > 1 or len({s.pdl for s in sources}) > 1:
        raise UnsupportedError(
            "a pack of kernels that differ in warps or in how they are launched: "
            + ", ".join(f"{s.name} has {s.num_warps} warps, pdl {s.pdl}" for s in sources)
        )
    return _Pack(kernel, members, sources).lower()


class _Pack:
    def __init__(self, kernel: Kernel, members: Sequence[Member], sources: Sequence[KernelSource]):
        self.kernel, self.members, self.sources = kernel, members, sources
        self.params: dict[tuple, Param] = {}
        self.scratch: list[Scratch] = []
        self.constexprs: dict[str, int] = {}

    def lower(self) -> KernelSource:
        kernel = self.kernel
        alike: dict[str, list[int]] = {}
        for n, source in enumerate(self.sources):
            alike.setdefault(source.name, []).append(n)
        lines = ["    pid = tl.program_id(0)"]
        start = 0
        for number, group in enumerate(alike.values()):
            end = start + self.sources[group[0]].programs * len(group)
            indent = "    "
            if len(alike) > 1:
                lines.append(f"    if {_within(start, end, last=number == len(alike) - 1)}:")
                indent += "    "
            lines += [indent + line for line in self._call(group, f"(pid - {start})" if start else "pid")]
            start = end
        params = tuple(self.params.values())
        signature = ", ".join([p.name for p in params] + [f"{c}: tl.constexpr" for c in self.constexprs])
        entry = "\n".join([f"@triton.jit\ndef {kernel.name}({signature}):", *lines]) + "\n"
        # A member may come several times; its function stands there once.
        functions = {s.name: _as_member(s, s.name) for s in self.sources}
        body = "\n\n".join([*functions.values(), entry])
        return KernelSource(
            name=kernel.name,
            source=kernel.file(body, [m.func for m in self.members]),
            params=params,
            grid=(start, 1, 1),
            num_warps=self.sources[0].num_warps,
            num_stages=max(s.num_stages for s in self.sources),
            constexprs=self.constexprs,
            scratch=tuple(self.scratch),
            pdl=self.sources[0].pdl,
            family="pack",
        )

    def _call(self, group: Sequence[int], pid: str) -> list[str]:
        """Lines that run the members `group`, which are one function, by programs from `pid` on.

        Where they differ in an argument, it is chosen by the member's number: code that stands there once needs registers and
        shared memory once.
        """
        source = self.sources[group[0]]
        arguments = [self._arguments(n) for n in group]
        lines = []
        if len(group) > 1:
            lines += [f"which = {pid} // {source.programs}", f"member_pid = {pid} % {source.programs}"]
            pid = "member_pid"
        passed = [n.format(pid=pid) for n in _program_numbers(source)]
        for param, names in zip(source.params, zip(*arguments)):
            if len(set(names)) == 1:
                passed.append(names[0])
                continue
            chosen = f"of_{param.name}"
            lines.append(f"{chosen} = {names[0]}")
            for other, name in enumerate(names[1:], start=1):
                if name != names[0]:
                    lines += [f"if which == {other}:", f"    {chosen} = {name}"]
            passed.append(chosen)
        for name, value in source.constexprs.items():
            self.constexprs[f"M{group[0]}_{name}"] = value
            passed.append(f"M{group[0]}_{name}")
        return [*lines, f"{source.name}({', '.join(passed)})"]

    def _arguments(self, number: int) -> list[str]:
        """The pack's parameters for those of a member."""
        source, member = self.sources[number], self.members[number]
        first_scratch = len(self.scratch)
        self.scratch += source.scratch
        found = []
        for p in source.params:
            index = {
                "arg": member.arguments[p.index] if p.kind == "arg" else 0,
                "result": member.first_result + p.index,
                "scratch": first_scratch + p.index,
            }[p.kind]
            found.append(self._param(p, index, number).name)
        return found

    def _param(self, param: Param, index: int, number: int) -> Param:
        """The pack's own parameter; members that see the same memory in the same way share it."""
        shared, descriptor = param.descriptor is None, param.descriptor
        if descriptor and "beside" in descriptor:
            # Its pointer stands in front of the descriptor among the member's parameters.
            other = next(p for p in self.sources[number].params if p.name == descriptor["beside"])
            own = self._param(other, self.members[number].arguments[other.index], number)
            descriptor = {**descriptor, "beside": own.name}
        described = json.dumps(descriptor, sort_keys=True)
        key = (param.kind, index, param.dtype, described)
        if key not in self.params:
            prefix = {"arg": "in", "result": "out", "scratch": "scratch"}[param.kind]
            name = f"{prefix}{index}" if shared else f"m{number}_{param.name}"
            if any(p.name == name for p in self.params.values()):
                name = f"{name}_{param.dtype}"
            self.params[key] = Param(name, param.kind, index, param.dtype, descriptor)
        return self.params[key]


def _program_numbers(source: KernelSource) -> list[str]:
    """For every axis that the member asks for: its program number as source, of `{pid}`."""
    x, y, _ = source.grid
    alone = y == 1 and source.grid[2] == 1
    numbers = {
        0: "{pid}" if alone else f"{{pid}} % {x}",
        1: f"{{pid}} // {x} % {y}" if source.grid[2] > 1 else f"{{pid}} // {x}",
        2: f"{{pid}} // {x * y}",
    }
    return [numbers[axis] for axis in _axes(_main(source))]


def _axes(text: str) -> list[int]:
    return sorted({int(axis) for axis in _PROGRAM.findall(text)})


def _main(source: KernelSource) -> str:
    return _functions(source)[source.name]


def _functions(source: KernelSource) -> dict[str, str]:
    """The functions of a kernel file, by name, each with its decorator."""
    lines = source.source.splitlines()
    found: dict[str, str] = {}
    for node in ast.parse(source.source).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno]) + "\n"
            if node.name not in (source.name, *_SHARED):
                raise UnsupportedError(f"kernel {source.name} has the function {node.name} beside its own")
        elif not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr)):
            raise UnsupportedError(f"kernel {source.name} has more than functions in its file")
    return found


def _within(start: int, end: int, last: bool) -> str:
    """Whether a program is one of `start` to `end`, of which the last ones need no upper bound, as source."""
    if start == 0:
        return f"pid < {end}"
    return f"pid >= {start}" if last else f"(pid >= {start}) & (pid < {end})"


def _as_member(source: KernelSource, name: str) -> str:
    """The function of a kernel with its program numbers as leading parameters."""
    text = _main(source)
    axes = _axes(text)
    text = _PROGRAM.sub(r"pid\1_", text)
    text = _PROGRAMS.sub(lambda m: str(source.grid[int(m[1])]), text)
    leading = ", ".join(f"pid{axis}_" for axis in axes)
    head = f"def {name}("
    if text.count(head) != 1:
        raise UnsupportedError(f"kernel {source.name} has another form than generated ones")
    return text.replace(head, f"{head}{leading}{', ' if leading and source.params else ''}", 1)
