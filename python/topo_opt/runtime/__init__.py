"""Runs bundles: torch, triton, numpy and safetensors only, never MLIR or the compiler."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topo_opt.runtime.loading import load
    from topo_opt.runtime.program import Program

__all__ = ["Program", "load"]


def __getattr__(name: str) -> Any:
    """Resolves the public names on first use: the compiler reads the plan's schema without paying for torch."""
    if name in __all__:
        from topo_opt.runtime import loading

        return getattr(loading, name)
    raise AttributeError(f"module 'topo_opt.runtime' has no attribute {name!r}")
