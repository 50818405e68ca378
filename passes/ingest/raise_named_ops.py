"""`topo-raise-named-ops`: named operations of the frontend become ops of the structured IR."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects import arith, linalg, tensor

from topo_opt.passes.base import Pass, fail
from topo_opt.passes.ingest.torch_types import builtin_tensor

_PREFIX = "torch.topo."


@dataclass(frozen=True)
class RaiseNamedOps(Pass):
    """Replaces `torch.operator "torch.topo.*"` by ops on builtin tensors, with `torch_c` casts around them.

    | before | after |
    |---|---|
    | `torch.topo.demote(x, dtype)` | `topo.demote` |
    | `torch.topo.contract(a, b, "mk,nk->mn", dtype)` | `linalg.contract` into a `linalg.fill` of zero |
    | `torch.topo.attention(q, k, v, mask, scale, causal, softcap)` | `topo.attention` |
    | `torch.topo.index_update(dest, source, index, dim)` | `topo.index_update` |
    | `torch.topo.top_k(x, k, largest)` | `topo.top_k` |
    | `torch.topo.grouped_product(x, weights, group)` | `topo.grouped_product` |
    | `torch.topo.aten_N_M(op, template, reason, dtypes, ...)` | `func.call` of a private declaration `@aten.N` |

    It runs before torch-mlir's own lowering, which refuses `torch.operator`. Equal ATen calls share one declaration,
    whose `topo.dtypes` lists the torch dtypes of the operands and then of the results.
    """

    name = "topo-raise-named-ops"

    def apply(self, module: Any) -> None:
        """Raises every named op of the module's functions."""
        found: list[ir.Operation] = []

        def collect(op: ir.Operation) -> ir.WalkResult:
            if op.name == "torch.operator" and op.attributes["name"].value.startswith(_PREFIX):
                found.append(op)
            return ir.WalkResult.ADVANCE

        module.operation.walk(collect)
        raiser = _Raiser(module)
        with module.context:
            for op in found:
                raiser.replace(op)


