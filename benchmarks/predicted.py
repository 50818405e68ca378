"""What the planner predicts for one device beside what was measured on one. Needs no GPU.

    python benchmarks/predicted.py [case ...]

`MEASURED` are medians of one H200, from results/kernels-h200.md. Prints milliseconds of both and the error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch
from bench_models import CASES, Work
from torch.export import ExportedProgram

from topo_opt.frontend.ingest import ingest, parse
from topo_opt.reference.binding import find_function
from topo_opt.sharding.plan import plan_topology
from topo_opt.sharding.plan_graph import PlanGraph
from topo_opt.sharding.plan_reading import read_plan_graph
from topo_opt.sharding.predict import prepare
from topo_opt.topology import load

MEASURED = {
    "llama8b-decode-b1": 3.72,
    "llama1b-decode-b1": 0.704,
    "llama1b-decode-b8": 0.930,
    "llama1b-decode-b32": 1.226,
    "llama1b-prefill-2048": 6.852,
    "bert-base-8x512": 1.835,
    "whisper-small-encoder": 1.083,
    "vit-b16-b32": 2.758,
    "gpt2-medium-8x512": 5.819,
    "qwen3moe-block-t1": 0.0395,
    "qwen3moe-block-t8": 0.136,
    "qwen3moe-block-t32": 0.262,
    "qwen3moe-block-t2048": 0.504,
}


def planned_graph(program: ExportedProgram) -> PlanGraph:
    """The graph that a compile of the program plans for."""
    module = parse(ingest({"main": program}).module)
    prepare(module)
    return read_plan_graph(find_function(module, "main"))


def predicted_ms(build: Callable[[str], Work]) -> float:
    """Milliseconds of a call on one H200."""
    work = build("meta")
    with torch.no_grad():
        program = torch.export.export(work.module, work.inputs, strict=False)
    return plan_topology(planned_graph(program), load("h200-x1")).seconds * 1e3


def main() -> None:
    warnings.filterwarnings("ignore")
    for case in sys.argv[1:] or MEASURED:
        found = predicted_ms(CASES[case])
        print(
            f"{case:24} measured {MEASURED[case]:7.4f} predicted {found:7.4f} {found / MEASURED[case] - 1:+7.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
