"""The cost of collectives on a machine: the best algorithm on the actual routes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from topo_opt.collectives import protocols
from topo_opt.collectives.algorithms import ALGORITHMS, Group, Place
from topo_opt.collectives.compute import ComputeModel, Shape
from topo_opt.collectives.correction import Correction, Observation, Signature, Table
from topo_opt.collectives.cost import NONE, ScheduleCost
from topo_opt.collectives.kernels import KernelKind
from topo_opt.collectives.network import Network
from topo_opt.collectives.orders import Orders
from topo_opt.collectives.result import CollectiveCost
from topo_opt.collectives.schedule import KINDS, Kind, Schedule, merged
from topo_opt.errors import InputError
from topo_opt.topology.schema import Topology

Groups = tuple[Group, ...]
HIERARCHICAL = "hierarchical"
MAX_KEPT = 1 << 18
MOST_EXCHANGED = 1 << 27
"""Bytes of a sum that a kernel adds up itself, at most."""
MOST_THROUGH_HOST = 1 << 20
"""The same through the host's memory, which every rank writes and reads for each of the others."""
REDUCING = 90
"""NVSwitches beside GPUs of this compute capability and above reduce (NVIDIA H100 architecture whitepaper: third generation)."""
# What a hierarchical collective does: (kind, inside of clusters or across them, its size over that of the whole with
# clusters of a out of n devices). Bytes on the slow routes are as few as they can be.
_STAGES: dict[Kind, tuple[tuple[Kind, str, str], ...]] = {
    "all_reduce": (
        ("reduce_scatter", "inside", "whole"),
        ("all_reduce", "across", "part"),
        ("all_gather", "inside", "whole"),
    ),
    "all_gather": (("all_gather", "across", "part"), ("all_gather", "inside", "whole")),
    "reduce_scatter": (("reduce_scatter", "inside", "whole"), ("reduce_scatter", "across", "part")),
    "all_to_all": (("all_to_all", "inside", "whole"), ("all_to_all", "across", "whole")),
}


@dataclass(frozen=True)
class _Candidate:
    """An algorithm for some groups: one call of its own, or calls of other collectives one behind the other.

    `curve` names the measurements that speak about it; those of the library are taken with multicast off.
    """

    name: str
    cost: ScheduleCost | None
    curve: str
    calls: tuple[tuple[Kind, Groups, float], ...] = ()


