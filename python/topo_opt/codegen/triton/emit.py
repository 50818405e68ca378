"""Demand-driven emission: the source of a tensor value at index expressions over the symbols of a kernel's tile.

A stored value is asked for at its indices and asks for its operands at composed indices, so views, broadcasts and
pointwise producers never exist in memory. A value asked for twice at the same indices under the same predicate is
computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch_mlir import ir

from topo_opt.codegen.triton import scalar_ops
from topo_opt.codegen.triton.element_types import NARROW_FLOATS, compute_type, storage_type
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.access import VIEWS, Condition, domain_indices, is_empty_reduction, view_sources
from topo_opt.structured.graph import Graph, Node
from topo_opt.structured.index import Expr, const, contiguous_strides, linearize, opaque, strided


@dataclass(frozen=True)
class Axis:
    """One symbol of the tile: `source` is its variable, already shaped to broadcast; `mask` guards its last block."""

    name: str
    size: int
    source: str
    mask: str | None = None


@dataclass(frozen=True)
class Value:
    """A computed scalar per tile element. `source` is an identifier or a literal.

    `element` is the MLIR element type it stands for (halves are held in f32); `index` is set when the value is an index
    expression, `depends` names the axes it varies over. An empty source is bound on first use: from `index`, or by
    widening `narrow`.
    """

    source: str
    element: str
    depends: frozenset[str] = frozenset()
    index: Expr | None = None
    is_literal: bool = False
    narrow: str | None = None
    """The loaded value in its storage type, when it is half precision."""
    is_load: bool = False
    """Straight from memory: masked elements are zero."""


@dataclass(frozen=True)
class Complex:
    """A complex scalar per tile element."""

    real: Value
    imag: Value


Scalar = Value | Complex
Seed = tuple[int, tuple[Expr, ...]]


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
    fast: bool = False
    wide_offsets: bool = False
    seeds: dict[Seed, Scalar] = field(default_factory=dict)
    on_reduction: Callable[[Node, int, tuple[Expr, ...]], Scalar] | None = None
    _memo: list[dict[tuple, Scalar]] = field(default_factory=lambda: [{}])
    _predicates: list[str] = field(default_factory=list)
    _predicate_depends: frozenset[str] = frozenset()

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

    # -- values -----------------------------------------------------------------------------------------------------

    def value(self, number: int, indices: Sequence[Expr]) -> Scalar:
        """The tensor value `number` at `indices` (one a dimension)."""
        where = tuple(indices)
        seeded = self.seeds.get((number, where))
        if seeded is not None:
            return seeded
        key = (number, where, tuple(self._predicates))
        for memo in reversed(self._memo):
            if key in memo:
                return memo[key]
        result = self._compute(number, where)
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
            return self._view(node, indices, info.position)
        if node.is_loop_nest:
            if node.has_reduction:
                if self.on_reduction is None:
                    raise UnsupportedError(f"a reduction ({node.name}) inside a kernel without reduction axes")
                return self.on_reduction(node, info.position, indices)
            return self.body(node, domain_indices(node, info.position, indices), [info.position])[0]
        handler = _HANDLERS.get(node.name)
        if handler is None:
            raise UnsupportedError(f"{node.name} can't be computed inside a kernel of another family")
        return handler(self, node, indices)

    def _view(self, node: Node, indices: Sequence[Expr], position: int) -> Scalar:
        sources = view_sources(self.graph, node, indices, position)
        pieces: list[tuple[list[str], frozenset[str], Scalar]] = []
        for source in sources:
            decided = [c.decided() for c in source.conditions]
            if False in decided:
                continue
            tests = [t for c, d in zip(source.conditions, decided) if d is None for t in self._condition(c)]
            depends = frozenset().union(*(c.index.symbols for c in source.conditions))
            with self.predicate(tests, depends):
                pieces.append((tests, depends, self.value(source.value, source.indices)))
            if not tests:
                break
        else:
            if node.name == "tensor.pad":
                pieces.append(([], frozenset(), self._pad_value(node, indices)))
        result = pieces[-1][2]
        for tests, depends, piece in reversed(pieces[:-1]):
            result = self._choose(" & ".join(tests), depends, piece, result)
        return result

    def _choose(self, test: str, depends: frozenset[str], a: Scalar, b: Scalar) -> Scalar:
        if isinstance(a, Complex) and isinstance(b, Complex):
            return Complex(self._where(test, depends, a.real, b.real), self._where(test, depends, a.imag, b.imag))
        assert isinstance(a, Value) and isinstance(b, Value)
        return self._where(test, depends, a, b)

    def _where(self, test: str, depends: frozenset[str], a: Value, b: Value) -> Value:
        name = self.writer.bind(f"tl.where({test}, {self.tensor(a)}, {self.tensor(b)})")
        return Value(name, a.element, depends | a.depends | b.depends)

    def _condition(self, condition: Condition) -> list[str]:
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

    def _pad_value(self, node: Node, indices: Sequence[Expr]) -> Scalar:
        block = node.op.regions[0].blocks[0]
        yielded = block.operations[len(block.operations) - 1].operation.operands[0]
        return self._scalar(yielded, {})

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
        offset, depends = self.index(position), position.symbols
        mask = self.mask(depends)
        depends = depends | (self._predicate_depends if self._predicates else frozenset())
        guard = f", mask={mask}, other=0" if mask else ""
        address = f"{pointer} + {offset}" if offset != "0" else pointer
        name = self.writer.bind(f"tl.load({address}{guard})", "a")
        if compute_type(element) != storage_type(element):
            return Value("", element, depends, narrow=name, is_load=True)
        return Value(name, element, depends, is_load=True)

    def store(self, pointer: str, number: int, indices: Sequence[Expr], axes: Sequence[str], shape: str) -> None:
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
        self, pointer: str, value: Value, where: Expr, element: str, axes: Sequence[str], shape: str, guard: str | None = None
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
        narrow = "" if stored or compute_type(element) == storage_type(element) else f".to({storage_type(element)})"
        self.writer.line(f"tl.store({pointer} + {offset}, {source}{narrow}{mask})")

    # -- scalars ----------------------------------------------------------------------------------------------------

    def tensor(self, value: Value) -> str:
        """Source of the value as a Triton tensor (literals become `tl.full`)."""
        if value.source == "":
            return self._numeric(value).source
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

    def body(self, node: Node, loop: Sequence[Expr], positions: Sequence[int], outputs: Sequence[Scalar] | None = None) -> list[Scalar]:
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
                bound[hash(argument)] = lambda v=outputs[position - node.inputs]: v
            else:
                operand, index_map = node.operands[position], node.maps[position]
                bound[hash(argument)] = lambda o=operand, m=index_map: self.value(o, m.apply(loop))
        terminator = block.operations[len(block.operations) - 1].operation
        environment = _Environment(bound, loop)
        return [self._scalar(terminator.operands[p], environment) for p in positions]

    def _scalar(self, value: ir.Value, environment: _Environment | dict) -> Scalar:
        """A scalar SSA value inside a region, or one captured from the function."""
        key = hash(value)
        if isinstance(environment, _Environment):
            if key in environment.known:
                return environment.known[key]
            if key in environment.arguments:
                result = environment.known[key] = environment.arguments[key]()
                return result
        captured = self.graph.numbers.get(key)
        if captured is not None and captured in self.pointers:
            return self.load(captured, ())
        op = value.owner.operation
        result = self._scalar_op(op, environment)
        if isinstance(environment, _Environment):
            environment.known[key] = result
        return result

    def _scalar_op(self, op: ir.Operation, environment: _Environment | dict) -> Scalar:
        name = op.name
        if name == "arith.constant":
            return self.constant(op.attributes["value"], str(op.results[0].type))
        if name == "linalg.index":
            dim = ir.IntegerAttr(op.attributes["dim"]).value
            assert isinstance(environment, _Environment)
            return self.from_index_lazily(environment.loop[dim])
        if name == "tensor.extract":
            return self._extract(op, environment)
        operands = [self._scalar(o, environment) for o in op.operands]
        if name.startswith("complex.") or any(isinstance(o, Complex) for o in operands):
            return self._complex_op(op, operands)
        return self.apply(op, [o for o in operands if isinstance(o, Value)])

    def from_index_lazily(self, expr: Expr) -> Value:
        """An index as a value of type `index`; its source is only bound when it is used as a number."""
        if expr.is_constant:
            return Value(str(expr.constant), "index", index=expr, is_literal=True)
        return Value("", "index", expr.symbols, expr)

    def _numeric(self, value: Value) -> Value:
        """The value with a source that stands for a number of its compute type."""
        if value.source:
            return value
        if value.index is not None:
            return self.from_index(value.index, value.element)
        return replace(value, source=self.writer.bind(f"{value.narrow}.to({compute_type(value.element)})"))

    def _extract(self, op: ir.Operation, environment: _Environment | dict) -> Scalar:
        number = self.graph.value_of(op.operands[0])
        shape = self.graph.values[number].shape or ()
        indices, tests = [], []
        depends: frozenset[str] = frozenset()
        for axis, operand in enumerate(list(op.operands)[1:]):
            found = self._scalar(operand, environment)
            assert isinstance(found, Value)
            expr = found.index
            if expr is None:
                expr = opaque(found.source, 0, max(shape[axis] - 1, 0), found.depends)
                tests.append(f"({found.source} >= 0) & ({found.source} < {shape[axis]})")
                depends = depends | found.depends
            elif Condition(expr, 0, shape[axis]).decided() is None:
                tests.extend(self._condition(Condition(expr, 0, shape[axis])))
                depends = depends | expr.symbols
            indices.append(expr)
        bound = [t if t.isidentifier() else self.writer.bind(t, "c") for t in tests]
        with self.predicate(bound, depends):
            return self.value(number, indices)

    def apply(self, op: ir.Operation, operands: list[Value]) -> Value:
        """A scalar op on values; integer arithmetic on indices stays symbolic."""
        element = str(op.results[0].type)
        symbolic = _symbolic(op.name, operands, element)
        if symbolic is not None:
            if element == "index":
                return self.from_index_lazily(symbolic)
            return Value(str(symbolic.constant), element, index=symbolic, is_literal=True) if symbolic.is_constant else Value(
                "", element, symbolic.symbols, symbolic
            )
        folded = _fold_boolean(op.name, operands)
        if folded is not None:
            return folded
        rule = scalar_ops.RULES.get(op.name)
        if rule is None:
            raise UnsupportedError(f"no Triton form for {op.name}", hint="the op is left to ATen")
        operands = [self._numeric(o) for o in operands]
        literals = op.name in scalar_ops.LITERAL_FRIENDLY and not all(o.is_literal for o in operands)
        texts = [o.source if literals else self.tensor(o) for o in operands]
        if op.name == "arith.select" and operands[0].is_literal:
            return operands[1] if operands[0].source == "True" else operands[2]
        if op.name == "arith.select":
            texts = [texts[0], self.tensor(operands[1]), self.tensor(operands[2])]
        context = scalar_ops.Context(tuple(o.element for o in operands), element, op, self.fast)
        source = rule(context, *texts)
        depends = frozenset().union(*(o.depends for o in operands))
        if op.name == "arith.truncf" and element in NARROW_FLOATS:
            return Value("", element, depends, narrow=self.writer.bind(source))
        if source in ("True", "False"):
            return Value(source, element, is_literal=True)
        return Value(source if source.isidentifier() else self.writer.bind(source), element, depends)

    def _complex_op(self, op: ir.Operation, operands: list[Scalar]) -> Scalar:
        return _COMPLEX[op.name](self, op, operands)

    def binary(self, symbol: str, a: Value, b: Value) -> Value:
        """`a symbol b` for two floats of one type."""
        source = self.writer.bind(f"{self.tensor(a)} {symbol} {self.tensor(b)}")
        return Value(source, a.element, a.depends | b.depends)


@dataclass
class _Environment:
    """Values of a region: block arguments (computed on first use), loop indices and what is known so far."""

    arguments: dict[int, Callable[[], Scalar]]
    loop: Sequence[Expr]
    known: dict[int, Scalar] = field(default_factory=dict)


def _symbolic(name: str, operands: Sequence[Value], element: str) -> Expr | None:
    """The result as an index expression, when the op is integer arithmetic that expressions can hold."""
    if not operands or any(o.index is None for o in operands) or element not in ("index", "i64"):
        return None
    indices = [o.index for o in operands if o.index is not None]
    if name in ("arith.index_cast", "arith.index_castui", "arith.extsi", "arith.extui"):
        return indices[0]
    if len(indices) != 2:
        return None
    left, right = indices
    match name:
        case "arith.addi":
            return left + right
        case "arith.subi":
            return left - right
        case "arith.muli" if right.is_constant:
            return left * right.constant
        case "arith.muli" if left.is_constant:
            return right * left.constant
        case "arith.divsi" | "arith.floordivsi" | "arith.divui" if right.is_constant and right.constant > 0 and left.bounds[0] >= 0:
            return left // right.constant
        case "arith.remsi" | "arith.remui" if right.is_constant and right.constant > 0 and left.bounds[0] >= 0:
            return left % right.constant
    return None


def _fold_boolean(name: str, operands: Sequence[Value]) -> Value | None:
    """`true & x -> x` and the like: the masks of models are full of them."""
    if name not in ("arith.andi", "arith.ori") or len(operands) != 2 or operands[0].element != "i1":
        return None
    for literal, other in (operands, operands[::-1]):
        if literal.is_literal:
            neutral = literal.source == ("True" if name == "arith.andi" else "False")
            return other if neutral else literal
    return None


def _fill(emitter: Emitter, node: Node, indices: Sequence[Expr]) -> Scalar:
    return emitter._scalar(node.op.operands[0], {})


def _empty(emitter: Emitter, node: Node, indices: Sequence[Expr]) -> Scalar:
    element = emitter.graph.values[node.results[0]].element
    if element.startswith("complex<"):
        zero = Value("0.0", element[8:-1], is_literal=True)
        return Complex(zero, zero)
    return Value(scalar_ops.literal(0, element), element, is_literal=True)


def _constant(emitter: Emitter, node: Node, indices: Sequence[Expr]) -> Scalar:
    info = emitter.graph.values[node.results[0]]
    attribute = node.op.attributes["value"]
    if info.shape is None:
        return emitter.constant(attribute, info.element)
    dense = ir.DenseElementsAttr(attribute)
    if not dense.is_splat:
        raise UnsupportedError("a constant tensor inside a kernel must be a splat; others are kernel arguments")
    return emitter.constant(dense.get_splat_value(), info.element)


def _from_elements(emitter: Emitter, node: Node, indices: Sequence[Expr]) -> Scalar:
    shape = emitter.graph.values[node.results[0]].shape or ()
    position = linearize(indices, shape)
    values = [emitter._scalar(o, {}) for o in node.op.operands]
    result = values[-1]
    for number in range(len(values) - 2, -1, -1):
        test = emitter._condition(Condition(position, number, number + 1))
        result = emitter._choose(" & ".join(test), position.symbols, values[number], result) if test else values[number]
    return result


_HANDLERS: dict[str, Callable[[Emitter, Node, Sequence[Expr]], Scalar]] = {
    "linalg.fill": _fill,
    "tensor.empty": _empty,
    "arith.constant": _constant,
    "tensor.from_elements": _from_elements,
}


def _pair(value: Scalar) -> Complex:
    assert isinstance(value, Complex)
    return value


def _complex_create(e: Emitter, op: ir.Operation, operands: list[Scalar]) -> Scalar:
    real, imag = operands
    assert isinstance(real, Value) and isinstance(imag, Value)
    return Complex(real, imag)


def _complex_elementwise(symbol: str) -> Callable:
    def emit(e: Emitter, op: ir.Operation, operands: list[Scalar]) -> Scalar:
        a, b = map(_pair, operands)
        return Complex(e.binary(symbol, a.real, b.real), e.binary(symbol, a.imag, b.imag))

    return emit


def _complex_mul(e: Emitter, op: ir.Operation, operands: list[Scalar]) -> Scalar:
    a, b = map(_pair, operands)
    real = e.binary("-", e.binary("*", a.real, b.real), e.binary("*", a.imag, b.imag))
    imag = e.binary("+", e.binary("*", a.real, b.imag), e.binary("*", a.imag, b.real))
    return Complex(real, imag)


def _complex_constant(e: Emitter, op: ir.Operation, operands: list[Scalar]) -> Scalar:
    element = str(op.results[0].type)[8:-1]
    parts = [e.constant(a, element) for a in ir.ArrayAttr(op.attributes["value"])]
    return Complex(parts[0], parts[1])


_COMPLEX: dict[str, Callable[[Emitter, ir.Operation, list[Scalar]], Scalar]] = {
    "complex.create": _complex_create,
    "complex.constant": _complex_constant,
    "complex.re": lambda e, op, v: _pair(v[0]).real,
    "complex.im": lambda e, op, v: _pair(v[0]).imag,
    "complex.add": _complex_elementwise("+"),
    "complex.sub": _complex_elementwise("-"),
    "complex.mul": _complex_mul,
}

__all__ = ["Axis", "Complex", "Emitter", "Scalar", "Value"]
