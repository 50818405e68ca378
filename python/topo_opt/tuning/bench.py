"""One kernel with its buffers, ready to check and time candidates on. Runs in the worker that owns the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from topo_opt.runtime.dtypes import torch_dtype, torch_dtype_of_triton
from topo_opt.tuning import gate
from topo_opt.tuning.arguments_data import Argument, Signature

MOST_SETS = 256
MOST_BYTES = 4 << 30
SEED = 0

Launch = Callable[[], None]


class Backend(Protocol):
    """How kernels run on one device."""

    device: torch.device
    l2_bytes: int

    def prepare(self, source: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Launch:
        """A compiled launch with its arguments bound; `source` is a `KernelSource` as plain data. Raises what the compiler
        raises, and RuntimeError when the device cannot hold the kernel."""

    def time_us(self, launches: Sequence[Launch], *, careful: bool, give_up_us: float) -> tuple[float, bool]:
        """Median time of one launch in microseconds, one after the other over `launches`, and whether it is final: a first
        estimate over `give_up_us` is not measured any closer."""


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate: a time, or the reason for its rejection."""

    us: float = 0.0
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason


class Bench:
    """Buffers of one kernel: several sets where together they must not fit into L2."""

    def __init__(self, signature: Signature, backend: Backend):
        self.signature, self.backend = signature, backend
        generator = torch.Generator(device=backend.device).manual_seed(SEED)
        self.pristine = [_fill(a, backend.device, generator) for a in signature.arguments]
        self._first: dict[str, list[torch.Tensor]] = {}
        self.sets = [self._copies(i) for i in range(self._count())]
        self.expected: list[torch.Tensor] | None = None
        self.best_us = float("inf")

    def _count(self) -> int:
        """Sets of buffers, so that what one launch leaves in L2 is gone when its set comes again."""
        cold = sum(
            t.numel() * t.element_size() for t, a in zip(self.pristine, self.signature.arguments) if a.cold
        )
        if cold == 0:
            return 1
        wanted = 1 + -(-2 * self.backend.l2_bytes // cold)
        return max(1, min(wanted, MOST_SETS, MOST_BYTES // cold))

    def _copies(self, number: int) -> dict[str, list[torch.Tensor]]:
        """Buffers of one launch: own copies of what is cold, the first set's of the rest."""
        arguments = [
            t.clone() if number == 0 or a.cold else self._first["arg"][i]
            for i, (t, a) in enumerate(zip(self.pristine, self.signature.arguments))
        ]
        results = []
        for i, r in enumerate(self.signature.results):
            if r.argument is not None:
                results.append(arguments[r.argument])
            elif number:
                results.append(self._first["result"][i])
            else:
                results.append(torch.empty(r.shape, dtype=torch_dtype(r.dtype), device=self.backend.device))
        found = {"arg": arguments, "result": results}
        if number == 0:
            self._first = found
        return found

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        tensors = [*self.pristine, *(t for s in self.sets for t in (*s["arg"], *s["result"]))]
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())

    def set_reference(self, source: Mapping[str, Any]) -> str:
        """Takes the results of this kernel as the right ones; "" or why it cannot."""
        results, reason = self._checked(source)[1:]
        if not reason:
            self.expected = results
        return reason

    def measure(self, source: Mapping[str, Any], *, careful: bool = False) -> Outcome:
        """Checks a candidate and times it."""
        launches, results, reason = self._checked(source)
        if not reason and self.expected is not None:
            reason = gate.mismatch(results, self.expected)
        if reason:
            return Outcome(reason=reason)
        us, final = self.backend.time_us(launches, careful=careful, give_up_us=3 * self.best_us)
        if final:
            self.best_us = min(self.best_us, us)
        again, reason = gate.outputs(self._runner(launches[0]), runs=1)
        if not reason and not all(gate.same_bits(a, b) for a, b in zip(results, again)):
            reason = "the results after many launches differ from those of the first: a race, or scratch left behind"
        return Outcome(reason=reason) if reason else Outcome(us)

    def _checked(self, source: Mapping[str, Any]) -> tuple[list[Launch], list[torch.Tensor], str]:
        try:
            launches = self._launches(source)
        except Exception as error:  # of the compiler or of the driver: the candidate's, whatever its type
            return [], [], f"it does not compile: {_last_line(error)}"
        results, reason = gate.outputs(self._runner(launches[0]))
        return launches, results, reason

    def _launches(self, source: Mapping[str, Any]) -> list[Launch]:
        scratch = [
            torch.zeros(s["numel"], dtype=torch_dtype_of_triton(s["dtype"]), device=self.backend.device)
            for s in source["scratch"]
        ]
        launches = []
        for buffers in self.sets:
            pools = buffers | {"scratch": scratch}
            tensors = [_as_real(pools[p["kind"]][p["index"]]) for p in source["params"]]
            launches.append(self.backend.prepare(source, tensors))
        return launches

    def _runner(self, launch: Launch) -> gate.Run:
        first = self.sets[0]

        def run() -> list[torch.Tensor]:
            for tensor, value in zip(first["arg"], self.pristine):
                tensor.copy_(value)
            for tensor, result in zip(first["result"], self.signature.results):
                if result.argument is None:
                    tensor.view(-1).view(torch.uint8).fill_(255)
            launch()
            return [t.clone() for t in first["result"]]

        return run


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _fill(argument: Argument, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Values of one argument, contiguous; see `arguments`."""
    shape, dtype, count = argument.shape, torch_dtype(argument.dtype), prod(argument.shape)
    match argument.fill:
        case "true":
            return torch.ones(shape, dtype=dtype, device=device)
        case "small":
            return torch.randint(-8, 8, shape, generator=generator, device=device).to(dtype)
        case "ends":
            steps = torch.arange(count, device=device) * argument.bound // max(count - 1, 1)
            return steps.to(dtype).reshape(shape)
        case "index":
            last = argument.bound - min(count, argument.bound)
            return (torch.arange(count, device=device) % argument.bound + last).clamp_(
                max=argument.bound - 1
            ).to(dtype).reshape(shape)  # fmt: skip
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device) / 2
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (torch.randn(shape, generator=generator, dtype=wide, device=device) / 2).to(dtype)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1][:200]}"
