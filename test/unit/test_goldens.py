"""Generated kernels as recorded, one or more a family, and what they need of a GPU.

After a wanted change `TOPO_UPDATE_GOLDENS=1 pytest test/unit/test_goldens.py` writes the new text; read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import test_gemm_goldens
from kernel_check import kernel_functions, to_kernel_ir
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.codegen import resources
from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton import lower_kernel

FOLDER = Path(__file__).parent / "goldens"
INPUTS = Path(__file__).parent.parent / "Inputs" / "kernels"
NAMES = sorted(p.stem for p in INPUTS.glob("*.mlir"))
# Kernels each input becomes.
EXPECTED = dict.fromkeys(NAMES, 1) | {
    "scatter_add": 3, "long_softmax": 2, "experts": 2, "attention_append": 3,
}  # fmt: skip


def sources(name: str) -> list[KernelSource]:
    with dialects.load(ir.Context()), ir.Location.unknown():
        module = to_kernel_ir(ir.Module.parse((INPUTS / f"{name}.mlir").read_text()))
        return [lower_kernel(f) for f in kernel_functions(module)]


@pytest.mark.parametrize("name", NAMES)
def test_source_is_as_recorded(name):
    made = sources(name)
    assert len(made) == EXPECTED[name], [k.name for k in made]
    text = "\n".join(k.source for k in made)
    recorded = FOLDER / f"{name}.py"
    if os.environ.get("TOPO_UPDATE_GOLDENS"):
        recorded.write_text(text)
    assert text == recorded.read_text()


def test_every_golden_has_an_input():
    others = {"attention_prefill", "attention_decode"} | set(test_gemm_goldens.KERNELS)
    assert {p.stem for p in FOLDER.glob("*.py")} == set(NAMES) | others


def test_all_compile_for_sm_90_within_its_limits(tmp_path):
    made = {k.name: k for name in NAMES for k in sources(name)}
    measured = resources.measure(made, capability=90, cache=tmp_path)
    assert set(measured) == set(made)
    for name, found in measured.items():
        assert found.spills == 0, name
        assert 0 < found.registers <= 255, name
        assert found.shared <= 232448, name
