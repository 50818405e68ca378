"""A model on its way into the compiler: loaded and lowered to structured IR in a child process, handed over as plain data.

The child is there because a model file comes from strangers and the native lowering can die on odd input; what it hands over
names no code (`frontend.wire`). Weights stay where they are: the parent gets a description of them.
"""

import functools
import itertools
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topo_opt.errors import CompilerCrash, InputError, Remark, UnsupportedError
from topo_opt.frontend import wire
from topo_opt.frontend.isolate import Limits, run_isolated
from topo_opt.frontend.signature import DimRecord, InputRecord, OutputRecord, Signature

for _record in (DimRecord, InputRecord, OutputRecord, Signature):
    wire.record(_record)

Source = Any
"""A path to a `.pt2` file, or an `ExportedProgram` in memory."""


DEFAULT_LIMITS = Limits()
_REPRODUCER_BYTES = 64 << 20


@wire.record
@dataclass(frozen=True)
class FunctionVariant:
    """One function at one bucket. `symbol` is its name in the module, None when the whole function is left to ATen."""

    function: str
    symbol: str | None
    bucket: dict[str, int]
    signature: Signature


@wire.record
@dataclass(frozen=True)
class ImportedModel:
    """What the child hands over.

    `module` is bytecode of the structured module, `aten` the ATen program of each function as JSON text.
    """

    module: bytes
    variants: tuple[FunctionVariant, ...]
    aten: dict[str, str]
    remarks: tuple[Remark, ...] = field(default=())


def import_model(
    sources: Mapping[str, Source],
    *,
    buckets: Mapping[str, Sequence[int]] | None = None,
    trust: bool = False,
    limits: Limits = DEFAULT_LIMITS,
    leave: Mapping[str, Mapping[str, str]] | None = None,
) -> ImportedModel:
    """Loads and lowers every function.

    Args:
        sources: function name -> path or exported program.
        buckets: name of a dynamic dim -> sizes to compile for. Every function gets a variant for each combination of the sizes
            of the dims that it has.
        trust: load archives without scanning them first.
        leave: function name -> {node of its graph: reason}, to be left to ATen besides what the import leaves by itself.

    Raises:
        InputError: a file that cannot be loaded, or buckets that do not fit.
        UntrustedError: a file with content that is not on the list.
        UnsupportedError, CompilerCrash: the model cannot be imported.
    """
    given = dict(sources), dict(buckets or {}), trust
    write = functools.partial(_write_reproducer, given[0])
    extern = {function: dict(nodes) for function, nodes in (leave or {}).items()}
    for find_extern in (_deadly_nodes, _all_nodes, None):
        try:
            return run_isolated(_import, *given, extern, stage="import", limits=limits, reproducer=write)
        except CompilerCrash as crash:
            if find_extern is None:
                raise
            more = run_isolated(
                find_extern, *given, crash.message, stage="probe", limits=limits, reproducer=write
            )
            extern = {f: extern.get(f, {}) | more.get(f, {}) for f in (*extern, *more)}
    raise AssertionError("the last attempt returns or raises")


