"""What a search sees of a kernel, be it one function or a pack of several."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch_mlir import ir

from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton.kernel import Kernel, mark, plain
from topo_opt.codegen.triton.pack import members_of
from topo_opt.codegen.triton.target import Target
from topo_opt.tuning import joint_products, search_space
from topo_opt.tuning.arguments import signature_of
from topo_opt.tuning.arguments_data import Signature
from topo_opt.tuning.key import Key, key_of
from topo_opt.tuning.records import Tile

PACK = "pack"
JOINT = 6
"""Choices of a pack for one number of warps."""
_TURN = 5
"""Choices of one kind in front of those of another: a short search sees both."""


class Tunable(Protocol):
    """A kernel whose tile can be chosen."""

    @property
    def own(self) -> Tile:
        """The tile that it has."""

    @property
    def key(self) -> Key: ...

    def candidates(self) -> list[Tile]:
        """Its own tile, then others, best first."""

    def slowdown(self, tile: Tile) -> float | None:
        """Estimated time with a tile, of that with the best one; None where nothing estimates it."""

    def lower(self, tile: Tile) -> KernelSource:
        """Its code with a tile; the IR stays as it is. Raises UnsupportedError."""

    def alone(self, tile: Tile) -> KernelSource:
        """As `lower`, of a kernel that waits for no other device."""

    def apply(self, tile: Tile) -> None:
        """Writes the tile into the IR."""

    def signature(self, l2_bytes: int, cold: frozenset[int] | None = None) -> Signature:
        """Its arguments and results; `cold`: the arguments that come from memory, as far as calls say."""


def tunable(func: ir.Operation, target: Target) -> Tunable:
    """The form of a kernel function."""
    kernel = plain(ir.DictAttr(func.attributes["topo.kernel"]))
    return Packed(func, target) if kernel["family"] == PACK else Single(func, target)


@dataclass
class Single:
    """One kernel function."""

    func: ir.Operation
    target: Target

    @cached_property
    def kernel(self) -> Kernel:
        return Kernel(self.func, self.target)

    @property
    def own(self) -> Tile:
        return _tile(self.func)

    @cached_property
    def key(self) -> Key:
        return key_of(self.func)

    def candidates(self) -> list[Tile]:
        return _own_first(self.own, search_space.candidates(self.kernel))

    def slowdown(self, tile: Tile) -> float | None:
        return search_space.slowdown(self.kernel, tile)

    def lower(self, tile: Tile) -> KernelSource:
        return search_space.lower(self.kernel, tile)

    def alone(self, tile: Tile) -> KernelSource:
        kernel = Kernel(self.func, self.target)
        kernel.attributes = {
            k: v for k, v in self.kernel.attributes.items() if k not in ("exchange", "gives")
        }
        return search_space.lower(kernel, tile)

    def apply(self, tile: Tile) -> None:
        set_tile(self.func, tile)

    def signature(self, l2_bytes: int, cold: frozenset[int] | None = None) -> Signature:
        return signature_of(self.func, l2_bytes=l2_bytes, cold=cold)


@dataclass
class Packed:
    """A pack. Its tile holds those of its different members, `{"0.x": 4, "0.warps": 2, "1.n": 64, "1.warps": 2}`; the warps are equal."""

    func: ir.Operation
    target: Target

    @cached_property
    def members(self) -> dict[str, ir.Operation]:
        """Symbol -> function, each once, in the order of the calls."""
        return {_name(m.func): m.func for m in members_of(self.func)}

    @property
    def own(self) -> Tile:
        return _joined([_tile(f) for f in self.members.values()])

    @cached_property
    def key(self) -> Key:
        return key_of(self.func, list(self.members.values()))

    def candidates(self) -> list[Tile]:
        """Tiles of the members as one product, then for every number of warps their best tiles together, and so on."""
        calls, members = [m.func for m in members_of(self.func)], list(self.members.values())
        together = [_joined(t) for t in joint_products.tiles(calls, members, self.target)]
        spaces = [Single(f, self.target).candidates() for f in self.members.values()]
        warps = dict.fromkeys(t["warps"] for space in spaces for t in space)
        rows: list[tuple[int, int, Tile]] = []
        for order, count in enumerate(warps):
            fitting = [[t for t in space if t["warps"] == count] for space in spaces]
            if not all(fitting):
                continue
            for rank in range(min(JOINT, max(map(len, fitting)))):
                tiles = [space[min(rank, len(space) - 1)] for space in fitting]
                rows.append((rank, order, _joined(tiles)))
        alone = [tile for _, _, tile in sorted(rows, key=lambda r: r[:2])]
        alone = [tile for tile in alone if tile not in together]
        return _own_first(self.own, [*together[:_TURN], *alone[:_TURN], *together[_TURN:], *alone[_TURN:]])

    def slowdown(self, tile: Tile) -> float | None:
        return None

    def lower(self, tile: Tile) -> KernelSource:
        before = [ir.DictAttr(f.attributes["topo.kernel"]) for f in self.members.values()]
        try:
            for func, own in zip(self.members.values(), _parted(tile, len(self.members))):
                set_tile(func, own)
            return search_space.lower(Kernel(self.func, self.target), _outer(self._parts(tile)))
        finally:
            for func, attribute in zip(self.members.values(), before):
                func.attributes["topo.kernel"] = attribute

    def alone(self, tile: Tile) -> KernelSource:
        return self.lower(tile)

    def apply(self, tile: Tile) -> None:
        """Gives its members the tile; of one that others call too it gets a copy."""
        for (symbol, func), own in zip(list(self.members.items()), self._parts(tile)):
            if _callers(func) > 1:
                func = self._copy(symbol, func, own)
            set_tile(func, own)
        set_tile(self.func, _outer(self._parts(tile)))
        del self.members

    def signature(self, l2_bytes: int, cold: frozenset[int] | None = None) -> Signature:
        return signature_of(self.func, self.members, l2_bytes=l2_bytes, cold=cold)

    def _parts(self, tile: Tile) -> list[Tile]:
        return _parted(tile, len(self.members))

    def _copy(self, symbol: str, func: ir.Operation, tile: Tile) -> ir.Operation:
        """A copy of a member, which this pack calls in its place."""
        text = _name(self.func) + repr(sorted(tile.items()))
        name = f"{symbol}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"
        with ir.InsertionPoint(func):
            copy = func.clone().operation
        copy.attributes["sym_name"] = ir.StringAttr.get(name, func.context)
        for view in self.func.regions[0].blocks[0].operations:
            op = view.operation
            if op.name == "func.call" and _callee(op) == symbol:
                op.attributes["callee"] = ir.FlatSymbolRefAttr.get(name, func.context)
        return copy


def set_tile(func: ir.Operation, tile: Mapping[str, int]) -> None:
    """Sets `tile` in the `topo.kernel` dictionary of a function."""
    context = func.context
    i64 = ir.IntegerType.get_signless(64, context)
    attribute = ir.DictAttr.get({k: ir.IntegerAttr.get(i64, v) for k, v in tile.items()}, context)
    mark(func, {"tile": attribute})


def _tile(func: ir.Operation) -> dict[str, int]:
    return dict(plain(ir.DictAttr(func.attributes["topo.kernel"]))["tile"])


def _own_first(own: Tile, tiles: list[Tile] | list[dict[str, int]]) -> list[Tile]:
    return [own, *(t for t in tiles if dict(t) != dict(own))]


def _joined(tiles: list[Tile] | list[dict[str, int]]) -> Tile:
    return {f"{i}.{key}": value for i, tile in enumerate(tiles) for key, value in tile.items()}


def _parted(tile: Tile, count: int) -> list[Tile]:
    parts: list[dict[str, int]] = [{} for _ in range(count)]
    for key, value in tile.items():
        number, _, name = key.partition(".")
        parts[int(number)][name] = value
    return list(parts)


def _outer(tiles: list[Tile]) -> Tile:
    """What a pack's own attribute says of its members' tiles."""
    return {"warps": max(t["warps"] for t in tiles), "stages": max(t.get("stages", 1) for t in tiles)}


def _callers(func: ir.Operation) -> int:
    """How many functions call a kernel."""
    name = _name(func)
    return sum(
        any(o.operation.name == "func.call" and _callee(o.operation) == name for o in f.operation.regions[0].blocks[0].operations)
        for f in func.parent.regions[0].blocks[0].operations
        if f.operation.name == "func.func" and f.operation.regions[0].blocks
    )  # fmt: skip


def _callee(call: ir.Operation) -> str:
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def _name(func: ir.Operation) -> str:
    return ir.StringAttr(func.attributes["sym_name"]).value