class _Raiser:
    def __init__(self, module: Any):
        self.body = module.operation.regions[0].blocks[0]
        self.declarations: dict[Any, str] = {}

    def replace(self, op: ir.Operation) -> None:
        name = op.attributes["name"].value.removeprefix(_PREFIX)
        build: Any = _Raiser._aten_call if name.startswith("aten_") else _RULES.get(name)
        if build is None:
            fail(op, f"'{name}' is not a named operation", hint=f"known: {', '.join(_RULES)} and aten_N_M")
        with ir.InsertionPoint(op), op.location:
            types = [builtin_tensor(r.type) for r in op.results]
            results = build(self, op, types)
            for old, new in zip(op.results, results, strict=True):
                cast = ir.Operation.create("torch_c.from_builtin_tensor", results=[old.type], operands=[new])
                old.replace_all_uses_with(cast.results[0])
        op.erase()

    def _demote(self, op: ir.Operation, types: list[ir.Type]) -> list[ir.Value]:
        return list(_create("topo.demote", types, [_tensor(op.operands[0])]).results)

    def _contract(self, op: ir.Operation, types: list[ir.Type]) -> list[ir.Value]:
        a, b = _tensor(op.operands[0]), _tensor(op.operands[1])
        (result,) = types
        element = result.element_type
        whole = isinstance(element, ir.IntegerType)
        zero = ir.IntegerAttr.get(element, 0) if whole else ir.FloatAttr.get(element, 0.0)
        init = linalg.fill(arith.constant(element, zero), outs=[tensor.empty(result.shape, element)])
        maps = _indexing_maps(_text(op, 2))
        return [linalg.contract(a, b, outs=[init], indexing_maps=ir.ArrayAttr.get(maps))]

    def _attention(self, op: ir.Operation, types: list[ir.Type]) -> list[ir.Value]:
        q, k, v, mask, scale, causal, softcap = op.operands
        masks = [] if str(mask.type) == "!torch.none" else [_tensor(mask)]
        attributes = {
            "scale": ir.FloatAttr.get(ir.F64Type.get(), _constant(scale).value),
            "causal": ir.BoolAttr.get(bool(_constant(causal).value)),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1, 1, len(masks), 0]),
        }
        if cap := _constant(softcap).value:
            attributes["softcap"] = ir.FloatAttr.get(ir.F64Type.get(), cap)
        return list(
            _create("topo.attention", types, [_tensor(q), _tensor(k), _tensor(v), *masks], attributes).results
        )

    def _index_update(self, op: ir.Operation, types: list[ir.Type]) -> list[ir.Value]:
        dest, source, index, dim = op.operands
        attributes = {"dim": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), _constant(dim).value)}
        operands = [_tensor(dest), _tensor(source), _tensor(index)]
        return list(_create("topo.index_update", types, operands, attributes).results)

    def _top_k(self, op: ir.Operation, types: list[ir.Type]) -> list[ir.Value]:
        x, k, largest = op.operands
        attributes = {
            "k": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), _constant(k).value),
            "largest": ir.BoolAttr.get(bool(_constant(largest).value)),
        }
        return list(_create("topo.top_k", types, [_tensor(x)], attributes).results)

    def _grouped_product(self, op: ir.Operation, types: list[ir.Type]) -> list[ir.Value]:
        attributes = {"operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1, 1, 0, 0])}
        operands = [_tensor(operand) for operand in op.operands]
        return list(_create("topo.grouped_product", types, operands, attributes).results)

    def _aten_call(self, op: ir.Operation, types: list[ir.Type]) -> list[ir.Value]:
        name, template, reason, dtypes = (_text(op, i) for i in range(4))
        operands = [_tensor(v) for v in list(op.operands)[4:]]
        key = (name, template, reason, dtypes, tuple(str(v.type) for v in operands), tuple(map(str, types)))
        if key not in self.declarations:
            symbol = f"aten.{len(self.declarations)}"
            self.declarations[key] = symbol
            self._declare(symbol, ir.FunctionType.get([v.type for v in operands], types), *key[:4])
        callee = ir.FlatSymbolRefAttr.get(self.declarations[key])
        return list(_create("func.call", types, operands, {"callee": callee}).results)

    def _declare(
        self, symbol: str, kind: ir.FunctionType, name: str, template: str, reason: str, dtypes: str
    ) -> None:
        text = ir.StringAttr.get
        attributes = {
            "sym_name": text(symbol), "sym_visibility": text("private"), "function_type": ir.TypeAttr.get(kind),
            "topo.aten": text(name), "topo.call": text(template), "topo.reason": text(reason),
            "topo.dtypes": ir.ArrayAttr.get([text(d) for d in dtypes.split()]),
        }  # fmt: skip
        with ir.InsertionPoint.at_block_begin(self.body):
            ir.Operation.create("func.func", attributes=attributes, regions=1)


_RULES: dict[str, Callable[[_Raiser, ir.Operation, list[ir.Type]], list[ir.Value]]] = {
    "demote": _Raiser._demote,
    "contract": _Raiser._contract,
    "attention": _Raiser._attention,
    "index_update": _Raiser._index_update,
    "top_k": _Raiser._top_k,
    "grouped_product": _Raiser._grouped_product,
}


def _create(
    name: str, types: list[ir.Type], operands: list[ir.Value], attributes: Any = None
) -> ir.Operation:
    return ir.Operation.create(name, results=types, operands=operands, attributes=attributes or {})


def _tensor(value: ir.Value) -> ir.Value:
    return _create("torch_c.to_builtin_tensor", [builtin_tensor(value.type)], [value]).results[0]


def _constant(value: ir.Value) -> Any:
    return value.owner.attributes["value"]


def _text(op: ir.Operation, position: int) -> str:
    return _constant(op.operands[position]).value


def _indexing_maps(equation: str) -> list[ir.AffineMapAttr]:
    """`"bmk,bnk->bmn"` as maps over (b, m, n, k): the letters of the result first, then those summed over."""
    terms, result = equation.split("->")
    letters = list(dict.fromkeys(result + terms.replace(",", "")))
    dims = {letter: ir.AffineDimExpr.get(i) for i, letter in enumerate(letters)}
    return [
        ir.AffineMapAttr.get(ir.AffineMap.get(len(letters), 0, [dims[letter] for letter in term]))
        for term in (*terms.split(","), result)
    ]