class CollectiveModel:
    """Costs of collectives and kernels on one machine.

    `cost` is what the communication library takes, as torch.distributed calls it, its launch included: rings, trees,
    and collectives that are put together of several calls. With `symmetric_memory` kernels that read the memory of peers
    (one-shot, two-shot) compete too, with `exchange` generated kernels that add up small sums themselves. Without a library the links are taken at their word: a transfer takes their latencies
    and its bytes over their rate, nothing is added, and every algorithm of the table competes.

    Args:
        topology: the machine; its measured curves correct the model unless `calibrated` is false.
        library: the communication library, a name in `hw_topologies/protocols`, or None.
        multicast: whether NVSwitches may reduce (NVLS), which NCCL_NVLS_ENABLE=0 forbids.
        calibration: another machine with the same kinds of links, whose curves are used as well.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        library: str | None = "nccl",
        calibrated: bool = True,
        symmetric_memory: bool = False,
        exchange: bool = False,
        multicast: bool = True,
        calibration: Topology | None = None,
    ) -> None:
        self.topology, self.symmetric_memory, self.multicast = topology, symmetric_memory, multicast
        self.exchange = exchange
        self.network = Network(topology, protocols.library(library) if library else None)
        self._compute = ComputeModel(topology, calibrated)
        self._orders = Orders(self.network)
        self._capability = {device.id: device.target.capability for device in topology.devices}
        self._launch_s = {device.id: device.launch.replayed_ns.value * 1e-9 for device in topology.devices}
        self._candidates: dict[tuple[Kind, Groups], tuple[_Candidate, ...]] = {}
        self._tables: dict[tuple[Kind, Groups, str], Table | None] = {}
        self._costs: dict[tuple[Kind, float, Groups, str | None, bool], CollectiveCost] = {}
        self._correction: Correction | None = None
        if calibrated and library:
            sources = [self] if topology.measured else []
            if calibration is not None:
                sources.append(
                    CollectiveModel(calibration, library=library, calibrated=False, symmetric_memory=True)
                )
            seen = [observation for source in sources for observation in observations(source)]
            self._correction = Correction(seen) if seen else None

    def compute(
        self,
        flops: float,
        nbytes: float,
        dtype: str,
        device: str,
        shape: Shape | None = None,
        kind: KernelKind | None = None,
    ) -> float:
        """Seconds of a kernel without its launch, see `ComputeModel.seconds`."""
        return self._compute.seconds(flops, nbytes, dtype, device, shape, kind)

    def start(self, kind: KernelKind, rows: int) -> float:
        """The part of `compute` that kernels side by side in one launch share."""
        return self._compute.start(kind, rows)

    def cost(
        self,
        kind: Kind,
        nbytes: float,
        groups: Groups,
        algorithm: str | None = None,
        *,
        one_call: bool = False,
    ) -> CollectiveCost:
        """What a collective takes when all `groups` run it at the same time.

        Args:
            kind: one of KINDS.
            nbytes: all_reduce, all_to_all, broadcast, send: the buffer of each device; all_gather: the result;
                reduce_scatter: the operand.
            groups: groups of equal size of devices, in the order of ranks; the first of each is the root of a broadcast
                and the source of a send.
            algorithm: only this one, by its name in `CollectiveCost.considered`, protocol left out.
            one_call: only what one call of the library does, nothing that is put together of several.

        Raises:
            InputError: an unknown kind or device, unequal groups, a device twice, no route, or no such algorithm.
        """
        key = (kind, nbytes, groups, algorithm, one_call)
        found = self._costs.get(key)
        if found is None:
            if len(self._costs) >= MAX_KEPT:
                self._costs.clear()
            found = self._costs[key] = self._cost(*key)
        return found

    def _cost(
        self, kind: Kind, nbytes: float, groups: Groups, algorithm: str | None, one_call: bool
    ) -> CollectiveCost:
        self._check(kind, nbytes, groups)
        if len(groups[0]) == 1 or not nbytes:
            return CollectiveCost(0.0, "nothing", 0, None, "none", (("nothing", 0.0),), (), self.network)
        timed = sorted(
            (
                (*self._time(kind, nbytes, groups, c), c)
                for c in self.candidates(kind, groups)
                if (c.cost is not None or not one_call) and _may_carry(c, nbytes)
            ),
            key=lambda entry: entry[0],
        )
        chosen = [entry for entry in timed if algorithm in (None, entry[2].name)]
        if not chosen:
            names = ", ".join(sorted({entry[2].name for entry in timed}))
            raise InputError(
                f"there is no algorithm '{algorithm}' for {kind} here", hint=f"there are {names}"
            )
        seconds, name, best = chosen[0]
        loads = self._loads(best, kind, nbytes, groups)
        main, size = max(loads, key=lambda entry: entry[0].at(entry[1]).seconds)
        resource = self.network.resources[main.bottleneck]
        by_latency = main.at(1.0).seconds > 0.5 * main.at(size).seconds
        return CollectiveCost(
            seconds,
            name,
            sum(cost.schedule.steps for cost, _ in loads),
            None if by_latency else resource.edge,
            "latency" if by_latency else resource.kind,
            tuple((label, time) for time, label, _ in timed),
            tuple(loads),
            self.network,
        )

    def _check(self, kind: Kind, nbytes: float, groups: Groups) -> None:
        if kind not in KINDS:
            raise InputError(f"'{kind}' is no collective", hint=f"known are {', '.join(KINDS)}")
        if not 0 <= nbytes < float("inf"):
            raise InputError(f"a collective of {nbytes} bytes: the size must be finite and not negative")
        sizes = {len(group) for group in groups}
        if len(sizes) != 1 or 0 in sizes:
            raise InputError(
                f"groups of {sorted(sizes)} devices: all groups of a collective have the same size"
            )
        members = [device for group in groups for device in group]
        if kind == "send" and sizes != {2}:
            raise InputError(f"send among {sizes.pop()} devices: a group is the source and the target")
        if len(set(members)) != len(members):
            twice = next(device for device in members if members.count(device) > 1)
            raise InputError(f"device '{twice}' is in two places of the groups")
        for device in members:
            if device not in self._launch_s:
                raise InputError(
                    f"{self.topology.name} has no device '{device}'",
                    hint=f"devices that compute are {', '.join(self.topology.compute[:8])}",
                )

    def candidates(self, kind: Kind, groups: Groups) -> tuple[_Candidate, ...]:
        """The algorithms that can run a collective on these groups."""
        found = self._candidates.get((kind, groups))
        if found is None:
            flat = self._flat(kind, groups)
            found = self._candidates[kind, groups] = (*flat, *self._hierarchical(kind, groups))
        return found

    def _flat(self, kind: Kind, groups: Groups) -> list[_Candidate]:
        launch_s = max(self._launch_s[device] for group in groups for device in group)
        places = [
            Place(
                group,
                self._orders.rings(group, False),
                self._orders.rings(group, True),
                self._orders.hosts(group),
                self._reducing_switch(group),
            )
            for group in groups
        ]
        bare = self.network.library is None
        out = []
        for row in ALGORITHMS:
            offered = bare or row.in_library
            if row.kernel in ("one_shot", "two_shot"):
                offered = bare or self.symmetric_memory
            elif row.kernel == "exchange":
                offered = self.exchange and not bare and all(len(place.hosts) == 1 for place in places)
            kernel = None if bare else row.kernel
            if kind not in row.builders or not offered or not all(row.applies(place) for place in places):
                continue
            phases = merged([row.builders[kind](place) for place in places])
            cost = ScheduleCost(Schedule(row.name, phases, kernel), self.network, launch_s)
            if cost.usable:
                out.append(_Candidate(row.name, cost, kernel or "library"))
        return out

    def _reducing_switch(self, group: Group) -> bool:
        """Whether all devices of a group hang on one NVSwitch that reduces: those of Hopper GPUs and later ones do."""
        if not self.multicast or self.network.library is None or len(group) < 3:
            return False
        switches: set[str] = set()
        for a, b in pairwise(group):
            edges = [self.network.resources[r].edge for r in self.network.route(a, b).resources]
            if len(edges) != 2 or self.network.graph.nodes[edges[0][1]]["kind"] != "nvswitch":
                return False
            switches.add(edges[0][1])
        capabilities = [self._capability[device] for device in group]
        return len(switches) == 1 and all(known is not None and known >= REDUCING for known in capabilities)

    def _hierarchical(self, kind: Kind, groups: Groups) -> list[_Candidate]:
        if kind not in _STAGES or len(groups[0]) < 4:
            return []
        out: list[_Candidate] = []
        for partition in self._partitions(groups):
            inside = tuple(cluster for clusters in partition for cluster in clusters)
            across = tuple(rank for clusters in partition for rank in zip(*clusters))
            part = 1.0 / len(inside[0])
            calls = tuple(
                (call, inside if where == "inside" else across, 1.0 if size == "whole" else part)
                for call, where, size in _STAGES[kind]
            )
            name = f"{HIERARCHICAL} {len(inside[0])}x{len(across[0])}"
            if name not in [c.name for c in out]:
                out.append(_Candidate(name, None, "library", calls))
        return out

    def _partitions(self, groups: Groups) -> list[list[tuple[Group, ...]]]:
        """Cuts of all groups into clusters: by nearness, and without a library also rows of the group's order."""
        cuts = [self._orders.partitions(group) for group in groups]
        out = [list(cut) for cut in zip(*cuts)] if len({len(cut) for cut in cuts}) == 1 else []
        out = [cut for cut in out if len({len(clusters[0]) for clusters in cut}) == 1]
        n = len(groups[0])
        if self.network.library is None:
            for width in (w for w in range(2, n) if n % w == 0):
                out.append([tuple(g[i : i + width] for i in range(0, n, width)) for g in groups])
        return out

    def _time(self, kind: Kind, nbytes: float, groups: Groups, candidate: _Candidate) -> tuple[float, str]:
        if candidate.cost is None:
            best = [self._best_flat(call, size * nbytes, where) for call, where, size in candidate.calls]
            inner = " + ".join(name for _, name, _ in best)
            return sum(seconds for seconds, _, _ in best), f"{candidate.name}: {inner}"
        timed = candidate.cost.at(nbytes)
        plain = timed.protocol in (NONE, candidate.cost.schedule.kernel)
        label = candidate.name if plain else f"{candidate.name}, {timed.protocol}"
        return timed.seconds * self._factor(kind, nbytes, groups, candidate.curve), label

    def _best_flat(self, kind: Kind, nbytes: float, groups: Groups) -> tuple[float, str, _Candidate]:
        flat = [c for c in self.candidates(kind, groups) if c.cost is not None]
        return min(((*self._time(kind, nbytes, groups, c), c) for c in flat), key=lambda entry: entry[0])

    def _loads(
        self, candidate: _Candidate, kind: Kind, nbytes: float, groups: Groups
    ) -> list[tuple[ScheduleCost, float]]:
        if candidate.cost is not None:
            return [(candidate.cost, nbytes)]
        out = []
        for call, where, size in candidate.calls:
            cost = self._best_flat(call, size * nbytes, where)[2].cost
            assert cost is not None
            out.append((cost, size * nbytes))
        return out

    def _factor(self, kind: Kind, nbytes: float, groups: Groups, curve: str) -> float:
        """Measured over modelled time."""
        if self._correction is None:
            return 1.0
        key = (kind, groups, curve)
        if key not in self._tables:
            self._tables[key] = self._table(kind, groups, curve)
        table = self._tables[key]
        if table is None:
            return 1.0
        return table.factor(nbytes, self.uncorrected(kind, nbytes, groups, curve))

    def _table(self, kind: Kind, groups: Groups, curve: str) -> Table | None:
        assert self._correction is not None
        return Table.of(
            self._correction,
            curve,
            self.signature(groups),
            kind,
            len(groups[0]),
            lambda nbytes: self.uncorrected(kind, nbytes, groups, curve),
        )

    def uncorrected(self, kind: Kind, nbytes: float, groups: Groups, curve: str) -> float:
        """Seconds of the best algorithm that a curve speaks about, by the model alone; inf where there is none."""
        costs = [c.cost for c in self.candidates(kind, groups) if c.cost is not None and c.curve == curve]
        return min((cost.at(nbytes).seconds for cost in costs), default=float("inf"))

    def signature(self, groups: Groups) -> Signature:
        """The kinds of links on the way between neighbours of the groups."""
        routes = [self.network.route(a, b) for group in groups for a, b in pairwise(group)]
        kinds = {self.network.resources[r].kind for route in routes for r in route.resources}
        return tuple(sorted(kinds))


def _may_carry(candidate: _Candidate, nbytes: float) -> bool:
    """Whether an algorithm is for sizes like this."""
    if candidate.name != "exchange" or candidate.cost is None:
        return True
    return nbytes <= (MOST_EXCHANGED if candidate.cost.classes == {"nvlink"} else MOST_THROUGH_HOST)


def observations(model: CollectiveModel) -> list[Observation]:
    """The measured collectives of a model's topology beside the uncorrected times."""
    measured = model.topology.measured
    out = []
    for curve in measured.collectives if measured else ():
        groups = (curve.participants,)
        name = curve.algorithm
        for point in curve.points:
            modelled = model.uncorrected(curve.kind, point.bytes, groups, name)
            if modelled < float("inf"):
                out.append(
                    Observation(
                        curve.kind,
                        name,
                        model.signature(groups),
                        len(curve.participants),
                        point.bytes,
                        point.seconds,
                        modelled,
                    )
                )
    return out
