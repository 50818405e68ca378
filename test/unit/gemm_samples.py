"""Kernel functions of family `gemm` as text: what passes form from models, in small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Shape = Sequence[int]
WIDEN = "%w{0} = arith.extf {{{0}}} : bf16 to f32"


def tensor(shape: Shape, element: str) -> str:
    return f"tensor<{'x'.join([*map(str, shape), element])}>"


def dictionary(entries: Mapping[str, object]) -> str:
    """An attribute dictionary; lists are integer arrays."""

    def text(value: object) -> str:
        match value:
            case bool():
                return str(value).lower()
            case int():
                return f"{value} : i64"
            case list():
                return f"array<i64: {', '.join(map(str, value))}>" if value else "array<i64>"
            case dict():
                return dictionary(value)
        return f'"{value}"'

    return "{" + ", ".join(f"{k} = {text(v)}" for k, v in entries.items()) + "}"


@dataclass(frozen=True)
class Named:
    """A value of the function being written."""

    name: str
    shape: tuple[int, ...]
    element: str

    @property
    def type(self) -> str:
        return tensor(self.shape, self.element)


@dataclass
class Function:
    """Writes one kernel function, op by op."""

    arguments: list[Named] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    count: int = 0

    def argument(self, shape: Shape, element: str = "bf16") -> Named:
        found = Named(f"%arg{len(self.arguments)}", tuple(shape), element)
        self.arguments.append(found)
        return found

    def _new(self, shape: Shape, element: str) -> Named:
        self.count += 1
        return Named(f"%v{self.count}", tuple(shape), element)

    def empty(self, shape: Shape, element: str) -> Named:
        made = self._new(shape, element)
        self.lines.append(f"{made.name} = tensor.empty() : {made.type}")
        return made

    def filled(self, shape: Shape, value: str = "0.0", element: str = "f32") -> Named:
        into, scalar, made = self.empty(shape, element), self._new((), element), self._new(shape, element)
        self.lines.append(f"{scalar.name} = arith.constant {value} : {element}")
        self.lines.append(
            f"{made.name} = linalg.fill ins({scalar.name} : {element}) outs({into.name} : {into.type}) -> {made.type}"
        )
        return made

    def contract(self, left: Named, right: Named, transposed: bool = True) -> Named:
        """`left[m, k] * right[n, k]` (or `right[k, n]`) in f32."""
        n = right.shape[0 if transposed else 1]
        into = self.filled((left.shape[0], n))
        made = self._new(into.shape, "f32")
        weights = "(d1, d2)" if transposed else "(d2, d1)"
        maps = ", ".join(f"affine_map<(d0, d1, d2) -> {m}>" for m in ("(d0, d2)", weights, "(d0, d1)"))
        self.lines.append(
            f"{made.name} = linalg.contract indexing_maps = [{maps}] ins({left.name}, {right.name} : "
            f"{left.type}, {right.type}) outs({into.name} : {into.type}) -> {made.type}"
        )
        return made

    def pointwise(
        self, operands: Sequence[tuple[Named, str]], shape: Shape, element: str, code: Sequence[str]
    ) -> Named:
        """A loop nest over `shape`: operands with the results of their maps (`d0, d1`), `code` with `{0}`... for them.

        The last line's value `%r` is the result.
        """
        into, made = self.empty(shape, element), self._new(shape, element)
        dims = ", ".join(f"d{i}" for i in range(len(shape)))
        maps = ", ".join(f"affine_map<({dims}) -> ({m})>" for m in [*(m for _, m in operands), dims])
        kinds = ", ".join('"parallel"' for _ in shape)
        names = [f"%x{i}" for i in range(len(operands))]
        head = ", ".join(f"{n}: {v.element}" for n, (v, _) in zip(names, operands))
        self.lines.append(
            f"{made.name} = linalg.generic {{indexing_maps = [{maps}], iterator_types = [{kinds}]}} "
            f"ins({', '.join(v.name for v, _ in operands)} : {', '.join(v.type for v, _ in operands)}) "
            f"outs({into.name} : {into.type}) {{\n^bb0({head}, %o: {element}):"
        )
        self.lines += [line.format(*names) for line in code]
        self.lines.append(f"linalg.yield %r : {element}\n}} -> {made.type}")
        return made

    def row_sum(self, value: Named, code: Sequence[str], others: Sequence[tuple[Named, str]] = ()) -> Named:
        """Sum over the columns of a matrix, in f32, of the value `%r` that `code` computes."""
        into = self.filled(value.shape[:1])
        made = self._new(into.shape, "f32")
        operands = [(value, "d0, d1"), *others]
        maps = ", ".join(f"affine_map<(d0, d1) -> ({m})>" for m in [*(m for _, m in operands), "d0"])
        head = ", ".join(f"%x{i}: {v.element}" for i, (v, _) in enumerate(operands))
        self.lines.append(
            f'{made.name} = linalg.generic {{indexing_maps = [{maps}], iterator_types = ["parallel", "reduction"]}} '
            f"ins({', '.join(v.name for v, _ in operands)} : {', '.join(v.type for v, _ in operands)}) "
            f"outs({into.name} : {into.type}) {{\n^bb0({head}, %o: f32):"
        )
        self.lines += [line.format(*(f"%x{i}" for i in range(len(operands)))) for line in code]
        self.lines.append(f"%s = arith.addf %o, %r : f32\nlinalg.yield %s : f32\n}} -> {made.type}")
        return made

    def mean_square(self, value: Named) -> Named:
        """Mean of the squares of the rows of a half-precision matrix."""
        total = self.row_sum(
            value, ["%w = arith.extf {0} : " + value.element + " to f32", "%r = arith.mulf %w, %w : f32"]
        )
        code = [f"%n = arith.constant {value.shape[1]}.0 : f32", "%r = arith.divf {0}, %n : f32"]
        return self.pointwise([(total, "d0")], total.shape, "f32", code)

    def demote(self, value: Named, element: str = "bf16") -> Named:
        made = self._new(value.shape, element)
        self.lines.append(f'{made.name} = "topo.demote"({value.name}) : ({value.type}) -> {made.type}')
        return made

    def expand(self, value: Named, shape: Shape, groups: str) -> Named:
        made = self._new(shape, value.element)
        sizes = ", ".join(map(str, shape))
        self.lines.append(
            f"{made.name} = tensor.expand_shape {value.name} {groups} output_shape [{sizes}] : {value.type} into {made.type}"
        )
        return made

    def slice(self, value: Named, offsets: Shape, shape: Shape, strides: Shape | None = None) -> Named:
        made = self._new(shape, value.element)
        steps = strides or [1] * len(shape)
        self.lines.append(
            f"{made.name} = tensor.extract_slice {value.name}{list(offsets)} {list(shape)} {list(steps)} : {value.type} to {made.type}"
        )
        return made

    def concat(self, values: Sequence[Named], dim: int) -> Named:
        shape = list(values[0].shape)
        shape[dim] = sum(v.shape[dim] for v in values)
        made = self._new(shape, values[0].element)
        self.lines.append(
            f"{made.name} = tensor.concat dim({dim}) {', '.join(v.name for v in values)} : "
            f"({', '.join(v.type for v in values)}) -> {made.type}"
        )
        return made

    def rotate(self, value: Named, interleaved: bool = False) -> Named:
        made = self._new(value.shape, value.element)
        self.lines.append(
            f'{made.name} = "topo.rotate_half"({value.name}) {{interleaved = {str(interleaved).lower()}}} : '
            f"({value.type}) -> {made.type}"
        )
        return made

    def update(self, into: Named, value: Named, index: Named, dim: int) -> Named:
        made = self._new(into.shape, into.element)
        self.lines.append(
            f'{made.name} = "topo.index_update"({into.name}, {value.name}, {index.name}) {{dim = {dim} : i64}} : '
            f"({into.type}, {value.type}, {index.type}) -> {made.type}"
        )
        return made

    def scatter(self, into: Named, value: Named, positions: Named) -> Named:
        """`into[positions[i, 0], :] = value[i, :]`."""
        made = self._new(into.shape, into.element)
        self.lines.append(
            f"{made.name} = tm_tensor.scatter {{dimension_map = array<i64: 0>}} unique_indices(false) ins({value.name}, {positions.name} : "
            f"{value.type}, {positions.type}) outs({into.name} : {into.type}) {{\n"
            f"^bb0(%u: {into.element}, %c: {into.element}):\ntm_tensor.yield %u : {into.element}\n}} -> {made.type}"
        )
        return made

    def text(
        self,
        results: Sequence[Named],
        tile: Mapping[str, int] | None,
        inout: Sequence[Sequence[int]] = (),
        name: str = "k_gemm",
        **attributes: object,
    ) -> str:
        """The module with this one kernel function."""
        heads = ", ".join(f"{a.name}: {a.type}" for a in self.arguments)
        types = ", ".join(r.type for r in results)
        kernel = dictionary({"family": "gemm", **({"tile": dict(tile)} if tile else {}), **attributes})
        pairs = ", ".join(f"array<i64: {r}, {a}>" for r, a in inout)
        extra = f"topo.inout = [{pairs}], " if inout else ""
        body = "\n".join(self.lines)
        return (
            f"module {{\nfunc.func private @{name}({heads}) -> ({types}) attributes {{{extra}topo.kernel = {kernel}}} {{\n"
            f"{body}\nreturn {', '.join(r.name for r in results)} : {types}\n}}\n}}"
        )


def gated(f: Function, gate: Named, up: Named, scale: Named | None = None) -> Named:
    """`silu(gate) * up`, both scaled by rows first."""
    code = [
        "%one = arith.constant 1.0 : f32",
        *(["%g = arith.mulf {0}, {2} : f32", "%u = arith.mulf {1}, {2} : f32"] if scale else []),
        f"%m = arith.negf {'%g' if scale else '{0}'} : f32",
        "%e = math.exp %m : f32",
        "%d = arith.addf %one, %e : f32",
        f"%s = arith.divf {'%g' if scale else '{0}'}, %d : f32",
        f"%r = arith.mulf %s, {'%u' if scale else '{1}'} : f32",
    ]
    operands = [(gate, "d0, d1"), (up, "d0, d1")] + ([(scale, "d0")] if scale else [])
    return f.demote(f.pointwise(operands, gate.shape, "f32", code))


def reciprocal_root(f: Function, mean: Named) -> Named:
    return f.pointwise([(mean, "d0")], mean.shape, "f32", ["%e = arith.constant 1.0e-5 : f32", "%t = arith.addf {0}, %e : f32", "%r = math.rsqrt %t : f32"])  # fmt: skip


def scaled(f: Function, value: Named, weight: Named, scale: Named | None = None) -> Named:
    """`value * weight[k] (* scale[m])` in f32, narrowed."""
    code = ["%a = arith.extf {0} : bf16 to f32", "%b = arith.extf {1} : bf16 to f32"]
    code += ["%p = arith.mulf %a, %b : f32", "%r = arith.mulf %p, {2} : f32"] if scale else ["%r = arith.mulf %a, %b : f32"]  # fmt: skip
    operands = [(value, "d0, d1"), (weight, "d1")] + ([(scale, "d0")] if scale else [])
    return f.demote(f.pointwise(operands, value.shape, "f32", code))


def rotated(f: Function, product: Named, heads: int, interleaved: bool, by_op: bool) -> Named:
    """The product as heads, turned by angles per row."""
    m, n = product.shape
    depth = n // heads
    x = f.expand(f.demote(product), (m, heads, depth), "[[0], [1, 2]]")
    cos, sin = f.argument((m, depth)), f.argument((m, depth))
    if by_op:
        turned = f.rotate(x, interleaved)
    else:
        low, high = (f.slice(x, (0, 0, at), (m, heads, depth // 2)) for at in (0, depth // 2))
        minus = f.pointwise([(high, "d0, d1, d2")], high.shape, "bf16", ["%r = arith.negf {0} : bf16"])
        turned = f.concat([minus, low], 2)
    code = [WIDEN.format(i) for i in range(4)]
    code += [
        "%p = arith.mulf %w0, %w2 : f32",
        "%q = arith.mulf %w1, %w3 : f32",
        "%r = arith.addf %p, %q : f32",
    ]
    operands = [(x, "d0, d1, d2"), (turned, "d0, d1, d2"), (cos, "d0, d2"), (sin, "d0, d2")]
    return f.demote(f.pointwise(operands, x.shape, "f32", code))
