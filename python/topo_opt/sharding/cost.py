"""What a strategy costs one device: its share of the operations and bytes, and the start of its kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from topo_opt.errors import InputError
from topo_opt.sharding.plan_graph import PlanOp, Work
from topo_opt.sharding.solver import FORBIDDEN, Table
from topo_opt.sharding.strategies import Strategy
from topo_opt.topology import Device, Topology

if TYPE_CHECKING:
    from topo_opt.collectives.kernels import KernelKind

PICOSECONDS = 1e12


class Prices(Protocol):
    """What things cost on a machine. `devices` are those that a model can be placed on."""

    devices: tuple[str, ...]

    def collective(self, kind: str, nbytes: int, groups: tuple[tuple[str, ...], ...]) -> Any:
        """As `CollectiveModel.cost`: `.seconds`, `.algorithm`, `.bottleneck_kind`."""

    def compute(
        self,
        flops: float,
        nbytes: float,
        dtype: str,
        device: str,
        kind: KernelKind = "loops",
        shape: tuple[int, int, int] | None = None,
    ) -> float:
        """Seconds of one kernel's work; rows come first in `shape`."""

    def start(self, kind: KernelKind, rows: int) -> float:
        """The part of `compute` that products side by side in one kernel share."""

    def call(self, device: str) -> float:
        """Seconds from calling a program to its first kernel."""

    def launch(self, device: str) -> float:
        """Seconds that starting a kernel takes when many start one behind the other."""

    def memory(self, device: str) -> int:
        """Bytes that the device has."""


class TopologyPrices:
    """The prices of a topology, by the models of its collectives and of its devices.

    A step of a plan is one call of the library, or with `exchange` a part of the kernels that make and read a sum; a sum that goes up and
    down a hierarchy is a plan over several axes.
    """

    def __init__(self, topology: Topology, *, exchange: bool = True):
        from topo_opt.collectives import CollectiveModel

        self.topology, self.model = topology, CollectiveModel(topology, exchange=exchange)
        self.devices: tuple[str, ...] = tuple(topology.compute)
        self._devices = {d: topology.device(d) for d in self.devices}

    def collective(self, kind: str, nbytes: int, groups: tuple[tuple[str, ...], ...]) -> Any:
        return self.model.cost(kind, nbytes, groups, one_call=True)

    def compute(
        self,
        flops: float,
        nbytes: float,
        dtype: str,
        device: str,
        kind: KernelKind = "loops",
        shape: tuple[int, int, int] | None = None,
    ) -> float:
        return self.model.compute(flops, nbytes, dtype, device, shape, kind)

    def start(self, kind: KernelKind, rows: int) -> float:
        return self.model.start(kind, rows)

    def call(self, device: str) -> float:
        return self._devices[device].launch.eager_ns.value * 1e-9

    def launch(self, device: str) -> float:
        launch = self._devices[device].launch
        return (launch.dependent_ns or launch.replayed_ns).value * 1e-9

    def memory(self, device: str) -> int:
        return self._devices[device].memory.capacity_bytes.value


@dataclass(frozen=True)
class ThroughMemory:
    """The cost of a collective between processes on one machine."""

    seconds: float
    algorithm: str = "through memory"
    bottleneck_kind: str = "memory"
    considered: tuple[tuple[str, float], ...] = ()
    link_kinds: tuple[str, ...] = ()
    link_bytes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """None: what moves stays in the host's memory."""


