"""`--verify-each=numeric`: executes every public function before and after each pass on the same random inputs.

A pass may reorder roundings, not change values: results must agree within `torch.testing`'s tolerance of their dtype, integers
and booleans exactly, NaN at the same places. Checking starts with the first state of the module that the reference executor
can run (structured IR), so it may be switched on for pipelines that begin in the torch dialect.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch_mlir import ir

from topo_opt import reference
from topo_opt.errors import InputError, TopoError, UnsupportedError
from topo_opt.pipeline.instruments import Watcher
from topo_opt.pipeline.run import Step
from topo_opt.reference.binding import find_function
from topo_opt.reference.element_types import element_dtype

SEED = 0
# Integers are mostly indices. Their range is not known, so the widest of these that no check of the model refuses is taken.
_INTEGER_BOUNDS = (8, 4, 2, 1)


class NumericMismatch(TopoError):
    """A pass changed what the program computes: a fault of that pass."""


class NumericCheck(Watcher):
    """The instrument. Keeps the inputs and results of each function, no IR."""

    def __init__(self) -> None:
        self._inputs: dict[str, list[Tensor]] = {}
        self._results: dict[str, list[Tensor]] = {}
        self._started = False
        self.compared = 0
        """Function executions that were compared with the one before the pass."""

    def before(self, step: Step, module: ir.Module) -> None:
        if not self._started:
            self._record(module)

    def after(self, step: Step, module: ir.Module) -> None:
        if not self._started:
            self._record(module)
            return
        for symbol, expected in self._results.items():
            results = reference.run(module, symbol, self._inputs[symbol])
            _require_same(str(step.leaf), symbol, results, expected)
            self.compared += 1

    def _record(self, module: ir.Module) -> None:
        try:
            found = {symbol: _first_run(module, symbol) for symbol in _public_functions(module)}
        except UnsupportedError:
            return
        self._inputs = {symbol: inputs for symbol, (inputs, _) in found.items()}
        self._results = {symbol: results for symbol, (_, results) in found.items()}
        self._started = True


def _public_functions(module: ir.Module) -> Iterator[str]:
    for view in module.body.operations:
        op = view.operation
        private = (
            "sym_visibility" in op.attributes
            and ir.StringAttr(op.attributes["sym_visibility"]).value == "private"
        )
        if op.name == "func.func" and not private and len(op.regions[0].blocks):
            yield ir.StringAttr(op.attributes["sym_name"]).value


def _first_run(module: ir.Module, symbol: str) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs that the function accepts, and its results.

    Raises:
        UnsupportedError: the function is not structured IR.
        InputError: no inputs were found that the model's own checks accept.
    """
    refusal: InputError | None = None
    for bound in _INTEGER_BOUNDS:
        inputs = _random_inputs(module, symbol, bound)
        try:
            return inputs, reference.run(module, symbol, inputs)
        except InputError as error:
            refusal = error
    raise InputError(f"no random inputs fit @{symbol}: {refusal}")


def _random_inputs(module: ir.Module, symbol: str, bound: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    function_type = ir.FunctionType(
        ir.TypeAttr(find_function(module, symbol).attributes["function_type"]).value
    )
    return [_random(kind, symbol, bound, generator) for kind in function_type.inputs]


def _random(kind: ir.Type, symbol: str, bound: int, generator: torch.Generator) -> Tensor:
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        raise UnsupportedError(f"@{symbol} takes a {kind}, which is not a static tensor")
    dtype, shape = element_dtype(kind.element_type), list(kind.shape)
    if dtype.is_floating_point or dtype.is_complex:
        # Drawn in one type and then narrowed, so that the numbers are the same at every precision.
        drawn = torch.randn(
            shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64
        )
        return drawn.to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else bound, shape, generator=generator).to(dtype)


def _require_same(step: str, symbol: str, results: list[Tensor], expected: list[Tensor]) -> None:
    if len(results) != len(expected):
        raise NumericMismatch(
            f"pass '{step}' changed the number of results of @{symbol}: {len(results)} != {len(expected)}"
        )
    for i, (result, before) in enumerate(zip(results, expected)):
        try:
            torch.testing.assert_close(result, before, equal_nan=True)
        except AssertionError as error:
            reason = " ".join(str(error).split())
            raise NumericMismatch(f"pass '{step}' changed result {i} of @{symbol}: {reason}") from None
