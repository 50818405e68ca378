"""What a kernel moves and computes, and how long that takes at least on a device.

The time is a floor, not a forecast: bytes that must cross the memory once, divided by what a copy reaches, or operations divided
by what a large matrix product reaches, whichever is longer, plus the start of the kernel. It ranks kernels and gives the
shares in the report; nothing is decided by it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.codegen.triton.kernel import plain
from topo_opt.codegen.triton.pack import is_pack, members_of
from topo_opt.structured.graph import Graph, Node, element_bytes, read
from topo_opt.topology import Device

_MATRIX_OPS = ("linalg.contract", "topo.attention", "topo.grouped_product")
# MLIR element type -> the name of its rate in a topology; what is not listed computes in f32.
RATES = {"f64": "f64", "bf16": "bf16", "f16": "f16", "f8E4M3FN": "f8", "f8E5M2": "f8", "i8": "i8"}


@dataclass(frozen=True)
class Work:
    """Bytes read and written once; operations on tensor cores by their type; operations of everything else."""

    nbytes: int
    matrix_ops: Mapping[str, int]
    scalar_ops: int

    @property
    def ops(self) -> int:
        """All operations; a multiply-add counts as two."""
        return sum(self.matrix_ops.values()) + self.scalar_ops

    def floor_ns(self, device: Device) -> float:
        """The least time in nanoseconds that one replayed launch takes on `device`."""
        memory = self.nbytes / device.memory.read_write_bytes_per_s.value
        matrix = sum(count / device.ops_per_s(dtype) for dtype, count in self.matrix_ops.items())
        compute = matrix + self.scalar_ops / device.ops_per_s("f32")
        return 1e9 * max(memory, compute) + device.launch.replayed_ns.value


def work_of(func: ir.Operation) -> Work:
    """The work of a function with a body: a kernel, or a whole plan function."""
    if is_pack(func):
        return _sum([work_of(member.func) for member in members_of(func)])
    graph = read(func)
    matrix: dict[str, int] = {}
    scalar = 0
    for node in graph.nodes:
        if node.name in _MATRIX_OPS:
            element = graph.values[node.operands[0]].element
            dtype = RATES.get(element, "f32")
            matrix[dtype] = matrix.get(dtype, 0) + matrix_ops(graph, node)
        else:
            scalar += scalar_ops(graph, node)
    return Work(_traffic(graph), matrix, scalar)


def _sum(parts: Sequence[Work]) -> Work:
    matrix: dict[str, int] = {}
    for part in parts:
        for dtype, count in part.matrix_ops.items():
            matrix[dtype] = matrix.get(dtype, 0) + count
    return Work(sum(p.nbytes for p in parts), matrix, sum(p.scalar_ops for p in parts))


def declared_traffic(func: ir.Operation) -> int:
    """Bytes of all arguments and results of a declaration, such as an ATen call's."""
    kind = ir.FunctionType(ir.TypeAttr(func.attributes["function_type"]).value)
    return sum(_type_bytes(t) for t in (*kind.inputs, *kind.results))


def matrix_ops(graph: Graph, node: Node) -> int:
    """Operations on tensor cores of one of `_MATRIX_OPS`; a multiply-add counts as two."""
    if node.name == "linalg.contract":
        return 2 * math.prod(node.domain)
    if node.name == "topo.grouped_product":
        rows, inner = graph.values[node.operands[0]].shape or (0, 0)
        return 2 * rows * inner * (graph.values[node.results[0]].shape or (0, 0))[1]
    q, k, v = (graph.values[operand].shape or () for operand in node.operands[:3])
    batch, heads, rows, depth = q
    pairs = batch * heads * rows * k[2]
    causal = ir.BoolAttr(node.op.attributes["causal"]).value
    # A causal mask leaves half of a square, everything of what lies left of it.
    seen = pairs - batch * heads * (min(rows, k[2]) ** 2 // 2) if causal else pairs
    return 2 * seen * (depth + v[3])


def scalar_ops(graph: Graph, node: Node) -> int:
    """Scalar operations of any other op: those in the body of a loop nest, one an element of a scan."""
    if node.is_loop_nest:
        body = node.op.regions[0].blocks[0].operations
        return math.prod(node.domain) * max(len(body) - 1, 1)
    return graph.values[node.results[0]].numel if node.name == "tm_tensor.scan" else 0


def _traffic(graph: Graph) -> int:
    rewritten = _rewritten(graph.func)
    users = graph.users()
    total = 0
    for position, argument in enumerate(graph.arguments):
        if position in rewritten.values():
            continue
        size = graph.values[argument].nbytes
        readers = [graph.nodes[n] for n in users[argument]]
        if readers and all(_gathers(reader, argument) for reader in readers):
            # A table that is only looked up in costs what is looked up, not what it holds.
            size = min(size, sum(graph.values[r].nbytes for reader in readers for r in reader.results))
        picked = [
            share for reader in readers if (share := _picked_share(graph, reader, argument)) is not None
        ]
        total += int(size * min(picked, default=1.0)) if readers else 0
    for position, value in enumerate(graph.returns):
        total += _written_bytes(graph, value) if position in rewritten else graph.values[value].nbytes
    return total


def _picked_share(graph: Graph, node: Node, argument: int) -> float | None:
    """The share of its matrices that a grouped product is expected to read, its rows picking at random; None for other reads."""
    product = node
    while product.name != "topo.grouped_product":  # a transpose of the weights, which is never made
        users = [n for n in graph.nodes if any(r in n.operands for r in product.results)]
        if len(users) != 1 or len(product.results) != 1 or product.has_reduction:
            return None
        if graph.values[product.results[0]].numel != graph.values[argument].numel:
            return None
        argument, product = product.results[0], users[0]
    if product.operands[1] != argument:
        return None
    rows, groups = ((graph.values[product.operands[i]].shape or (1,))[0] for i in (0, 1))
    return 1 - (1 - 1 / groups) ** rows


def _rewritten(func: ir.Operation) -> dict[int, int]:
    """Result -> argument of `topo.inout`."""
    if "topo.inout" not in func.attributes:
        return {}
    return dict(plain(func.attributes["topo.inout"]))


def _written_bytes(graph: Graph, value: int) -> int:
    """What an update writes into the buffer that it changes: as much as its source has."""
    node = graph.producer(value)
    if node is None or node.name != "topo.index_update":
        return graph.values[value].nbytes
    return graph.values[node.operands[1]].nbytes


def _gathers(node: Node, argument: int) -> bool:
    return node.is_loop_nest and argument in node.operands[len(node.maps) :]


def _type_bytes(kind: ir.Type) -> int:
    shaped = ir.RankedTensorType(kind)
    return math.prod(tuple(shaped.shape)) * element_bytes(str(shaped.element_type))
