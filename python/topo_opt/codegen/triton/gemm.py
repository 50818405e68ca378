"""Matrix products with fused epilogue: `linalg.contract` and what follows it element by element.

Two forms, chosen by the tile: `matrix` (tensor cores, one tile of the result a program, k in blocks) and `vector` (up to
four rows: weights are streamed once with full-width loads and multiplied in f32, no tensor cores).

`topo.kernel` of this family: `tile` = `m`, `n`, `k`, `group`, `warps`, `stages` for the matrix form, `n`, `k`, `warps`
for the vector form.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.contraction import VECTOR_ROWS, Contraction, find
from topo_opt.codegen.triton.element_types import storage_type
from topo_opt.codegen.triton.emit import Axis, Emitter, Value
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import forward_indices
from topo_opt.structured.index import ZERO, Expr, const, symbol


def lower(kernel: Kernel) -> KernelSource:
    """The Triton kernel of a function of family `gemm`."""
    form = _Matrix if "m" in kernel.attributes["tile"] else _Vector
    return form(kernel).lower()


@dataclass
class _Gemm:
    kernel: Kernel
    writer: Writer = field(default_factory=lambda: Writer(indent=1))

    def __post_init__(self) -> None:
        graph = self.kernel.graph
        self.contraction: Contraction = find(graph)
        self.batch, self.m, self.n, self.k = self.contraction.counts
        self.tile = self.kernel.attributes["tile"]
        used = {v for node in graph.nodes for v in node.operands}
        pointers, self.params = self.kernel.pointer_params(used)
        self.emitter = Emitter(graph, self.writer, self._axes(), pointers, fast=self.kernel.fast)
        self.element = graph.values[self.contraction.operand("left")[1]].element

    def _axes(self) -> dict[str, Axis]:
        raise NotImplementedError

    def _axis(self, name: str, size: int, block: int, source: str | None = None) -> Axis:
        return Axis(name, size, source or name, f"{source or name}_mask" if size % block else None)

    def _define(self, axis: str, code: str) -> None:
        """Defines an axis variable and its mask."""
        found = self.emitter.axes[axis]
        self.writer.line(f"{found.source} = {code}")
        if found.mask:
            self.writer.line(f"{found.mask} = {found.source} < {found.size}")

    def _define_batch(self) -> None:
        if self.batch > 1:
            wide = ".to(tl.int64)" if self.kernel.wide else ""
            self.writer.line(f"b = tl.program_id(1){wide}")

    def _operand(self, side: str, m: Expr, n: Expr, k: Expr) -> Value:
        position, value = self.contraction.operand(side)
        loop = self.contraction.loop(symbol("b", self.batch), m, n, k)
        return self.emitter.real(value, self.contraction.node.maps[position].apply(loop))

    def _finish(self, accumulator: str, m: Expr, n: Expr, axes: tuple[str, ...], shape: str) -> None:
        """Seeds the accumulator as the op's result and stores every returned value at its place."""
        graph, node = self.kernel.graph, self.contraction.node
        indices = self.contraction.result_indices(symbol("b", self.batch), m, n)
        init = self.emitter.real(
            node.operands[2],
            node.output_map(0).apply(self.contraction.loop(symbol("b", self.batch), m, n, ZERO)),
        )
        if not (init.is_literal and float(init.source) == 0.0):
            accumulator = self.writer.bind(f"{accumulator} + {self.emitter.tensor(init)}")
        self.emitter.seeds[(node.results[0], tuple(indices))] = Value(accumulator, "f32", frozenset(axes))
        places = forward_indices(graph, node.results[0], indices)
        for position, value in enumerate(graph.returns):
            if value not in places:
                raise UnsupportedError("a result of a gemm kernel that is not one-to-one with the product")
            self.emitter.store(f"out{position}", value, places[value], axes, shape)

    def _source(self, blocks: dict[str, int], grid: tuple[int, int, int], stages: int) -> KernelSource:
        kernel = self.kernel
        signature = ", ".join([p.name for p in self.params] + [f"{b}: tl.constexpr" for b in blocks])
        body = f"@triton.jit\ndef {kernel.name}({signature}):\n{self.writer.text()}"
        return KernelSource(
            name=kernel.name,
            source=kernel.file(body),
            params=tuple(self.params),
            grid=grid,
            num_warps=self.tile["warps"],
            num_stages=stages,
            constexprs=blocks,
            family="gemm",
        )


