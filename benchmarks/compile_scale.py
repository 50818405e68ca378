"""How the passes scale: a synthetic module of gated blocks, some 120,000 structured ops, through the pipeline. Needs no GPU.

    python benchmarks/compile_scale.py [--ops 30000,120000] [--level 2] [--rows 1]

Every block is a norm written out, two products that meet in a gate, and a third with a residual. Prints the seconds of every
pass, what the function became, and the growth from the first size to the last.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

from torch_mlir import ir

from topo_opt import dialects
from topo_opt.pipeline import levels
from topo_opt.pipeline.instruments import Watcher
from topo_opt.pipeline.run import Step, run

WIDTH, HIDDEN = 256, 512

_MAPS = """#id = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i, 0)>
#col = affine_map<(i, j) -> (j)>
#a = affine_map<(m, n, k) -> (m, k)>
#b = affine_map<(m, n, k) -> (n, k)>
#c = affine_map<(m, n, k) -> (m, n)>
"""


class _Text:
    """Structured IR as text, one op a call."""

    def __init__(self, rows: int):
        self.rows, self.lines, self.count = rows, [], 0

    def name(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def kind(self, columns: int, element: str = "f32") -> str:
        return f"tensor<{self.rows}x{columns}x{element}>"

    def op(self, text: str) -> str:
        name = self.name()
        self.lines.append(f"  {name} = {text}")
        return name

    def loop(self, inputs: list[tuple[str, str, str]], columns: int, body: str, element: str = "f32") -> str:
        """A pointwise loop nest; `inputs` are (value, type, map), the body defines %r from %i0, %i1, ..."""
        kind = self.kind(columns, element)
        empty = self.op(f"tensor.empty() : {kind}")
        maps = ", ".join([m for _, _, m in inputs] + ["#id"])
        values, types = ", ".join(v for v, _, _ in inputs), ", ".join(t for _, t, _ in inputs)
        arguments = ", ".join(f"%i{n}: {t[:-1].rpartition('x')[2]}" for n, (_, t, _) in enumerate(inputs))
        return self.op(
            f'linalg.generic {{indexing_maps = [{maps}], iterator_types = ["parallel", "parallel"]}} '
            f"ins({values} : {types}) outs({empty} : {kind}) {{\n  ^bb0({arguments}, %o: {element}):\n"
            f"    {body}\n    linalg.yield %r : {element}\n  }} -> {kind}"
        )

    def zeros(self, columns: int) -> str:
        empty = self.op(f"tensor.empty() : {self.kind(columns)}")
        return self.op(
            f"linalg.fill ins(%zero : f32) outs({empty} : {self.kind(columns)}) -> {self.kind(columns)}"
        )

    def product(self, x: str, weight: str, k: int, n: int) -> str:
        out = self.kind(n)
        return self.op(
            f"linalg.contract indexing_maps = [#a, #b, #c] ins({x}, {weight} : {self.kind(k, 'bf16')}, "
            f"tensor<{n}x{k}xbf16>) outs({self.zeros(n)} : {out}) -> {out}"
        )

    def narrow(self, x: str, columns: int) -> str:
        return self.op(f'"topo.demote"({x}) : ({self.kind(columns)}) -> {self.kind(columns, "bf16")}')

    def one(self, x: str, columns: int, body: str) -> str:
        return self.loop([(x, self.kind(columns), "#id")], columns, body)

    def widen(self, x: str, columns: int) -> str:
        source = [(x, self.kind(columns, "bf16"), "#id")]
        return self.loop(source, columns, "%r = arith.extf %i0 : bf16 to f32")


def _block(text: _Text, x: str) -> str:
    wide = text.widen(x, WIDTH)
    square = text.one(wide, WIDTH, "%r = arith.mulf %i0, %i0 : f32")
    kind, total = text.kind(WIDTH), text.kind(1)
    total_sum = text.op(
        'linalg.generic {indexing_maps = [#id, #row], iterator_types = ["parallel", "reduction"]} '
        f"ins({square} : {kind}) outs({text.zeros(1)} : {total}) {{\n  ^bb0(%i: f32, %o: f32):\n"
        f"    %r = arith.addf %i, %o : f32\n    linalg.yield %r : f32\n  }} -> {total}"
    )
    mean = text.one(total_sum, 1, "%r = arith.divf %i0, %width : f32")
    scale = text.one(mean, 1, "%r = math.rsqrt %i0 : f32")
    normed = text.loop([(wide, kind, "#id"), (scale, total, "#row")], WIDTH, "%r = arith.mulf %i0, %i1 : f32")
    weighted = text.loop(
        [(normed, kind, "#id"), ("%w", f"tensor<{WIDTH}xf32>", "#col")],
        WIDTH,
        "%r = arith.mulf %i0, %i1 : f32",
    )
    operand = text.narrow(weighted, WIDTH)
    gate = text.widen(text.narrow(text.product(operand, "%gate", WIDTH, HIDDEN), HIDDEN), HIDDEN)
    up = text.widen(text.narrow(text.product(operand, "%up", WIDTH, HIDDEN), HIDDEN), HIDDEN)
    hidden = text.kind(HIDDEN)
    bounded = text.one(gate, HIDDEN, "%r = math.tanh %i0 : f32")
    active = text.loop(
        [(gate, hidden, "#id"), (bounded, hidden, "#id")], HIDDEN, "%r = arith.mulf %i0, %i1 : f32"
    )
    both = text.loop([(active, hidden, "#id"), (up, hidden, "#id")], HIDDEN, "%r = arith.mulf %i0, %i1 : f32")
    down = text.product(text.narrow(both, HIDDEN), "%down", HIDDEN, WIDTH)
    added = text.loop([(wide, kind, "#id"), (down, kind, "#id")], WIDTH, "%r = arith.addf %i0, %i1 : f32")
    return text.narrow(added, WIDTH)


def synthetic(ops: int, rows: int) -> tuple[str, int]:
    """Text of a module of at least `ops` ops (those of loop bodies not counted), and how many blocks it has."""
    text = _Text(rows)
    value, blocks = "%x", 0
    while text.count < ops:
        value, blocks = _block(text, value), blocks + 1
    kind = text.kind(WIDTH, "bf16")
    weight = '{topo.kind = "param", topo.name = "%s", topo.dtype = "%s"}'
    arguments = [
        f"%x: {kind} " + '{topo.kind = "input", topo.name = "x", topo.dtype = "bfloat16"}',
        f"%w: tensor<{WIDTH}xf32> " + weight % ("w", "float32"),
        *(f"%{n}: tensor<{HIDDEN}x{WIDTH}xbf16> " + weight % (n, "bfloat16") for n in ("gate", "up")),
        f"%down: tensor<{WIDTH}x{HIDDEN}xbf16> " + weight % ("down", "bfloat16"),
    ]
    result = f"({kind} " + '{topo.kind = "output", topo.name = "0", topo.dtype = "bfloat16"})'
    head = f'func.func @main({", ".join(arguments)}) -> {result} attributes {{topo.function = "main"}} {{'
    constants = "  %zero = arith.constant 0.0 : f32\n  %width = arith.constant 256.0 : f32"
    return "\n".join([_MAPS, head, constants, *text.lines, f"  return {value} : {kind}\n}}"]), blocks


class _Clock(Watcher):
    """Seconds of every pass, its verification included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start = 0.0

    def before(self, step: Step, module: ir.Module) -> None:
        self.start = time.perf_counter()

    def after(self, step: Step, module: ir.Module) -> None:
        self.seconds[step.name] = round(time.perf_counter() - self.start, 1)


