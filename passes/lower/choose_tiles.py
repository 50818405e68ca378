"""`topo-choose-tiles`: block sizes, warps and stages of every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from topo_opt.passes.base import Pass

DEFAULT_TOPOLOGY = "h200-x1"


@dataclass(frozen=True)
class ChooseTiles(Pass):
    """Adds a `tile` dictionary to every `topo.kernel` that has none, from the kernel's shape and
    the cores of the machine (`topology`, by name or file).

    `topo.kernel = {family = "loops", ...}`  -->  `topo.kernel = {family = "loops", ..., tile = {x = 4, r = 256, warps = 4}}`

    With `tune` the choice then follows what was measured, for kernels that had a tile too: `cache` takes what is in the folder
    `cache` (by default the user's) and in the file or bundle `data`; `short` and `full` measure on the GPU of this machine, for
    `seconds` at most. What a choice rests on is a remark.
    """

    name = "topo-choose-tiles"
    topology: str | None = None
    tune: Literal["off", "cache", "short", "full"] = "off"
    cache: str | None = None
    data: str | None = None
    seconds: float | None = None

    def apply(self, module) -> None:
        from topo_opt.codegen.triton.kernel import Kernel
        from topo_opt.codegen.triton.target import Target
        from topo_opt.codegen.triton.tiles import default_tile
        from topo_opt.tuning.forms import set_tile

        target = Target.named(self.topology) if self.topology else Target()
        for view in module.operation.regions[0].blocks[0].operations:
            op = view.operation
            if "topo.kernel" in op.attributes:
                kernel = Kernel(op, target)
                if "tile" not in kernel.attributes:
                    set_tile(op, default_tile(kernel))
        if self.tune != "off":
            self._tune(module)

    def _tune(self, module) -> None:
        from topo_opt.pipeline import remarks
        from topo_opt.topology import load
        from topo_opt.tuning.modules import tune_module
        from topo_opt.tuning.settings import Settings

        files = [self.data] if self.data is not None else []
        settings = Settings.of(2, self.tune, self.cache, files, self.seconds)
        tuned = tune_module(module.operation, load(self.topology or DEFAULT_TOPOLOGY).primary, settings)
        for note in tuned.notes:
            remarks.emit("tuning", self.name, note)
        for choice in tuned.choices.values():
            remarks.emit("tile", choice.symbol, f"{choice.basis}: {choice.note}")
