"""Other tiles for kernels that turn out to need more shared memory than there is: models of a compiler are estimates."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.resources import DoesNotFit
from topo_opt.codegen.triton.target import Target
from topo_opt.errors import UnsupportedError
from topo_opt.topology import Device
from topo_opt.tuning.forms import Tunable, tunable
from topo_opt.tuning.records import Tile


@dataclass
class Refit:
    """Walks the tile spaces of the kernels of a module, one step a kernel at a time."""

    module: ir.Operation
    device: Device
    tried: dict[str, set[str]] = field(default_factory=dict)

    def next_tiles(self, error: DoesNotFit) -> dict[str, KernelSource]:
        """Gives every kernel named by the error the next tile of its space, in the IR too.

        Raises:
            DoesNotFit: the error itself, when a kernel has no further tile.
        """
        table = ir.SymbolTable(self.module)
        found: dict[str, KernelSource] = {}
        for symbol in error.symbols:
            form = tunable(table[symbol].operation, Target.of(self.device))
            tried = self.tried.setdefault(symbol, {_text(form.own)})
            for tile in form.candidates():
                if _text(tile) in tried:
                    continue
                tried.add(_text(tile))
                source = _lowered(form, tile)
                if source is not None:
                    form.apply(tile)
                    found[symbol] = source
                    break
            else:
                raise error
        return found


def _lowered(form: Tunable, tile: Tile) -> KernelSource | None:
    try:
        return form.lower(tile)
    except UnsupportedError:
        return None


def _text(tile: Tile) -> str:
    return json.dumps(dict(tile), sort_keys=True)
