"""What every op of a structured function is for fusion: free, a view, or a compute op of some kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch_mlir import ir

from topo_opt.sim import Kind
from topo_opt.structured.access import RESHAPES, is_empty_reduction, is_movement, slice_parameters
from topo_opt.structured.graph import Graph, Node


class Role(Enum):
    """FREE ops are repeated wherever they are used, VIEWs become index arithmetic of their readers, COMPUTE ops form kernels."""

    FREE = "free"
    VIEW = "view"
    COMPUTE = "compute"


VIEWS = (*RESHAPES, "tensor.extract_slice", "tensor.cast")
KINDS = {
    "topo.attention": Kind.ATTENTION,
    "topo.index_update": Kind.UPDATE,
    "tm_tensor.scatter": Kind.UPDATE,
    "tm_tensor.scan": Kind.SCAN,
    "func.call": Kind.FIXED,
}
MATRIX_ELEMENTS = ("bf16", "f16", "f32")


@dataclass
class Roles:
    """Role of every node, and which values must exist in memory in the plan function."""

    graph: Graph
    roles: list[Role] = field(default_factory=list)
    in_memory: set[int] = field(default_factory=set)

    def of(self, node: Node) -> Role:
        return self.roles[node.id]

    def compute_nodes(self) -> list[Node]:
        return [n for n in self.graph.nodes if self.roles[n.id] is Role.COMPUTE]


def assign_roles(graph: Graph) -> Roles:
    """Roles of a function; a view that the plan needs in memory and that is no alias becomes a compute op."""
    result = Roles(graph, [_role(graph, n) for n in graph.nodes])
    result.in_memory = set(graph.returns)
    for node in graph.nodes:
        result.in_memory.update(memory_operands(node))
    for node in reversed(graph.nodes):
        if not any(r in result.in_memory for r in node.results):
            continue
        role = result.of(node)
        if role is Role.VIEW and is_alias(graph, node):
            result.in_memory.add(node.operands[0])
        elif role is Role.VIEW or (role is Role.FREE and _materialises(graph, node)):
            result.roles[node.id] = Role.COMPUTE
    return result


def memory_operands(node: Node) -> list[int]:
    """Operands that must be buffers: all of an ATen call, the destination of an update."""
    if node.name == "func.call":
        return node.operands
    if node.name == "topo.index_update":
        return node.operands[:1]
    if node.name == "tm_tensor.scatter":
        return node.operands[2:3]
    return []


def is_alias(graph: Graph, node: Node) -> bool:
    """Whether a view of a contiguous buffer is contiguous memory itself."""
    if node.name != "tensor.extract_slice":
        return node.name in VIEWS
    source = graph.values[node.operands[0]].shape or ()
    _, sizes, strides = slice_parameters(node)
    if any(stride != 1 and size > 1 for size, stride in zip(sizes, strides)):
        return False
    partial = next((d for d, size in enumerate(sizes) if size != 1), len(sizes))
    return all(size == full for size, full in zip(sizes[partial + 1 :], source[partial + 1 :]))


def _materialises(graph: Graph, node: Node) -> bool:
    """A free tensor that needs a kernel to exist: fills and splat constants (dense constants are stored by the plan)."""
    return graph.values[node.results[0]].shape is not None


def _role(graph: Graph, node: Node) -> Role:
    if node.name in VIEWS or is_movement(node) or is_empty_reduction(node):
        return Role.VIEW
    if node.name in ("tensor.empty", "linalg.fill"):
        return Role.FREE
    if node.name == "arith.constant":
        return Role.FREE if _is_scalar_or_splat(graph, node) else Role.COMPUTE
    if node.name != "func.call" and all(graph.values[r].shape is None for r in node.results):
        return Role.FREE
    return Role.COMPUTE


def _is_scalar_or_splat(graph: Graph, node: Node) -> bool:
    if graph.values[node.results[0]].shape is None:
        return True
    return ir.DenseElementsAttr(node.op.attributes["value"]).is_splat


def kind_of(graph: Graph, node: Node) -> Kind:
    """The fusion kind of a compute op."""
    if node.name in KINDS:
        return KINDS[node.name]
    if node.name == "arith.constant":
        return Kind.FIXED
    if is_empty_reduction(node):
        return Kind.POINTWISE
    if node.name == "linalg.contract" and is_matrix_product(graph, node):
        return Kind.CONTRACTION
    return Kind.REDUCTION if node.has_reduction else Kind.POINTWISE


def is_matrix_product(graph: Graph, node: Node) -> bool:
    """Whether tensor cores can take a contraction: one float type on both sides, f32 result, plain permuted maps."""
    left, right, out = (graph.values[o].element for o in node.operands[:3])
    return (
        left == right
        and left in MATRIX_ELEMENTS
        and out == "f32"
        and all(m.is_projected_permutation for m in node.maps)
        and min(node.domain, default=0) > 0
    )
