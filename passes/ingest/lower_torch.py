"""`topo-lower-torch`: the torch dialect becomes linalg on tensors."""

from dataclasses import dataclass
from typing import Any

from torch_mlir import ir
from torch_mlir.dialects.transform import interpreter
from torch_mlir.passmanager import PassManager

from topo_opt.passes.base import Pass, PassFailure
from topo_opt.passes.ingest.mirrored_reads import move_into_maps
from topo_opt.passes.ingest.transposed_results import reduce_in_reading_order

# The conversions run singly: torch-mlir's own pipeline ends in a check that refuses the ops we raised. A casts-and-loops pass
# comes before the ones that make use of what it leaves.
_PIPELINE = (
    "func.func(torch-match-quantized-custom-ops)",
    "torchdynamo-export-to-torch-backend-pipeline",
    "func.func(convert-torch-to-tmtensor,canonicalize,convert-torch-to-linalg,cse,convert-torch-to-scf,"
    "convert-torch-to-arith,convert-torch-to-tensor)",
    "convert-torch-conversion-to-mlprogram",
    "func.func(canonicalize,resolve-shaped-type-result-dims,cse)",
    "torch-func-backend-type-conversion",
    "func.func(canonicalize,torch-finalizing-backend-type-conversion)",
)
_AFTER = "func.func(canonicalize,cse)"

# What has a meaning of its own in the structured IR; every other named op becomes a linalg.generic.
_STAYS_NAMED = {"linalg.generic", "linalg.contract", "linalg.fill", "linalg.yield", "linalg.index"}


@dataclass(frozen=True)
class LowerTorch(Pass):
    """Runs torch-mlir's conversions and writes linalg's named ops, other than `contract` and `fill`, as `linalg.generic`.

    | before | after |
    |---|---|
    | `torch.aten.mul.Tensor` | `linalg.generic` with `arith.mulf` |
    | `torch.aten.permute` | `linalg.transpose`, then `linalg.generic` |
    | `torch.aten.flip` | `linalg.generic` with a map like `(d0) -> (7 - d0)` |
    """

    name = "topo-lower-torch"

    def apply(self, module: Any) -> None:
        """Lowers the whole module.

        Raises:
            PassFailure: torch-mlir refused an op, at whose location the failure is.
        """
        with module.context:
            for pipeline in _PIPELINE:
                _run(pipeline, module)
            _generalize(module)
            _fold_narrowed_constants(module)
            move_into_maps(module)
            reduce_in_reading_order(module)
            _run(_AFTER, module)


def _run(pipeline: str, module: Any) -> None:
    try:
        PassManager.parse(f"builtin.module({pipeline})").run(module.operation)
    except ir.MLIRError as error:
        location, message = _first(error)
        raise PassFailure(message, location=location) from error


def _first(error: ir.MLIRError) -> tuple[Any, str]:
    for diagnostic in error.error_diagnostics:
        return diagnostic.location, diagnostic.message
    return None, str(error)


def _generalize(module: Any) -> None:
    """Runs linalg's generalization on the named ops that do not stay. Its pass would take `contract` and `fill` along."""
    names: set[str] = set()

    def collect(op: ir.Operation) -> ir.WalkResult:
        if op.name.startswith("linalg.") and op.name not in _STAYS_NAMED:
            names.add(op.name)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    if not names:
        return
    ops = ", ".join(f'"{name}"' for name in sorted(names))
    schedule = ir.Module.parse(f"""
        module attributes {{transform.with_named_sequence}} {{
          transform.named_sequence @__transform_main(%module: !transform.any_op) {{
            %named = transform.structured.match ops{{[{ops}]}} in %module : (!transform.any_op) -> !transform.any_op
            %generic = transform.structured.generalize %named : (!transform.any_op) -> !transform.any_op
            transform.yield
          }}
        }}""")
    interpreter.apply_named_sequence(module, schedule.body.operations[0], schedule)


def _fold_narrowed_constants(module: Any) -> None:
    """`arith.truncf` of an f64 constant becomes a constant: torch rounds a Python number once to the type it computes in.

    MLIR's own folder leaves those that are not exact.
    """
    found: list[ir.Operation] = []

    def collect(op: ir.Operation) -> ir.WalkResult:
        if op.name == "arith.truncf" and _is_float_constant(op.operands[0]):
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for op in found:
        kind = op.results[0].type
        value = ir.FloatAttr(op.operands[0].owner.attributes["value"]).value
        with ir.InsertionPoint(op), op.location:
            constant = ir.Operation.create(
                "arith.constant", results=[kind], attributes={"value": ir.FloatAttr.get(kind, value)}
            )
        op.results[0].replace_all_uses_with(constant.results[0])
        op.erase()


def _is_float_constant(value: ir.Value) -> bool:
    owner = value.owner
    return isinstance(owner, ir.Operation | ir.OpView) and (
        owner.operation.name == "arith.constant" and isinstance(value.type, ir.FloatType)
    )
