"""The streaming form of a grouped product: few rows, each with a matrix of its own.

A program computes `n` columns of one row: it reads the row's group and streams those columns of the group's matrix through
registers, all of them on their way before the first is used. No tensor cores, nothing is sorted.
"""

from __future__ import annotations

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.emit import Axis, Value
from topo_opt.codegen.triton.grouped_base import Experts
from topo_opt.structured.index import Expr, symbol

UNROLLED = 16
"""Blocks of k up to which there is no loop."""


class GroupedStream(Experts):
    """Blocks of columns of one row."""

    def axes(self) -> dict[str, Axis]:
        block = self.tile["k"]
        return {
            "a": Axis("a", self.problem.rows, "a", scalar=True),
            "n": self.axis("n", self.problem.columns, self.tile["n"]),
            "k": self.axis("k", self.problem.inner, block) if self._looped else Axis("k", block, "k"),
            "kt": Axis("kt", self.problem.inner % block or block, "k", "k_mask"),
        }

    @property
    def _looped(self) -> bool:
        return -(-self.problem.inner // self.tile["k"]) > UNROLLED

    def lower(self) -> KernelSource:
        problem, tile, line = self.problem, self.tile, self.writer.line
        group = self.pointer(2)
        line(f"a = tl.program_id(1){self.cast}")
        self.define("n", f"tl.program_id(0){self.cast} * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]")
        line(f"expert = tl.load({group} + a){self.cast or '.to(tl.int32)'}")
        line(f"expert = tl.minimum(tl.maximum(expert, 0), {problem.groups - 1})")
        a = symbol("a", problem.rows)
        columns = self.columns_asked(a)
        names = [f"acc{i}" for i in range(len(columns))]
        if self._looped:
            self._loop(a, columns, names)
        else:
            self._unroll(a, columns, names)
        sums = [self.writer.bind(f"tl.sum({name}, axis=1)[:, None]") for name in names]
        self.finish(a, columns, sums, ("n",), "(BLOCK_N, 1)")
        blocks = {"BLOCK_N": tile["n"], "BLOCK_K": tile["k"]}
        return self.source(blocks, (-(-problem.columns // tile["n"]), problem.rows, 1))

    def _loop(self, a: Expr, columns: list[Expr], names: list[str]) -> None:
        for name in names:
            self.writer.line(f"{name} = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)")
        k = symbol("k", self.problem.inner)
        with self.emitter.scope(f"for k0 in range(0, {self.problem.inner}, BLOCK_K):"):
            self.define("k", "k0 + tl.arange(0, BLOCK_K)[None, :]")
            row = self._masked(self.rows_of(a, k), "k")
            for name, column in zip(names, columns):
                self.writer.line(f"{name} += {self._masked(self.weights_of(k, column), 'k')} * {row}")

    def _unroll(self, a: Expr, columns: list[Expr], names: list[str]) -> None:
        inner, block, line = self.problem.inner, self.tile["k"], self.writer.line
        line("k = tl.arange(0, BLOCK_K)[None, :]")
        if inner % block:
            line(f"k_mask = k < {inner % block}")
        full = [(symbol("k", block) + i * block, "k") for i in range(inner // block)]
        tail = [(symbol("kt", inner % block) + inner // block * block, "kt")] if inner % block else []
        steps = full + tail
        weights = {(axis, column, k): self.weights_of(k, column) for k, axis in steps for column in columns}
        for number, (k, axis) in enumerate(steps):
            row = self._masked(self.rows_of(a, k), axis)
            for name, column in zip(names, columns):
                product = f"{self._masked(weights[(axis, column, k)], axis)} * {row}"
                if number == 0:
                    product = f"tl.broadcast_to({product}, (BLOCK_N, BLOCK_K))"
                line(f"{name} {'=' if number == 0 else '+='} {product}")

    def _masked(self, value: Value, axis: str) -> str:
        """Source of a value that is zero past the end of k."""
        source, mask = self.emitter.tensor(value), self.emitter.axes[axis].mask
        if mask and not (value.is_load and axis in value.depends):
            return self.writer.bind(f"tl.where({mask}, {source}, 0.0)")
        return source
