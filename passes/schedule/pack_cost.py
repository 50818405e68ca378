"""When one launch of several independent kernels is faster than one launch each.

A kernel runs its programs in waves over the slots of the machine. Alone, each pays its own launch and its own last wave, in
which most slots may be empty; together they pay one launch, and programs of the next member fill the slots that the one before
left. `makespan` is the greedy schedule that the hardware makes: programs in order, each to the slot that is free first.

Products of equal rows take the tile of one product of all their columns, whatever tile each would have alone; with few programs
a core they always go together.

What speaks against it: code for several kernels has the registers and the shared memory of the hungriest one. So kernels that
fill the machine go together only with their like (same family and form of tile); whatever has at most one program a core may
join any.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
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
from topo_opt.tuning import joint_products

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
    _fitted: dict[tuple, Candidate | None] = field(default_factory=dict)
    _tiled: dict[tuple, Candidate | None] = field(default_factory=dict)
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
        for members in self._joint(known):
            # Their tile is that of one product, so beside the launches nothing changes but the order of programs.
            few = sum(c.waves for c in members) <= MANY_WAVES
            if few and all(
                c.source.family == "gemm" and c.source.pdl == members[0].source.pdl for c in members
            ):
                return members
            if (found := self._together(members)) is not None and self._pays(known, found):
                return found
        found = self._together(known)
        return found if found is not None and self._pays(known, found) else None

    def _together(self, members: Sequence[Candidate]) -> list[Candidate] | None:
        """The members with tiles that go with the one that takes longest."""
        host = max(members, key=lambda c: c.program_ns * max(c.waves, 1.0))
        fitted = [self._fit(c, host) for c in members]
        found = [c for c in fitted if c is not None]
        return found if len(found) == len(members) else None

    def _joint(self, alone: Sequence[Candidate]) -> Iterator[list[Candidate]]:
        """The members, those that are products of equal rows with the tiles that they would have as one product.

        A default tile fills the machine with one product alone. Which form and how many warps that takes must not decide
        whether products side by side become one launch.
        """
        products = [c for c in alone if c.source.family == "gemm"]
        if len(products) < 2:
            return
        calls = [self.functions[c.symbol] for c in products]
        symbols = list(dict.fromkeys(c.symbol for c in products))
        each = [self.functions[s] for s in symbols]
        for tiles in joint_products.tiles(calls, each, Target.of(self.device)):
            made = {s: self._with_tile(s, tile) for s, tile in zip(symbols, tiles)}
            if None not in made.values():
                yield [made.get(c.symbol) or c for c in alone]
                return

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
        key = (*_identity(member), *_identity(host))
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
            return self._with_tile(member.symbol, {**member.tile, "warps": host.source.num_warps})
        return self._with_tile(member.symbol, host.tile) if like else None

    def _with_tile(self, symbol: str, tile: Tile) -> Candidate | None:
        key = (symbol, tuple(sorted(tile.items())))
        if key not in self._tiled:
            copy = self.functions[symbol].clone()
            try:
                set_tile(copy.operation, tile)
                self._tiled[key] = self._candidate(symbol, copy.operation, tile)
            finally:
                copy.operation.erase()
        return self._tiled[key]

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


def _identity(candidate: Candidate) -> tuple:
    return candidate.symbol, tuple(sorted(candidate.tile.items()))


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
