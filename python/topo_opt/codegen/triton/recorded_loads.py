"""Which elements of memory a value is made of, for tensor descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from topo_opt.codegen.triton.emit import Emitter, Scalar, Value
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.structured.index import Expr, contiguous_strides, strided

ALIGNMENT = 16
"""Bytes that strides and start addresses of a descriptor are a multiple of (CUDA driver API, cuTensorMapEncodeTiled)."""


@dataclass
class _Recorder(Emitter):
    """Emits into nowhere and remembers which elements of memory were read."""

    loads: list[tuple[int, Expr]] = field(default_factory=list)

    def load(self, number: int, indices: Sequence[Expr]) -> Scalar:
        strides = contiguous_strides(self.graph.values[number].shape or ())
        self.loads.append((number, strided(indices, strides)))
        return super().load(number, indices)


def single_load(emitter: Emitter, value: int, indices: Sequence[Expr]) -> tuple[int, Expr]:
    """The value in memory, and the element of it, that a value at indices is loaded from.

    Raises:
        UnsupportedError: it is computed.
    """
    recorder = _Recorder(emitter.graph, Writer(), emitter.axes, emitter.pointers)
    found = recorder.value(value, indices)
    if not (isinstance(found, Value) and found.is_load and len(recorder.loads) == 1):
        raise UnsupportedError("a tensor descriptor for an operand that is computed inside the kernel")
    return recorder.loads[0]
