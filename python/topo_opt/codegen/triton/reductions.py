"""Reduction bodies: which ones combine in any order, and how Triton spells them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch_mlir import ir

from topo_opt.codegen.triton import f32_products, fast_functions
from topo_opt.structured.graph import Node


@dataclass(frozen=True)
class Combiner:
    """An associative, commutative combination. `function` is a jit function of the prelude, or None for `tl.sum`."""

    symbol: str
    identity: str
    function: str | None

    def reduce(self, source: str) -> str:
        """Source of the reduction of a tile over its second axis, kept as a column."""
        if self.function is None:
            return f"tl.sum({source}, axis=1)[:, None]"
        return f"tl.reduce({source}, 1, {self.function})[:, None]"

    @property
    def function_name(self) -> str:
        """The jit function of the prelude that combines two values."""
        return self.function or "_add"

    @property
    def is_float_sum(self) -> bool:
        """Whether it adds numbers that are rounded."""
        return self.symbol == "+" and self.identity == "0.0"

    def combine(self, a: str, b: str) -> str:
        if self.function is None:
            return f"{a} + {b}"
        return f"{self.function}({a}, {b})"


PRELUDE = {
    "_add": "a + b",
    "_mul": "a * b",
    "_max": "tl.maximum(a, b)",
    "_min": "tl.minimum(a, b)",
    "_max_nan": "tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)",
    "_min_nan": "tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)",
    "_and": "a & b",
    "_or": "a | b",
    "_xor": "a ^ b",
}
"""Combination functions a generated file may define, by name."""


def _extreme(element: str, largest: bool) -> str:
    if element == "i1":
        return "True" if largest else "False"
    if element.startswith(("f", "bf")):
        return "float('inf')" if largest else "float('-inf')"
    bits = int(element[1:])
    return str(2 ** (bits - 1) - 1 if largest else -(2 ** (bits - 1)))


def combiner_of(name: str, element: str) -> Combiner | None:
    """The combination that the scalar op `name` makes on an element type; None when it is none."""
    table = {
        "arith.addf": Combiner("+", "0.0", None),
        "arith.addi": Combiner("+", "0", None),
        "arith.mulf": Combiner("*", "1.0", "_mul"),
        "arith.muli": Combiner("*", "1", "_mul"),
        "arith.maximumf": Combiner("max", _extreme(element, False), "_max_nan"),
        "arith.minimumf": Combiner("min", _extreme(element, True), "_min_nan"),
        "arith.maxnumf": Combiner("max", _extreme(element, False), "_max"),
        "arith.minnumf": Combiner("min", _extreme(element, True), "_min"),
        "arith.maxsi": Combiner("max", _extreme(element, False), "_max"),
        "arith.minsi": Combiner("min", _extreme(element, True), "_min"),
        "arith.andi": Combiner("&", "True" if element == "i1" else "-1", "_and"),
        "arith.ori": Combiner("|", "False" if element == "i1" else "0", "_or"),
        "arith.xori": Combiner("^", "False" if element == "i1" else "0", "_xor"),
    }
    if element == "i1" and name in ("arith.addi", "arith.muli"):
        return None
    return table.get(name)


@dataclass(frozen=True)
class Recognised:
    """`result = combine(accumulator, term)`; `term` is an SSA value of the region that does not see the accumulators."""

    combiner: Combiner
    term: ir.Value


def recognise(node: Node, position: int, element: str) -> Recognised | None:
    """The combination that result `position` of a `linalg.generic` computes, None when it is not one of the table."""
    if node.name != "linalg.generic":
        return None
    block = node.op.regions[0].blocks[0]
    arguments = list(block.arguments)
    outputs = {hash(a) for a in arguments[node.inputs :]}
    accumulator = hash(arguments[node.inputs + position])
    yielded = block.operations[len(block.operations) - 1].operation.operands[position]
    if hash(yielded) in {hash(a) for a in arguments}:
        return None
    op = yielded.owner.operation
    combiner = combiner_of(op.name, element)
    if combiner is None or len(op.operands) != 2:
        return None
    left, right = op.operands
    term = right if hash(left) == accumulator else left if hash(right) == accumulator else None
    if term is None or depends_on(term, outputs, {hash(a) for a in arguments}):
        return None
    return Recognised(combiner, term)


def depends_on(value: ir.Value, targets: set[int], arguments: set[int]) -> bool:
    """Whether `value` is or depends on one of `targets` inside the region."""
    if hash(value) in targets:
        return True
    if hash(value) in arguments:
        return False
    if isinstance(value.owner, ir.Block):  # an argument of the function around it
        return False
    op = value.owner.operation
    if op.name in ("arith.constant", "linalg.index"):
        return False
    return any(depends_on(o, targets, arguments) for o in op.operands)


def prelude(source: str) -> str:
    """Definitions of the combination functions, fast functions and products in f32 that `source` names."""
    names = set(re.findall(r"(?<![\w.])_[a-z]\w*", source))
    combinations = "".join(
        f"@triton.jit\ndef {n}(a, b):\n    return {PRELUDE[n]}\n\n\n" for n in PRELUDE if n in names
    )
    fast = "".join(fast_functions.definition(n) for n in fast_functions.FUNCTIONS if n in names)
    return combinations + fast + f32_products.prelude(source)


__all__ = ["PRELUDE", "Combiner", "Recognised", "depends_on", "prelude", "recognise"]
