"""Kernel files as Python modules, from text that was verified and without torch."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

from topo_opt.errors import InputError


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
    """The Triton function `name` of a kernel file: compiled, or interpreted inside `interpreter.interpreting()`.

    Raises:
        InputError: the file does not load with this version of Triton, or lacks the function.
    """
    try:
        return load_module(source, file)[name]
    except Exception as error:
        # Whatever Triton's decorator or an import raises, the user's problem is this bundle with this Triton.
        raise InputError(f"{file} can't be loaded: {type(error).__name__}: {str(error)[:200]}") from error
