"""`topo-align-operands`: factors of large products get rows that start at multiples of what hardware copies at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch_mlir import ir
from torch_mlir.dialects import func, tensor

from topo_opt.passes.base import Pass
from topo_opt.passes.schedule.outline import callee, clone_nodes, kernels_of, name_kernel
from topo_opt.passes.schedule.roles import Roles, memory_operands
from topo_opt.structured.graph import element_bytes
from topo_opt.structured.index import Symbol

if TYPE_CHECKING:
    from topo_opt.codegen.triton.kernel import Kernel
    from topo_opt.codegen.triton.target import Target

_LINE_BYTES = 128
"""Rows start at a cache line where that is a small part of them."""
_SMALL_PART = 16
_SLOWER = 2.0
"""Time of a product whose factors are loaded element by element, of that with aligned ones, at least: 4103 x 2949 x 2985 in f32
took an H200 3.997 ms, 3.15 times what the model of tiles says for aligned rows. Not measured for halves, whose elements are
smaller and can't be copied asynchronously at all."""
_LAUNCH_US = 3.3
"""A launch more, from its start to its end."""
_SETTLED = ("param", "constant")


@dataclass(frozen=True)
class AlignOperands(Pass):
    """Copies factors of products into memory with longer rows, where that costs less than loading them element by element.

    `%y = call @gemm(%a, %b)`  -->  `%p = call @pad(%a); %y = call @gemm(%p, %b)`, where `gemm` reads a slice of `%p`

    A row of such a factor is no multiple of 16 bytes, so neither tensor descriptors nor loads of vectors can read it. What
    rows end in is never read. A weight is copied once, when the program is loaded (`topo-mark-load-time`). Only products of
    the matrix form, on the machine `topology` (by name or file); the others are bound by reading the weights once.
    """

    name = "topo-align-operands"
    topology: str | None = None

    def apply(self, module: Any) -> None:
        """Rewrites the kernels and their calls in all plan functions."""
        from topo_opt.codegen.triton.kernel import Kernel
        from topo_opt.codegen.triton.target import Target

        target = Target.named(self.topology) if self.topology else Target()
        block = module.operation.regions[0].blocks[0]
        functions = [v.operation for v in block.operations if v.operation.name == "func.func"]
        plans = [f for f in functions if "topo.kernel" not in f.attributes and f.regions[0].blocks]
        calls: dict[str, list[ir.Operation]] = {}
        for call in (v.operation for f in plans for v in f.regions[0].blocks[0].operations):
            if call.name == "func.call":
                calls.setdefault(callee(call), []).append(call)
        rewriter = _Rewriter(module.operation)
        for function in functions:
            if "topo.kernel" not in function.attributes:
                continue
            kernel = Kernel(function, target)
            mine = calls.get(kernel.name, [])
            rows = longer_rows(kernel, target, _settled(mine)) if mine else {}
            if rows:
                rewriter.rewrite(kernel, rows, mine)


def longer_rows(kernel: Kernel, target: Target, settled: frozenset[int]) -> dict[int, int]:
    """Argument -> elements of a row of its copy, of those whose copies cost less than they save.

    Args:
        settled: arguments that are weights, whose copies cost nothing at run time.
    """
    from topo_opt.codegen.triton.gemm_figures import figures_of
    from topo_opt.codegen.triton.gemm_matrix_tiles import microseconds
    from topo_opt.codegen.triton.gemm_tiles import few_rows

    rows = _off_boundaries(kernel) if kernel.attributes["family"] == "gemm" else {}
    if not rows:
        return {}
    figures = figures_of(kernel)
    if few_rows(kernel, figures):
        return {}
    copied = [kernel.graph.values[kernel.graph.arguments[a]].nbytes for a in rows if a not in settled]
    copying = sum(2 * n / target.memory_bytes_per_s * 1e6 + _LAUNCH_US for n in copied)
    if copying < (_SLOWER - 1) * (microseconds(kernel, figures) - _LAUNCH_US):
        return rows
    return {a: length for a, length in rows.items() if a in settled}


