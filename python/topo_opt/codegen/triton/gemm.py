"""Matrix products with fused prologue and epilogue: `linalg.contract` and what stands around it element by element.

`topo.kernel` of this family: `parts` and `period` (how a tile walks the columns, `gemm_base`), `immutable`, `pdl`, and
`tile`, whose keys name the form:

* `m`, `n`, `k`, `group`, `warps`, `stages`: matrix form (`gemm_matrix`), tensor cores, one tile of the result a program;
  `persistent`, `tma` and `splits` (programs that share a tile, each with its range of k) as options;
* `split`, `n`, `k`, `warps`, `stages`: skinny form (`gemm_skinny`), few rows beside many weights; with `slices` (parts of a block
  of k, one or more a warp) the warps of a program share k; `ahead` blocks of weights are requested before the wait (1);
* `n`, `k`, `warps`, `repeat` (blocks of columns a program, 1): vector form (`gemm_vector`), very few rows, weights streamed
  through registers.
"""

from __future__ import annotations

from collections.abc import Mapping

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.gemm_matrix import Matrix
from topo_opt.codegen.triton.gemm_skinny import Skinny
from topo_opt.codegen.triton.gemm_vector import Vector
from topo_opt.codegen.triton.kernel import Kernel


def lower(kernel: Kernel) -> KernelSource:
    """The Triton kernel of a function of family `gemm`.

    Raises:
        UnsupportedError: something in the kernel that its form can't express.
    """
    return form_of(kernel.attributes["tile"])(kernel).lower()


def form_of(tile: Mapping[str, int]) -> type[Matrix] | type[Skinny] | type[Vector]:
    """The form that a tile is for."""
    return Matrix if "m" in tile else Skinny if "split" in tile else Vector
