"""The `*-opt` half of `topo-opt`: parse MLIR, run a pipeline, print."""

import argparse
import io
import re
import sys
from pathlib import Path

from torch_mlir import ir

from topo_opt import dialects
from topo_opt.errors import InputError, OptionError, PipelineError, TopoError
from topo_opt.passes import PASSES
from topo_opt.pipeline import diagnostics, remarks
from topo_opt.pipeline.diagnostics import DiagnosedError, Diagnostic
from topo_opt.pipeline.instruments import PrintIr, Reproducer, Timing
from topo_opt.pipeline.run import Instrument, build
from topo_opt.pipeline.run import run as run_pipeline
from topo_opt.pipeline.spec import Group, parse
from topo_opt.pipeline.upstream import nearest, upstream_passes
from topo_opt.tools import expected
from topo_opt.tools.output import check_destination, write_output

BYTECODE_MAGIC = b"ML\xefR"
SPLIT_MARKER = "// -----"
STDIN = "-"


def run(arguments: argparse.Namespace) -> int:
    """Does what the command line asks of one MLIR file; returns the exit code.

    Raises:
        TopoError: the input cannot be read, or the pipeline does not parse.
    """
    if len(arguments.inputs) > 1:
        raise OptionError(f"{len(arguments.inputs)} inputs were given, MLIR is processed one file at a time")
    check_pass_names(arguments)
    check_destination(arguments.output)
    name = arguments.inputs[0] if arguments.inputs else STDIN
    data = sys.stdin.buffer.read() if name == STDIN else _read(name)
    chunks = _chunks(data, split=arguments.split_input_file)
    pipeline = _pipeline(arguments, chunks[0])
    if arguments.dump_pass_pipeline:
        print(f"Pass Manager with {sum(1 for _ in pipeline.leaves())} passes:\n{pipeline}", file=sys.stderr)
    if arguments.verify_diagnostics:
        return _verify(arguments, name, chunks, pipeline)
    results = [_process(arguments, name, chunk, pipeline) for chunk in chunks]
    printed = [result for result in results if result is not None]
    separator = b"" if arguments.emit_bytecode else f"{SPLIT_MARKER}\n".encode()
    write_output(separator.join(printed), arguments.output)
    return 0 if len(printed) == len(results) else 1


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}") from None


def _chunks(data: bytes, *, split: bool) -> list[bytes]:
    """The parts of a file between the markers, each padded with empty lines so that its line numbers are the file's."""
    if not split or data.startswith(BYTECODE_MAGIC):
        return [data]
    chunks, line = [], 0
    for part in re.split(rb"^// -----[^\n]*$", data, flags=re.MULTILINE):
        chunks.append(b"\n" * line + part)
        line += part.count(b"\n")
    return chunks


def _pipeline(arguments: argparse.Namespace, data: bytes) -> Group:
    given = [text for text in (arguments.pass_pipeline, arguments.passes) if text is not None]
    if len(given) > 1:
        raise OptionError("both --pass-pipeline and -p were given", hint="they say the same thing; keep one")
    if arguments.run_reproducer:
        match = re.search(
            r'mlir_reproducer: \{\s*pipeline: "((?:\\.|[^"\\])*)"', data.decode("utf-8", "replace")
        )
        if not match:
            raise InputError(
                "the input has no pipeline inside", hint="--run-reproducer takes a file that a crash has left"
            )
        try:
            return parse(re.sub(r"\\(.)", r"\1", match[1]))
        except PipelineError as error:
            raise InputError(f"the pipeline inside the input: {error.message}", hint=error.hint) from None
    return parse(given[0] if given else "")


def instruments_of(arguments: argparse.Namespace) -> list[Instrument]:
    """The instruments that the command line asks for; the same for MLIR input and for models."""
    instruments: list[Instrument] = []
    if arguments.mlir_pass_pipeline_crash_reproducer:
        path = Path(arguments.mlir_pass_pipeline_crash_reproducer)
        instruments.append(Reproducer(path, verify_each=arguments.verify_each != "false"))
    if arguments.verify_each == "numeric":
        from topo_opt.pipeline.numeric import NumericCheck

        instruments.append(NumericCheck())
    after = _printed_after(arguments)
    if after or arguments.mlir_print_ir_after_all or arguments.mlir_print_ir_after_change:
        tree = arguments.mlir_print_ir_tree_dir
        instruments.append(
            PrintIr(
                lambda name: not after or name in after,
                only_changes=arguments.mlir_print_ir_after_change,
                tree_dir=Path(tree) if tree else None,
                debug_info=arguments.mlir_print_debuginfo,
            )
        )
    if arguments.mlir_timing:
        instruments.append(Timing())
    return instruments


