"""An exported program as one flat FX graph: decomposed, functional, every size a number."""

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymIntArgument,
    TensorArgument,
)

from topo_opt.errors import InputError, Remark, UnsupportedError
from topo_opt.frontend.aten_export import source_line
from topo_opt.frontend.casts import cast
from topo_opt.frontend.decomposition import decompose, storage_key
from topo_opt.frontend.dynamic_dims import concrete, dynamic_dims, solve_sizes
from topo_opt.frontend.graph_builder import Argument, GraphBuilder
from topo_opt.frontend.signature import (
    DimRecord,
    InputRecord,
    OutputRecord,
    Signature,
    dtype_name,
    tree_as_json,
)
from topo_opt.frontend.strided_views import from_base, stays_inside


@dataclass(frozen=True)
class FxProgram:
    """A program whose graph takes the tensors of `signature.inputs` (without literals) and returns a tuple.

    The graph's outputs are those of `signature.outputs`, literals included, in that order. When `whole_reason` is set the
    graph could not be made static (sizes depend on data, control flow): it is the decomposed graph as exported, with its
    symbols and submodules, and only an ATen program can run it.
    """

    graph: fx.Graph
    signature: Signature
    sizes: dict[str, int]
    mode: FakeTensorMode
    whole_reason: Remark | None = None

    @property
    def static(self) -> bool:
        """Whether every size in the graph is a number."""
        return self.whole_reason is None


def normalize(
    ep: ExportedProgram, bucket: Mapping[str, int] | None = None, names: Mapping[str, str] | None = None
) -> FxProgram:
    """`ep` decomposed with the keep table and specialised to the sizes of `bucket`.

    Args:
        bucket: sizes of dynamic dims by name (`dynamic_dims.solve_sizes`); dims not named have the size of the example.
        names: symbol -> name, for dims that have lost theirs.

    Raises:
        InputError: the bucket does not fit the program.
    """
    return specialize(decompose(ep), bucket, names)


def specialize(
    ep: ExportedProgram, bucket: Mapping[str, int] | None = None, names: Mapping[str, str] | None = None
) -> FxProgram:
    """A decomposed program with the sizes of `bucket`; several buckets share one `decompose`."""
    dims = dynamic_dims(ep, names)
    sizes = solve_sizes(dims, bucket)
    specializer = _Specializer(ep, sizes)
    try:
        outputs = specializer.run()
    except _NotStatic as stop:
        return _unspecialized(ep, stop.remark, dims)
    signature = Signature(tuple(specializer.inputs), tuple(outputs), *_trees(ep), dims)
    return FxProgram(specializer.builder.graph, signature, sizes, specializer.builder.mode)


class _NotStatic(Exception):
    def __init__(self, node: fx.Node, reason: str):
        super().__init__(reason)
        self.remark = Remark("left-to-aten", str(node.target), reason, source_line(node))


_INPUT_KINDS = {
    InputKind.PARAMETER: "param",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}
_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)

# Checks that mean nothing once every size is a number; `_assert_scalar` is looked at instead of dropped.
_NO_EFFECT = {
    "aten::_assert_async", "aten::_assert_tensor_metadata", "aten::_print",
    "aten::sym_constrain_range", "aten::sym_constrain_range_for_size", "aten::_functional_assert_async",
}  # fmt: skip


# Stands for a number read from a tensor that nothing but checks look at; such checks are dropped.
_DATA = object()


def schema_name(node: fx.Node) -> str:
    """`aten::add` for a call of any overload of it, else empty."""
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""


