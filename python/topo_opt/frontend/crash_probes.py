"""Finds out which node of a program kills the process that lowers it.

Each kind of node is lowered alone in a process of its own. What dies there is left to ATen when the program is lowered again.
"""

from collections.abc import Mapping
from typing import Any

from topo_opt.errors import CompilerCrash
from topo_opt.frontend.externs import can_leave, known_reason
from topo_opt.frontend.fx_graph import FxProgram
from topo_opt.frontend.isolate import Limits, run_isolated
from topo_opt.frontend.lower_program import kind_of_node, lower_program, single

# One node: what takes longer than this hangs.
_LIMITS = Limits(memory_bytes=8 << 30, cpu_seconds=60, wall_seconds=60)


def deadly_nodes(program: FxProgram) -> dict[str, str]:
    """Node -> what happened, for every node like one whose lowering ends the process or does not end."""
    if not program.static:
        return {}
    verdicts: dict[Any, str | None] = {}
    found: dict[str, str] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or known_reason(node) or not can_leave(node):
            continue
        kind = kind_of_node(node)
        if kind not in verdicts:
            verdicts[kind] = _verdict(single(program, node))
        if reason := verdicts[kind]:
            found[node.name] = reason
    return found


def _verdict(program: FxProgram) -> str | None:
    try:
        run_isolated(_lower_alone, program, stage="probe", limits=_LIMITS)
    except CompilerCrash as crash:
        return f"lowering it crashes: {crash.message}"
    return None


def _lower_alone(program: FxProgram) -> None:
    from torch_mlir import ir

    from topo_opt.dialects import load

    sizes: Mapping[str, int] = {}
    lower_program(load(ir.Context()), program, "probe", "probe", sizes)
