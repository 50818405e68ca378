"""Writes the bundle of a compilation, and makes sure that the runtime takes it before it replaces an older one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_mlir import ir

from topo_opt.errors import CompilerCrash, TopoError, UnsupportedError, UntrustedError

if TYPE_CHECKING:
    from topo_opt.codegen.plan import VariantRequest
    from topo_opt.driver import Compilation
    from topo_opt.frontend.archive_scan import ArchiveInfo
    from topo_opt.frontend.weights import WeightSource
    from topo_opt.model import FunctionVariant
    from topo_opt.report import Report


def write(compilation: Compilation, resources: Mapping[str, Any], summary: Report, out: Path) -> Path:
    """Writes the bundle; the path of its folder.

    Args:
        resources: what every kernel needs, where that was measured.

    Raises:
        UnsupportedError: a function that should be split is left to ATen.
        CompilerCrash: what was made cannot be opened.
    """
    from topo_opt.codegen.bundle import write_bundle
    from topo_opt.codegen.plan import build_plan
    from topo_opt.report_page.page import page

    _require_all_split(compilation)
    with compilation.options.phase("write"):
        built = build_plan(
            compilation.module,
            compilation.sources,
            [variant_request(compilation, variant) for variant in compilation.variants],
            resources=resources,
            meta={"topology": compilation.options.machine.name, "level": compilation.options.level},
        )
        weights = _weights(compilation, out)
        _require_aten_readable(compilation.model.aten)
        path = write_bundle(
            out,
            built,
            {symbol: source.source for symbol, source in compilation.sources.items()},
            aten={function: json.loads(text) for function, text in compilation.model.aten.items()},
            ir={"structured": _structured_text(compilation), "kernel": str(compilation.module)},
            report=summary.as_json(),
            page=page(summary, built.plan, compilation.options.machine, compilation.plans),
            tuning=_tuning_data(compilation),
            weights=weights.table if weights else None,
            weights_writer=weights.writer if weights else None,
        )
        _require_openable(path)
        return path


def _require_all_split(compilation: Compilation) -> None:
    """Ranks have no ATen program of their own to fall back to."""
    whole = [v.function for v in compilation.variants if v.symbol is None]
    if compilation.options.split and whole:
        reasons = [r.reason for r in compilation.remarks if r.kind == "left-to-aten"]
        raise UnsupportedError(
            f"'{whole[0]}' cannot be split over {compilation.options.mesh or 'devices'}: it is left to ATen as a whole"
            + (f" ({reasons[0]})" if reasons else "")
        )


def _tuning_data(compilation: Compilation) -> Any:
    """tuning.json: the measured times behind the choices, for other compiles; None when there are none."""
    from topo_opt.tuning.records import file_content

    entries = compilation.tuned.entries() if compilation.tuned else []
    return file_content(entries) if entries else None


def _require_aten_readable(programs: Mapping[str, str]) -> None:
    """The ATen programs must be what the runtime takes, before they replace those of an older bundle."""
    from topo_opt.runtime.aten_program import AtenProgram

    for function, text in programs.items():
        # Whose custom operators may run is for the one to say who loads the bundle.
        namespaces = frozenset(re.findall(r'"op": "(\w+)\.', text))
        try:
            AtenProgram(json.loads(text), extra_namespaces=namespaces, path=f"aten.{function}")
        except TopoError as error:
            raise CompilerCrash(
                f"the ATen program of '{function}' cannot be read back: {error.message}",
                hint="a fault of topo-opt; please report it with the model",
            ) from error


def _require_openable(path: Path) -> None:
    from topo_opt.runtime.bundle import open_bundle

    try:
        open_bundle(path, verify_weights=False)
    except TopoError as error:
        shutil.rmtree(path, ignore_errors=True)
        raise CompilerCrash(
            f"the bundle that was made cannot be opened: {error.message}",
            hint="a fault of topo-opt; please report it with the model",
        ) from error


def _weights(compilation: Compilation, out: Path) -> WeightSource | None:
    """A reference to the archives when all functions come from such, else a packed copy."""
    from topo_opt.frontend import weights

    inputs, options = compilation.inputs, compilation.options
    paths = {name: Path(source) for name, source in inputs.items() if isinstance(source, str | Path)}
    if len(paths) == len(inputs):
        archives = _scanned(paths, options.trust)
        if archives is not None:
            return weights.reference(archives, out)
    if not options.pack_weights:
        return None
    from topo_opt.frontend.load import load_archive

    programs = {
        name: load_archive(paths[name], trust=options.trust) if name in paths else source
        for name, source in inputs.items()
    }
    return weights.pack(weights.program_tensors(programs))


def _scanned(paths: Mapping[str, Path], trust: bool) -> dict[str, ArchiveInfo] | None:
    """What the scans say about where the weights lie; None when a trusted file has what no scan accepts."""
    from topo_opt.frontend.archive_scan import scan

    try:
        return {name: scan(path) for name, path in paths.items()}
    except UntrustedError:
        if not trust:
            raise
        return None


def _structured_text(compilation: Compilation) -> str:
    return str(ir.Module.parse(compilation.model.module, compilation.module.context))


def variant_request(compilation: Compilation, variant: FunctionVariant) -> VariantRequest:
    """A variant as the plan is asked for it."""
    from topo_opt.codegen.plan import VariantRequest

    signature = variant.signature
    reasons = [r.reason for r in compilation.remarks if r.kind == "left-to-aten"]
    return VariantRequest(
        variant.function,
        variant.symbol,
        variant.bucket,
        signature.inputs,
        signature.outputs,
        signature.in_tree,
        signature.out_tree,
        reason=None if variant.symbol else (reasons or ["it could not be lowered"])[0],
    )
