"""The matrix form of a grouped product: rows sorted by group, tensor cores, a block of rows of one group a program.

How many rows a group has is known on the device only. The grid covers the most blocks that there can be; a program finds its
group by counting the blocks of the groups before it, and those past the last block do nothing. Rows are gathered in the
load of x and written back where they came from. With few rows a group (`swap`) the weights are the first operand of the
product, whose side tensor cores want long. With `tma` the hardware copies blocks of the weights; with `tail` the
last rows of a group, when they are no more than that, are a smaller block.
"""

from __future__ import annotations

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton import f32_products
from topo_opt.codegen.triton.attention_descriptors import Descriptor, find
from topo_opt.codegen.triton.emit import Axis
from topo_opt.codegen.triton.grouped_base import Experts
from topo_opt.codegen.triton.kernel import next_power_of_two
from topo_opt.errors import UnsupportedError
from topo_opt.structured.index import Expr, opaque, symbol


def most_blocks(rows: int, groups: int, block: int) -> int:
    """The most blocks of `block` rows that `rows` rows in up to `groups` groups can need, none shared by two groups."""
    reached = min(rows, groups)
    return reached + (rows - reached) // block


class GroupedMatrix(Experts):
    """Blocks of rows of one group by blocks of columns."""

    def axes(self) -> dict[str, Axis]:
        return self._axes("")

    def _axes(self, suffix: str) -> dict[str, Axis]:
        problem, tile = self.problem, self.tile
        sizes = {"n": (problem.columns, "n"), "kx": (problem.inner, "k"), "kw": (problem.inner, "k")}
        masked = {name: size % tile[key] for name, (size, key) in sizes.items()}
        found = {"row": Axis("row", problem.rows, f"row{suffix}", f"row{suffix}_mask")}
        for name, (size, _) in sizes.items():
            mask = f"{name}{suffix}_mask" if masked[name] else None
            found[name] = Axis(name, size, f"{name}{suffix}", mask)
        return found

    @property
    def swapped(self) -> bool:
        return bool(self.tile.get("swap", 0))

    def lower(self) -> KernelSource:
        problem, tile = self.problem, self.tile
        column_blocks = -(-problem.columns // tile["n"])
        blocks = {"BLOCK_M": tile["m"], "BLOCK_N": tile["n"], "BLOCK_K": tile["k"]}
        tail = tile.get("tail", 0)
        if tail:
            blocks["BLOCK_T"] = tail
        self._find_group(column_blocks)
        with self.emitter.scope(f"if expert < {problem.groups}:"):
            self._find_rows(column_blocks)
            if tail:
                with self.emitter.scope("if end - start > BLOCK_T:"):
                    self._multiply("BLOCK_M", "")
                # Other names: Triton joins what both branches define.
                with self.emitter.scope("else:"):
                    self._multiply("BLOCK_T", "t")
            else:
                self._multiply("BLOCK_M", "")
        count = most_blocks(problem.rows, problem.groups, tile["m"])
        return self.source(blocks, (count * column_blocks, 1, 1))

    def _find_group(self, column_blocks: int) -> None:
        """The group of the program: as many as have all their blocks before its own."""
        line, groups = self.writer.line, self.problem.groups
        offsets = self.pointer(4)
        count = next_power_of_two(groups)
        mask = f", mask=groups < {groups}, other=0" if count != groups else ""
        line("pid = tl.program_id(0)")
        line(f"block = pid // {column_blocks}")
        line(f"groups = tl.arange(0, {count})")
        line(f"starts = tl.load({offsets} + groups{mask})")
        line(f"ends = tl.load({offsets} + groups + 1{mask})")
        line("blocks = (ends - starts + BLOCK_M - 1) // BLOCK_M")
        line("before = tl.cumsum(blocks, 0) <= block")
        line("expert = tl.sum(before.to(tl.int32), 0)")

    def _find_rows(self, column_blocks: int) -> None:
        """Where the rows of the program's block stand in the order, and the descriptors of its weights."""
        line, offsets = self.writer.line, self.pointer(4)
        line("first = block - tl.sum(tl.where(before, blocks, 0), 0)")
        line(f"start = tl.load({offsets} + expert) + first * BLOCK_M")
        line(f"end = tl.load({offsets} + expert + 1)")
        if self.cast:
            line(f"expert = expert{self.cast}")
        line(f"n0 = pid % {column_blocks} * BLOCK_N")
        self.columns = self.columns_asked(self._row_of("a"))
        self.described = (
            [self._describe(c, i) for i, c in enumerate(self.columns)] if self.tile.get("tma") else []
        )

    def _row_of(self, name: str) -> Expr:
        return opaque(name, 0, self.problem.rows - 1, frozenset({"row"}))

    def _multiply(self, block: str, suffix: str) -> None:
        """A block of `block` rows; variables end in `suffix`."""
        line, problem, axes = self.writer.line, self.problem, self._axes(suffix)
        self.emitter.axes = axes
        across, down = ("[:, None]", "[None, :]") if self.swapped else ("[None, :]", "[:, None]")
        row, mask = axes["row"].source, axes["row"].mask
        line(f"{row} = start + tl.arange(0, {block}){down}")
        line(f"{mask} = {row} < end")
        line(f"a{suffix} = tl.load({self.pointer(3)} + {row}, mask={mask}, other=0){self.cast}")
        self.define("n", f"n0 + tl.arange(0, BLOCK_N){across}")
        a = self._row_of(f"a{suffix}")
        names = [f"acc{i}{suffix}" for i in range(len(self.columns))]
        shape = f"(BLOCK_N, {block})" if self.swapped else f"({block}, BLOCK_N)"
        for name in names:
            line(f"{name} = tl.zeros({shape}, tl.float32)")
        with self.emitter.scope(f"for k0{suffix} in range(0, {problem.inner}, BLOCK_K):"):
            self.define("kx", f"k0{suffix} + tl.arange(0, BLOCK_K){across}")
            if not self.described:
                self.define("kw", f"k0{suffix} + tl.arange(0, BLOCK_K){down}")
            self._step(a, names, block, f"k0{suffix}")
        axes_of_tile = ("n", "row") if self.swapped else ("row", "n")
        self.finish(a, self.columns, names, axes_of_tile, shape)

    def _step(self, a: Expr, names: list[str], block: str, k0: str) -> None:
        """The products of one block of k."""
        problem = self.problem
        kx, kw = symbol("kx", problem.inner), symbol("kw", problem.inner)
        x_shape = f"(BLOCK_K, {block})" if self.swapped else f"({block}, BLOCK_K)"
        w_shape = "(BLOCK_N, BLOCK_K)" if self.swapped else "(BLOCK_K, BLOCK_N)"
        rows = self.factor(self.rows_of(a, kx), "kx", {"row", "kx"}, x_shape)
        for i, (name, column) in enumerate(zip(names, self.columns)):
            if self.described:
                weights = self.writer.bind(self.described[i].replace("k0", k0), "w")
            else:
                wide = {"kw", *column.symbols}
                weights = self.factor(self.weights_of(kw, column), "kw", wide, w_shape)
            pair = (weights, rows) if self.swapped else (rows, weights)
            self.writer.line(f"{name} = {f32_products.product(*pair, problem.element, name)}")

    def _describe(self, column: Expr, number: int) -> str:
        """Source of a block of the weights at a column, loaded through a descriptor.

        Raises:
            UnsupportedError: the weights do not lie in memory as a descriptor can say.
        """
        graph, name, tile = self.graph, f"weights{number}", self.tile
        indices = [self.expert, symbol("kw", self.problem.inner), column]
        operand = self.problem.node.operands[1]
        try:
            found, by_columns = find(self.emitter, operand, indices, "n", "kw", frozenset()), True
        except UnsupportedError:
            found, by_columns = find(self.emitter, operand, indices, "kw", "n", frozenset()), False
        block = (tile["n"], tile["k"]) if by_columns else (tile["k"], tile["n"])
        self.params.append(found.param(graph, name, block))
        place, shape = ("n0, k0", "(BLOCK_N, BLOCK_K)") if by_columns else ("k0, n0", "(BLOCK_K, BLOCK_N)")
        turned = "" if by_columns == self.swapped else ".T"
        return f"{name}.load([{self._outer(found)}, {place}]).reshape({shape}){turned}"

    def _outer(self, found: Descriptor) -> str:
        outer = found.outer.source()
        return f"({outer}).to(tl.int32)" if self.cast else outer
