"""Gemm kernels as schedules form them from a decoder, at the sizes of a small language model: recorded text, and what they need.

After a wanted change `TOPO_UPDATE_GOLDENS=1 pytest test/unit/test_gemm_goldens.py` writes the new text; read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gemm_samples import Function, gated, reciprocal_root, rotated, scaled
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen import resources
from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton import lower_kernel

FOLDER = Path(__file__).parent / "goldens"
K, HEADS, DEPTH = 2048, 8, 64


def gate_and_up(m: int, columns: int, name: str) -> str:
    """A sunk norm, gate and up projection, and their activation."""
    f = Function()
    x, w, a, b = f.argument((m, K)), f.argument((K,)), f.argument((columns, K)), f.argument((columns, K))
    left, scale = scaled(f, x, w), reciprocal_root(f, f.mean_square(x))
    result = gated(f, f.contract(left, a), f.contract(left, b), scale)
    return f.text([result], None, name=name, immutable=[1, 2, 3], pdl=True)


def rotary_append(m: int, name: str) -> str:
    """A sunk norm, the key projection, its rotation, and the rows written into the cache."""
    f = Function()
    x, a, cache, index = f.argument((m, K)), f.argument((HEADS * DEPTH, K)), f.argument((1024, HEADS, DEPTH)), f.argument((m,), "i64")  # fmt: skip
    w = f.argument((K,))
    scale = reciprocal_root(f, f.mean_square(x))
    product = f.contract(scaled(f, x, w), a)
    product = f.pointwise(
        [(product, "d0, d1"), (scale, "d0")], product.shape, "f32", ["%r = arith.mulf {0}, {1} : f32"]
    )
    result = f.update(cache, rotated(f, product, HEADS, False, True), index, 0)
    return f.text([result], None, [[0, 2]], name=name, immutable=[1, 4], pdl=True, parts=2, period=DEPTH // 2)


KERNELS = {
    "gemm_gate_up_vector": lambda name: gate_and_up(1, 8192, name),
    "gemm_rotary_append_vector": lambda name: rotary_append(1, name),
    "gemm_rotary_append_skinny": lambda name: rotary_append(8, name),
}


def source(name: str) -> KernelSource:
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = ir.Module.parse(KERNELS[name](name))
        return lower_kernel(module.body.operations[0].operation)


@pytest.mark.parametrize("name", KERNELS)
def test_source_is_as_recorded(name):
    text, recorded = source(name).source, FOLDER / f"{name}.py"
    if os.environ.get("TOPO_UPDATE_GOLDENS"):
        recorded.write_text(text)
    assert text == recorded.read_text()


def test_all_compile_for_sm_90_without_spills(tmp_path):
    measured = resources.measure({n: source(n) for n in KERNELS}, capability=90, cache=tmp_path)
    for name, found in measured.items():
        assert found.spills == 0 and 0 < found.registers <= 224, (name, found)
        assert found.shared <= 232448, name