class ProcessPrices:
    """Processes on one CPU, any number of them, as gloo runs them: all share its cores and its memory.

    Every process computes at its share of the rates. A collective writes and reads every buffer once for each round of a
    ring, `nbytes / n` at a time, and starts every round like a kernel.
    """

    def __init__(self, device: Device, processes: Sequence[str]):
        self._device, self.devices = device, tuple(processes)

    def collective(self, kind: str, nbytes: int, groups: tuple[tuple[str, ...], ...]) -> ThroughMemory:
        size, ranks = len(groups[0]), sum(map(len, groups))
        rounds = {"all_reduce": 2 * (size - 1), "send": 1, "broadcast": 1}.get(kind, size - 1)
        part = nbytes if kind in ("send", "broadcast") else nbytes / size
        moved = 2 * part * ranks / self._device.memory.read_write_bytes_per_s.value
        return ThroughMemory(rounds * (self.launch(groups[0][0]) + moved))

    def compute(
        self,
        flops: float,
        nbytes: float,
        dtype: str,
        device: str,
        kind: KernelKind = "loops",
        shape: tuple[int, int, int] | None = None,
    ) -> float:
        rate, memory = self._device.ops_per_s(dtype), self._device.memory.read_write_bytes_per_s.value
        return len(self.devices) * max(flops / rate, nbytes / memory)

    def start(self, kind: KernelKind, rows: int) -> float:
        return 0.0

    def call(self, device: str) -> float:
        return 0.0

    def launch(self, device: str) -> float:
        return self._device.launch.eager_ns.value * 1e-9

    def memory(self, device: str) -> int:
        return self._device.memory.capacity_bytes.value // len(self.devices)


def check_devices(prices: Prices, wanted: int | None) -> int:
    """The number of devices to plan for.

    Raises:
        InputError: more than there are.
    """
    count = len(prices.devices)
    if wanted is not None and not 1 <= wanted <= count:
        raise InputError(
            f"the plan is to use {wanted} devices, the topology has {count}", hint="ask for fewer"
        )
    return count if wanted is None else wanted


def picoseconds(seconds: float) -> int:
    """Whole picoseconds; what is longer than any plan counts as forbidden."""
    return FORBIDDEN if not math.isfinite(seconds) else min(round(seconds * PICOSECONDS), FORBIDDEN)


def parts_of(op: PlanOp, strategy: Strategy, sizes: Sequence[int]) -> list[int]:
    """Into how many parts every factor is split."""
    parts = [1] * len(op.rule.factors)
    for axis, factor in enumerate(strategy.axes):
        if factor >= 0:
            parts[factor] *= sizes[axis]
    return parts


def local_work(op: PlanOp, strategy: Strategy, sizes: Sequence[int]) -> tuple[float, float]:
    """Operations and bytes of the device that has the most to do.

    Of causal rows in p parts the last part sees all keys: (2p - 1) / p^2 of the triangle instead of 1 / p. Rows that pick
    among G matrices at random read 1 - (1 - 1/G)^rows of them. Foreign elements are not read, and written only as zeros.
    """
    work = op.work
    parts = parts_of(op, strategy, sizes)
    share = 1.0 / math.prod(parts)
    if work.triangular >= 0:
        p = parts[work.triangular]
        share *= (2 * p - 1) / p
    nbytes = 0.0
    for position, size in work.reads:
        layout = strategy.operands[position]
        part = size / layout.parts(sizes) / math.prod(sizes[a] for a in layout.owned + layout.loose)
        if work.shared_rows and position == 1:
            groups = op.rule.factors[-1].size
            part *= 1 - (1 - 1 / max(groups, 1)) ** (work.shared_rows / parts[0])
        nbytes += part
    for position, size in work.writes:
        layout = strategy.results[position]
        nbytes += size / layout.parts(sizes) / math.prod(sizes[a] for a in layout.loose)
    return work.flops * share, nbytes


