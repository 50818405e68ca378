"""Kernels to tune, and devices that don't exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from kernel_check import kernel_functions, to_kernel_ir
from torch_mlir import ir

from topo_opt import dialects
from topo_opt.runtime import interpreter
from topo_opt.runtime.executor import kernel_arguments
from topo_opt.runtime.kernel_module import load_function
from topo_opt.topology import Device, load
from topo_opt.tuning.compiled import launch_record
from topo_opt.tuning.measure import Job, Outcome

ROWS = """
func.func @rows(%a: tensor<{m}x{n}x{t}>) -> tensor<{m}x{t}> attributes {{topo.function = "rows"}} {{
  %z = arith.constant 0.0 : {t}
  %i = tensor.empty() : tensor<{m}x{t}>
  %f = linalg.fill ins(%z : {t}) outs(%i : tensor<{m}x{t}>) -> tensor<{m}x{t}>
  %r = linalg.generic {{indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>],
                        iterator_types = ["parallel", "reduction"]}}
      ins(%a : tensor<{m}x{n}x{t}>) outs(%f : tensor<{m}x{t}>) {{
  ^bb0(%x: {t}, %o: {t}):
    %s = arith.mulf %x, %x : {t}
    %e = arith.addf %s, %o : {t}
    linalg.yield %e : {t}
  }} -> tensor<{m}x{t}>
  return %r : tensor<{m}x{t}>
}}
"""

PRODUCT = """
func.func @product(%a: tensor<{m}x{k}xbf16>, %b: tensor<{n}x{k}xbf16>) -> tensor<{m}x{n}xbf16> attributes {{topo.function = "product"}} {{
  %z = arith.constant 0.0 : f32
  %i = tensor.empty() : tensor<{m}x{n}xf32>
  %f = linalg.fill ins(%z : f32) outs(%i : tensor<{m}x{n}xf32>) -> tensor<{m}x{n}xf32>
  %c = linalg.contract indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>]
      ins(%a, %b : tensor<{m}x{k}xbf16>, tensor<{n}x{k}xbf16>) outs(%f : tensor<{m}x{n}xf32>) -> tensor<{m}x{n}xf32>
  %r = "topo.demote"(%c) : (tensor<{m}x{n}xf32>) -> tensor<{m}x{n}xbf16>
  return %r : tensor<{m}x{n}xbf16>
}}
"""


def device() -> Device:
    return load("h200-x1").primary


def kernel_module(text: str) -> ir.Module:
    """Kernel IR of structured IR; only one function may be lowered."""
    return to_kernel_ir(ir.Module.parse(text, dialects.load(ir.Context())))


def sum_of_squares(m: int = 6, n: int = 200, element: str = "f32") -> ir.Module:
    return kernel_module(ROWS.format(m=m, n=n, t=element))


def product(m: int, n: int, k: int) -> ir.Module:
    return kernel_module(PRODUCT.format(m=m, n=n, k=k))


def only_kernel(module: ir.Module) -> ir.Operation:
    (function,) = kernel_functions(module)
    return function


class Interpreted:
    """A backend on the CPU. Times come from a function of the source."""

    device = torch.device("cpu")

    def __init__(self, us=lambda source: 1.0, l2_bytes: int = 0):
        self.us, self.l2_bytes = us, l2_bytes

    def prepare(self, source: Mapping[str, Any], tensors: Sequence[torch.Tensor]):
        kernel = launch_record(source)
        with interpreter.interpreting():
            function = load_function(source["source"], kernel.file, kernel.function)
        arguments = kernel_arguments(kernel, list(tensors))

        def launch() -> None:
            with interpreter.interpreting():
                interpreter.launch(function, kernel.grid, arguments, list(tensors))

        launch.us = self.us(source)  # type: ignore[attr-defined]
        return launch

    def time_us(self, launches, *, careful: bool, give_up_us: float) -> tuple[float, bool]:
        for launch in launches:
            launch()
        return launches[0].us, True


class FakeMeasurer:
    """Times by a function of the tile; a string is the reason of a rejection, None means that time ran out."""

    def __init__(self, answer):
        self.answer = answer
        self.jobs: list[Job] = []

    def close(self) -> None:
        self.closed = True

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[tuple[Job, Outcome]]:
        for job in jobs:
            self.jobs.append(job)
            match self.answer(job):
                case None:
                    yield job, Outcome(reason="not tried: time ran out", tried=False)
                case str(reason):
                    yield job, Outcome(reason=reason)
                case us:
                    yield job, Outcome(float(us))
