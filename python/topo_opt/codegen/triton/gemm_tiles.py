"""Default tiles of gemm kernels, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from topo_opt.codegen.triton import gemm_matrix_tiles, gemm_skinny_tiles, gemm_vector_tiles
from topo_opt.codegen.triton.gemm_figures import Figures, figures_of
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.codegen.triton.memory_model import Ranked
from topo_opt.errors import UnsupportedError


def default_tile(kernel: Kernel) -> dict[str, int]:
    """Block sizes, warps and stages; the keys name the form."""
    figures = figures_of(kernel)
    streamed = few_rows(kernel, figures)
    if streamed:
        return streamed[0][1]
    ordered = gemm_matrix_tiles.ordered(kernel, figures)
    if figures.alike and not _spans_both(kernel, ordered[0]):
        ordered = gemm_matrix_tiles.ordered(kernel, replace(figures, alike=False))
    return ordered[0]


def _spans_both(kernel: Kernel, tile: dict[str, int]) -> bool:
    """Whether a descriptor spans the weights of both products with a tile; one that cannot be lowered says so later."""
    from topo_opt.codegen.triton.gemm_matrix import Matrix

    trial = Kernel(kernel.func, kernel.target)
    trial.attributes = {**kernel.attributes, "tile": tile}
    try:
        form = Matrix(trial)
        form.lower()
    except UnsupportedError:
        return False
    return form.has_pair


def slowdown(kernel: Kernel, tile: Mapping[str, int]) -> float | None:
    """Estimated time with a tile, of that with the best one; None where the model that ranks tiles does not know this form."""
    figures = figures_of(kernel)
    streamed = few_rows(kernel, figures)
    if (figures.element == "f32" and not streamed) or (streamed and "m" in tile):
        return None
    found = streamed or gemm_matrix_tiles.timed(kernel, figures)
    alike = [time for time, other in found if _priced(other) == _priced(tile)]
    return min(alike, default=inf) / min(time for time, _ in found)


def _priced(tile: Mapping[str, int]) -> dict[str, int]:
    """What the models tell tiles apart by."""
    return {name: size for name, size in tile.items() if name not in ("ahead", "group", "tma")}


def few_rows(kernel: Kernel, figures: Figures) -> Ranked:
    """Tiles of the forms for few rows with their estimated times, best first; empty where there are many rows."""
    forms = (gemm_vector_tiles, gemm_skinny_tiles)
    found = [entry for form in forms for entry in form.ranked(figures, kernel.target)]
    return sorted(found, key=lambda entry: (entry[0], sorted(entry[1].items())))
