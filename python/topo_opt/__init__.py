"""topo-opt: a topology-aware graph optimizer for PyTorch inference.

The package imports nothing heavy by itself: `topo_opt.runtime` runs bundles with torch, triton and numpy only,
everything that needs MLIR is imported when it is used.
"""

from typing import Any

__all__ = ["__version__", "compile", "load"]


def __getattr__(name: str) -> Any:
    """Resolves the public functions on first use, so that `import topo_opt` stays cheap."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("topo-opt")
        except PackageNotFoundError:  # a copy of the source that was never installed
            return "unknown"
    if name == "compile":
        from topo_opt.api import compile

        return compile
    if name == "load":
        from topo_opt.runtime import load

        return load
    raise AttributeError(f"module 'topo_opt' has no attribute {name!r}")
