"""Exported programs to structured IR in a child process, so that a crash of the native lowering fails one test only."""

from torch.export import ExportedProgram
from torch_mlir import ir
from torch_mlir.dialects import linalg  # noqa: F401  half a second, once here and not in every child

from topo_opt.frontend.ingest import ingest, parse
from topo_opt.frontend.isolate import run_isolated


def lowered(program: ExportedProgram) -> ir.Module:
    """The structured module, with the function `main`.

    Raises:
        CompilerCrash: the native code died.
        AssertionError: the whole function was left to ATen.
    """
    module, symbol, remarks = run_isolated(_ingest, program, stage="test")
    assert symbol == "main", remarks
    return parse(module)


def left_to_aten(module: ir.Module) -> set[str]:
    """Names of the ops that a structured module leaves to ATen, such as `convolution`."""
    found = set()
    for view in module.body.operations:
        attributes = view.operation.attributes
        if "topo.aten" in attributes:
            found.add(ir.StringAttr(attributes["topo.aten"]).value.split(".")[1])
    return found


def _ingest(program: ExportedProgram) -> tuple[bytes, str | None, list[str]]:
    result = ingest({"main": program})
    return result.module, result.functions[0].symbol, [f"{r.subject}: {r.reason}" for r in result.remarks]
