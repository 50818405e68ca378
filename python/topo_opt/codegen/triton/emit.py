"""Demand-driven emission: the source of a tensor value at index expressions over the symbols of a kernel's tile.

A stored value is asked for at its indices and asks for its operands at composed indices, so views, broadcasts and
pointwise producers never exist in memory. A value asked for twice at the same indices under the same predicate is
computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from torch_mlir import ir

from topo_opt.codegen.triton import scalar_ops, view_values
from topo_opt.codegen.triton.element_rules import ELEMENT_RULES
from topo_opt.codegen.triton.element_types import compute_type, storage_type
from topo_opt.codegen.triton.regions import Region
from topo_opt.codegen.triton.target import Precision
from topo_opt.codegen.triton.values import Axis, Complex, Scalar, Value
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import (
    VIEWS,
    Condition,
    domain_indices,
    is_empty_reduction,
)
from topo_opt.structured.graph import Graph, Map, Node
from topo_opt.structured.index import Expr, const, contiguous_strides, strided

Seed = tuple[int, tuple[Expr, ...]]
ReductionHook = Callable[[Node, int, tuple[Expr, ...]], Scalar]


def _same(value: Scalar) -> Scalar:
    return value


@dataclass
class Emitter:
    """Emits values of one kernel function into a writer.

    `pointers` maps value numbers that live in memory to pointer parameters; `seeds` holds values that the kernel family
    computed itself (an accumulator, a reduction) at given indices.
    """

    graph: Graph
    writer: Writer
    axes: Mapping[str, Axis]
    pointers: Mapping[int, str]
    precision: Precision = Precision.EXACT
    seeds: dict[Seed, Scalar] = field(default_factory=dict)
    on_reduction: ReductionHook | None = None
    changed: dict[int, Callable[[Scalar, Sequence[Expr]], Scalar]] = field(default_factory=dict)
    """What becomes of a value as soon as it is made, by its number: given it and its indices."""
    gifts: dict[str, Callable[[Writer, str, str, Sequence[str]], None]] = field(default_factory=dict)
    """What else is done with a result, by its pointer: given its source, its element offset and the masks of its store."""
    steps: frozenset[str] = frozenset()
    """Axes whose variables are known when the kernel is compiled: what they add to an address becomes a part of the load."""
    _memo: list[dict[tuple, Scalar]] = field(default_factory=lambda: [{}])
    _predicates: list[str] = field(default_factory=list)
    _predicate_depends: frozenset[str] = frozenset()
    _asserted: set[str] = field(default_factory=set)
    _fill: str | None = None
    """What loads give where they are masked, instead of zero."""

    # -- scopes -----------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, header: str) -> Iterator[None]:
        """A Python block (a loop); what is computed inside is not reused after it."""
        with self.writer.block(header):
            self._memo.append({})
            try:
                yield
            finally:
                self._memo.pop()

    @contextmanager
    def predicate(self, conditions: Sequence[str], depends: frozenset[str]) -> Iterator[None]:
        """Loads inside only touch memory where all conditions hold."""
        before, before_depends = len(self._predicates), self._predicate_depends
        self._predicates.extend(c for c in conditions if c not in self._predicates)
        self._predicate_depends = before_depends | depends
        try:
            yield
        finally:
            del self._predicates[before:]
            self._predicate_depends = before_depends

    @contextmanager
    def rehearsal(self, writer: Writer, on_reduction: ReductionHook | None) -> Iterator[None]:
        """What is asked for inside is written to `writer` and not remembered."""
        saved = self.writer, self._memo, self.on_reduction, self._asserted
        self.writer, self._memo, self.on_reduction, self._asserted = writer, [{}], on_reduction, set()
        try:
            yield
        finally:
            self.writer, self._memo, self.on_reduction, self._asserted = saved

    @contextmanager
    def assuming(self, values: Mapping[Seed, Scalar]) -> Iterator[None]:
        """The given values hold inside; what is computed from them is not remembered."""
        saved = self.seeds, self._memo
        self.seeds, self._memo = {**self.seeds, **values}, [{}]
        try:
            yield
        finally:
            self.seeds, self._memo = saved

    # -- values -----------------------------------------------------------------------------------------------------

    def value(self, number: int, indices: Sequence[Expr]) -> Scalar:
        """The tensor value `number` at `indices` (one a dimension)."""
        where = tuple(indices)
        seeded = self.seeds.get((number, where))
        if seeded is not None and number not in self.changed:
            return seeded
        key = (number, where, tuple(self._predicates), self._fill)
        for memo in reversed(self._memo):
            if key in memo:
                return memo[key]
        result = seeded or self._compute(number, where)
        if number in self.changed:
            result = self.changed[number](result, where)
        self._memo[-1][key] = result
        return result

    def real(self, number: int, indices: Sequence[Expr]) -> Value:
        """As `value`, for a tensor that is not complex."""
        found = self.value(number, indices)
        if isinstance(found, Complex):
            raise UnsupportedError("a complex value is used where a real one is expected")
        return found

    def _compute(self, number: int, indices: tuple[Expr, ...]) -> Scalar:
        if number in self.pointers:
            return self.load(number, indices)
        node = self.graph.producer(number)
        if node is None:
            raise UnsupportedError(f"kernel argument {number} has no pointer")
        info = self.graph.values[number]
        if node.name in VIEWS or is_empty_reduction(node):
            return view_values.view(self, node, indices, info.position)
        if node.is_loop_nest:
            if node.has_reduction:
                if self.on_reduction is None:
                    raise UnsupportedError(
                        f"a reduction ({node.name}) inside a kernel without reduction axes"
                    )
                return self.on_reduction(node, info.position, indices)
            return self.body(node, domain_indices(node, info.position, indices), [info.position])[0]
        handler = ELEMENT_RULES.get(node.name)
        if handler is None:
            raise UnsupportedError(f"{node.name} can't be computed inside a kernel of another family")
        return handler(self, node, indices)

    def choose(self, test: str, depends: frozenset[str], a: Scalar, b: Scalar) -> Scalar:
        """`a` where `test` holds, else `b`."""
        if isinstance(a, Complex) and isinstance(b, Complex):
            return Complex(
                self._where(test, depends, a.real, b.real), self._where(test, depends, a.imag, b.imag)
            )
        assert isinstance(a, Value) and isinstance(b, Value)
        return self._where(test, depends, a, b)

    def _where(self, test: str, depends: frozenset[str], a: Value, b: Value) -> Value:
        name = self.writer.bind(f"tl.where({test}, {self.tensor(a)}, {self.tensor(b)})")
        return Value(name, a.element, depends | a.depends | b.depends)

    def condition(self, condition: Condition) -> list[str]:
        """Tests that are not decided by ranges, each an identifier."""
        index = self.index(condition.index)
        low, high = condition.index.bounds
        tests = []
        if low < condition.low:
            tests.append(f"({index} >= {condition.low})")
        if high >= condition.high:
            tests.append(f"({index} < {condition.high})")
        if condition.step > 1:
            tests.append(f"(({index} - {condition.low}) % {condition.step} == 0)")
        return [self.writer.bind(t, "c") for t in tests]

    @contextmanager
    def filling(self, number: str | None) -> Iterator[None]:
        """Loads inside give `number` where they are masked, zero for None."""
        saved, self._fill = self._fill, number
        try:
            yield
        finally:
            self._fill = saved

    # -- memory -----------------------------------------------------------------------------------------------------

    def offset(self, indices: Sequence[Expr], strides: Sequence[int]) -> tuple[str, frozenset[str]]:
        """Source of an element offset and the axes it varies over."""
        position = strided(indices, strides)
        return self.index(position), position.symbols

    def index(self, expr: Expr) -> str:
        """Source of an index expression: a literal, an axis variable or a bound name."""
        text = expr.source(lambda name: self.axes[name].source if name in self.axes else name)
        if text.isidentifier() or expr.is_constant:
            return text
        return self.writer.bind(text, "i")

    def mask(self, depends: frozenset[str]) -> str | None:
        """The mask of an access that varies over the given axes, with the predicates in force; None when always true."""
        parts = [self.axes[n].mask for n in sorted(depends | self._predicate_depends) if n in self.axes]
        masks = list(dict.fromkeys([p for p in parts if p] + self._predicates))
        if not masks:
            return None
        return masks[0] if len(masks) == 1 else self.writer.bind(" & ".join(masks), "m")

    def inside(self, index: str, size: int, depends: frozenset[str]) -> str:
        """A test that a run-time index is inside a dimension, a name; asserted where the kernel is compiled with assertions.

        Asserted of the elements that exist: an index that varies over the axes `depends` may be anything past their ends.

        What is outside is neither read nor written in any case.
        """
        test = self.writer.bind(f"({index} >= 0) & ({index} < {size})", "c")
        where = self.mask(depends)
        allowed = f"{test} | ({where} == 0)" if where else test
        line = f'tl.device_assert({allowed}, "index out of range")'
        if line not in self._asserted:
            self._asserted.add(line)
            self.writer.line(line)
        return test

    def load(self, number: int, indices: Sequence[Expr]) -> Scalar:
        """Loads an element of a contiguous tensor in memory, widened to its compute type."""
        info = self.graph.values[number]
        pointer = self.pointers[number]
        if info.shape is None:
            return Value(self.writer.bind(f"tl.load({pointer})", "s"), info.element)
        strides = contiguous_strides(info.shape)
        if info.element.startswith("complex<"):
            inner = info.element[8:-1]
            real = self._load(pointer, strided(indices, [2 * s for s in strides]), inner)
            imag = self._load(pointer, strided(indices, [2 * s for s in strides]) + 1, inner)
            return Complex(real, imag)
        return self._load(pointer, strided(indices, strides), info.element)

    def _load(self, pointer: str, position: Expr, element: str) -> Value:
        steps = tuple(t for t in position.terms if frozenset() < t[0].symbols() <= self.steps)
        if steps and len(steps) < len(position.terms):
            fixed = Expr(tuple(t for t in position.terms if t not in steps))
            return self._load_at(
                f"{pointer} + {self.index(fixed)}", Expr(steps, position.constant), element, fixed.symbols
            )
        return self._load_at(pointer, position, element)

    def _load_at(
        self, pointer: str, position: Expr, element: str, also: frozenset[str] = frozenset()
    ) -> Value:
        """Loads the element at an offset from `pointer`, which varies over the axes `also`."""
        offset, symbols = self.index(position), position.symbols | also
        mask = self.mask(symbols)
        depends = symbols | (self._predicate_depends if self._predicates else frozenset())
        # Triton makes no float of eight bits from an integer.
        zero = self._fill or ("0.0" if element.startswith("f8") else "0")
        guard = f", mask={mask}, other={zero}" if mask else ""
        if position.is_constant:
            offset = self.writer.bind(f"tl.full((1, 1), {offset}, tl.int32)", "k")
        elif mask and all(n in self.axes and self.axes[n].scalar for n in symbols):
            offset = self.writer.bind(f"{offset} + tl.zeros((1, 1), tl.int32)", "i")
        address = f"{pointer} + {offset}"
        name = self.writer.bind(f"tl.load({address}{guard})", "a")
        if compute_type(element) != storage_type(element):
            return Value("", element, depends, narrow=name, is_load=True)
        return Value(name, element, depends, is_load=True)

    def store(
        self, pointer: str, number: int, indices: Sequence[Expr], axes: Sequence[str], shape: str
    ) -> None:
        """Computes the tensor value `number` at `indices` and stores it in a contiguous buffer.

        Args:
            axes: the axes that the stored tile spans; their masks guard the store.
            shape: source of the tile's shape, e.g. `(XBLOCK, 1)`.
        """
        info = self.graph.values[number]
        found = self.value(number, indices)
        where = strided(indices, contiguous_strides(info.shape or ()))
        if isinstance(found, Complex):
            inner = info.element[8:-1]
            self.store_scalar(pointer, found.real, where * 2, inner, axes, shape)
            self.store_scalar(pointer, found.imag, where * 2 + 1, inner, axes, shape)
        else:
            self.store_scalar(pointer, found, where, info.element, axes, shape)

    def store_scalar(
        self,
        pointer: str,
        value: Value,
        where: Expr,
        element: str,
        axes: Sequence[str],
        shape: str,
        guard: str | None = None,
    ) -> None:
        """Stores one value per tile element at element offset `where`, narrowed to its storage type.

        Args:
            guard: a further condition for the store.
        """
        # A masked axis of size one still has a block of more.
        wide = {a for a in axes if self.axes[a].size > 1 or self.axes[a].mask}
        stored = value.narrow is not None and value.element == element
        source, offset = value.narrow if stored and value.narrow else self.tensor(value), self.index(where)
        if value.is_literal or not wide <= value.depends:
            source = f"tl.broadcast_to({source}, {shape})"
        if where.is_constant:
            offset = f"tl.full({shape}, {offset}, tl.int32)"
        elif not wide <= where.symbols:
            offset = f"tl.broadcast_to({offset}, {shape})"
        masks = [m for a in axes if (m := self.axes[a].mask)] + ([guard] if guard else [])
        mask = f", mask={' & '.join(masks)}" if masks else ""
        narrow = (
            ""
            if stored or compute_type(element) == storage_type(element)
            else f".to({storage_type(element)})"
        )
        self.writer.line(f"tl.store({pointer} + {offset}, {source}{narrow}{mask})")
        if pointer in self.gifts:
            self.gifts[pointer](self.writer, f"{source}{narrow}", offset, masks)

    # -- scalars ----------------------------------------------------------------------------------------------------

    def tensor(self, value: Value) -> str:
        """Source of the value as a Triton tensor (literals become `tl.full`)."""
        if value.source == "":
            return self.number(value).source
        if not value.is_literal:
            return value.source
        return self.writer.bind(f"tl.full((1, 1), {value.source}, {compute_type(value.element)})", "k")

    def constant(self, attribute: ir.Attribute, element: str) -> Value:
        """A literal from an integer or float attribute."""
        number = attribute.value
        source = scalar_ops.literal(number, element)
        index = const(int(number)) if element.startswith(("i", "index")) and element != "i1" else None
        return Value(source, element, index=index, is_literal=True)

    def from_index(self, expr: Expr, element: str) -> Value:
        """An index expression as a value of an integer type."""
        if expr.is_constant:
            return Value(str(expr.constant), element, index=expr, is_literal=True)
        source = self.writer.bind(f"({self.index(expr)}).to({compute_type(element)})", "i")
        return Value(source, element, expr.symbols, expr)

    def number(self, value: Value) -> Value:
        """The value with a source that stands for a number of its compute type."""
        if value.source:
            return value
        if value.index is not None:
            return self.from_index(value.index, value.element)
        return replace(value, source=self.writer.bind(f"{value.narrow}.to({compute_type(value.element)})"))

    def operand(self, operand: int, index_map: Map, loop: Sequence[Expr]) -> Scalar:
        """The element of an operand of a loop nest that a body at loop indices `loop` sees."""
        return self.value(operand, index_map.apply(loop))

    def body(
        self,
        node: Node,
        loop: Sequence[Expr],
        positions: Sequence[int],
        outputs: Sequence[Scalar] | None = None,
    ) -> list[Scalar]:
        """Evaluates the region of a `linalg.generic` at loop indices.

        Args:
            positions: which of the yielded values are wanted.
            outputs: values of the output block arguments; None takes them from the init operands.
        """
        if node.name == "linalg.contract":
            raise UnsupportedError("linalg.contract has no region to evaluate")
        block = node.op.regions[0].blocks[0]
        bound: dict[int, Callable[[], Scalar]] = {}
        for position, argument in enumerate(block.arguments):
            if outputs is not None and position >= node.inputs:
                bound[hash(argument)] = partial(_same, outputs[position - node.inputs])
            else:
                operand, index_map = node.operands[position], node.maps[position]
                bound[hash(argument)] = partial(self.operand, operand, index_map, loop)
        terminator = block.operations[len(block.operations) - 1].operation
        region = Region(self, bound, loop)
        return [region.scalar(terminator.operands[p]) for p in positions]

    def binary(self, symbol: str, a: Value, b: Value) -> Value:
        """`a symbol b` for two floats of one type."""
        return self.formula(f"{{}} {symbol} {{}}", a, b)

    def formula(self, template: str, *values: Value, element: str | None = None) -> Value:
        """A value of the first one's type, or `element`, from a template with `{}` for the source of each."""
        source = self.writer.bind(template.format(*map(self.tensor, values)))
        return Value(source, element or values[0].element, frozenset().union(*(v.depends for v in values)))


__all__ = ["Axis", "Complex", "Emitter", "Scalar", "Value"]
