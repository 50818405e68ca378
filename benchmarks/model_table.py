"""Writes docs/models.md: for every model of the test zoo what was imported, the kernels at each level, and what is left to ATen.

    python benchmarks/model_table.py [--dtype bfloat16] [--check]

With --check nothing is written and the exit code is 1 when the file is not up to date.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch_mlir import ir

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "test" / "unit"))
TARGET = ROOT / "docs" / "models.md"
LEVELS = (0, 1, 2)
HEADER = """# Models

Small models with random weights ({dtype}), compiled for `h200-x1`; written by `python benchmarks/model_table.py`
(torch {torch}, transformers {transformers}). *Ops* are ATen ops after decomposition. *Kernels* are launches of one call at
each level, the number of different kernels at `-O2` in parentheses. What is left to ATen is named with its count and reason.

| model | ops | -O0 | -O1 | -O2 | left to ATen |
|---|---|---|---|---|---|
"""


def launches(module: ir.Module, symbol: str) -> tuple[int, int]:
    """Kernel launches of a plan function and how many different kernels they are."""
    function = next(o for o in module.body.operations if o.operation.attributes["sym_name"].value == symbol)
    called = [
        ir.FlatSymbolRefAttr(o.operation.attributes["callee"]).value
        for o in function.regions[0].blocks[0].operations
        if o.operation.name == "func.call" and "topo.at_load" not in o.operation.attributes
    ]
    kernels = [c for c in called if not c.startswith("aten.")]
    return len(kernels), len(set(kernels))


def row(name: str, dtype: torch.dtype) -> str:
    """The table row of one model."""
    from model_zoo import ZOO

    from topo_opt import dialects
    from topo_opt.frontend.ingest import ingest
    from topo_opt.pipeline import levels
    from topo_opt.pipeline.run import run

    case = ZOO[name](dtype)
    with torch.no_grad():
        exported = torch.export.export(case.module, case.args, case.kwargs, strict=False)
        ingested = ingest({"main": exported})
    record = ingested.functions[0]
    ops = sum(
        1 for n in record.program.graph.nodes if n.op == "call_function" and "getitem" not in str(n.target)
    )
    left = Counter((r.subject, r.reason) for r in ingested.remarks if r.kind == "left-to-aten")
    counts = []
    for level in LEVELS:
        with dialects.load(ir.Context()), ir.Location.unknown():
            module = ir.Module.parse(ingested.module)
            run(levels.pipeline(level, ("schedule",)), module)
            counts.append(launches(module, record.symbol))
    shown = [str(c[0]) for c in counts[:-1]] + [f"{counts[-1][0]} ({counts[-1][1]})"]
    reasons = "<br>".join(f"{n} x {subject}: {reason}" for (subject, reason), n in left.items()) or "none"
    return f"| {name} | {ops} | {' | '.join(shown)} | {reasons} |\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    import transformers
    from model_zoo import DTYPES, ZOO

    text = HEADER.format(
        dtype=arguments.dtype, torch=torch.__version__, transformers=transformers.__version__
    )
    for name in ZOO:
        text += row(name, DTYPES[arguments.dtype])
        print(name, flush=True)
    if arguments.check:
        return 0 if TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
