"""When one launch of several independent kernels is faster than one launch each.

A kernel runs its programs in waves over the slots of the machine. Alone, each pays its own launch and its own last wave, in
which most slots may be empty; together they pay one launch, and programs of the next member fill the slots that the one before
left. `makespan` is the greedy schedule that the hardware makes: programs in order, each to the slot that is free first.

What speaks against it: code for several kernels has the registers and the shared memory of the hungriest one. So kernels that
fill the machine go together only with their like (same family and form of tile); whatever has at most one program a core may
join any.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton import lower_kernel
from topo_opt.codegen.triton.kernel import plain
from topo_opt.codegen.triton.pack import obstacle
from topo_opt.codegen.triton.target import Target
from topo_opt.errors import UnsupportedError
from topo_opt.estimate import work_of
from topo_opt.topology import Device

MAX_MEMBERS = 8
MANY_WAVES = 4
"""From here on a launch is small against the kernel: packing two such kernels must save a part of a wave."""
_WARP = 32
_REGISTERS = 128
"""Registers of a thread that slots are counted with."""
_WARPS_ARE_FREE = ("loops", "update", "scan")
"""Families whose code does not depend on the number of warps."""

Tile = dict[str, int]


@dataclass(frozen=True)
class Candidate:
    """A kernel with one tile, as a member of a pack: its source and the time that one of its programs takes."""

    symbol: str
    tile: Tile
    source: KernelSource
    program_ns: float
    slots: int

    @property
    def waves(self) -> float:
        return self.source.programs / self.slots


@dataclass
class PackCost:
    """Decides about sets of kernels of one module on one device. Everything is kept, equal layers ask again and again."""

    functions: dict[str, ir.Operation]
    device: Device
    _alone: dict[str, Candidate | None] = field(default_factory=dict)
    _fitted: dict[tuple[str, str], Candidate | None] = field(default_factory=dict)
    _decided: dict[tuple[str, ...], list[Candidate] | None] = field(default_factory=dict)

    def members(self, symbols: Sequence[str]) -> list[Candidate] | None:
        """The members of a pack of these kernels with their tiles, in their order; None when they should stay apart."""
        key = tuple(symbols)
        if key not in self._decided:
            self._decided[key] = self._decide(key)
        return self._decided[key]

    def _decide(self, symbols: Sequence[str]) -> list[Candidate] | None:
        alone = [self.alone(s) for s in symbols]
        if len(symbols) > MAX_MEMBERS or None in alone:
            return None
        known = [c for c in alone if c is not None]
        host = max(known, key=lambda c: c.program_ns * max(c.waves, 1.0))
        together = [self._fit(c, host) for c in known]
        if None in together:
            return None
        found = [c for c in together if c is not None]
        return found if self._pays(known, found) else None

    def _pays(self, apart: Sequence[Candidate], together: Sequence[Candidate]) -> bool:
        before = sum(makespan([c]) for c in apart)
        after = makespan(sorted(together, key=lambda c: -c.program_ns))
        long = [c for c in apart if c.waves > MANY_WAVES]
        if len(long) > 1:
            return before - after >= 0.5 * min(c.program_ns for c in long)
        launches = (len(apart) - 1) * self.device.launch.replayed_ns.value
        return before + launches - after >= 0.5 * launches

    def alone(self, symbol: str) -> Candidate | None:
        """The kernel with the tile that it has; None when it can't be a member."""
        if symbol not in self._alone:
            function = self.functions[symbol]
            tile = plain(ir.DictAttr(function.attributes["topo.kernel"])).get("tile")
            self._alone[symbol] = self._candidate(symbol, function, tile) if tile else None
        return self._alone[symbol]

    def _fit(self, member: Candidate, host: Candidate) -> Candidate | None:
        key = (member.symbol, host.symbol)
        if key not in self._fitted:
            self._fitted[key] = self._fitting(member, host)
        return self._fitted[key]

    def _fitting(self, member: Candidate, host: Candidate) -> Candidate | None:
        """The member with a tile that goes with the host's: as it is, with the host's warps, or with the host's tile."""
        if member.source.pdl != host.source.pdl:
            return None
        like = member.source.family == host.source.family and member.tile.keys() == host.tile.keys()
        if not like and min(c.source.programs for c in (member, host)) > self.device.cores.count.value:
            return None
        if member.source.num_warps == host.source.num_warps:
            return member
        if member.source.family in _WARPS_ARE_FREE:
            return self._retiled(member, {**member.tile, "warps": host.source.num_warps})
        return self._retiled(member, host.tile) if like else None

    def _retiled(self, member: Candidate, tile: Tile) -> Candidate | None:
        copy = self.functions[member.symbol].clone()
        try:
            set_tile(copy.operation, tile)
            found = self._candidate(member.symbol, copy.operation, tile)
        finally:
            copy.operation.erase()
        return found

    def _candidate(self, symbol: str, function: ir.Operation, tile: Tile) -> Candidate | None:
        try:
            source = lower_kernel(function, Target.of(self.device))
        except UnsupportedError:
            return None  # code generation will say why
        if source.family == "pack" or obstacle(source) is not None:
            return None
        cores = self.device.cores
        registers = _REGISTERS * _WARP * source.num_warps
        slots = cores.count.value * max(1, cores.registers_per_block.value // registers)
        work_ns = work_of(function).floor_ns(self.device) - self.device.launch.replayed_ns.value
        return Candidate(symbol, dict(tile), source, work_ns * slots / source.programs, slots)


def set_tile(function: ir.Operation, tile: Tile) -> None:
    """Gives a kernel function another tile."""
    i64 = ir.IntegerType.get_signless(64, function.context)
    kernel = {n.name: n.attr for n in ir.DictAttr(function.attributes["topo.kernel"])}
    kernel["tile"] = ir.DictAttr.get({k: ir.IntegerAttr.get(i64, v) for k, v in tile.items()})
    function.attributes["topo.kernel"] = ir.DictAttr.get(kernel)


def makespan(members: Sequence[Candidate]) -> float:
    """Nanoseconds from the first program to the end of the last one, when programs start in order on slots that get free."""
    slots = min(c.slots for c in members)
    free = [(0.0, slots)]  # (time, slots that get free then)
    end = 0.0
    for c in members:
        left = c.source.programs
        # Many full waves are one step: they leave all slots as they were, later.
        whole = max(left // slots - 2 * len(members), 0)
        free = [(at + whole * c.program_ns, n) for at, n in free]
        left -= whole * slots
        heapq.heapify(free)
        while left:
            at, count = heapq.heappop(free)
            used = min(count, left)
            left -= used
            if used < count:
                heapq.heappush(free, (at, count - used))
            heapq.heappush(free, (at + c.program_ns, used))
            end = max(end, at + c.program_ns)
        end = max([end, *(at for at, _ in free)])
    return end
