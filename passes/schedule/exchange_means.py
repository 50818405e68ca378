"""How the devices of a topology exchange what kernels give to one another (`codegen.triton.exchange_boxes`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch_mlir import ir

from topo_opt.collectives.schedule import Kind
from topo_opt.sharding.parts import groups
from topo_opt.sharding.spec import Mesh

Memory = Literal["peers", "host"]


class Means:
    """What the devices of a mesh have for it. The topology says how long kernels take, and how long the library."""

    def __init__(self, topology: str, mesh: Mesh):
        from topo_opt.collectives import CollectiveModel
        from topo_opt.topology.loading import load

        found = load(topology)
        self.mesh = mesh
        self._model = CollectiveModel(found, exchange=True) if found.links else None

    def entry(self, kind: Kind, nbytes: int, axes: Sequence[str], context: ir.Context) -> ir.DictAttr | None:
        """What `topo.kernel` says of an exchange over axes: `axes`, `ranks` and `memory`; None where a call of the library is faster.

        Args:
            nbytes: as `CollectiveModel.cost` counts them.
        """
        places = groups(self.mesh, tuple(axes))
        members = tuple(tuple(self.mesh.devices[rank] for rank in sorted(group)) for group in places)
        memory = self._memory(kind, nbytes, members) if nbytes else None
        if memory is None:
            return None
        i64 = ir.IntegerType.get_signless(64, context)
        entries = {
            "axes": ir.ArrayAttr.get([ir.StringAttr.get(axis, context) for axis in axes], context),
            "ranks": ir.IntegerAttr.get(i64, len(members[0])),
            "memory": ir.StringAttr.get(memory, context),
        }
        return ir.DictAttr.get(entries, context)

    def in_order(self, axes: Sequence[str]) -> bool:
        """Whether parts are numbered as the ranks are that hold them."""
        return all(list(group) == sorted(group) for group in groups(self.mesh, tuple(axes)))

    def _memory(self, kind: Kind, nbytes: int, members: tuple[tuple[str, ...], ...]) -> Memory | None:
        """Where devices exchange; None where a call of the library is faster."""
        from topo_opt.collectives.model import MOST_THROUGH_HOST

        if self._model is None:  # processes of one host
            return "host" if nbytes <= MOST_THROUGH_HOST else None
        cost = self._model.cost(kind, nbytes, members, one_call=True)
        if cost.algorithm != "exchange":
            return None
        network = self._model.network
        classes = {
            network.route(a, b).route_class for group in members for a in group for b in group if a != b
        }
        return "peers" if classes == {"nvlink"} else "host"