class _Matrix(_Gemm):
    """One tile of the result a program; programs in groups of rows, so that neighbours share tiles in L2."""

    def _axes(self) -> dict[str, Axis]:
        tile = self.tile
        return {
            "m": self._axis("m", self.m, tile["m"]),
            "n": self._axis("n", self.n, tile["n"]),
            "ka": self._axis("ka", self.k, tile["k"]),
            "kb": self._axis("kb", self.k, tile["k"]),
            "b": Axis("b", self.batch, "b", scalar=True),
        }

    def lower(self) -> KernelSource:
        tile, line = self.tile, self.writer.line
        rows, columns = -(-self.m // tile["m"]), -(-self.n // tile["n"])
        group = min(tile["group"], rows)
        line("pid = tl.program_id(0)")
        self._define_batch()
        line(f"first = pid // {group * columns} * {group}")
        line(f"rows = tl.minimum({rows} - first, {group})")
        line(f"pid_m = first + pid % {group * columns} % rows")
        line(f"pid_n = pid % {group * columns} // rows")
        wide = ".to(tl.int64)" if self.kernel.wide else ""
        self._define("m", f"pid_m{wide} * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]")
        self._define("n", f"pid_n{wide} * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]")
        line("acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)")
        m, n = symbol("m", self.m), symbol("n", self.n)
        with self.emitter.scope(f"for k0 in range(0, {self.k}, BLOCK_K):"):
            self._define("ka", "k0 + tl.arange(0, BLOCK_K)[None, :]")
            self._define("kb", "k0 + tl.arange(0, BLOCK_K)[:, None]")
            left = self._factor("left", m, n, symbol("ka", self.k), "(BLOCK_M, BLOCK_K)", {"m", "ka"})
            right = self._factor("right", m, n, symbol("kb", self.k), "(BLOCK_K, BLOCK_N)", {"n", "kb"})
            precision = ', input_precision="ieee"' if self.element == "f32" else ""
            line(f"acc = tl.dot({left}, {right}, acc{precision})")
        self._finish("acc", m, n, ("m", "n"), "(BLOCK_M, BLOCK_N)")
        blocks = {"BLOCK_M": tile["m"], "BLOCK_N": tile["n"], "BLOCK_K": tile["k"]}
        return self._source(blocks, (rows * columns, self.batch, 1), tile["stages"])

    def _factor(self, side: str, m: Expr, n: Expr, k: Expr, shape: str, axes: set[str]) -> str:
        """A block of an operand in its storage type; columns past the end of k are zero."""
        value = self._operand(side, m, n, k)
        source = value.narrow or f"{self.emitter.tensor(value)}.to({storage_type(self.element)})"
        wide = {a for a in axes if self.emitter.axes[a].size > 1}
        if not wide <= value.depends or value.is_literal:
            source = f"tl.broadcast_to({source}, {shape})"
        mask = self.emitter.axes["ka" if side == "left" else "kb"].mask
        if mask and value.narrow is None:
            source = f"tl.where({mask}, {source}, 0)"
        return source if source.isidentifier() else self.writer.bind(source)


class _Vector(_Gemm):
    """Few rows: a block of columns a program, all of k streamed through registers."""

    def _axes(self) -> dict[str, Axis]:
        return {
            "n": self._axis("n", self.n, self.tile["n"]),
            "k": self._axis("k", self.k, self.tile["k"]),
            "b": Axis("b", self.batch, "b", scalar=True),
        }

    def lower(self) -> KernelSource:
        if self.m > VECTOR_ROWS:
            raise UnsupportedError(f"the vector form takes up to {VECTOR_ROWS} rows, not {self.m}")
        tile, line = self.tile, self.writer.line
        self._define_batch()
        wide = ".to(tl.int64)" if self.kernel.wide else ""
        self._define("n", f"tl.program_id(0){wide} * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]")
        n, k = symbol("n", self.n), symbol("k", self.k)
        for row in range(self.m):
            line(f"acc{row} = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)")
        with self.emitter.scope(f"for k0 in range(0, {self.k}, BLOCK_K):"):
            self._define("k", "k0 + tl.arange(0, BLOCK_K)[None, :]")
            right = self._masked(self._operand("right", ZERO, n, k))
            for row in range(self.m):
                left = self._masked(self._operand("left", const(row), n, k))
                line(f"acc{row} += {right} * {left}")
        for row in range(self.m):
            total = self.writer.bind(f"tl.sum(acc{row}, axis=1)[:, None]")
            self._finish(total, const(row), n, ("n",), "(BLOCK_N, 1)")
        blocks = {"BLOCK_N": tile["n"], "BLOCK_K": tile["k"]}
        return self._source(blocks, (-(-self.n // tile["n"]), self.batch, 1), tile["stages"])

    def _masked(self, value: Value) -> str:
        source, mask = self.emitter.tensor(value), self.emitter.axes["k"].mask
        if mask and not value.is_load:
            return self.writer.bind(f"tl.where({mask}, {source}, 0.0)")
        return source
