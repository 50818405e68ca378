"""Preparing functions for evaluation: every op becomes a step, every value a slot that is freed after its last use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch_mlir import ir

from topo_opt.errors import InputError, UnsupportedError
from topo_opt.reference.body import captures, prepare_scalar_op
from topo_opt.reference.scalar_ops import SCALAR_OPS

Step = Callable[[list[Tensor]], Sequence[Tensor]]
Trace = Callable[[ir.Operation, Sequence[Tensor]], None]
EVALUATORS: dict[str, Callable[[ir.Operation, "Program"], Step]] = {}
"""Op name -> prepare(op, program) -> step(operands followed by captured values) -> results."""


def evaluates(*names: str) -> Callable[[Callable[[ir.Operation, "Program"], Step]], Callable]:
    """Adds rows to `EVALUATORS`."""

    def add(prepare: Callable[[ir.Operation, "Program"], Step]) -> Callable:
        for name in names:
            EVALUATORS[name] = prepare
        return prepare

    return add


@dataclass(frozen=True)
class _Line:
    op: ir.Operation
    step: Step
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]


@dataclass(frozen=True)
class Function:
    """A function ready to run."""

    lines: tuple[_Line, ...]
    slots: int
    arguments: int
    returned: tuple[int, ...]
    trace: Trace | None

    def __call__(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        values: list[Tensor | None] = [None] * self.slots
        values[: self.arguments] = arguments
        for line in self.lines:
            results = line.step([values[s] for s in line.inputs])  # type: ignore[misc]
            for slot, result in zip(line.outputs, results, strict=True):
                values[slot] = result
            if self.trace is not None:
                self.trace(line.op, results)
            for slot in line.dead:
                values[slot] = None
        return [values[s] for s in self.returned]  # type: ignore[misc]


class Program:
    """The functions of a module. Valid until the module changes; preparation happens once per function."""

    def __init__(self, module: ir.Module, trace: Trace | None = None):
        self.trace = trace
        self.symbols: dict[str, ir.Operation] = {}
        for view in module.body.operations:
            op = view.operation
            if "sym_name" in op.attributes:
                self.symbols[ir.StringAttr(op.attributes["sym_name"]).value] = op
        self._functions: dict[str, Function] = {}

    def find(self, symbol: str) -> ir.Operation:
        """The `func.func` of this name.

        Raises:
            InputError: there is none.
        """
        if symbol not in self.symbols:
            names = ", ".join(self.symbols) or "none"
            raise InputError(f"the module has no function @{symbol}", hint=f"its functions: {names}")
        return self.symbols[symbol]

    def function(self, symbol: str) -> Function:
        """The prepared body of a function.

        Raises:
            UnsupportedError: an op without an evaluator, named with its location.
        """
        if symbol not in self._functions:
            self._functions[symbol] = self._prepare(self.find(symbol))
        return self._functions[symbol]

    def _prepare(self, func: ir.Operation) -> Function:
        if not func.regions[0].blocks:
            raise InputError(
                f"@{ir.StringAttr(func.attributes['sym_name']).value} is a declaration without a body"
            )
        block = func.regions[0].blocks[0]
        slots = {hash(a): i for i, a in enumerate(block.arguments)}
        drafts: list[tuple[ir.Operation, Step, tuple[int, ...], tuple[int, ...]]] = []
        returned: tuple[int, ...] = ()
        for view in block.operations:
            op = view.operation
            read = [*op.operands, *(captures(op) if op.regions else ())]
            inputs = tuple(slots[hash(v)] for v in read)
            if op.name == "func.return":
                returned = inputs
                continue
            outputs = tuple(range(len(slots), len(slots) + len(op.results)))
            slots.update((hash(r), s) for r, s in zip(op.results, outputs, strict=True))
            drafts.append((op, self._step(op), inputs, outputs))
        return Function(
            _with_lifetimes(drafts, returned), len(slots), len(block.arguments), returned, self.trace
        )

    def _step(self, op: ir.Operation) -> Step:
        if op.name in EVALUATORS:
            return EVALUATORS[op.name](op, self)
        if op.name in SCALAR_OPS or op.name == "tensor.extract":
            return prepare_scalar_op(op)
        raise UnsupportedError(f"the reference executor has no rule for {op.name}", where=location_text(op))


def location_text(op: ir.Operation) -> str | None:
    """The op's location as `file:line` or a name; None when unknown."""
    text = str(op.location).removeprefix("loc(").removesuffix(")").replace('"', "")
    return None if text == "unknown" else text[:200]


def _with_lifetimes(drafts: list, returned: tuple[int, ...]) -> tuple[_Line, ...]:
    later = set(returned)
    lines = []
    for op, step, inputs, outputs in reversed(drafts):
        dead = tuple(sorted({*inputs, *outputs} - later))
        later.update(inputs)
        lines.append(_Line(op, step, inputs, outputs, dead))
    return tuple(reversed(lines))