def check_pass_names(arguments: argparse.Namespace) -> None:
    """Raises OptionError for an unknown pass in `--mlir-print-ir-after`, which would else print nothing without a word."""
    for name in _printed_after(arguments):
        if name not in PASSES and name not in upstream_passes():
            near = nearest(name)
            hint = f"did you mean {' or '.join(near)}?" if near else "--list-passes prints those of topo-opt"
            raise OptionError(f"--mlir-print-ir-after: there is no pass '{name}'", hint=hint)


def _printed_after(arguments: argparse.Namespace) -> list[str]:
    return [name for names in arguments.mlir_print_ir_after for name in names.split(",")]


def _process(arguments: argparse.Namespace, name: str, data: bytes, pipeline: Group) -> bytes | None:
    """The printed result of one chunk, or None after its diagnostics were printed."""
    sources = {} if data.startswith(BYTECODE_MAGIC) else {name: data.decode("utf-8", "replace")}
    with remarks.collect() as collected:
        try:
            return _optimize(arguments, name, data, pipeline)
        except DiagnosedError as error:
            if arguments.traceback:
                raise
            for diagnostic in error.diagnostics:
                print(diagnostic.in_file(name).render(sources), file=sys.stderr)
            return None
        finally:
            for remark in collected if not arguments.quiet else ():
                where = f"{remark.where}: " if remark.where else ""
                print(f"{where}remark: {remark.subject}: {remark.reason} [{remark.kind}]", file=sys.stderr)


def _optimize(arguments: argparse.Namespace, name: str, data: bytes, pipeline: Group) -> bytes:
    """Parses, runs the pipeline and prints.

    Raises:
        DiagnosedError: the input does not parse, or a pass or the verifier refused it.
    """
    context = _context(arguments)
    module = _parse_module(context, name, data)
    run_pipeline(
        build(pipeline, context),
        module,
        verify_each=arguments.verify_each != "false",
        instruments=instruments_of(arguments),
    )
    if arguments.verify_roundtrip:
        _check_roundtrip(module)
    return _print(module, bytecode=arguments.emit_bytecode, debug_info=arguments.mlir_print_debuginfo)


def _context(arguments: argparse.Namespace) -> ir.Context:
    context = dialects.load(ir.Context())
    context.allow_unregistered_dialects = arguments.allow_unregistered_dialect
    return context


def _parse_module(context: ir.Context, name: str, data: bytes) -> ir.Module:
    with diagnostics.collect(context) as collected, context:
        try:
            return ir.Module.parse(data if data.startswith(BYTECODE_MAGIC) else data.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name} is neither MLIR text nor bytecode: {error.reason} at byte {error.start}"
            ) from None
        except ir.MLIRError:
            raise DiagnosedError(
                tuple(collected) or (Diagnostic("error", f"{name} does not parse"),)
            ) from None


def _check_roundtrip(module: ir.Module) -> None:
    """Text and bytecode of a module must read back as the module they were written from."""
    text, context = module.operation.get_asm(), module.context
    for form, data in (("text", text), ("bytecode", _print(module, bytecode=True, debug_info=False))):
        again = ir.Module.parse(data, context).operation.get_asm()
        if again != text:
            raise TopoError(f"the {form} of the result does not read back as the same IR")


def _print(module: ir.Module, *, bytecode: bool, debug_info: bool) -> bytes:
    if bytecode:
        buffer = io.BytesIO()
        module.operation.write_bytecode(buffer)
        return buffer.getvalue()
    text = module.operation.get_asm(enable_debug_info=debug_info, assume_verified=True)
    return (text.rstrip("\n") + "\n").encode()


def _verify(arguments: argparse.Namespace, name: str, chunks: list[bytes], pipeline: Group) -> int:
    """`--verify-diagnostics`: every expected diagnostic must come, and no other; nothing else is printed."""
    complaints = []
    for chunk in chunks:
        emitted: list[Diagnostic] = []
        with remarks.collect() as collected:
            try:
                _optimize(arguments, name, chunk, pipeline)
            except DiagnosedError as error:
                emitted += error.diagnostics
        emitted += map(expected.from_remark, collected)
        complaints += expected.check(chunk.decode("utf-8", "replace"), emitted, name)
    print("\n".join(complaints), file=sys.stderr, end="\n" if complaints else "")
    return 1 if complaints else 0