def torch_dialect(
    sources: Mapping[str, Source],
    *,
    buckets: Mapping[str, Sequence[int]] | None = None,
    trust: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> str:
    """The variants in the torch dialect as text, one module each, as they are before the first pass; raises as `import_model`."""
    return run_isolated(_torch_text, dict(sources), dict(buckets or {}), trust, stage="import", limits=limits)


def _import(
    sources: Mapping[str, Source],
    buckets: Mapping[str, Sequence[int]],
    trust: bool,
    extern: Mapping[str, Mapping[str, str]],
) -> ImportedModel:
    from topo_opt.frontend.ingest import ingest

    programs = _load(sources, trust)
    asked = _asked(programs, buckets)
    ingested = ingest(programs, asked.combinations, dim_names=asked.names, extra_externs=extern)
    variants = tuple(FunctionVariant(r.function, r.symbol, r.bucket, r.signature) for r in ingested.functions)
    aten, remarks = _aten_programs(programs, ingested)
    return ImportedModel(ingested.module, variants, aten, (*ingested.remarks, *remarks))


def _deadly_nodes(
    sources: Mapping[str, Source], buckets: Mapping[str, Sequence[int]], trust: bool, reason: str
) -> dict[str, dict[str, str]]:
    """Function -> node -> what happened, for the nodes whose lowering alone ends the process."""
    from topo_opt.frontend.crash_probes import deadly_nodes
    from topo_opt.frontend.fx_graph import normalize

    programs = _load(sources, trust)
    asked = _asked(programs, buckets)
    return {
        function: deadly_nodes(normalize(program, *asked.first(function)))
        for function, program in programs.items()
    }


def _all_nodes(
    sources: Mapping[str, Source], buckets: Mapping[str, Sequence[int]], trust: bool, reason: str
) -> dict[str, dict[str, str]]:
    """Every node that can be left to ATen, with the crash as the reason: for a crash that no node has alone."""
    from topo_opt.frontend.externs import can_leave
    from topo_opt.frontend.fx_graph import normalize

    programs = _load(sources, trust)
    asked = _asked(programs, buckets)
    graphs = {
        function: normalize(program, *asked.first(function)).graph for function, program in programs.items()
    }
    return {
        function: {
            n.name: f"lowering the function crashes: {reason}"
            for n in graph.nodes
            if n.op == "call_function" and can_leave(n)
        }
        for function, graph in graphs.items()
    }


def _write_reproducer(sources: Mapping[str, Source], folder: Path) -> None:
    """The models of a crash: small ones as they are, of large ones only where they were."""
    import torch

    for name, source in sources.items():
        target = folder / f"{name}.pt2"
        if not isinstance(source, str | Path):
            nbytes = sum(value.nbytes for value in source.state_dict.values())
            if nbytes <= _REPRODUCER_BYTES:
                torch.export.save(source, target)
        elif Path(source).stat().st_size <= _REPRODUCER_BYTES:
            shutil.copyfile(source, target)
        else:
            (folder / f"{name}.txt").write_text(f"{Path(source).absolute()}\n")


def _aten_programs(programs: Mapping[str, Any], ingested: Any) -> tuple[dict[str, str], list[Remark]]:
    """The ATen program of every function, with its dims dynamic where they are; a function that has none becomes a remark."""
    import json

    from topo_opt.frontend.aten_export import export_aten
    from topo_opt.frontend.decomposition import decompose

    programs_json: dict[str, str] = {}
    remarks: list[Remark] = []
    for function, exported in programs.items():
        record = next(r for r in ingested.functions if r.function == function)
        try:
            if record.signature.dims:
                decomposed = decompose(exported)
                data = export_aten(decomposed.graph_module, decomposed.graph_signature)
            else:
                data = record.aten_program()
        except UnsupportedError as error:
            if record.symbol is None:
                whole = [r for r in ingested.remarks if r.kind == "not-decomposed" and r.subject == function]
                error.hint = whole[0].reason if whole else error.hint
                raise
            remarks.append(Remark("no-fallback", function, error.message, error.where))
            continue
        programs_json[function] = json.dumps(data, allow_nan=False)
    return programs_json, remarks


def _torch_text(sources: Mapping[str, Source], buckets: Mapping[str, Sequence[int]], trust: bool) -> str:
    from torch_mlir import ir

    from topo_opt.dialects import load
    from topo_opt.frontend.decomposition import decompose
    from topo_opt.frontend.fx_graph import specialize
    from topo_opt.frontend.import_torch import ImportFailure, import_graph
    from topo_opt.frontend.ingest import variant_symbol
    from topo_opt.frontend.legalize import legalize

    programs = _load(sources, trust)
    asked = _asked(programs, buckets)
    context = load(ir.Context())
    texts = []
    for function, exported in programs.items():
        decomposed = decompose(exported)
        for bucket in asked.combinations.get(function, [{}]):
            program = specialize(decomposed, bucket, asked.names[function])
            if program.whole_reason is not None:
                reason = program.whole_reason
                raise UnsupportedError(
                    f"'{function}' is not static: {reason.subject}: {reason.reason}", where=reason.where
                )
            symbol = variant_symbol(function, bucket)
            try:
                module = import_graph(
                    context,
                    legalize(program, {}).graph,
                    symbol,
                    program.signature,
                    {"topo.function": function},
                )
            except ImportFailure as failure:
                raise UnsupportedError(
                    f"node {failure.node} of '{function}' cannot be imported: {failure.reason}"
                ) from None
            texts.append(str(module))
    return "// -----\n".join(texts)


def _load(sources: Mapping[str, Source], trust: bool) -> dict[str, Any]:
    return {name: _load_one(source, trust) for name, source in sources.items()}


def _load_one(source: Source, trust: bool) -> Any:
    if not isinstance(source, str | Path):
        return source
    from topo_opt.frontend.load import load_archive

    return load_archive(Path(source), trust=trust)


@dataclass(frozen=True)
class _Asked:
    """What the caller's buckets come to: function -> the sizes of its dims by name, and symbol -> name of dims that the caller named."""

    combinations: dict[str, list[dict[str, int]]]
    names: dict[str, dict[str, str]]

    def first(self, function: str) -> tuple[dict[str, int], dict[str, str]]:
        """The first bucket of a function, and the names of its dims."""
        return (self.combinations[function] or [{}])[0], self.names[function]


def _asked(programs: Mapping[str, Any], buckets: Mapping[str, Sequence[int]]) -> _Asked:
    """Every combination of the sizes asked for.

    Raises:
        InputError: a dim that no function has, or two keys for one dim.
    """
    from topo_opt.frontend.dynamic_dims import dynamic_dims

    dims = {function: dynamic_dims(program) for function, program in programs.items()}
    names = {function: _names_given(known, buckets) for function, known in dims.items()}
    dims = {function: dynamic_dims(program, names[function]) for function, program in programs.items()}
    combinations = {}
    missing = dict.fromkeys(buckets)
    for function, known in dims.items():
        asked: dict[str, list[tuple[str, int]]] = {}
        keys: dict[str, str] = {}
        for key, dim in _keyed(known).items():
            if key not in buckets:
                continue
            missing.pop(key, None)
            if keys.setdefault(dim.name, key) != key:
                raise InputError(
                    f"buckets '{keys[dim.name]}' and '{key}' are the same dim of '{function}'",
                    hint="keep one",
                )
            asked[dim.name] = [(dim.name, size) for size in buckets[key]]
        in_order = [asked[key] for key in sorted(asked, key=lambda n: list(buckets).index(keys[n]))]
        combinations[function] = [dict(choice) for choice in itertools.product(*in_order)]
    for key in missing:
        raise InputError(
            f"a bucket was given for '{key}', which is no dynamic dim",
            hint=_how_to_name([dim for known in dims.values() for dim in known]),
        )
    return _Asked(combinations, names)


def _keyed(dims: Sequence[DimRecord]) -> dict[str, DimRecord]:
    """What a bucket's key may be -> the dim it means: its name, its symbol, or a place of it such as `input_ids[1]`."""
    from topo_opt.frontend.dynamic_dims import places

    return {key: dim for dim in dims for key in (dim.name, dim.symbol, *places(dim))}


def _names_given(dims: Sequence[DimRecord], keys: Collection[str]) -> dict[str, str]:
    """Symbol -> the name that a bucket gives it.

    A `.pt2` does not hold the names that dims were exported under. When just one dim is without a name and just one key is not
    found otherwise, they belong together.
    """
    direct = _keyed(dims)
    taken = {direct[key].symbol for key in keys if key in direct}
    open_keys = [key for key in keys if key not in direct]
    unnamed = [dim for dim in dims if dim.name == dim.symbol and dim.symbol not in taken]
    return {unnamed[0].symbol: open_keys[0]} if len(open_keys) == len(unnamed) == 1 else {}


def _how_to_name(dims: Sequence[DimRecord]) -> str:
    """The keys that a bucket may have, one for each dim."""
    known = ", ".join(dict.fromkeys(_description(dim) for dim in dims)) or "none"
    lost = any(dim.name == dim.symbol for dim in dims)
    return f"dynamic dims: {known}" + (
        "; a .pt2 does not keep their names, so name them by a place" if lost else ""
    )


def _description(dim: DimRecord) -> str:
    from topo_opt.frontend.dynamic_dims import places

    return dim.name if dim.name != dim.symbol else next(iter(places(dim)), dim.symbol)
