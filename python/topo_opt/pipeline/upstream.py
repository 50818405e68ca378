"""What the C++ side of the wheel has registered: its passes by name, and the nearest names to a mistyped one."""

import difflib
import subprocess
from functools import cache
from pathlib import Path

import torch_mlir

from topo_opt.passes import PASSES


@cache
def upstream_passes() -> dict[str, str]:
    """Name -> summary of every C++ pass, as the wheel's own tool lists them; empty when the wheel came without it."""
    tool = Path(torch_mlir.__path__[0]) / "_mlir_libs" / "torch-mlir-opt"
    if not tool.is_file():
        return {}
    listing = subprocess.run([tool, "--list-passes"], capture_output=True, text=True, timeout=30, check=False)
    passes = {}
    # A pass stands at indent 2, its options deeper: "  --cse      -   Eliminate common sub-expressions".
    for line in (listing.stdout + listing.stderr).splitlines():
        name, _, summary = line.removeprefix("  --").partition(" ")
        if line.startswith("  --") and name:
            passes[name.partition("=")[0]] = summary.lstrip(" -")
    return passes


def nearest(name: str) -> list[str]:
    """At most three pass names, ours and upstream's, that `name` may have been meant to be; the best first."""
    return difflib.get_close_matches(name, [*PASSES, *upstream_passes()], n=3, cutoff=0.6)
