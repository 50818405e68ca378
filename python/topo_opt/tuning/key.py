"""What makes two kernels the same for tuning: their text, or their text without its sizes."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_mlir import ir

_TILE = re.compile(r"tile = \{[^{}]*\}(, )?|, tile = \{[^{}]*\}")
# What a kernel exchanges with other devices is no matter of its tile.
_EXCHANGE = re.compile(
    r"(?:exchange|gives) = \{[^{}]*\}, |, (?:exchange|gives) = \{[^{}]*\}| \{topo\.summed\}"
)
# When a kernel starts beside its neighbours depends on them, and no tile on that.
_LAUNCH = re.compile(
    r"late_trigger = true, |settled = array<i64[^>]*>, |, late_trigger = true|, settled = array<i64[^>]*>"
)
_WRITTEN = re.compile(r"written = \[[^\]]*\], |(?:, )?written = \[[^\]]*\]")
_INDEX = re.compile(r"array<i64: \d+, (\d+), \d+>")
_SYMBOL = re.compile(r"@[\w$.]+|@\"[^\"]*\"")
_SHAPE = re.compile(r"tensor<((?:\d+x)+)")
# A number that is not part of a name: %0, d1, i64 and bf16 stay.
_NUMBER = re.compile(r"(?<![\w.%#@$^])-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?!\w)")


@dataclass(frozen=True)
class Key:
    """Digests of a kernel's text, and of its structure: the text without sizes. `sizes` are those of its arguments and results."""

    text: str
    structure: str
    sizes: tuple[int, ...]

    def distance(self, other: Key) -> float:
        """How far the sizes of two kernels of one structure lie apart: the sum of their ratios as powers of two."""
        if self.structure != other.structure or len(self.sizes) != len(other.sizes):
            return math.inf
        return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(self.sizes, other.sizes))

    def spread(self, other: Key) -> float:
        """The largest ratio of a size in two kernels of one structure, above one."""
        ratios = (max(a, b, 1) / max(min(a, b), 1) for a, b in zip(self.sizes, other.sizes))
        return max(ratios, default=1.0)


def key_of(func: ir.Operation, members: Sequence[ir.Operation] = ()) -> Key:
    """The key of a kernel function.

    Args:
        members: the kernel functions that it calls, when it is a pack.
    """
    from torch_mlir import ir  # not at the top: entries are read where there is no MLIR

    text = canonical("\n".join(f.get_asm(use_local_scope=True) for f in (func, *members)))
    kind = ir.FunctionType(ir.TypeAttr(func.attributes["function_type"]).value)
    of_launch = _arguments_of_launch(func.get_asm(use_local_scope=True))
    inputs = [t for i, t in enumerate(kind.inputs) if i not in of_launch]
    sizes = [size for t in (*inputs, *kind.results) for size in ir.ShapedType(t).shape]
    return Key(_digest(text), _digest(without_sizes(text)), tuple(sizes))


def canonical(text: str) -> str:
    """A function's text without its tile and how it is launched beside others, and with symbols numbered in their order."""
    numbers: dict[str, str] = {}
    for argument in _arguments_of_launch(text):
        text = re.sub(rf", %arg{argument}: [^,()]*(?=\))", "", text, count=1)
    text = _WRITTEN.sub("", text)
    text = _EXCHANGE.sub("", _LAUNCH.sub("", _TILE.sub("", text)))
    return _SYMBOL.sub(lambda m: numbers.setdefault(m[0], f"@{len(numbers)}"), text)


def _arguments_of_launch(text: str) -> set[int]:
    """Arguments that say what the kernel in front writes, behind all others."""
    return {int(index) for marks in _WRITTEN.findall(text) for index in _INDEX.findall(marks)}


def without_sizes(text: str) -> str:
    """The canonical text with `#` for every number, but 1 in shapes: a broadcast is structure, a size is not.

    `tensor<1x2048xbf16>`  -->  `tensor<1x#xbf16>`
    """
    text = _SHAPE.sub(
        lambda m: "tensor<" + "".join("1x" if s == "1" else "#x" for s in m[1].split("x")[:-1]), text
    )
    return _NUMBER.sub("#", text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
