"""The plan function of one variant as plain data: values, nodes, arguments and results.

Read once from kernel IR, so that the decisions in `plan_inplace` and `memory_plan` are about small Python objects and can be
tested without MLIR. Views are resolved while reading: every value is a region of a *root* value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from topo_opt.codegen.dense import dense_values
from topo_opt.errors import UnsupportedError
from topo_opt.runtime.dtypes import from_mlir_name, from_torch_name
from topo_opt.runtime.strict_json import Json

AT_LOAD = "topo.at_load"
"""Attribute of a call that is made once, when the program is loaded: the digest of what it computes."""


@dataclass
class Value:
    """A tensor value. A root has `root == index`; a view is `offset` and `strides` in elements of its root."""

    index: int
    dtype: str
    shape: tuple[int, ...]
    root: int
    offset: int = 0
    strides: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass
class Node:
    """One thing to run. `inout` pairs are (result, argument) positions of a kernel that rewrites its argument."""

    kind: Literal["kernel", "aten", "copy", "collective"]
    inputs: list[int]
    outputs: list[int]
    kernel: str = ""
    inout: tuple[tuple[int, int], ...] = ()
    op: str = ""
    call: Json = None
    input_dtypes: tuple[str, ...] = ()
    reason: str = ""
    collective: Mapping[str, Any] = field(default_factory=dict)
    """What `topo.collective` says of a collective."""


Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Argument:
    """One function argument: `kind` is param, buffer, constant, input or coordinate; or prepared, for what a node makes at load time.

    `dims`: over which axes of the mesh each dimension is split; None for what is whole. `whole`: its shape before, where that does not divide.
    """

    kind: str
    name: str
    value: int
    dims: Dims | None = None
    whole: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Result:
    """One function result: `kind` is output or mutation; `name` the position or the target."""

    kind: str
    name: str
    dtype: str
    value: int
    dims: Dims | None = None
    whole: tuple[int, ...] | None = None


@dataclass
class PlanGraph:
    """A whole plan function."""

    symbol: str
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    load_nodes: list[Node] = field(default_factory=list)
    """Run once, when the program is loaded. Their results are arguments of what runs at every call."""
    arguments: list[Argument] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    constants: dict[int, np.ndarray] = field(default_factory=dict)
    """Root value -> its data (numpy; bf16 and float8 as unsigned integers of the same size)."""

    def new_value(self, dtype: str, shape: tuple[int, ...]) -> Value:
        """A fresh root."""
        value = Value(len(self.values), dtype, shape, len(self.values), 0, contiguous_strides(shape))
        self.values.append(value)
        return value

    def new_view(self, of: Value, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Value:
        """A region of the root of `of`; `offset` counts from the start of the root."""
        value = Value(len(self.values), of.dtype, shape, of.root, offset, strides)
        self.values.append(value)
        return value

    def covers_root(self, index: int) -> bool:
        """Whether the value is all elements of its root, in order."""
        value, root = self.values[index], self.values[self.values[index].root]
        return value.offset == 0 and value.numel == root.numel and is_contiguous(value.shape, value.strides)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements are dense and in row-major order; sizes of 1 may have any stride."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != step:
            return math.prod(shape) == 0
        step *= size
    return True


def read_plan_function(func: Any, symbols: Mapping[str, Any], *, kinds: bool = True) -> PlanGraph:
    """The plan function `func` (op view of a `func.func`) as a graph.

    Args:
        symbols: every other function of the module by name: kernels and private `@aten.*` declarations.
        kinds: whether every argument must have a `topo.kind`; False takes those without one for inputs.

    Raises:
        UnsupportedError: an op that may not stand in a plan function, or an argument without `topo.kind`.
    """
    return _Reader(func, symbols, kinds).read()


class _Reader:
    def __init__(self, func: Any, symbols: Mapping[str, Any], kinds: bool):
        self.func, self.symbols, self.kinds = func, symbols, kinds
        self.graph = PlanGraph(symbol=func.attributes["sym_name"].value)
        self.numbers: dict[Any, int] = {}
        self.types: dict[Any, tuple[str, tuple[int, ...]]] = {}

    def read(self) -> PlanGraph:
        block = self.func.regions[0].blocks[0]
        arg_attrs = _attr_dicts(self.func, "arg_attrs", len(block.arguments))
        for i, (argument, attrs) in enumerate(zip(block.arguments, arg_attrs)):
            if self.kinds and "topo.kind" not in attrs:
                raise UnsupportedError(f"argument {i} of @{self.graph.symbol} has no topo.kind attribute")
            value = self.define(argument, attrs.get("topo.dtype"))
            self.graph.arguments.append(
                Argument(
                    attrs.get("topo.kind", "input"),
                    attrs.get("topo.name", str(i)),
                    value.index,
                    attrs.get(_DIMS),
                    attrs.get(_WHOLE),
                )
            )
        for op in block.operations:
            handler = _HANDLERS.get(op.operation.name)
            if handler is None:
                raise UnsupportedError(
                    f"{op.operation.name} can't stand in a plan function, only kernel calls, ATen calls and views can",
                    where=str(op.operation.location),
                    hint="topo-form-kernels should have moved it into a kernel",
                )
            handler(self, op)
        return self.graph

    def typed(self, value: Any) -> tuple[str, tuple[int, ...]]:
        from torch_mlir import ir

        key = value.type
        if key not in self.types:
            try:
                tensor = ir.RankedTensorType(key)
            except ValueError:
                raise UnsupportedError(
                    f"@{self.graph.symbol} passes a value of type {key} between kernels, only tensors can be"
                ) from None
            if not tensor.has_static_shape:
                raise UnsupportedError(
                    f"@{self.graph.symbol} has the dynamic type {key}, only static shapes can be planned"
                )
            self.types[key] = from_mlir_name(str(tensor.element_type)).torch_name, tuple(tensor.shape)
        return self.types[key]

    def define(self, value: Any, dtype: str | None = None) -> Value:
        stored, shape = self.typed(value)
        if dtype and from_torch_name(dtype).itemsize == from_torch_name(stored).itemsize:
            stored = from_torch_name(dtype).torch_name
        new = self.graph.new_value(stored, shape)
        self.numbers[value] = new.index
        return new

    def operand(self, value: Any) -> Value:
        return self.graph.values[self.numbers[value]]

    def call(self, op: Any) -> None:
        symbol = op.operation.attributes["callee"].value
        callee = self.symbols.get(symbol)
        if callee is None:
            raise UnsupportedError(f"@{self.graph.symbol} calls @{symbol}, which is not in the module")
        inputs = [self.contiguous(self.operand(v)).index for v in op.operation.operands]
        attributes = callee.attributes
        if "topo.kernel" in attributes:
            outputs = [self.define(r).index for r in op.operation.results]
            node = Node("kernel", inputs, outputs, kernel=symbol, inout=_inout(attributes))
            if AT_LOAD in op.operation.attributes:
                digest = op.operation.attributes[AT_LOAD].value
                for i, value in enumerate(outputs):
                    self.graph.arguments.append(Argument("prepared", f"{digest}.{i}", value))
                self.graph.load_nodes.append(node)
                return
        elif "topo.aten" in attributes:
            dtypes = _strings(attributes, "topo.dtypes")
            count = len(inputs)
            given, made = (dtypes[:count], dtypes[count:]) if len(dtypes) >= count else ([], [])
            outputs = [
                self.define(r, made[i] if len(made) == len(op.operation.results) else None).index
                for i, r in enumerate(op.operation.results)
            ]
            stored = [self.graph.values[i].dtype for i in inputs]
            node = Node(
                "aten", inputs, outputs, op=attributes["topo.aten"].value,
                call=json.loads(attributes["topo.call"].value) if "topo.call" in attributes else None,
                input_dtypes=tuple(d or s for d, s in zip(given or stored, stored)),
                reason=attributes["topo.reason"].value if "topo.reason" in attributes else "",
            )  # fmt: skip
        elif "topo.collective" in attributes:
            outputs = [self.define(r).index for r in op.operation.results]
            described = _plain(attributes["topo.collective"])
            # A sum of terms may take the place of this rank's term.
            inout = ((0, 0),) if described["kind"] == "all_reduce" else ()
            node = Node("collective", inputs, outputs, inout=inout, collective=described)
        else:
            raise UnsupportedError(
                f"@{self.graph.symbol} calls @{symbol}, which is neither a kernel, an ATen call nor a collective"
            )
        self.graph.nodes.append(node)

    def contiguous(self, value: Value) -> Value:
        """`value`, or a packed copy of it: kernels and ATen calls see row-major tensors only."""
        if is_contiguous(value.shape, value.strides):
            return value
        packed = self.graph.new_value(value.dtype, value.shape)
        self.graph.nodes.append(Node("copy", [value.index], [packed.index]))
        return packed

    def reshape(self, op: Any) -> None:
        source = self.contiguous(self.operand(op.operation.operands[0]))
        _, shape = self.typed(op.operation.results[0])
        view = self.graph.new_view(source, shape, source.offset, contiguous_strides(shape))
        self.numbers[op.operation.results[0]] = view.index

    def extract_slice(self, op: Any) -> None:
        if len(op.operation.operands) != 1:
            raise UnsupportedError(
                "a plan function can only slice at fixed positions", where=str(op.operation.location)
            )
        source = self.operand(op.operation.operands[0])
        attributes = op.operation.attributes
        offsets, sizes, steps = (list(attributes[f"static_{k}"]) for k in ("offsets", "sizes", "strides"))
        offset = source.offset + sum(o * s for o, s in zip(offsets, source.strides))
        strides = [step * s for step, s in zip(steps, source.strides)]
        _, shape = self.typed(op.operation.results[0])
        kept = _kept_dims(sizes, shape)
        view = self.graph.new_view(
            source, shape, offset if math.prod(shape) else 0, tuple(strides[d] for d in kept)
        )
        self.numbers[op.operation.results[0]] = view.index

    def constant(self, op: Any) -> None:
        value = self.define(op.operation.results[0])
        try:
            attribute = op.operation.attributes["value"]
        except TypeError:  # the bindings have no class for complex elements
            attribute = str(op.operation)
        self.graph.constants[value.index] = dense_values(attribute, value.dtype, value.shape)

    def empty(self, op: Any) -> None:
        self.define(op.operation.results[0])

    def alias(self, op: Any) -> None:
        self.numbers[op.operation.results[0]] = self.numbers[op.operation.operands[0]]

    def results(self, op: Any) -> None:
        operands = list(op.operation.operands)
        outputs = 0
        for value, attrs in zip(operands, _attr_dicts(self.func, "res_attrs", len(operands))):
            kind, number = attrs.get("topo.kind", "output"), self.numbers[value]
            name = attrs.get("topo.name", str(outputs))
            outputs += kind == "output"
            dtype = attrs.get("topo.dtype", self.graph.values[number].dtype)
            self.graph.results.append(Result(kind, name, dtype, number, attrs.get(_DIMS), attrs.get(_WHOLE)))


_HANDLERS = {
    "func.call": _Reader.call,
    "func.return": _Reader.results,
    "tensor.expand_shape": _Reader.reshape,
    "tensor.collapse_shape": _Reader.reshape,
    "tensor.extract_slice": _Reader.extract_slice,
    "tensor.cast": _Reader.alias,
    "tensor.empty": _Reader.empty,
    "arith.constant": _Reader.constant,
}


_DIMS = "topo.sharding"
_WHOLE = "topo.whole"


def _attr_dicts(func: Any, name: str, count: int) -> list[dict[str, Any]]:
    if name not in func.attributes:
        return [{} for _ in range(count)]
    out = []
    for attrs in func.attributes[name]:
        found: dict[str, Any] = {a.name: a.attr.value for a in attrs if hasattr(a.attr, "value")}
        if _DIMS in attrs:
            found[_DIMS] = tuple(tuple(axis.value for axis in axes) for axes in attrs[_DIMS])
        if _WHOLE in attrs:
            found[_WHOLE] = tuple(attrs[_WHOLE])
        out.append(found)
    return out


def _plain(attributes: Any) -> dict[str, Any]:
    """A dictionary of numbers, strings and lists of strings."""
    return {
        a.name: a.attr.value if hasattr(a.attr, "value") else tuple(x.value for x in a.attr)
        for a in attributes
    }


def _strings(attributes: Any, name: str) -> list[str]:
    return [a.value for a in attributes[name]] if name in attributes else []


def _inout(attributes: Any) -> tuple[tuple[int, int], ...]:
    if "topo.inout" not in attributes:
        return ()
    return tuple((int(p[0]), int(p[1])) for p in (_ints(pair) for pair in attributes["topo.inout"]))


def _ints(pair: Any) -> list[int]:
    return [x if isinstance(x, int) else x.value for x in pair]


def _kept_dims(sizes: list[int], shape: tuple[int, ...]) -> list[int]:
    """Which source dims a rank-reducing slice keeps: dims of size 1 are dropped from the left as needed."""
    kept, drop, wanted = [], len(sizes) - len(shape), 0
    for d, size in enumerate(sizes):
        if drop and size == 1 and (wanted >= len(shape) or shape[wanted] != 1 or drop >= len(sizes) - d):
            drop -= 1
            continue
        kept.append(d)
        wanted += 1
    return kept
