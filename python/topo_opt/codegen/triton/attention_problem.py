"""What an attention kernel computes, read from its kernel function: sizes, scale, mask, and which heads share keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.codegen.triton.emit import Axis, Emitter, Value
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.graph import Node
from topo_opt.structured.index import Expr, symbol

DOT_ELEMENTS = ("f16", "bf16", "f32")
MASK_ELEMENTS = ("i1", "f16", "bf16", "f32")


@dataclass(frozen=True)
class Problem:
    """One `topo.attention`. `shared` query heads in a row read the same keys and values.

    The op's own grouping (`H // G`) is a divisor of `shared`, which also sees keys that the kernel function expands from
    fewer heads.
    """

    node: Node
    batch: int
    heads: int
    rows: int
    keys: int
    depth: int
    width: int
    element: str
    scale: float
    low: tuple[ir.AffineExpr, ...]
    """Bounds of the keys that a row sees, of the row and its position; a causal order is one of `high`."""
    high: tuple[ir.AffineExpr, ...]
    softcap: float | None
    grouped: int
    """Query heads for one head of the `k` operand."""
    shared: int
    mask_element: str | None
    mask: int | None
    """Value number of the mask."""
    positions: int | None
    """Value number of the rows' positions."""

    @property
    def additive(self) -> bool:
        return self.mask_element not in (None, "i1")

    def key_indices(self, batch: Expr, head: Expr, key: Expr, depth: Expr) -> list[Expr]:
        """Indices of the `k` (or `v`) operand for query head `head`."""
        return [batch, head // self.grouped, key, depth]

    def mask_indices(self, shape: Sequence[int], indices: Sequence[Expr]) -> list[Expr]:
        """Indices of a mask of `shape` that broadcasts, for the score at `indices` (batch, head, row, key)."""
        return [index * (0 if size == 1 else 1) for index, size in zip(indices, shape, strict=True)]


def read_problem(kernel: Kernel) -> Problem:
    """The attention of a kernel function.

    Raises:
        UnsupportedError: not exactly one `topo.attention`, or element types without a kernel.
    """
    graph = kernel.graph
    nodes = [n for n in graph.nodes if n.name == "topo.attention"]
    if len(nodes) != 1:
        raise UnsupportedError(
            f"an attention kernel with {len(nodes)} topo.attention ops", hint="it takes exactly one"
        )
    node = nodes[0]
    query, keys, values = (graph.values[v] for v in node.operands[:3])
    batch, heads, rows, depth = query.shape or ()
    if query.element not in DOT_ELEMENTS:
        raise UnsupportedError(
            f"attention on {query.element}",
            hint=f"kernels take {', '.join(DOT_ELEMENTS)}; it is left to ATen",
        )
    has_mask, has_positions = list(ir.DenseI32ArrayAttr(node.op.attributes["operandSegmentSizes"]))[3:]
    mask = node.operands[3] if has_mask else None
    mask_element = None if mask is None else graph.values[mask].element
    if mask_element is not None and mask_element not in MASK_ELEMENTS:
        raise UnsupportedError(
            f"an attention mask of {mask_element}", hint=f"kernels take {', '.join(MASK_ELEMENTS)}"
        )
    grouped = heads // (keys.shape or ())[1]
    problem = Problem(
        node=node,
        batch=batch,
        heads=heads,
        rows=rows,
        keys=(keys.shape or ())[2],
        depth=depth,
        width=(values.shape or ())[3],
        element=query.element,
        scale=node.op.attributes["scale"].value,
        low=_bounds(node, "low"),
        high=_bounds(node, "high"),
        softcap=node.op.attributes["softcap"].value if "softcap" in node.op.attributes else None,
        grouped=grouped,
        shared=1,
        mask_element=mask_element,
        mask=mask,
        positions=node.operands[-1] if has_positions else None,
    )
    if min(batch, heads, rows, problem.keys, depth, problem.width) == 0:
        raise UnsupportedError("attention on an empty tensor", hint="it is left to ATen")
    return Problem(**{**vars(problem), "shared": _shared_heads(kernel, problem)})


def _bounds(node: Node, name: str) -> tuple[ir.AffineExpr, ...]:
    """The results of a bound; a causal order is the upper bound `m + 1`."""
    attributes, found = node.op.attributes, []
    if name in attributes:
        found = list(ir.AffineMapAttr(attributes[name]).value.results)
    if name == "high" and attributes["causal"].value:
        row = ir.AffineDimExpr.get(0, context=node.op.context)
        found.append(ir.AffineExpr.get_add(row, 1))
    return tuple(found)


def _shared_heads(kernel: Kernel, problem: Problem) -> int:
    """The most neighbouring query heads that read the same keys and values: keys are asked for at a head that is written as
    `group * s + member`, and must not depend on the member."""
    for size in range(problem.heads, problem.grouped, -1):
        if problem.heads % size == 0 and size % problem.grouped == 0 and _is_shared(kernel, problem, size):
            return size
    return problem.grouped


def _is_shared(kernel: Kernel, problem: Problem, size: int) -> bool:
    names = {
        "b": problem.batch,
        "g": problem.heads // size,
        "s": size,
        "n": problem.keys,
        "d": problem.depth,
        "e": problem.width,
    }
    sym = {name: symbol(name, extent) for name, extent in names.items()}
    used = {v for node in kernel.graph.nodes for v in node.operands}
    pointers, _ = kernel.pointer_params(used)
    emitter = Emitter(
        kernel.graph, Writer(), {n: Axis(n, extent, n) for n, extent in names.items()}, pointers
    )
    head = sym["g"] * size + sym["s"]
    for operand, last in zip(problem.node.operands[1:3], ("d", "e")):
        found = emitter.value(operand, problem.key_indices(sym["b"], head, sym["n"], sym[last]))
        if not isinstance(found, Value) or "s" in found.depends:
            return False
    return True
