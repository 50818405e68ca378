"""`topo-pack-siblings`: independent kernels that go side by side become one launch."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_mlir import ir
from torch_mlir.dialects import func

from topo_opt.codegen.plan_graph import AT_LOAD, PlanGraph, read_plan_function
from topo_opt.codegen.triton.kernel import plain
from topo_opt.passes.base import Pass
from topo_opt.passes.schedule.launch_order import LaunchOrder, launch_order
from topo_opt.passes.schedule.pack_cost import Candidate, PackCost, set_tile

PATIENCE = 6
"""Levels that a kernel with time to spare waits for company: what it reads lives that much longer."""
LOOKED_AT = 32
"""Waiting kernels that are tried at a level."""
DEFAULT_TOPOLOGY = "h200-x1"

Members = Callable[[Sequence[str]], list[Candidate] | None]


@dataclass(frozen=True)
class PackSiblings(Pass):
    """Makes one kernel of family `pack` of kernels that don't depend on each other, where one launch is faster.

    `%1 = call @k_a(%x); %2 = call @k_b(%x)`  -->  `%1:2 = call @k_pack_01(%x)`, and `@k_pack_01` calls both

    Runs after tiles were chosen: members need the same number of warps, so the smaller one may get another tile. What each
    member rewrites and what is immutable to it holds for the pack. The choice is that of `pack_cost`, with the figures of
    `topology` (a name or a file).
    """

    name = "topo-pack-siblings"
    topology: str = DEFAULT_TOPOLOGY

    def apply(self, module) -> None:
        from topo_opt.topology import load

        device = load(self.topology).primary
        if device.target.backend != "cuda":
            return
        top = module.operation
        symbols = {
            ir.StringAttr(view.operation.attributes["sym_name"]).value: view
            for view in top.regions[0].blocks[0].operations
            if view.operation.name == "func.func"
        }
        kernels = {s: v.operation for s, v in symbols.items() if "topo.kernel" in v.operation.attributes}
        cost = PackCost(kernels, device)
        rewriter = _Rewriter(top, kernels)
        for view in symbols.values():
            if not view.operation.regions[0].blocks or "topo.kernel" in view.operation.attributes:
                continue
            graph = read_plan_function(view, symbols, kinds=False)
            packs = choose_packs(graph, launch_order(graph), cost.members)
            if packs:
                rewriter.rewrite(view.operation, packs)
        rewriter.drop_unused()


@dataclass(frozen=True)
class Pack:
    """Nodes of a plan graph that become one launch, counted without copies, and the member that each becomes."""

    calls: tuple[int, ...]
    members: tuple[Candidate, ...]


def choose_packs(graph: PlanGraph, order: LaunchOrder, members: Members) -> list[Pack]:
    """Sets of kernel calls to put together, decided level by level.

    A node runs at a level after all that it depends on. Those that must run now, since the longest path goes through them,
    come first; those that may run later join one of them when that is faster, or wait.
    """
    nodes, late = graph.nodes, order.late
    missing = [len(b) for b in order.before]
    latest = list(late)
    waiting = [i for i, m in enumerate(missing) if m == 0]
    groups: list[list[int]] = []
    level = 0
    while waiting:
        here: list[list[int]] = []
        waiting.sort(key=lambda i: (latest[i], i))
        placed = [i for i in waiting if nodes[i].kind != "kernel" or latest[i] <= level]
        for i in placed:
            if nodes[i].kind != "kernel" or not _joined(graph, order, here, i, members):
                here.append([i])
        for i in [i for i in waiting if i not in placed][:LOOKED_AT]:
            if _joined(graph, order, here, i, members):
                placed.append(i)
        groups += [g for g in here if len(g) > 1]
        done = set(placed)
        waiting = [i for i in waiting if i not in done]
        for i in placed:
            for follower in order.after[i]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    latest[follower] = min(late[follower], level + 1 + PATIENCE)
                    waiting.append(follower)
        level += 1
    call_of = {n: c for c, n in enumerate(i for i, node in enumerate(nodes) if node.kind != "copy")}
    return [
        Pack(tuple(call_of[i] for i in sorted(g)), tuple(members([nodes[i].kernel for i in sorted(g)]) or ()))
        for g in groups
    ]


def _joined(
    graph: PlanGraph, order: LaunchOrder, groups: list[list[int]], node: int, members: Members
) -> bool:
    """Adds a node to the first group that it makes faster; groups that read what it reads come first."""
    kin = sorted(groups, key=lambda g: not any(order.reads[node] & order.reads[i] for i in g))
    for group in kin:
        if any(graph.nodes[i].kind != "kernel" or order.conflict(node, i) for i in group):
            continue
        if members([graph.nodes[i].kernel for i in sorted([*group, node])]) is not None:
            group.append(node)
            return True
    return False


class _Rewriter:
    """Replaces calls by calls of packs. Equal packs are one function."""

    def __init__(self, module: ir.Operation, kernels: dict[str, ir.Operation]):
        self.module, self.kernels = module, kernels
        self.before = set(kernels)
        self.packs: dict[tuple, str] = {}
        self.members: dict[tuple, str] = {}

    def rewrite(self, function: ir.Operation, packs: Sequence[Pack]) -> None:
        block = function.regions[0].blocks[0]
        ops = [v.operation for v in block.operations]
        calls = [i for i, op in enumerate(ops) if op.name == "func.call" and AT_LOAD not in op.attributes]
        pack_of = {calls[c]: number for number, p in enumerate(packs) for c in p.calls}
        for unit in _ordered(ops[:-1], pack_of):
            for i in unit:
                ops[i].move_before(ops[-1])
            if unit[0] in pack_of:
                self._replace([ops[i] for i in unit], packs[pack_of[unit[0]]], ops[-1])

    def _replace(self, calls: list[ir.Operation], pack: Pack, terminator: ir.Operation) -> None:
        operands: list[ir.Value] = []
        for call in calls:
            operands += [v for v in call.operands if v not in operands]
        symbols = [self._member(c) for c in pack.members]
        name = self._function(calls, symbols, operands)
        results = [r for call in calls for r in call.results]
        with ir.InsertionPoint(terminator), calls[0].location:
            made = func.CallOp([r.type for r in results], name, operands)
        for old, new in zip(results, made.operation.results):
            old.replace_all_uses_with(new)
        for call in calls:
            call.erase()

    def _member(self, candidate: Candidate) -> str:
        """The kernel function with the tile that was chosen; a copy when that is another one."""
        key = (candidate.symbol, *sorted(candidate.tile.items()))
        if key not in self.members:
            self.members[key] = self._made_member(candidate)
        return self.members[key]

    def _made_member(self, candidate: Candidate) -> str:
        original = self.kernels[candidate.symbol]
        if plain(ir.DictAttr(original.attributes["topo.kernel"]))["tile"] == candidate.tile:
            return candidate.symbol
        tile = "_".join(f"{k}{v}" for k, v in sorted(candidate.tile.items()))
        name = f"{candidate.symbol}_{hashlib.sha256(tile.encode()).hexdigest()[:6]}"
        if name not in self.kernels:
            with ir.InsertionPoint(self.module.regions[0].blocks[0]):
                copy = original.clone().operation
            copy.attributes["sym_name"] = ir.StringAttr.get(name, self.module.context)
            set_tile(copy, candidate.tile)
            self.kernels[name] = copy
        return name

    def _function(
        self, calls: Sequence[ir.Operation], symbols: Sequence[str], operands: Sequence[ir.Value]
    ) -> str:
        """The pack that calls the kernels `symbols` as `calls` do, on arguments that stand for `operands`."""
        # Members decide all types, so these tell the whole pack.
        key = tuple((s, *map(operands.index, call.operands)) for s, call in zip(symbols, calls))
        if key in self.packs:
            return self.packs[key]
        results = [r.type for call in calls for r in call.results]
        with ir.InsertionPoint(self.module.regions[0].blocks[0]), ir.Location.unknown(self.module.context):
            kind = ir.FunctionType.get([v.type for v in operands], results)
            made = func.FuncOp("kernel", kind, visibility="private")
            arguments = made.add_entry_block().arguments
            with ir.InsertionPoint(made.entry_block):
                returned: list[ir.Value] = []
                for call, symbol in zip(calls, symbols):
                    given = [arguments[operands.index(v)] for v in call.operands]
                    returned += func.CallOp([r.type for r in call.results], symbol, given).operation.results
                func.ReturnOp(returned)
        _describe(made.operation, [self.kernels[s] for s in symbols], calls, operands)
        text = made.operation.get_asm(use_local_scope=True)
        name = self.packs[key] = f"k_pack_{hashlib.sha256(text.encode()).hexdigest()[:10]}"
        made.operation.attributes["sym_name"] = ir.StringAttr.get(name, self.module.context)
        self.kernels[name] = made.operation
        return name

    def drop_unused(self) -> None:
        """Erases kernels that nothing calls any more, because a copy with another tile took their place."""
        called = {
            ir.FlatSymbolRefAttr(v.operation.attributes["callee"]).value
            for f in self.module.regions[0].blocks[0].operations
            if f.operation.name == "func.func" and f.operation.regions[0].blocks
            for v in f.operation.regions[0].blocks[0].operations
            if v.operation.name == "func.call"
        }
        if self.packs:
            for symbol in sorted(self.before - called):
                self.kernels[symbol].erase()


def _describe(
    pack: ir.Operation,
    members: Sequence[ir.Operation],
    calls: Sequence[ir.Operation],
    operands: Sequence[ir.Value],
) -> None:
    """Sets `topo.kernel` and `topo.inout` of a pack from those of its members."""
    kernels = [plain(ir.DictAttr(m.attributes["topo.kernel"])) for m in members]
    inout: list[list[int]] = []
    written: set[int] = set()
    first = 0
    for member, kernel, call in zip(members, kernels, calls):
        place = [operands.index(v) for v in call.operands]
        for result, argument in (
            plain(member.attributes["topo.inout"]) if "topo.inout" in member.attributes else ()
        ):
            inout.append([first + result, place[argument]])
        fixed = kernel.get("immutable", ())
        written |= {p for i, p in enumerate(place) if i not in fixed}
        first += len(call.results)
    i64 = ir.IntegerType.get_signless(64, pack.context)
    tile = {
        "warps": max(k["tile"]["warps"] for k in kernels),
        "stages": max(k["tile"].get("stages", 1) for k in kernels),
    }
    with pack.context:
        attributes: dict[str, ir.Attribute] = {
            "family": ir.StringAttr.get("pack"),
            "tile": ir.DictAttr.get({k: ir.IntegerAttr.get(i64, v) for k, v in tile.items()}),
        }
        if all(k.get("pdl") for k in kernels):
            immutable = [i for i in range(len(operands)) if i not in written]
            attributes |= {"immutable": ir.DenseI64ArrayAttr.get(immutable), "pdl": ir.BoolAttr.get(True)}
        pack.attributes["topo.kernel"] = ir.DictAttr.get(attributes)
        if inout:
            pairs = [ir.DenseI64ArrayAttr.get(p) for p in inout]
            pack.attributes["topo.inout"] = ir.ArrayAttr.get(pairs)


def _ordered(ops: Sequence[ir.Operation], pack_of: dict[int, int]) -> list[list[int]]:
    """Numbers of ops, those of each pack together, in an order in which values come before their uses."""
    units: list[list[int]] = []
    unit_of_pack: dict[int, int] = {}
    maker: dict[int, int] = {}
    for i, op in enumerate(ops):
        number = unit_of_pack.setdefault(pack_of[i], len(units)) if i in pack_of else len(units)
        if number == len(units):
            units.append([])
        units[number].append(i)
        maker.update({hash(r): number for r in op.results})
    before = [
        {maker[hash(v)] for i in unit for v in ops[i].operands if hash(v) in maker} - {number}
        for number, unit in enumerate(units)
    ]
    after: list[list[int]] = [[] for _ in units]
    for number, needed in enumerate(before):
        for n in needed:
            after[n].append(number)
    missing = [len(b) for b in before]
    ready = [n for n, m in enumerate(missing) if m == 0]
    heapq.heapify(ready)
    out = []
    while ready:
        number = heapq.heappop(ready)
        out.append(units[number])
        for follower in after[number]:
            missing[follower] -= 1
            if missing[follower] == 0:
                heapq.heappush(ready, follower)
    assert len(out) == len(units), "a pack depends on itself"
    return out
