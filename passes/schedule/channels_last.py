"""`topo-channels-last`: convolutions that are left to ATen work on tensors whose channels are the innermost dimension in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir

from topo_opt.passes.base import Pass
from topo_opt.passes.ingest.dead_ops import erase_dead, plan_functions
from topo_opt.passes.schedule.dim_orders import Orders, channels_last, shape_of

CONVOLUTION = "aten.convolution.default"
_ELEMENTS = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class ChannelsLast(Pass):
    """Gives and takes the tensors of convolutions with their channels last, and moves the change of order away from them.

    ```
    %y = call @aten.0(%x, %w) : (tensor<2x8x9x9xf32>, tensor<4x8x3x3xf32>) -> tensor<2x4x7x7xf32>
    %z = linalg.generic relu(%y) : tensor<2x4x7x7xf32>
      -->
    %xt = linalg.generic transpose(%x) : tensor<2x9x9x8xf32>; %wt = linalg.generic transpose(%w) : tensor<4x3x3x8xf32>
    %yt = call @aten.0.channels_last(%xt, %wt) : tensor<2x7x7x4xf32>
    %zt = linalg.generic relu(%yt) : tensor<2x7x7x4xf32>
    %z = linalg.generic transpose(%zt) : tensor<2x4x7x7xf32>
    ```
    The call shows ATen the tensors in the order that it expects, as views, so that cuDNN neither changes the order itself nor
    picks kernels for the other one. A convolution over one dimension becomes one over two, the first of size 1: cuDNN has no
    other. What stands between two convolutions (loop nests, padding, concatenation, slices, views that keep channels apart
    from the rest) works in the order of the first one's result; what is left of the changes becomes part of the kernels
    around it.

    A product whose result is transposed to have its columns second, as a convolution that is one has, is followed likewise in the
    order in which it was computed.

    Convolutions with groups stay: cuDNN's kernels for those are slower with channels last (on grouped 3x3 convolutions up to
    31 times, PyTorch's `_inductor.graph.GraphLowering.decide_layout_opt`), and so do those in f64, which has no such kernels.
    """

    name = "topo-channels-last"

    def apply(self, module: Any) -> None:
        """Rewrites every plan function with such a convolution."""
        top = module.operation
        declarations = {
            ir.StringAttr(view.operation.attributes["sym_name"]).value: call
            for view in top.regions[0].blocks[0].operations
            if (call := _convolution(view.operation)) is not None
        }
        with module.context:
            for function in plan_functions(top):
                operations = [view.operation for view in function.regions[0].blocks[0].operations]
                if declarations or any(_moved_columns(op) is not None for op in operations):
                    _rewrite(function, declarations)
            for convolution in declarations.values():
                if not convolution.used:
                    convolution.declaration.erase()


@dataclass
class _Convolution:
    """A declaration of a convolution that is to be rewritten. `template`: the call with channels last."""

    declaration: ir.Operation
    template: str
    replacement: str | None = None
    used: bool = False
    """Whether a call of the old one remains."""

    @property
    def types(self) -> tuple[list[ir.Type], ir.Type]:
        kind = ir.FunctionType(ir.TypeAttr(self.declaration.attributes["function_type"]).value)
        return list(kind.inputs), kind.results[0]


def _convolution(op: ir.Operation) -> _Convolution | None:
    """The convolution that a function declares, None where it declares none or one that stays."""
    if "topo.aten" not in op.attributes or ir.StringAttr(op.attributes["topo.aten"]).value != CONVOLUTION:
        return None
    args = json.loads(ir.StringAttr(op.attributes["topo.call"]).value)["args"]
    kind = ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value)
    x, weight, *rest = (ir.RankedTensorType(t) for t in kind.inputs)
    plain = args[:2] == [{"operand": 0}, {"operand": 1}] and not rest and args[2] is None
    groups = args[8]
    fits = x.rank == weight.rank == ir.RankedTensorType(kind.results[0]).rank and 3 <= x.rank <= 5
    if not plain or not fits or groups != 1 or str(x.element_type) not in _ELEMENTS:
        return None
    return _Convolution(op, json.dumps(_template(args, x.rank)))


def _template(args: list[Any], rank: int) -> dict[str, Any]:
    """The call of a convolution on views of tensors with channels last."""
    *_, stride, padding, dilation, transposes, output_padding, groups = args
    if rank == 3:
        stride, padding, dilation, output_padding = (
            [first, *sizes]
            for first, sizes in ((1, stride), (0, padding), (1, dilation), (0, output_padding))
        )
    outer = max(rank, 4)
    seen = [0, outer - 1, *range(1, outer - 1)]  # channels, last in memory, are ATen's second dim
    tensors = [{"permuted": [{"operand": i}, seen]} for i in range(2)]
    last = list(channels_last(outer))
    return {
        "args": [*tensors, None, stride, padding, dilation, transposes, output_padding, groups],
        "kwargs": {},
        "results": [last],
    }


def _rewrite(function: ir.Operation, convolutions: dict[str, _Convolution]) -> None:
    orders = Orders()
    for view in list(function.regions[0].blocks[0].operations):
        op = view.operation
        with ir.InsertionPoint(op), op.location:
            if op.name != "func.call":
                product = _moved_columns(op)
                if product is None:
                    orders.follow(op)
                else:
                    orders.computed(op.results[0], product, channels_last(len(shape_of(product))))
                continue
            convolution = convolutions.get(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)
            if convolution is not None:
                _call(op, convolution, orders)
    erase_dead(function)


def _moved_columns(op: ir.Operation) -> ir.Value | None:
    """The product of which an op is the transpose with the last dimension second; None for any other op."""
    if op.name != "linalg.generic" or len(op.operands) != 2:
        return None
    source, owner = op.operands[0], op.operands[0].owner
    if isinstance(owner, ir.Block) or owner.operation.name != "linalg.contract":
        return None
    read, written = (ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes["indexing_maps"]))
    body = list(op.regions[0].blocks[0].operations)
    rank = len(shape_of(source))
    transposes = rank >= 3 and read == ir.AffineMap.get_permutation(list(channels_last(rank)))
    copies = len(body) == 1 and body[0].operation.operands[0] == op.regions[0].blocks[0].arguments[0]
    return source if transposes and copies and written == ir.AffineMap.get_identity(rank) else None


def _call(op: ir.Operation, convolution: _Convolution, orders: Orders) -> None:
    rank = ir.RankedTensorType(op.results[0].type).rank
    operands = [orders.in_order(v, channels_last(rank)) for v in op.operands]
    if rank == 3:
        operands = [_with_height(v) for v in operands]
    shape = [shape_of(op.results[0])[d] for d in channels_last(rank)]
    element = ir.RankedTensorType(op.results[0].type).element_type
    result = ir.RankedTensorType.get([shape[0], 1, *shape[1:]] if rank == 3 else shape, element)
    callee = _declared(convolution, [v.type for v in operands], result)
    call = ir.Operation.create("func.call", [result], operands, {"callee": ir.FlatSymbolRefAttr.get(callee)})
    value = call.results[0]
    if rank == 3:
        value = _without_height(value, ir.RankedTensorType.get(shape, element))
    orders.replace(op.results[0], value, channels_last(rank))
    op.erase()


def _with_height(value: ir.Value) -> ir.Value:
    """`NxLxC` as `Nx1xLxC`."""
    n, length, channels = shape_of(value)
    kind = ir.RankedTensorType.get([n, 1, length, channels], ir.RankedTensorType(value.type).element_type)
    attributes = {
        "reassociation": ir.Attribute.parse("[[0], [1, 2], [3]]"),
        "static_output_shape": ir.DenseI64ArrayAttr.get(list(kind.shape)),
    }
    return ir.Operation.create("tensor.expand_shape", [kind], [value], attributes).results[0]


def _without_height(value: ir.Value, kind: ir.RankedTensorType) -> ir.Value:
    attributes = {"reassociation": ir.Attribute.parse("[[0], [1, 2], [3]]")}
    return ir.Operation.create("tensor.collapse_shape", [kind], [value], attributes).results[0]


def _declared(convolution: _Convolution, inputs: list[ir.Type], result: ir.Type) -> str:
    """The symbol of the declaration with channels last, made at its first use."""
    if convolution.replacement is None:
        old = convolution.declaration
        convolution.replacement = ir.StringAttr(old.attributes["sym_name"]).value + ".channels_last"
        attributes = {name: old.attributes[name] for name in old.attributes} | {
            "sym_name": ir.StringAttr.get(convolution.replacement),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(inputs, [result])),
            "topo.call": ir.StringAttr.get(convolution.template),
        }
        with ir.InsertionPoint(old), old.location:
            ir.Operation.create("func.func", attributes=attributes, regions=1)
    return convolution.replacement
