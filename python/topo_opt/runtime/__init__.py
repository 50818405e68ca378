"""Runs bundles: torch, triton, numpy and safetensors only, never MLIR or the compiler."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topo_opt.runtime.program import Program, load

__all__ = ["Program", "load"]


def __getattr__(name: str) -> Any:
    """Resolves the public names on first use: the compiler reads the plan's schema without paying for torch."""
    if name in __all__:
        from topo_opt.runtime import program

        return getattr(program, name)
    raise AttributeError(f"module 'topo_opt.runtime' has no attribute {name!r}")
