"""Generated kernels against the reference executor, one kernel at a time."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch_mlir import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, CompiledKernel

from topo_opt import reference
from topo_opt.codegen.kernel_source import KernelSource
from topo_opt.codegen.triton import lower_kernel
from topo_opt.codegen.triton.target import Target
from topo_opt.pipeline import levels
from topo_opt.pipeline.run import run as run_pipeline
from topo_opt.runtime import interpreter
from topo_opt.runtime.executor import kernel_arguments
from topo_opt.runtime.kernel_module import load_function
from topo_opt.tuning.compiled import launch_record

TRITON_TO_TORCH = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "i1": torch.bool, "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}  # fmt: skip
ELEMENTS = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "i1": torch.bool,
    "complex<f32>": torch.complex64, "complex<f64>": torch.complex128, "f8E4M3FN": torch.float8_e4m3fn,
    "f8E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass
class Checked:
    """A kernel's results by the interpreter and by the reference executor."""

    name: str
    source: KernelSource
    ours: list[torch.Tensor]
    expected: list[torch.Tensor]


def kernel_functions(module: ir.Module) -> list[ir.Operation]:
    return [o.operation for o in module.body.operations if "topo.kernel" in o.operation.attributes]


def to_kernel_ir(module: ir.Module, level: int = 2) -> ir.Module:
    """Structured IR to kernel IR, in place."""
    with module.context, ir.Location.unknown():
        run_pipeline(levels.pipeline(level, ("schedule", "lower")), module)
    return module


def random_tensor(kind: ir.Type, generator: torch.Generator) -> torch.Tensor:
    """Values that any op accepts: small integers (valid indices for most gathers), floats around zero."""
    shaped = ir.RankedTensorType(kind)
    dtype, shape = ELEMENTS[str(shaped.element_type)], list(shaped.shape)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(
            shape, generator=generator, dtype=torch.float64 if not dtype.is_complex else dtype
        ).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def launch(kernel: KernelSource, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Runs a kernel source in the interpreter; results are written in place."""
    scratch = [
        (torch.zeros if s.zeroed else torch.empty)(s.numel, dtype=TRITON_TO_TORCH[s.dtype])
        for s in kernel.scratch
    ]
    pools = {"arg": inputs, "result": results, "scratch": scratch}
    buffers = [pools[p.kind][p.index] for p in kernel.params]
    buffers = [torch.view_as_real(t) if t.is_complex() else t for t in buffers]
    arguments = kernel_arguments(launch_record(asdict(kernel)), buffers)
    with interpreter.interpreting():
        function = load_function(kernel.source, f"{kernel.name}.py", kernel.name)
        interpreter.launch(function, kernel.grid, arguments, buffers)
    for declared, tensor in zip(kernel.scratch, scratch):
        assert not (declared.zeroed and tensor.any()), f"{kernel.name} leaves its zeroed scratch dirty"


def check_kernels(
    module: ir.Module,
    make: Callable[[ir.Type, torch.Generator], torch.Tensor] = random_tensor,
    seed: int = 0,
) -> list[Checked]:
    """Runs every kernel of a module both ways on the same random inputs."""
    checked = []
    with module.context, ir.Location.unknown():
        for function in kernel_functions(module):
            kernel = lower_kernel(function, Target())
            generator = torch.Generator().manual_seed(seed)
            kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
            inputs = [make(t, generator) for t in kind.inputs]
            expected = reference.run(module, kernel.name, [i.clone() for i in inputs])
            inout = {p[0]: p[1] for p in _pairs(function)}
            results = [
                inputs[inout[i]].clone() if i in inout else torch.empty_like(e)
                for i, e in enumerate(expected)
            ]
            launch(kernel, [i.contiguous() for i in inputs], results)
            checked.append(Checked(kernel.name, kernel, results, expected))
    return checked


def _pairs(function: ir.Operation) -> list[list[int]]:
    if "topo.inout" not in function.attributes:
        return []
    return [list(ir.DenseI64ArrayAttr(a)) for a in ir.ArrayAttr(function.attributes["topo.inout"])]


def assembled(source: KernelSource, folder: Path) -> tuple[CompiledKernel, str]:
    """A kernel compiled for Hopper, and what ptxas says about it; `folder` is for its files."""
    function = load_function(source.source, f"{source.name}.py", source.name)
    signature = dict.fromkeys(source.constexprs, "constexpr")
    for p in source.params:
        block = p.descriptor and ",".join(map(str, p.descriptor["block"]))
        signature[p.name] = f"tensordesc<{p.dtype}[{block}]>" if block else f"*{p.dtype}"
    aligned = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(source.params) if not p.descriptor}
    made = ASTSource(function, signature, dict(source.constexprs), aligned)
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    compiled = triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options)
    (folder / "k.ptx").write_text(compiled.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", folder / "k.ptx", "-o", folder / "k.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return compiled, done.stderr
