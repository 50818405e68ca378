"""FX graph of ATen calls -> the AtenProgram JSON of docs/architecture.md, section 6.

The result is plain data that the runtime turns back into calls: no pickle, no source text. Devices become "the runtime's
device", so a program exported on the CPU or on the meta device runs on a GPU.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature, InputKind

from topo_opt.aten_allowlist import PYTHON_FUNCTIONS
from topo_opt.errors import UnsupportedError

_INPUT_KINDS = {
    InputKind.PARAMETER: "param",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}
_OUTPUT_KINDS = {
    "USER_OUTPUT": "output",
    "LOSS_OUTPUT": "output",
    "BUFFER_MUTATION": "mutation",
    "PARAMETER_MUTATION": "mutation",
    "USER_INPUT_MUTATION": "mutation",
}
_MODULE_ALIASES = {"_operator": "operator"}
_MAX_INLINE_ELEMENTS = 1 << 16
# Checks of the trace itself: they hold by construction, and would compare `cpu` with the runtime's device.
_DROPPED = {"aten._assert_tensor_metadata.default"}
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH_FOLDER = str(Path(torch.__file__).parent)

Encoder = Callable[[fx.Node], Any]


class Role(Protocol):
    """What a placeholder or a result stands for; `Slot` here, and the records of `frontend.signature`, have this form."""

    @property
    def kind(self) -> str: ...

    @property
    def target(self) -> str | None: ...


class Roles(Protocol):
    """The roles of all placeholders and results of a graph, in order."""

    @property
    def inputs(self) -> Sequence[Role]: ...

    @property
    def outputs(self) -> Sequence[Role]: ...


@dataclass(frozen=True)
class Slot:
    """One argument or result: `kind` as in section 2 of the architecture, `target` its name (None: the node's name)."""

    kind: str
    target: str | None = None


@dataclass(frozen=True)
class Signature:
    """What the placeholders and the results of a graph stand for, in order."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @classmethod
    def of(cls, signature: ExportGraphSignature) -> "Signature":
        """The same facts from torch.export's signature. User outputs are named "0", "1"...

        Raises:
            UnsupportedError: script objects, effect tokens or gradients cross the boundary.
        """
        inputs: list[Slot] = []
        outputs: list[Slot] = []
        for taken in signature.input_specs:
            if taken.kind not in _INPUT_KINDS:
                raise UnsupportedError(
                    f"the model takes a {taken.kind.name.lower()} ({taken.target or taken.arg.name})"
                )
            inputs.append(Slot(_INPUT_KINDS[taken.kind], taken.target))
        for given in signature.output_specs:
            kind = _OUTPUT_KINDS.get(given.kind.name)
            if kind is None:
                raise UnsupportedError(f"the model returns a {given.kind.name.lower()} ({given.target})")
            number = sum(slot.kind == "output" for slot in outputs)
            outputs.append(Slot(kind, given.target if kind == "mutation" else str(number)))
        return cls(tuple(inputs), tuple(outputs))


def export_aten(
    graph: fx.Graph | fx.GraphModule, signature: "Signature | ExportGraphSignature | None" = None
) -> dict:
    """The AtenProgram of a functional graph.

    Args:
        graph: ATen calls, Python functions on sizes, and higher-order operators whose bodies are submodules.
        signature: roles of placeholders and results by position; None means plain inputs and outputs. Inputs of kind
            `literal` may have no placeholder (the program was specialised to them).

    Raises:
        UnsupportedError: a node cannot be written as data, or changes a tensor in place; names the source line.
    """
    if isinstance(graph, fx.GraphModule):
        graph = graph.graph
    if isinstance(signature, ExportGraphSignature):
        signature = Signature.of(signature)
    roles = _input_roles(graph, signature)
    inputs: list[dict] = []
    nodes: list[dict] = []
    names: dict[fx.Node, Any] = {}

    def ref(node: fx.Node) -> Any:
        return names[node]

    for node in graph.nodes:
        if node.op == "placeholder":
            inputs.append(_input(node, roles[len(inputs)]))
            names[node] = {"ref": node.name}
        elif node.op == "output":
            return {"inputs": inputs, "nodes": nodes, **_outputs(node, signature, ref)}
        elif node.op == "get_attr":
            names[node] = _attribute(node, nodes)
        elif (item := _item(node, names)) is not None:
            names[node] = item
        else:
            op = op_name(node)
            if op in _DROPPED:
                continue
            args, kwargs = _arguments(node, ref)
            nodes.append({"name": node.name, "op": op, "args": args, "kwargs": kwargs})
            names[node] = {"ref": node.name}
    raise UnsupportedError("the graph has no output node")


def call_template(node: fx.Node) -> tuple[dict, list[fx.Node]]:
    """One call as data: `({"op", "args", "kwargs"}, operands)`, nodes numbered as `{"operand": i}` into `operands`."""
    operands: dict[fx.Node, int] = {}

    def operand(argument: fx.Node) -> dict:
        return {"operand": operands.setdefault(argument, len(operands))}

    args, kwargs = _arguments(node, operand)
    return {"op": op_name(node), "args": args, "kwargs": kwargs}, list(operands)


def op_name(node: fx.Node) -> str:
    """The operator of a call node as architecture section 6 writes it, e.g. `aten.add.Tensor` or `operator.mul`.

    Raises:
        UnsupportedError: not an operator that can be looked up by name, or one that changes its arguments.
    """
    target = node.target
    if node.op == "call_function" and isinstance(target, torch._ops.OpOverload):
        if target._schema.is_mutable:
            raise _unsupported(node, f"{target} changes a tensor in place", "decompose the program first")
        return _overload_name(target)
    if node.op == "call_function" and isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if node.op == "call_function":
        module = getattr(target, "__module__", None) or "builtins"
        name = f"{_MODULE_ALIASES.get(module, module)}.{getattr(target, '__name__', target)}"
        if name in PYTHON_FUNCTIONS:
            return name
        raise _unsupported(node, f"the Python function {name} is not one that runs on data")
    raise _unsupported(node, f"{node.op} {target} is not an operator call")


def source_line(node: fx.Node) -> str | None:
    """`file:line` of the innermost frame outside torch that made the node, or None."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(_TORCH_FOLDER)] or frames
    return ":".join(own[-1]) if own else None


def _unsupported(node: fx.Node, message: str, hint: str | None = None) -> UnsupportedError:
    return UnsupportedError(f"{message} (node {node.name})", hint=hint, where=source_line(node))


def _overload_name(target: torch._ops.OpOverload) -> str:
    return f"{target._schema.name.replace('::', '.')}.{target._overloadname}"


def _input_roles(graph: fx.Graph, signature: Roles | None) -> Sequence[Role]:
    count = len(graph.find_nodes(op="placeholder"))
    if signature is None:
        return [Slot("input")] * count
    roles = signature.inputs
    if len(roles) != count:
        roles = [role for role in roles if role.kind != "literal"]
    if len(roles) != count:
        raise UnsupportedError(f"the graph has {count} placeholders, its signature {len(roles)} inputs")
    return [Slot("input", role.target) if role.kind == "literal" else role for role in roles]


def _dim(size: int | torch.SymInt) -> dict | None:
    """Name and range of a dim that is one symbol; None for a number or an expression of symbols."""
    if isinstance(size, int) or not size.node.expr.is_Symbol:
        return None
    symbol = size.node.expr
    bounds = size.node.shape_env.bound_sympy(symbol)
    high = int(bounds.upper) if bounds.upper.is_Integer else None
    return {"symbol": str(symbol), "min": int(bounds.lower) if bounds.lower.is_Integer else 0, "max": high}


def _input(node: fx.Node, slot: Role) -> dict:
    value = node.meta.get("val")
    entry = {"name": node.name, "kind": slot.kind, "target": slot.target or node.name}
    if isinstance(value, torch.Tensor):
        shape = [size if isinstance(size, int) else None for size in value.shape]
        entry |= {"shape": shape, "dtype": _dtype_name(value.dtype)}
        dims = [_dim(size) for size in value.shape]
        return {**entry, "dims": dims} if any(dims) else entry
    for symbol, name in ((torch.SymInt, "int"), (torch.SymFloat, "float"), (torch.SymBool, "bool")):
        if isinstance(value, symbol):
            return {**entry, "shape": None, "dtype": name}
    if "val" not in node.meta:
        return {**entry, "shape": None, "dtype": None}
    # A number, string or None the program was specialised to.
    literal = encode(value, _no_nodes)
    return {
        **entry,
        "shape": None,
        "dtype": type(value).__name__ if value is not None else None,
        "value": literal,
    }


def _outputs(node: fx.Node, signature: Roles | None, ref: Encoder) -> dict:
    (results,) = node.args
    single = not isinstance(results, list | tuple)
    values: Sequence[Any] = [results] if single else results  # type: ignore[assignment, list-item]
    slots: Sequence[Role] = (
        signature.outputs if signature else [Slot("output", str(i)) for i in range(len(values))]
    )
    outputs = [
        {
            "kind": "mutation" if slot.kind == "mutation" else "output",
            "target": slot.target,
            "value": encode(value, ref, node),
        }
        for slot, value in zip(slots, values, strict=True)
    ]
    # A higher-order operator's body may return a bare value; only that differs from a tuple of one.
    return {"outputs": outputs, **({"single": True} if single else {})}


def _item(node: fx.Node, names: dict[fx.Node, Any]) -> dict | None:
    """`getitem` with a constant index on a node's outputs is part of the reference, not a call."""
    if getattr(node.target, "__name__", None) != "getitem" or len(node.args) != 2:
        return None
    base, index = node.args
    encoded = names.get(base) if isinstance(base, fx.Node) else None
    if type(index) is not int or not isinstance(encoded, dict) or "ref" not in encoded:
        return None
    return {"item": [encoded["ref"], index]}


def _attribute(node: fx.Node, nodes: list[dict]) -> dict:
    owner: Any = node.graph.owning_module
    try:
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
    except AttributeError:
        raise _unsupported(node, f"the graph has no attribute {node.target}") from None
    if isinstance(owner, fx.GraphModule):
        return {"graph": export_aten(owner)}
    if (
        isinstance(owner, torch.Tensor)
        and owner.numel() <= _MAX_INLINE_ELEMENTS
        and owner.device.type != "meta"
    ):
        kwargs = {"dtype": {"dtype": _dtype_name(owner.dtype)}, "device": {"device": True}}
        data = encode(owner.detach().cpu().tolist(), _no_nodes)
        nodes.append({"name": node.name, "op": "torch.tensor", "args": [data], "kwargs": kwargs})
        return {"ref": node.name}
    raise _unsupported(
        node, f"{node.target} is a {type(owner).__name__} inside the graph, not an argument of it"
    )


def _arguments(node: fx.Node, ref: Encoder) -> tuple[list, dict]:
    target = node.target
    tuples = isinstance(target, torch._ops.HigherOrderOperator)  # ATen takes lists for both
    args = [encode(value, ref, node, tuples) for value in node.args]
    kwargs = {name: encode(value, ref, node, tuples) for name, value in node.kwargs.items()}
    if isinstance(target, torch._ops.OpOverload) and _is_factory(target) and kwargs.get("device") is None:
        # Traced without a device it would run on the default one, not on the program's.
        kwargs["device"] = {"device": True}
    if getattr(target, "__name__", None) == "wrap_with_autocast":
        args[0] = {"device_type": True}
    return args, kwargs


def _is_factory(target: torch._ops.OpOverload) -> bool:
    arguments = target._schema.arguments
    takes_tensors = any("Tensor" in str(argument.type) for argument in arguments)
    return not takes_tensors and any(
        argument.name == "device" and argument.kwarg_only for argument in arguments
    )


def encode(value: Any, ref: Encoder, node: fx.Node | None = None, tuples: bool = False) -> Any:
    """One argument as JSON data.

    Args:
        ref: encodes FX nodes.
        node: the call the argument belongs to, for messages.
        tuples: keep tuples apart from lists.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, list | tuple):
        items = [encode(item, ref, node, tuples) for item in value]
        return {"tuple": items} if tuples and isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {"dict": {_key(k, node): encode(item, ref, node, tuples) for k, item in value.items()}}
    for cls, encoder in _SCALARS:
        if isinstance(value, cls):
            return encoder(value)
    if isinstance(value, fx.Node):
        return ref(value)
    if isinstance(value, slice):
        return {"slice": [encode(part, ref, node) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and value.node.is_constant():
        return encode(value.node.maybe_as_int(), ref, node)
    message = f"an argument of type {type(value).__name__} cannot be written as data"
    raise _unsupported(node, message) if node is not None else UnsupportedError(message)


def _key(key: Any, node: fx.Node | None) -> str:
    if isinstance(key, str):
        return key
    message = f"a dictionary with the key {key!r} cannot be written as data"
    raise _unsupported(node, message) if node is not None else UnsupportedError(message)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_SCALARS: list[tuple[type, Callable[[Any], Any]]] = [
    (complex, lambda v: {"complex": [encode(v.real, _no_nodes), encode(v.imag, _no_nodes)]}),
    (torch.dtype, lambda v: {"dtype": _dtype_name(v)}),
    (torch.device, lambda v: {"device": True}),
    (torch.layout, lambda v: {"layout": str(v).removeprefix("torch.")}),
    (torch.memory_format, lambda v: {"memory_format": str(v).removeprefix("torch.")}),
    (torch._ops.OpOverload, lambda v: {"op": _overload_name(v)}),
]


def _no_nodes(node: fx.Node) -> Any:
    raise UnsupportedError(f"node {node.name} stands where a constant is needed")