def _only_checked(graph: fx.Graph) -> set[fx.Node]:
    """Checks, and the nodes whose values reach nothing else."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        check = schema_name(node) in (*_NO_EFFECT, "aten::_assert_scalar")
        if check or (node.op == "call_function" and node.users and all(u in found for u in node.users)):
            found.add(node)
    return found


class _Specializer:
    """Runs the graph node by node on fake tensors of concrete size and records a new one."""

    def __init__(self, ep: ExportedProgram, sizes: Mapping[str, int]):
        self.ep, self.sizes = ep, sizes
        self.builder = GraphBuilder(FakeTensorMode(allow_non_fake_inputs=True))
        self.env: dict[fx.Node, Argument] = {}
        self.inputs: list[InputRecord] = []
        self.owner: dict[str, str] = {}  # target of a lifted tensor -> target that stands for it

    def run(self) -> list[OutputRecord]:
        self._placeholders()
        checks = _only_checked(self.ep.graph)
        for node in self.ep.graph.nodes:
            if node.op == "call_function" and node in checks and self._sees_data(node):
                self.env[node] = _DATA
            elif node.op == "call_function":
                with self.builder.at(node):
                    self.env[node] = self._call(node)
            elif node.op == "get_attr" and any(_is_control_flow(user) for user in node.users):
                continue  # the body of a higher-order op, which is refused at its call
            elif node.op not in ("placeholder", "output"):
                raise _NotStatic(node, f"a graph node of kind {node.op}")
        return self._outputs()

    def _sees_data(self, node: fx.Node) -> bool:
        return schema_name(node) == "aten::_local_scalar_dense" or any(
            self.env.get(n) is _DATA for n in node.all_input_nodes
        )

    def _placeholders(self) -> None:
        seen: dict[Any, tuple[int, fx.Node]] = {}
        nodes = self.ep.graph.find_nodes(op="placeholder")
        for node, spec in zip(nodes, self.ep.graph_signature.input_specs, strict=True):
            if isinstance(spec.arg, ConstantArgument):
                self.env[node] = spec.arg.value
                self.inputs.append(InputRecord(node.name, "literal", node.name, value=plain(spec.arg.value)))
                continue
            if isinstance(spec.arg, SymIntArgument):
                self.env[node] = size = concrete(node.meta["val"], self.sizes)
                self.inputs.append(InputRecord(node.name, "literal", node.name, value=size))
                continue
            if spec.kind not in _INPUT_KINDS or not isinstance(spec.arg, TensorArgument):
                raise _NotStatic(node, f"an input of kind {spec.kind.name} ({type(spec.arg).__name__})")
            kind, target = _INPUT_KINDS[spec.kind], spec.target or node.name
            key = storage_key(self.ep, target) if kind != "input" else None
            if key is not None and key in seen:
                position, first = seen[key]
                self.env[node] = self.env[first]
                self._merge(position, kind, target)
                continue
            value = self._fake(node.meta["val"])
            self.env[node] = placed = self.builder.placeholder(node.name, value)
            self.owner[target] = target
            if key is not None:
                seen[key] = len(self.inputs), node
            self.inputs.append(
                InputRecord(placed.name, kind, target, dtype_name(value.dtype), tuple(value.shape))
            )

    def _merge(self, position: int, kind: str, target: str) -> None:
        """Notes that `target` is another name of the tensor at `position`; a name in the state dict is the main one."""
        first = self.inputs[position]
        main, other = (
            (first.target, target)
            if first.kind != "constant" or kind == "constant"
            else (target, first.target)
        )
        self.inputs[position] = InputRecord(
            first.name, first.kind if main == first.target else kind, main, first.dtype, first.shape,
            aliases=(*first.aliases, other),
        )  # fmt: skip
        for name in (main, other, *first.aliases):
            self.owner[name] = main

    def _fake(self, value: torch.Tensor) -> torch.Tensor:
        shape = [concrete(s, self.sizes) for s in value.shape]
        with self.builder.mode:
            if value.layout is not torch.strided:
                raise InputError(
                    f"an input has layout {value.layout}", hint="only strided tensors are supported"
                )
            strides = [concrete(s, self.sizes) for s in value.stride()]
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)

    def _call(self, node: fx.Node) -> Argument:
        target = node.target
        if isinstance(target, HigherOrderOperator):
            raise _NotStatic(node, f"control flow or a higher-order op ({target})")
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.env.__getitem__)
        if target is operator.getitem:
            return args[0][args[1]]
        if not isinstance(target, OpOverload):
            return target(*args, **kwargs)  # arithmetic on sizes
        schema = target._schema
        if schema.name in _NO_EFFECT:
            return None
        if schema.name == "aten::_assert_scalar":
            return self._check(node, *args)
        if schema.name == "aten::as_strided":
            args = from_base(*args)
        if schema.name == "aten::threshold_backward":
            args = self._promoted(args)
        if schema.name == "aten::as_strided" and not stays_inside(args[0].meta["val"], *args[1:], **kwargs):
            raise _NotStatic(node, "it reads memory outside of its operand")
        if schema.is_mutable:
            raise _NotStatic(node, "it writes into its argument")
        return self._emit(node, target, args, kwargs)

    def _promoted(self, args: tuple[Argument, ...]) -> tuple[Argument, ...]:
        """The tensors in their common type, which eager's result has; torch's fake result has the type of the first."""
        nodes = [a for a in args if isinstance(a, fx.Node)]
        common = functools.reduce(torch.promote_types, (n.meta["val"].dtype for n in nodes))
        return tuple(cast(self.builder, a, common) if a in nodes else a for a in args)

    def _emit(self, node: fx.Node, target: OpOverload, args: Any, kwargs: Any) -> Argument:
        graph_name = node.name
        try:
            result = self.builder.emit(target, *args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise _NotStatic(node, "the size or value of its result depends on data") from None
        except UnsupportedOperatorException:
            raise _NotStatic(node, "torch cannot tell the shape of its result") from None
        except RuntimeError as error:
            if not self.sizes:
                raise
            first = str(error).splitlines()[0]
            raise InputError(
                f"sizes {dict(self.sizes)} do not fit the program: {node.target}: {first}",
                hint="choose another bucket", where=source_line(node),
            ) from error  # fmt: skip
        if isinstance(result, fx.Node):
            result.name = graph_name
        return result

    def _check(self, node: fx.Node, holds: Any, message: str = "") -> None:
        if isinstance(holds, bool | int | float) and not holds:
            raise InputError(
                f"sizes {dict(self.sizes)} break a check of the program: {message}", where=source_line(node)
            )

    def _check_written(self, kind: str, target: str, shape: tuple[int, ...]) -> None:
        written = next((r for r in self.inputs if kind == "mutation" and r.target == target), None)
        if written is not None and written.shape != shape:
            raise UnsupportedError(
                f"the program writes a result of shape {list(shape)} into '{target}', which has {list(written.shape or ())}",
                hint="give out= a tensor of the shape of the result",
            )

    def _outputs(self) -> list[OutputRecord]:
        values, records = [], []
        (output,) = self.ep.graph.find_nodes(op="output")
        position = 0
        for argument, spec in zip(output.args[0], self.ep.graph_signature.output_specs, strict=True):
            value = self.env[argument] if isinstance(argument, fx.Node) else argument
            values.append(value)
            kind = "mutation" if spec.kind in _MUTATIONS else "output"
            if spec.kind not in (*_MUTATIONS, OutputKind.USER_OUTPUT):
                raise _NotStatic(output, f"an output of kind {spec.kind.name}")
            target = self.owner[spec.target] if kind == "mutation" else str(position)
            position += kind == "output"
            if isinstance(value, fx.Node):
                fake = value.meta["val"]
                self._check_written(kind, target, tuple(fake.shape))
                records.append(OutputRecord(kind, target, dtype_name(fake.dtype), tuple(fake.shape)))
            else:
                records.append(OutputRecord("literal", target, value=plain(value)))
        self.builder.graph.output(tuple(values))
        self.builder.graph.eliminate_dead_code()
        return records


def _unspecialized(ep: ExportedProgram, remark: Remark, dims: tuple[DimRecord, ...]) -> FxProgram:
    """The program as exported, described as far as it is known; sizes that vary are -1."""
    inputs, outputs = [], []
    for node, spec in zip(ep.graph.find_nodes(op="placeholder"), ep.graph_signature.input_specs, strict=True):
        kind = _INPUT_KINDS.get(spec.kind, spec.kind.name.lower())
        if isinstance(spec.arg, ConstantArgument):
            inputs.append(InputRecord(node.name, "literal", node.name, value=plain(spec.arg.value)))
        else:
            inputs.append(InputRecord(node.name, kind, spec.target or node.name, *_described(node)))
    (output,) = ep.graph.find_nodes(op="output")
    position = 0
    for argument, spec in zip(output.args[0], ep.graph_signature.output_specs, strict=True):
        mutates = spec.kind in _MUTATIONS
        target = spec.target if mutates else str(position)
        position += not mutates
        if isinstance(argument, fx.Node):
            outputs.append(OutputRecord("mutation" if mutates else "output", target, *_described(argument)))
        else:
            outputs.append(OutputRecord("literal", target, value=plain(argument)))
    signature = Signature(tuple(inputs), tuple(outputs), *_trees(ep), dims)
    return FxProgram(ep.graph, signature, {}, FakeTensorMode(), remark)


def _described(node: fx.Node) -> tuple[str | None, tuple[int, ...] | None]:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None, None
    return dtype_name(value.dtype), tuple(s if isinstance(s, int) else -1 for s in value.shape)


def _trees(ep: ExportedProgram) -> tuple[dict[str, Any], dict[str, Any]]:
    spec = ep.call_spec
    return tree_as_json(spec.in_spec), tree_as_json(spec.out_spec)


def _is_control_flow(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator)


def plain(value: Any) -> Any:
    """A literal input or output as JSON has it; not-finite floats and other objects as their text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
