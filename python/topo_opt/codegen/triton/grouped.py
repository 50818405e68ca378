"""Products of rows with the matrix each picks (`topo.grouped_product`), with what follows them row by row.

`topo.kernel` of this family: `tile`, whose keys name the form:

* `m`, `n`, `k`, `swap`, `warps`, `stages`: matrix form (`grouped_matrix`), for rows that come with their order by group;
* `n`, `k`, `warps`: streaming form (`grouped_stream`), few rows with a matrix each.
"""

from __future__ import annotations

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.grouped_matrix import GroupedMatrix
from topo_opt.codegen.triton.grouped_stream import GroupedStream
from topo_opt.codegen.triton.kernel import Kernel
from topo_opt.errors import UnsupportedError


def lower(kernel: Kernel) -> KernelSource:
    """The Triton kernel of a function of family `experts`.

    Raises:
        UnsupportedError: something in the kernel that its form can't express.
    """
    if "m" not in kernel.attributes["tile"]:
        return GroupedStream(kernel).lower()
    form = GroupedMatrix(kernel)
    if not form.problem.is_sorted:
        raise UnsupportedError("the matrix form needs the order of the rows by group")
    return form.lower()
