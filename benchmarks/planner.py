"""Planner time against the size of the graph and the number of devices. Needs no GPU.

    python benchmarks/planner.py [--ops 1000,3000,9000] [--topologies hgx-h100-x8,hgx-h100-x8-ib-x16] [--devices 64]
    python benchmarks/planner.py --ir model.mlir ...        structured IR, as topo-opt --emit=structured writes it

Two kinds of synthetic graphs: `layers` repeats one block, `unrolled` gives every block widths of its own and connects some
blocks over long distances, so that nothing repeats. A block is a norm written out, two products that meet in a gate, a third
product and a residual. Times are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

from torch_mlir import ir

from topo_opt import dialects
from topo_opt.sharding.layers import layers_of
from topo_opt.sharding.plan import PlanOptions, describe, plan_topology
from topo_opt.sharding.plan_reading import read_plan_graph
from topo_opt.topology import load

OPS_PER_BLOCK = 11
_MAPS = """#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i, 0)>
#a = affine_map<(m, n, k) -> (m, k)>
#b = affine_map<(m, n, k) -> (n, k)>
#c = affine_map<(m, n, k) -> (m, n)>
"""


class _Text:
    """Structured IR of one function, op by op."""

    def __init__(self, rows: int):
        self.rows, self.lines, self.arguments, self.count = rows, list[str](), list[str](), 0

    def _name(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def op(self, text: str) -> str:
        name = self._name()
        self.lines.append(f"  {name} = {text}")
        return name

    def weight(self, *shape: int) -> str:
        name, number = self._name(), len(self.arguments)
        kind = "x".join(map(str, shape))
        self.arguments.append(
            f'{name}: tensor<{kind}xbf16> {{topo.kind = "param", topo.name = "w{number}.weight", topo.dtype = "bfloat16"}}'
        )
        return name

    def loop(self, maps: str, values: dict[str, str], result: str, body: str, reduces: bool = False) -> str:
        init = self.op(f"tensor.empty() : {result}")
        if reduces:
            init = self.op(f"linalg.fill ins(%zero : f32) outs({init} : {result}) -> {result}")
        second = "reduction" if reduces else "parallel"
        names, kinds = ", ".join(values), ", ".join(values.values())
        scalars = ", ".join(f"%i{n}: {_element(k)}" for n, k in enumerate(values.values()))
        return self.op(
            f'linalg.generic {{indexing_maps = [{maps}], iterator_types = ["parallel", "{second}"]}} '
            f"ins({names} : {kinds}) outs({init} : {result}) {{ ^bb0({scalars}, %o: {_element(result)}): {body} }} -> {result}"
        )

    def product(self, x: str, columns: int, inner: int) -> str:
        left, right = f"tensor<{self.rows}x{inner}xbf16>", f"tensor<{columns}x{inner}xbf16>"
        result = f"tensor<{self.rows}x{columns}xf32>"
        weight = self.weight(columns, inner)
        init = self.op(f"tensor.empty() : {result}")
        init = self.op(f"linalg.fill ins(%zero : f32) outs({init} : {result}) -> {result}")
        made = self.op(
            f"linalg.contract indexing_maps = [#a, #b, #c] ins({x}, {weight} : {left}, {right}) "
            f"outs({init} : {result}) -> {result}"
        )
        return self.op(f'"topo.demote"({made}) : ({result}) -> tensor<{self.rows}x{columns}xbf16>')


def _element(kind: str) -> str:
    return kind.removesuffix(">").rpartition("x")[2]


def _block(text: _Text, x: str, far: str, width: int, hidden: int) -> str:
    wide, half = f"tensor<{text.rows}x{width}xf32>", f"tensor<{text.rows}x{width}xbf16>"
    gated, one = f"tensor<{text.rows}x{hidden}xbf16>", f"tensor<{text.rows}x1xf32>"
    y = text.loop("#id, #id", {x: half}, wide, "%r = arith.extf %i0 : bf16 to f32 linalg.yield %r : f32")
    square = "%s = arith.mulf %i0, %i0 : f32 %r = arith.addf %s, %o : f32 linalg.yield %r : f32"
    total = text.loop("#id, #row", {y: wide}, one, square, reduces=True)
    scale = "%s = math.rsqrt %i1 : f32 %m = arith.mulf %i0, %s : f32 %r = arith.truncf %m : f32 to bf16 linalg.yield %r : bf16"
    normed = text.loop("#id, #row, #id", {y: wide, total: one}, half, scale)
    gate, up = text.product(normed, hidden, width), text.product(normed, hidden, width)
    both = "%r = arith.mulf %i0, %i1 : bf16 linalg.yield %r : bf16"
    mixed = text.loop("#id, #id, #id", {gate: gated, up: gated}, gated, both)
    down = text.product(mixed, width, hidden)
    add = "%r = arith.addf %i0, %i1 : bf16 linalg.yield %r : bf16"
    return text.loop("#id, #id, #id", {down: half, (far if far != down else x): half}, half, add)


def synthetic(ops: int, repeats: bool, rows: int = 64) -> str:
    """A module of about `ops` operations that the planner follows."""
    rng, text = random.Random(0), _Text(rows)
    width, hidden = 4096, 14336
    x = "%x"
    earlier = [x]
    for number in range(max(ops // OPS_PER_BLOCK, 1)):
        if not repeats:
            hidden = 64 * rng.randint(40, 400)
        far = x if repeats or number % 5 else rng.choice(earlier[-8:])
        x = _block(text, x, far, width, hidden)
        earlier.append(x)
    kind = f"tensor<{rows}x{width}xbf16>"
    head = f'%x: {kind} {{topo.kind = "input", topo.name = "x", topo.dtype = "bfloat16"}}'
    arguments = ", ".join([head, *text.arguments])
    result = f'({kind} {{topo.kind = "output", topo.name = "0", topo.dtype = "bfloat16"}})'
    body = "\n".join(["  %zero = arith.constant 0.0 : f32", *text.lines, f"  return {x} : {kind}"])
    return f"{_MAPS}module {{ func.func @main({arguments}) -> {result} {{\n{body}\n}} }}"


def _sources(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for path in arguments.ir:
        yield path.stem if path.stem != "structured" else path.parent.parent.name, path.read_text()
    if not arguments.ir:
        for ops in map(int, arguments.ops.split(",")):
            yield "layers", synthetic(ops, True)
            yield "unrolled", synthetic(ops, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ops", default="1000,3000,9000")
    parser.add_argument("--topologies", default="hgx-h100-x8,hgx-h100-x8-ib-x16")
    parser.add_argument("--devices", type=int, default=64, help="the most devices to use")
    parser.add_argument("--ir", type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    print(
        f"{'graph':24} {'ops':>6} {'layers':>6} {'topology':20} {'devices':>7} {'read s':>7} {'plan s':>7} "
        f"{'call ms':>9} {'gap':>7}  plan"
    )
    for name, text in _sources(arguments):
        context = ir.Context()
        dialects.load(context)
        module = ir.Module.parse(text, context)
        func = next(
            o.operation
            for o in module.body.operations
            if o.operation.name == "func.func" and o.regions[0].blocks
        )
        start = time.process_time()
        graph = read_plan_graph(func)
        read = time.process_time() - start
        for topology in arguments.topologies.split(","):
            machine = load(topology)
            count = min(arguments.devices, len(machine.compute))
            start = time.process_time()
            plan = plan_topology(graph, machine, PlanOptions(devices=count))
            seconds = time.process_time() - start
            print(
                f"{name:24} {len(graph.ops):6} {len(layers_of(graph).starts):6} {topology:20} {count:7} {read:7.2f} "
                f"{seconds:7.2f} {plan.seconds * 1e3:9.3f} {plan.gap:7.2%}  {describe(plan.mesh)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
