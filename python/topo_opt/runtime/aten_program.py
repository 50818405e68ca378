"""Runs a whole program as ATen calls: the reference of `--check`, and the fallback when a variant has no kernels.

The program is data (docs/architecture.md, section 6). Names of operators are looked up on a list; nothing in it is
executed as source text.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from topo_opt.errors import InputError
from topo_opt.runtime import aten_ops
from topo_opt.runtime.aten_values import (
    Body,
    Device,
    Item,
    Many,
    Named,
    Ref,
    Scope,
    Slice,
    decode,
    evaluate,
    order_of,
    slots,
)

_INPUT_KINDS = ("param", "buffer", "constant", "input")
_OUTPUT_KINDS = ("output", "mutation")


@dataclass(frozen=True)
class Dim:
    """A size known at the run: dims of one `symbol` are equal, between `low` and `high` (None: no bound)."""

    symbol: str
    low: int
    high: int | None


@dataclass(frozen=True)
class Input:
    """One flat input. `shape` has None for sizes known at the run, `dims` says what is known of those; `value` is what a
    literal input must equal."""

    name: str
    kind: str
    target: str
    shape: tuple[int | None, ...] | None
    dtype: str | None
    literal: bool = False
    value: Any = None
    dims: tuple[Dim | None, ...] = ()


@dataclass(frozen=True)
class Output:
    """One flat result: a user output, or the new value of the buffer or input named `target`."""

    kind: str
    target: str | None
    value: Any


@dataclass(frozen=True)
class Call:
    """One operator call into slot `slot`; `dead` are the slots nobody reads afterwards."""

    name: str
    op: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    slot: int
    dead: tuple[int, ...] = ()

    def run(self, env: list[Any], device: torch.device) -> Any:
        """The result of the call. Raises InputError naming the operator when torch refuses its arguments."""
        args = [evaluate(value, env, device) for value in self.args]
        kwargs = {name: evaluate(value, env, device) for name, value in self.kwargs}
        try:
            return self.fn(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as exc:
            reason = (str(exc).splitlines() or [type(exc).__name__])[0]
            raise InputError(f"{self.op} (node {self.name}) failed: {reason}") from exc


class AtenProgram:
    """A checked program. `inputs` and `outputs` describe the flat argument and result lists of `run`."""

    def __init__(self, data: Any, *, extra_namespaces: Iterable[str] = (), path: str = "aten"):
        """Checks and resolves `data`, the JSON object of one program.

        Raises:
            InputError: the data is malformed (with the JSON path), or an operator is not registered.
            UntrustedError: an operator is not on the list of what may be called.
        """
        self._namespaces = frozenset(extra_namespaces)
        self._slots: dict[str, int] = {}
        self._modules: dict[torch.device, fx.GraphModule] = {}
        if not isinstance(data, dict) or not all(
            isinstance(data.get(k), list) for k in ("inputs", "nodes", "outputs")
        ):
            raise InputError(f"{path}: expected an object with the lists inputs, nodes and outputs")
        scope = Scope(self._slot_of, self._body_of, self._op_of)
        try:
            self.inputs = tuple(
                self._input(v, scope, f"{path}.inputs[{i}]") for i, v in enumerate(data["inputs"])
            )
            calls = [self._call(v, scope, f"{path}.nodes[{i}]") for i, v in enumerate(data["nodes"])]
            self.outputs = tuple(
                _output(v, scope, f"{path}.outputs[{i}]") for i, v in enumerate(data["outputs"])
            )
        except RecursionError:
            raise InputError(f"{path}: nested too deeply") from None
        self.single = data.get("single") is True
        self.calls = _with_last_uses(calls, self.inputs, self.outputs)
        self._check_targets(path)

    def run(self, inputs: Sequence[Any], device: torch.device | str | None = None) -> list[Any]:
        """All results in the order of `outputs`; inputs and state are not changed.

        Args:
            inputs: one value for each of `inputs`, tensors on `device`, numbers as they are.
            device: where the program creates tensors; by default the device of the first tensor input.

        Raises:
            InputError: a wrong number of inputs, or values that an operator refuses.
        """
        if len(inputs) != len(self.inputs):
            raise InputError(f"the program takes {len(self.inputs)} inputs, got {len(inputs)}")
        where = torch.device(device) if device is not None else _device_of(inputs)
        env = [*inputs, *([None] * len(self.calls))]
        with torch.no_grad():
            for call in self.calls:
                env[call.slot] = call.run(env, where)
                for slot in call.dead:
                    env[slot] = None
            return [evaluate(output.value, env, where) for output in self.outputs]

    def bound(self, device: torch.device) -> Callable[..., Any]:
        """The program as a function of positional operands, as higher-order operators call their bodies."""

        def body(*operands: Any) -> Any:
            results = self.run(operands, device)
            return results[0] if self.single else tuple(results)

        return body

    def to_graph_module(self, device: torch.device | str = "cpu") -> fx.GraphModule:
        """The same program as an FX module, for eager execution and torch.compile.

        Its forward takes the flat inputs, writes mutated state and inputs in place at its end, and returns the tuple of
        user outputs.
        """
        return _GraphBuilder(self, torch.device(device)).build()

    def _slot_of(self, name: Any, path: str) -> int:
        if not isinstance(name, str) or name not in self._slots:
            raise InputError(f"{path}: {name!r:.80} is not defined before its use")
        return self._slots[name]

    def _define(self, name: Any, path: str) -> int:
        if not isinstance(name, str) or not name or name in self._slots:
            raise InputError(f"{path}: {name!r:.80} is not a new name")
        return self._slots.setdefault(name, len(self._slots))

    def _body_of(self, data: Any, path: str) -> "AtenProgram":
        return AtenProgram(data, extra_namespaces=self._namespaces, path=path)

    def _op_of(self, name: Any, path: str) -> Callable[..., Any]:
        return aten_ops.resolve(name, extra_namespaces=self._namespaces)

    def _input(self, data: Any, scope: Scope, path: str) -> Input:
        if not isinstance(data, dict) or data.get("kind") not in _INPUT_KINDS:
            raise InputError(f"{path}: expected an object whose kind is one of {', '.join(_INPUT_KINDS)}")
        shape, dtype, target = data.get("shape"), data.get("dtype"), data.get("target")
        sizes_ok = shape is None or (
            isinstance(shape, list) and all(s is None or (type(s) is int and s >= 0) for s in shape)
        )
        if not sizes_ok or not isinstance(dtype, str | None) or not isinstance(target, str):
            raise InputError(f"{path}: shape, dtype or target is malformed")
        self._define(data.get("name"), path)
        value = decode(data.get("value"), scope, f"{path}.value")
        sizes = None if shape is None else tuple(shape)
        dims = tuple(_dim(d, f"{path}.dims") for d in data.get("dims") or ())
        return Input(data["name"], data["kind"], target, sizes, dtype, "value" in data, value, dims)

    def _call(self, data: Any, scope: Scope, path: str) -> Call:
        if not isinstance(data, dict):
            raise InputError(f"{path}: expected an object")
        op, fn, args, kwargs = _parse_call(data, scope, path, self._namespaces)
        return Call(str(data.get("name")), op, fn, args, kwargs, self._define(data.get("name"), path))

    def _check_targets(self, path: str) -> None:
        mutable = {entry.target for entry in self.inputs}
        for output in self.outputs:
            if output.kind == "mutation" and output.target not in mutable:
                raise InputError(f"{path}: a result rewrites {output.target!r:.80}, which is not an input")


def _dim(data: Any, path: str) -> Dim | None:
    if data is None:
        return None
    match data:
        case {"symbol": str(symbol), "min": int(low), "max": int() | None as high}:
            return Dim(symbol, low, high)
    raise InputError(f"{path}: expected null or an object of symbol, min and max")


@dataclass(frozen=True)
class AtenCall:
    """One ATen call of a plan or of the IR, prepared once: `run(operands)` may be called any number of times.

    `orders` are those of the dims in which results are given, one for each; empty: as the operator has them.
    """

    call: Call
    operand_count: int
    orders: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def parse(
        cls, template: Any, op: str | None = None, *, extra_namespaces: Iterable[str] = ()
    ) -> "AtenCall":
        """Checks `template` (`{"op", "args", "kwargs", "results"}`, as an object or as JSON text); `op` overrides the one in it."""
        if isinstance(template, str):
            try:
                template = json.loads(template)
            except ValueError as exc:
                raise InputError(f"an ATen call template is not JSON: {exc}") from exc
        if not isinstance(template, dict):
            raise InputError("an ATen call template must be an object")
        namespaces = frozenset(extra_namespaces)
        count = 0

        def slot_of(index: Any, path: str) -> int:
            nonlocal count
            if type(index) is not int or not 0 <= index < 1 << 16:
                raise InputError(f"{path}: {index!r:.80} is not an operand number")
            count = max(count, index + 1)
            return index

        scope = Scope(
            slot_of,
            lambda data, path: AtenProgram(data, extra_namespaces=namespaces, path=path),
            lambda name, path: aten_ops.resolve(name, extra_namespaces=namespaces),
        )
        data = {**template, "op": op or template.get("op")}
        op, fn, args, kwargs = _parse_call(data, scope, "topo.call", namespaces)
        try:
            orders = tuple(order_of(order) for order in data.get("results", ()))
        except (TypeError, ValueError) as exc:
            raise InputError(f"topo.call.results: {exc}") from exc
        return cls(Call(op, op, fn, args, kwargs, 0), count, orders)

    def run(self, operands: Sequence[Any], device: torch.device | str | None = None) -> list[Any]:
        """The outputs of the call as a flat list (one entry for a single tensor)."""
        if len(operands) < self.operand_count:
            raise InputError(f"{self.call.op} takes {self.operand_count} operands, got {len(operands)}")
        where = torch.device(device) if device is not None else _device_of(operands)
        with torch.no_grad():
            result = self.call.run(list(operands), where)
        results = list(result) if isinstance(result, list | tuple) else [result]
        if not self.orders:
            return results
        if [getattr(r, "ndim", -1) for r in results] != [len(order) for order in self.orders]:
            raise InputError(f"{self.call.op} has other results than its call puts in order")
        return [r.permute(order) for r, order in zip(results, self.orders)]


@functools.lru_cache(maxsize=1024)
def _parsed(template: str, op: str | None) -> AtenCall:
    return AtenCall.parse(template, op)


def call_aten(
    template: dict | str,
    operands: Sequence[Any],
    *,
    op: str | None = None,
    device: torch.device | str | None = None,
) -> list[Any]:
    """Runs one ATen call on `operands` and gives its outputs as a flat list; see `AtenCall`."""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return _parsed(text, op).run(operands, device)


def _parse_call(
    data: dict, scope: Scope, path: str, namespaces: frozenset[str]
) -> tuple[str, Callable, tuple, tuple]:
    args, kwargs = data.get("args", []), data.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise InputError(f"{path}: args must be a list and kwargs an object")
    op = data.get("op")
    fn = aten_ops.resolve(op, extra_namespaces=namespaces)  # type: ignore[arg-type]
    positional = tuple(decode(value, scope, f"{path}.args[{i}]") for i, value in enumerate(args))
    named = tuple((name, decode(value, scope, f"{path}.kwargs.{name}")) for name, value in kwargs.items())
    return str(op), fn, positional, named


def _output(data: Any, scope: Scope, path: str) -> Output:
    if not isinstance(data, dict) or data.get("kind") not in _OUTPUT_KINDS or "value" not in data:
        raise InputError(f"{path}: expected an object with kind ({' or '.join(_OUTPUT_KINDS)}) and value")
    target = data.get("target")
    return Output(
        data["kind"], None if target is None else str(target), decode(data["value"], scope, f"{path}.value")
    )


def _device_of(values: Iterable[Any]) -> torch.device:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def _reads(call: Call) -> set[int]:
    return set().union(*map(slots, call.args), *(slots(value) for _, value in call.kwargs))


def _with_last_uses(
    calls: list[Call], inputs: Sequence[Input], outputs: Sequence[Output]
) -> tuple[Call, ...]:
    """Each call with the slots that die after it, so that a run holds no more memory than eager would."""
    alive = set().union(*(slots(output.value) for output in outputs)) | set(range(len(inputs)))
    result = []
    for call in reversed(calls):
        dying = (_reads(call) | {call.slot}) - alive
        alive |= dying
        result.append(
            Call(call.name, call.op, call.fn, call.args, call.kwargs, call.slot, tuple(sorted(dying)))
        )
    return tuple(reversed(result))


class _GraphBuilder:
    """AtenProgram -> FX graph. Names in the generated module are ours; the program's own are not used."""

    def __init__(self, program: AtenProgram, device: torch.device):
        self.program, self.device = program, device
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.nodes: dict[int, fx.Node] = {}
        self.items: dict[Item, fx.Node] = {}
        self.bodies = 0

    def build(self) -> fx.GraphModule:
        program = self.program
        for slot, entry in enumerate(program.inputs):
            readable = re.sub(r"[^A-Za-z0-9]+", "_", entry.name)[:40]
            self.nodes[slot] = self.graph.placeholder(f"in{slot}_{readable}")
        for call in program.calls:
            args = tuple(self.value(value) for value in call.args)
            kwargs = {name: self.value(value) for name, value in call.kwargs}
            self.nodes[call.slot] = self.graph.call_function(call.fn, args, kwargs)
        results = [(output, self.value(output.value)) for output in program.outputs]
        by_target = {entry.target: slot for slot, entry in enumerate(program.inputs)}
        for output, value in results:
            if output.kind == "mutation":
                destination = self.nodes[by_target[str(output.target)]]
                self.graph.call_function(torch.ops.aten.copy_.default, (destination, value))
        values = tuple(value for output, value in results if output.kind == "output")
        self.graph.output(values[0] if program.single else values)
        return fx.GraphModule(self.root, self.graph)

    def value(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.nodes[value.slot]
        if isinstance(value, Item):
            if value not in self.items:
                base = self.nodes[value.slot]
                self.items[value] = self.graph.call_function(
                    aten_ops.resolve("operator.getitem"), (base, value.index)
                )
            return self.items[value]
        if isinstance(value, Many):
            return value.kind([self.value(member) for member in value.members])
        if isinstance(value, Named):
            return {name: self.value(member) for name, member in value.members}
        if isinstance(value, Slice):
            return slice(*map(self.value, value.parts))
        if isinstance(value, Device):
            return self.device.type if value.type_only else self.device
        if isinstance(value, Body):
            name = f"body_{self.bodies}"
            self.bodies += 1
            self.root.add_module(name, value.program.to_graph_module(self.device))
            return self.graph.get_attr(name)
        return value
