"""`topo-choose-tiles`: block sizes, warps and stages of every kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.passes.base import Pass


@dataclass(frozen=True)
class ChooseTiles(Pass):
    """Adds a `tile` dictionary to every `topo.kernel` that has none, from the kernel's shape and
    the cores of the machine (`topology`, by name or file).

    `topo.kernel = {family = "loops", ...}`  -->  `topo.kernel = {family = "loops", ..., tile = {x = 4, r = 256, warps = 4}}`
    """

    name = "topo-choose-tiles"
    topology: str | None = None

    def apply(self, module) -> None:
        from topo_opt.codegen.triton.kernel import Kernel
        from topo_opt.codegen.triton.target import Target
        from topo_opt.codegen.triton.tiles import default_tile

        target = Target.named(self.topology) if self.topology else Target()
        i64 = ir.IntegerType.get_signless(64, module.context)
        for view in module.operation.regions[0].blocks[0].operations:
            op = view.operation
            if "topo.kernel" not in op.attributes:
                continue
            kernel = ir.DictAttr(op.attributes["topo.kernel"])
            if "tile" in kernel:
                continue
            tile = {k: ir.IntegerAttr.get(i64, v) for k, v in default_tile(Kernel(op, target)).items()}
            entries = {n.name: n.attr for n in kernel} | {"tile": ir.DictAttr.get(tile, module.context)}
            op.attributes["topo.kernel"] = ir.DictAttr.get(entries, module.context)