def local_shape(op: PlanOp, strategy: Strategy, sizes: Sequence[int]) -> tuple[int, int, int] | None:
    """Rows, columns and inner size of a kernel on one device; None where only bytes and operations count."""
    work = op.work
    if not work.shape:
        return None
    parts, factors = parts_of(op, strategy, sizes), op.rule.factors
    m, n, k = (math.prod(factors[f].size // parts[f] for f in fs) for fs in work.shape)
    if work.kind == "grouped_product":  # rows are with their experts, evenly as far as anybody knows
        m = -(-m // math.prod(parts[f] for f in work.shape[2]))
    return m, n, k


def least_cost(op: PlanOp, count: int, prices: Prices, kinds: Sequence[str]) -> int:
    """Picoseconds that `count` devices take at least: everything split evenly, and nothing but bytes or operations counted."""
    work = settled(op.work, prices, kinds[0])
    nbytes = sum(size for _, size in (*work.reads, *work.writes)) / count
    if work.shared_rows:  # which matrices are read is only known for a split of the rows
        nbytes = 0.0
    flops = work.flops / count
    found = min(picoseconds(prices.launch(d)) for d in kinds) * work.kernels
    shapes = _shapes_of_parts(op, count)
    return found + min(_work_cost(work, flops, nbytes, s, prices, d) for d in kinds for s in shapes)


def _shapes_of_parts(op: PlanOp, count: int) -> list[tuple[int, int, int] | None]:
    """The shape of a kernel as it is, and with one of its sizes divided."""
    if not op.work.shape:
        return [None]
    m, n, k = (math.prod(op.rule.factors[f].size for f in factors) for factors in op.work.shape)
    c = [(m, n, k), (-(-m // count), n, k), (m, -(-n // count), k), (m, n, -(-k // count))]
    if op.work.kind == "grouped_product":
        c.append((-(-m // count), n, -(-k // count)))
    return list(dict.fromkeys(c))


def compute_table(
    op: PlanOp, choices: Sequence[Strategy], sizes: Sequence[int], prices: Prices, kinds: Sequence[str]
) -> Table:
    """Picoseconds of every strategy on the slowest of the devices `kinds`, kernel starts included. The work is settled."""
    costs = np.zeros(len(choices), dtype=np.int64)
    known: dict[object, int] = {}
    for i, choice in enumerate(choices):
        key = (*local_work(op, choice, sizes), local_shape(op, choice, sizes))
        if key not in known:
            known[key] = max(_work_cost(op.work, *key, prices, d) for d in kinds)
        costs[i] = known[key]
    return costs + max(picoseconds(prices.launch(d)) for d in kinds) * op.work.kernels


def settled(work: Work, prices: Prices, device: str) -> Work:
    """What counts of the work of an operation that is a part of a kernel.

    Where operations bind the kernel its bytes hide behind them, and the other way round.
    """
    beside = work.beside
    if beside is None:
        return work
    computing = prices.compute(beside.flops, 0.0, beside.dtype, device)
    computing += prices.compute(beside.scalars, 0.0, "f32", device)
    if computing > prices.compute(0.0, beside.nbytes, beside.dtype, device):
        return replace(work, reads=(), writes=(), beside=None)
    return replace(work, flops=0.0, beside=None)


def _work_cost(
    work: Work, flops: float, nbytes: float, shape: tuple[int, int, int] | None, prices: Prices, device: str
) -> int:
    """Picoseconds of an operation, or of its part of a kernel."""
    if not flops and not nbytes:
        return 0
    kind = work.kind or "loops"
    seconds = prices.compute(flops, nbytes, work.dtype, device, kind, shape)
    if work.products > 1:
        seconds -= (1 - 1 / work.products) * prices.start(kind, shape[0] if shape else 1)
    return picoseconds(seconds)


def device_kinds(prices: Prices, devices: Sequence[str]) -> list[str]:
    """One device of every kind among `devices`, told apart by what three works cost, one bound by each resource."""
    seen: dict[tuple[float, ...], str] = {}
    for device in devices:
        probe = (
            prices.compute(1e12, 1.0, "bf16", device),
            prices.compute(1.0, 1e9, "f32", device),
            prices.launch(device),
            float(prices.memory(device)),
        )
        seen.setdefault(probe, device)
    return [seen[p] for p in sorted(seen, reverse=True)]
