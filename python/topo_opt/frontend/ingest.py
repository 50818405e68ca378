"""Exported programs -> one structured module, with everything that was left to ATen named."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch_mlir import ir

from topo_opt.dialects import load
from topo_opt.errors import InputError, Remark
from topo_opt.frontend.aten_export import Signature as AtenSignature
from topo_opt.frontend.aten_export import Slot, export_aten
from topo_opt.frontend.decomposition import try_decompose
from topo_opt.frontend.fx_graph import FxProgram, specialize
from topo_opt.frontend.lower_program import lower_program
from topo_opt.frontend.merge import merge_into
from topo_opt.frontend.signature import Signature

Bucket = Mapping[str, int]


@dataclass(frozen=True)
class FunctionRecord:
    """One function at one bucket.

    `symbol` is its name in the module, None when the whole function is left to ATen. `bucket` gives every dynamic dim by name.
    `program` is the normalized graph, for `aten_program`; it is no plain data and stays out of `as_json`.
    """

    function: str
    symbol: str | None
    bucket: dict[str, int]
    signature: Signature
    program: FxProgram

    def as_json(self) -> dict[str, Any]:
        """The record without the graph, as dictionaries and lists."""
        return {
            "function": self.function,
            "symbol": self.symbol,
            "bucket": dict(self.bucket),
            "signature": self.signature.as_json(),
        }

    def aten_program(self) -> dict[str, Any]:
        """The whole program as the AtenProgram of docs/architecture.md, section 6."""
        described = {r.name: r for r in self.signature.inputs}
        slots = []
        for node in self.program.graph.find_nodes(op="placeholder"):
            record = described[node.name]
            kind = "input" if record.kind == "literal" else record.kind
            slots.append(Slot(kind, record.target))
        results = [
            Slot("output" if r.kind == "literal" else r.kind, r.target) for r in self.signature.outputs
        ]
        return export_aten(self.program.graph, AtenSignature(tuple(slots), tuple(results)))


@dataclass(frozen=True)
class Ingested:
    """`module`: bytecode of the structured module with every function that could be lowered; what was not is in `remarks`."""

    module: bytes
    functions: tuple[FunctionRecord, ...]
    remarks: tuple[Remark, ...]


def ingest(
    programs: Mapping[str, ExportedProgram],
    buckets: Mapping[str, Sequence[Bucket]] | None = None,
    *,
    dim_names: Mapping[str, Mapping[str, str]] | None = None,
    extra_externs: Mapping[str, Mapping[str, str]] | None = None,
    on_stage: Callable[[str, str], None] | None = None,
) -> Ingested:
    """Lowers every function at every bucket into one structured module.

    Args:
        programs: function name -> exported program.
        buckets: function name -> sizes of dynamic dims, one variant each; a function not named has the sizes of its example.
        dim_names: function name -> {symbol: name}, for dims whose name the program has lost.
        extra_externs: function name -> {node of the normalized graph: reason}, to be left to ATen besides what `ingest`
            leaves by itself. The driver uses it for nodes whose lowering kills the process (`crash_probes`).
        on_stage: called with (function symbol, stage) before each stage, so that a crash can be told where it happened.

    Raises:
        InputError: function names that clash, a bucket that does not fit, or a bucket of an unknown function.
    """
    _check_names(programs, buckets or {})
    context = load(ir.Context())
    with context, ir.Location.unknown():
        whole = ir.Module.create()
    records: list[FunctionRecord] = []
    remarks: list[Remark] = []
    for function, exported in programs.items():
        decomposed, reason = try_decompose(exported)
        if reason is not None:
            remarks.append(Remark("not-decomposed", function, f"torch cannot take it apart: {reason}"))
        variants = list((buckets or {}).get(function) or [{}])
        for bucket in variants:
            program = specialize(decomposed, bucket, (dim_names or {}).get(function))
            sizes = {d.name: program.sizes[d.symbol] for d in program.signature.dims if program.static}
            symbol = variant_symbol(function, sizes if len(variants) > 1 else {})
            extra = (extra_externs or {}).get(function, {})
            lowered = lower_program(context, program, symbol, function, sizes, extra, on_stage)
            remarks += lowered.remarks
            if lowered.module is not None:
                merge_into(whole, lowered.module)
            found = symbol if lowered.module is not None else None
            records.append(FunctionRecord(function, found, sizes, program.signature, program))
    return Ingested(bytecode(whole), tuple(records), tuple(dict.fromkeys(remarks)))


def structured_module(
    program: ExportedProgram | torch.nn.Module | Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    bucket: Bucket | None = None,
) -> ir.Module:
    """The structured module of one function `main`, in a fresh context. Meant for tests and interactive use.

    Args:
        program: an exported program, or a module or function to export with `args` and `kwargs`.
    """
    if not isinstance(program, ExportedProgram):
        module = program if isinstance(program, torch.nn.Module) else _Function(program)
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    result = ingest({"main": program}, {"main": [bucket]} if bucket else None)
    return parse(result.module)


def parse(module: bytes | str, context: ir.Context | None = None) -> ir.Module:
    """A module from bytecode or text, in a context that knows every dialect."""
    return ir.Module.parse(module, load(context or ir.Context()))


def bytecode(module: ir.Module) -> bytes:
    """The module as MLIR bytecode."""
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def variant_symbol(function: str, sizes: Bucket) -> str:
    """The symbol of a function at a bucket, an identifier: `decode`, or `decode__batch_4__seq_1` when it has several."""
    parts = [function, *(f"{name}_{size}" for name, size in sizes.items())]
    return re.sub(r"\W", "_", "__".join(parts), flags=re.ASCII)


class _Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _check_names(programs: Mapping[str, Any], buckets: Mapping[str, Any]) -> None:
    symbols: dict[str, str] = {}
    for function in programs:
        symbol = variant_symbol(function, {})
        if symbol in symbols:
            raise InputError(
                f"functions '{symbols[symbol]}' and '{function}' have the same symbol '{symbol}'"
            )
        symbols[symbol] = function
    for function in buckets:
        if function not in programs:
            raise InputError(
                f"buckets for '{function}', which is no function", hint=f"functions: {', '.join(programs)}"
            )