def compile_ops(ops: int, level: int, rows: int) -> dict[str, object]:
    """Runs the passes over one module."""
    source, blocks = synthetic(ops, rows)
    start, cpu = time.perf_counter(), time.process_time()
    module = ir.Module.parse(source, dialects.load(ir.Context()))
    parsed = time.perf_counter()
    clock = _Clock()
    with module.context, ir.Location.unknown():
        run(levels.pipeline(level, ("schedule", "lower")), module, instruments=[clock])
    total, cpu = time.perf_counter() - start, time.process_time() - cpu
    calls = Counter(
        v.operation.attributes["callee"].value.rpartition("_")[0]
        for v in module.body.operations[0].operation.regions[0].blocks[0].operations
        if v.operation.name == "func.call"
    )
    return {
        "ops": ops,
        "blocks": blocks,
        "parse_s": round(parsed - start, 1),
        "total_s": round(total, 1),
        "cpu_s": round(cpu, 1),
        "passes_s": clock.seconds,
        "calls": dict(calls),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", default="30000,120000")
    parser.add_argument("--level", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1, help="rows of every product")
    arguments = parser.parse_args()
    found = []
    for ops in map(int, arguments.ops.split(",")):
        found.append(compile_ops(ops, arguments.level, arguments.rows))
        print(json.dumps(found[-1]), flush=True)
    first, last = found[0], found[-1]
    growth = last["total_s"] / first["total_s"] / (last["ops"] / first["ops"])
    print(json.dumps({"growth of seconds over growth of ops": round(growth, 2)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
