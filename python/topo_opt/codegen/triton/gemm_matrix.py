"""The matrix form: tensor cores, one tile of the result a program, k in blocks."""

from __future__ import annotations

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.emit import Axis
from topo_opt.codegen.triton.gemm_base import Accumulator, Gemm
from topo_opt.errors import UnsupportedError
from topo_opt.structured.index import symbol


class Matrix(Gemm):
    """Programs in groups of rows, so that neighbours share tiles in L2."""

    def _axes(self) -> dict[str, Axis]:
        tile = self.tile
        return {
            "m": self.axis("m", self.m, tile["m"]),
            "n": self.axis("n", self.columns, tile["n"]),
            "ka": self.axis("ka", self.k, tile["k"]),
            "kb": self.axis("kb", self.k, tile["k"]),
            "b": Axis("b", self.batch, "b", scalar=True),
        }

    def lower(self) -> KernelSource:
        tile, line = self.tile, self.writer.line
        if self.pdl:
            line("gdc_launch_dependents()")
        rows, columns = -(-self.m // tile["m"]), -(-self.columns // tile["n"])
        group = min(tile["group"], rows)
        line("pid = tl.program_id(0)")
        self.define_batch()
        line(f"first = pid // {group * columns} * {group}")
        line(f"rows = tl.minimum({rows} - first, {group})")
        line(f"pid_m = first + pid % {group * columns} % rows")
        line(f"pid_n = pid % {group * columns} // rows")
        self.define("m", f"pid_m{self.cast} * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]")
        self.define("n", f"pid_n{self.cast} * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]")
        m, n = symbol("m", self.m), symbol("n", self.columns)
        places = self.places(m, n)
        self.check_coverage(places, self.batch * self.m * self.columns)
        shape = "(BLOCK_M, BLOCK_N)"
        needs = self.emitter.rehearse(lambda: [self.store(p, ("m", "n"), shape) for p in places])
        if not all(map(self.is_product, needs.reductions)):
            raise UnsupportedError("a statistic in the matrix form of a gemm kernel")
        accumulators = [self.accumulator(r, [m]) for r in needs.reductions]
        names = ["acc", *(f"acc{i}" for i in range(1, len(accumulators)))]
        for name in names:
            line(f"{name} = tl.zeros({shape}, tl.float32)")
        if self.pdl:
            line("gdc_wait()")
        with self.emitter.scope(f"for k0 in range(0, {self.k}, BLOCK_K):"):
            self.define("ka", "k0 + tl.arange(0, BLOCK_K)[None, :]")
            self.define("kb", "k0 + tl.arange(0, BLOCK_K)[:, None]")
            precision = ', input_precision="ieee"' if self.element == "f32" else ""
            for name, accumulator in zip(names, accumulators):
                left, right = self._factors(accumulator)
                line(f"{name} = tl.dot({left}, {right}, {name}{precision})")
        for name, accumulator in zip(names, accumulators):
            self.seed_product(accumulator, name, ("m", "n"))
        for place in places:
            self.store(place, ("m", "n"), shape)
        blocks = {"BLOCK_M": tile["m"], "BLOCK_N": tile["n"], "BLOCK_K": tile["k"]}
        return self.source(blocks, (rows * columns, self.batch, 1), tile["stages"])

    def _factors(self, accumulator: Accumulator) -> tuple[str, str]:
        axes = self.emitter.axes
        left = self.operand(accumulator, "left", symbol("ka", self.k))
        right = self.operand(accumulator, "right", symbol("kb", self.k))
        return (
            self.factor(left, axes["ka"].mask, "ka", {"m", "ka"}, "(BLOCK_M, BLOCK_K)"),
            self.factor(right, axes["kb"].mask, "kb", {"n", "kb"}, "(BLOCK_K, BLOCK_N)"),
        )
