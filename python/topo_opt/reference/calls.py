"""`func.call`: functions of the module, kernel functions and ops left to ATen."""

import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt.errors import InputError
from topo_opt.reference.element_types import as_dtype, as_signless, value_dtype
from topo_opt.reference.program import Program, Step, evaluates
from topo_opt.runtime.aten_program import AtenCall
from topo_opt.runtime.dtypes import torch_dtype


@evaluates("func.call")
def call(op: ir.Operation, program: Program) -> Step:
    """A callee with a body is prepared once however often it is called."""
    callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
    target = program.find(callee)
    if "topo.aten" in target.attributes:
        return _aten(op, target)
    return program.function(callee)


def _aten(op: ir.Operation, declaration: ir.Operation) -> Step:
    name = ir.StringAttr(declaration.attributes["topo.aten"]).value
    prepared = AtenCall.parse(ir.StringAttr(declaration.attributes["topo.call"]).value, name)
    dtypes = _operand_dtypes(declaration, len(op.operands))
    expected = [value_dtype(r.type) for r in op.results]

    def step(operands: list[Tensor]) -> list[Tensor]:
        tensors = [x if d is None else as_dtype(x, d) for x, d in zip(operands, dtypes, strict=True)]
        results = prepared.run(tensors, "cpu")
        if len(results) != len(expected):
            raise InputError(
                f"{name} returned {len(results)} tensors where the call has {len(expected)} results"
            )
        return [as_signless(r).to(d) for r, d in zip(results, expected, strict=True)]

    return step


def _operand_dtypes(declaration: ir.Operation, count: int) -> list[torch.dtype | None]:
    if "topo.dtypes" not in declaration.attributes:
        return [None] * count
    names = [ir.StringAttr(a).value for a in ir.ArrayAttr(declaration.attributes["topo.dtypes"])]
    return [torch_dtype(name) if name else None for name in names[:count]]