def _off_boundaries(kernel: Kernel) -> dict[int, int]:
    """Arguments that are factors as they lie in memory, with rows that a descriptor can't say; and how long they should be."""
    from topo_opt.codegen.triton.gemm_figures import loaded_factors
    from topo_opt.codegen.triton.recorded_loads import ALIGNMENT

    graph, found = kernel.graph, {}
    rewritten = {v for node in graph.nodes for v in memory_operands(node)}
    for value, place in loaded_factors(kernel):
        info = graph.values[value]
        shape, unit = info.shape or (), element_bytes(info.element)
        if len(shape) < 2 or shape[-1] < 2 or shape[-1] * unit % ALIGNMENT == 0 or value in rewritten:
            continue
        along = [atom for atom, step in place.terms if step == 1]
        others = [step for _, step in place.terms if step != 1]
        # One axis of the product runs along a row, the others from row to row.
        from_row_to_row = bool(others) and all(step % shape[-1] == 0 for step in others)
        inside = len(along) == 1 and isinstance(along[0], Symbol) and along[0].size <= shape[-1]
        if inside and from_row_to_row:
            line = _LINE_BYTES if shape[-1] * unit >= _SMALL_PART * _LINE_BYTES else ALIGNMENT
            found[graph.arguments.index(value)] = -(-shape[-1] * unit // line) * line // unit
    return found


def _settled(calls: Sequence[ir.Operation]) -> frozenset[int]:
    """Positions of the operands that are parameters or constants at every call."""

    def of(call: ir.Operation) -> set[int]:
        return {i for i, v in enumerate(call.operands) if _kind(v) in _SETTLED}

    return frozenset(set.intersection(*map(of, calls)))


def _kind(value: ir.Value) -> str | None:
    """`topo.kind` of an argument of a plan function."""
    from topo_opt.codegen.triton.kernel import plain

    if not isinstance(value.owner, ir.Block):
        return None
    function = value.owner.owner
    if "arg_attrs" not in function.attributes:
        return None
    attributes = ir.ArrayAttr(function.attributes["arg_attrs"])[ir.BlockArgument(value).arg_number]
    return plain(attributes).get("topo.kind")


@dataclass
class _Rewriter:
    """Makes functions and calls; a tensor is copied once a function."""

    module: ir.Operation
    copies: dict[tuple[ir.Value, int], ir.Value] = field(default_factory=dict)

    def rewrite(self, kernel: Kernel, rows: Mapping[int, int], calls: Sequence[ir.Operation]) -> None:
        """The kernel with `rows` of its arguments, given copies of its operands."""
        name = self._kernel(kernel, rows)
        for call in calls:
            operands = list(call.operands)
            for argument, length in rows.items():
                operands[argument] = self._copy(call, operands[argument], length)
            with call.location, ir.InsertionPoint(call):
                made = func.CallOp([r.type for r in call.results], name, operands).operation
            for before, after in zip(call.results, made.results):
                before.replace_all_uses_with(after)
            call.erase()
        kernel.graph.func.erase()

    def _copy(self, call: ir.Operation, value: ir.Value, length: int) -> ir.Value:
        found = self.copies.get((value, length))
        if found is None:
            kind = ir.RankedTensorType(value.type)
            longer = _longer(kind, length)
            with call.location, ir.InsertionPoint(call):
                found = func.CallOp([longer], self._pad(kind, longer), [value]).operation.results[0]
            self.copies[value, length] = found
        return found

    def _pad(self, kind: ir.RankedTensorType, longer: ir.RankedTensorType) -> str:
        """The kernel that copies a tensor into longer rows."""
        shape, rank = list(longer.shape), len(kind.shape)
        low, high = [0] * rank, [b - a for a, b in zip(kind.shape, longer.shape)]
        identity = ir.AffineMapAttr.get(ir.AffineMap.get_identity(rank, kind.context))
        zero = "0.0" if not str(kind.element_type).startswith("i") else "0"
        text = f"""func.func private @kernel(%a: {kind}) -> {longer} attributes {{topo.kernel = {{family = "loops",
            rows = array<i64: {", ".join(map(str, shape))}>, cols = array<i64>,
            full_shape = array<i64: {", ".join(map(str, shape))}>, full_map = {identity}}}}} {{
          %z = arith.constant {zero} : {kind.element_type}
          %p = tensor.pad %a low{low} high{high} {{
          ^bb0({", ".join(f"%i{d}: index" for d in range(rank))}):
            tensor.yield %z : {kind.element_type}
          }} : {kind} to {longer}
          return %p : {longer}
        }}"""
        with kind.context, ir.Location.unknown():
            made = ir.Operation.parse(text)
            ir.InsertionPoint(self.module.regions[0].blocks[0]).insert(made)
            return name_kernel(made.operation, "loops", kernels_of(self.module))

    def _kernel(self, kernel: Kernel, rows: Mapping[int, int]) -> str:
        graph, function = kernel.graph, kernel.graph.func
        handles = [graph.handles[v] for v in graph.arguments]
        types = [_longer(h.type, rows[i]) if i in rows else h.type for i, h in enumerate(handles)]
        kind = ir.FunctionType.get(types, [graph.handles[v].type for v in graph.returns])
        with (
            function.context,
            ir.Location.unknown(),
            ir.InsertionPoint(self.module.regions[0].blocks[0]),
        ):
            made = func.FuncOp("kernel", kind, visibility="private")
            body = made.add_entry_block()
        made.operation.attributes["topo.kernel"] = function.attributes["topo.kernel"]
        with function.context, ir.Location.unknown(), ir.InsertionPoint(body):
            given = [
                _part(a, h.type) if i in rows else a for i, (a, h) in enumerate(zip(body.arguments, handles))
            ]
            mapping = dict(zip(graph.arguments, given))
            clone_nodes(Roles(graph), graph.nodes, mapping)
            func.ReturnOp([mapping[v] for v in graph.returns])
        return name_kernel(made.operation, kernel.attributes["family"], kernels_of(self.module))


def _longer(kind: ir.Type, length: int) -> ir.RankedTensorType:
    """The type with rows of `length` elements."""
    old = ir.RankedTensorType(kind)
    return ir.RankedTensorType.get(
        [*old.shape[:-1], length], old.element_type, loc=ir.Location.unknown(old.context)
    )


def _part(value: ir.Value, kind: ir.Type) -> ir.Value:
    """The part of a tensor with longer rows that is of type `kind`."""
    sizes = list(ir.RankedTensorType(kind).shape)
    rank = len(sizes)
    return tensor.ExtractSliceOp(kind, value, [], [], [], [0] * rank, sizes, [1] * rank).result


__all__ = ["AlignOperands", "longer_rows"]
