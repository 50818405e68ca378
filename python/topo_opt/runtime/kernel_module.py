"""Kernel files as Python modules, from text that was verified and without torch."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any


def load_module(source: str, file: str) -> dict[str, Any]:
    """Executes a checked kernel file and returns its names.

    Args:
        file: path for messages and debuggers. It is not read: Triton, which looks for the source of its functions, is
            given the verified text.
    """
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    # Triton hashes and mangles the module's name: it may not depend on where the bundle lies.
    namespace: dict[str, Any] = {"__name__": f"topo_opt_kernels.{Path(file).stem}", "__file__": file}
    exec(compile(source, file, "exec"), namespace)
    return namespace


def load_function(source: str, file: str, name: str) -> Any:
    """The Triton function `name` of a kernel file: compiled, or interpreted inside `interpreter.interpreting()`."""
    return load_module(source, file)[name]
