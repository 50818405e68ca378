"""What generated kernels reach of a device's rates: data (`hw_topologies/kernels/*.json`), each figure with its source.

A kernel takes `start_ns`, then the longer of its operations over `ops_share` of the device's rate and of its bytes over
`bytes_share` of what a copy reaches, and its launch, which is the device's.
"""

import math
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import Field

from topo_opt.topology.figures import Count, Identifier, Latency, Strict, Text

KernelKind = Literal["product", "attention", "grouped_product", "top_k", "loops"]


class Ratio(Strict):
    """A figure over another one."""

    value: Annotated[float, Field(gt=0, le=4)]
    source: Text


class Tile(Strict):
    """Rows and columns of a result that one program makes, and the share of the rate that such programs reach."""

    m: Count
    n: Count
    ops_share: Ratio

    def spread(self, rows: int, columns: int, cores: int) -> float:
        """Time over that of programs spread evenly: they run in waves of one a core, and those at the edges do full work."""
        programs = math.ceil(rows / self.m) * math.ceil(columns / self.n)
        even = rows * columns / (self.m * self.n) / cores
        return math.ceil(programs / cores) / even / self.ops_share.value


class Reach(Strict):
    """Kernels of up to `rows` rows of their left operand; None for all others.

    `bytes_share` is above one where data are only read, or come from the cache in part. `of_library` is the time over that of
    the vendor's library, whose measured curves the kernels are compared with. `tiles` are those that a product may have.
    """

    rows: Count | None
    start_ns: Latency
    ops_share: Ratio
    bytes_share: Ratio
    of_library: Ratio | None = None
    tiles: tuple[Tile, ...] = ()

    def spread(self, rows: int, columns: int, cores: int) -> float:
        """Time of computing over that with all cores busy, by the best tile."""
        return min((tile.spread(rows, columns, cores) for tile in self.tiles), default=1.0)

    def ragged(self, rows: int, groups: int) -> float:
        """Operations over those of the rows, which pick their groups at random: each group leaves half of a tile empty."""
        if not self.tiles:
            return 1.0
        high = next((t.m for t in self.tiles if t.m * groups >= rows), self.tiles[-1].m)
        picked = groups * (1 - (1 - 1 / groups) ** rows)
        return 1 + high * picked / (2 * rows)


class Kernels(Strict):
    """Kernels by what they do. `top_k` choose experts for rows, and their bytes are those of what they chose; `loops` are pointwise operations and reductions."""

    name: Identifier
    description: Text
    product: tuple[Reach, ...] = Field(min_length=1)
    attention: tuple[Reach, ...] = Field(min_length=1)
    grouped_product: tuple[Reach, ...] = Field(min_length=1)
    top_k: tuple[Reach, ...] = Field(min_length=1)
    loops: tuple[Reach, ...] = Field(min_length=1)

    def reach(self, kind: KernelKind, rows: int) -> Reach:
        """The entry of a kernel with so many rows."""
        entries: tuple[Reach, ...] = getattr(self, kind)
        return next((e for e in entries if e.rows is None or rows <= e.rows), entries[-1])


@cache
def kernels(name: str = "generated") -> Kernels:
    """The kernels of that name among those of the package."""
    return Kernels.model_validate_json(
        files("topo_opt.hw_topologies").joinpath("kernels", f"{name}.json").read_bytes()
    )
