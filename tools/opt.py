"""`topo-opt`: optimizes exported models, and runs passes over MLIR text as the `*-opt` tools of MLIR do.

This file is the command line only; `opt_mlir` and `opt_model` do the work. Exit codes: 0 all went well, 1 an error that was
reported as one diagnostic, 2 a command line that does not parse (an unknown option, a value of
another form, options that exclude each other), 130 an interrupt.
"""

import argparse
import sys
from collections.abc import Sequence

from topo_opt.errors import OptionError
from topo_opt.tools.input_kind import MODEL_SUFFIX, input_kind
from topo_opt.tools.reporting import reported

EXIT_CODES = "exit codes: 0 success, 1 an error (one diagnostic on standard error), 2 a command line that does not parse, 130 an interrupt"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns its exit code."""
    parser = _parser()
    arguments = parser.parse_args(_normalise(parser, sys.argv[1:] if argv is None else argv))
    return reported(lambda: _dispatch(arguments), arguments, "topo-opt", arguments.output)


_MODEL_ONLY = {
    "topology": "--topology",
    "level": "-O",
    "bucket": "--bucket",
    "emit": "--emit",
    "to": "--to",
    "strict": "--strict",
    "trust_model": "--trust-model",
    "tune": "--tune",
    "tuning_cache": "--tuning-cache",
    "tuning_data": "--tuning-data",
    "tuning_time": "--tuning-time",
    "mesh": "--mesh",
    "shard": "--shard",
    "objective": "--objective",
    "memory_limit": "--memory-limit",
    "pin": "--pin",
    "wide_sums": "--wide-sums",
}
_DESCRIPTIONS = {
    "version": "versions",
    "list_passes": "passes",
    "dump_irdl": "irdl",
    "dump_topology_schema": "topology_schema",
}


def _dispatch(arguments: argparse.Namespace) -> int:
    for option, function in _DESCRIPTIONS.items():
        if getattr(arguments, option):
            from topo_opt.tools import describe

            print(getattr(describe, function)())
            return 0
    kinds = {name: input_kind(name) for name in arguments.inputs}
    if "model" in kinds.values():
        other = next((name for name, kind in kinds.items() if kind != "model"), None)
        if other is not None:
            raise OptionError(
                f"'{other}' is not a {MODEL_SUFFIX} file", hint="models and MLIR files are different jobs"
            )
        from topo_opt.tools import model_arguments

        model_arguments.check(arguments)
        from topo_opt.tools import opt_model

        return opt_model.run(arguments)
    _refuse_model_options(arguments)
    from topo_opt.tools.supervise import run_supervised

    return run_supervised(
        lambda: reported(lambda: _mlir(arguments), arguments, "topo-opt", arguments.output),
        (*arguments.inputs, "stdin")[0],
    )


def _refuse_model_options(arguments: argparse.Namespace) -> None:
    parser = _parser()
    for option, flag in _MODEL_ONLY.items():
        if getattr(arguments, option) != parser.get_default(option):
            raise OptionError(
                f"{flag} is for models ({MODEL_SUFFIX}), the input is MLIR",
                hint="passes are named with --pass-pipeline or -p",
            )


def _mlir(arguments: argparse.Namespace) -> int:
    from topo_opt.tools import opt_mlir

    if arguments.explain:
        from topo_opt.tools import explain_plans

        return explain_plans.with_passes(arguments, lambda: opt_mlir.run(arguments))
    return opt_mlir.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="topo-opt", description=__doc__.partition("\n")[0], epilog=EXIT_CODES, allow_abbrev=False
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="model.pt2, several functions of one model as name=model.pt2, or one .mlir/.mlirbc file; - or nothing reads MLIR from stdin",
    )
    both = parser.add_argument_group("output")
    both.add_argument(
        "-o",
        dest="output",
        metavar="PATH",
        help="where the result goes; default: stdout, for a bundle INPUT.bundle",
    )
    both.add_argument(
        "--version", action="store_true", help="print the versions of topo-opt, torch-mlir, torch and triton"
    )
    both.add_argument("--list-passes", action="store_true", help="print every pass with its options")
    both.add_argument(
        "--dump-irdl",
        action="store_true",
        help="print the topo dialect as IRDL, for other MLIR tools (--irdl-file)",
    )
    both.add_argument(
        "--dump-topology-schema", action="store_true", help="print the JSON Schema of --topology files"
    )
    both.add_argument(
        "--explain",
        choices=("sharding", "sharding-json"),
        help="print why tensors lie on devices as they do, instead of the result: of a model the plan for --topology, "
        "pipelines included; of MLIR what topo-plan-shardings among the passes chose",
    )
    both.add_argument("--quiet", "-q", action="store_true", help="no progress and no report")
    both.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")

    model = parser.add_argument_group("models (.pt2)")
    model.add_argument(
        "--topology",
        metavar="NAME|FILE",
        default="h200-x1",
        help="the machine to compile for (default: %(default)s)",
    )
    model.add_argument(
        "-O", dest="level", type=int, choices=range(4), default=2, help="optimization level (default: 2)"
    )
    model.add_argument(
        "--bucket",
        action="append",
        default=[],
        metavar="DIM=N,N",
        help="sizes of a dynamic dim to compile for; may be repeated",
    )
    model.add_argument(
        "--emit",
        choices=("torch", "structured", "kernel", "triton", "bundle"),
        default="bundle",
        help="what to write",
    )
    model.add_argument(
        "--to",
        choices=("import", "ingest", "schedule", "lower"),
        help="stop after this phase and print the IR",
    )
    model.add_argument(
        "--strict", action="store_true", help="fail when anything is left to ATen or did not take effect"
    )
    model.add_argument(
        "--trust-model", action="store_true", help="skip the scan of the .pt2: its content may run code"
    )
    split = parser.add_argument_group("several devices (.pt2)")
    split.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="split the model over these axes, a process for each place: data=2,model=4; auto: the planner's choice",
    )
    split.add_argument(
        "--shard",
        action="append",
        default=[],
        metavar="NAME=AXIS,_",
        help="how tensors of this name (* and ? as in file names) are split, one entry a dimension; the rest follows; may be repeated",
    )
    split.add_argument(
        "--objective",
        choices=("latency", "throughput"),
        default="latency",
        help="what a plan makes good: the time of a call, or calls a second (default: latency)",
    )
    split.add_argument(
        "--memory-limit",
        type=int,
        metavar="BYTES",
        help="what a plan may take of each device (default: nine tenths of what it has)",
    )
    split.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME=AXIS,_",
        help="as --shard, but the rest is planned: an entry may also be ?, for any; may be repeated",
    )
    split.add_argument(
        "--wide-sums",
        action="store_true",
        help="form sums over devices in f32 where their results are rounded to f16 or bf16 (default: in that type, half the bytes)",
    )
    tuning = parser.add_argument_group("tuning of kernels (.pt2)")
    tuning.add_argument(
        "--tune",
        choices=("off", "cache", "short", "full"),
        help="off: the cost model alone; cache: what was measured earlier; short, full: measure, when the GPU is here "
        "(default: by level, in this order from -O0 to -O3)",
    )
    tuning.add_argument(
        "--tuning-cache",
        metavar="DIR",
        help="measured tiles (default: topo-opt/tuning in the user's cache folder)",
    )
    tuning.add_argument(
        "--tuning-data",
        action="append",
        default=[],
        metavar="FILE|BUNDLE",
        help="more measured tiles to read; may be repeated",
    )
    tuning.add_argument(
        "--tuning-time",
        type=float,
        metavar="S",
        help="seconds that a search may take (default: short 30, full 600)",
    )

    passes = parser.add_argument_group("passes")
    passes.add_argument(
        "--pass-pipeline", metavar="TEXT", help="builtin.module(a,func.func(b{option=value}))"
    )
    passes.add_argument(
        "-p", dest="passes", metavar="TEXT", help="the same without builtin.module(...): a,func.func(b)"
    )
    passes.add_argument(
        "--dump-pass-pipeline", action="store_true", help="print the pipeline that will run, to stderr"
    )
    passes.add_argument(
        "--verify-each",
        default="true",
        choices=("true", "false", "numeric"),
        help="verify after every pass; numeric: also execute before and after on random inputs and compare",
    )
    passes.add_argument("--mlir-timing", action="store_true", help="print the time of every pass")
    passes.add_argument("--mlir-print-ir-after-all", action="store_true")
    passes.add_argument("--mlir-print-ir-after", action="append", default=[], metavar="PASS[,PASS]")
    passes.add_argument(
        "--mlir-print-ir-after-change", action="store_true", help="only after passes that changed the IR"
    )
    passes.add_argument("--mlir-print-ir-tree-dir", metavar="DIR", help="print into files below DIR")
    passes.add_argument("--mlir-print-debuginfo", action="store_true", help="print locations")
    passes.add_argument(
        "--mlir-pass-pipeline-crash-reproducer",
        metavar="FILE",
        help="write the failing pass and its input to FILE",
    )

    mlir = parser.add_argument_group("MLIR input")
    mlir.add_argument(
        "--split-input-file",
        action="store_true",
        help="treat the parts between // ----- as files of their own",
    )
    mlir.add_argument(
        "--verify-diagnostics",
        action="store_true",
        help="check expected-error@... comments instead of printing errors",
    )
    mlir.add_argument(
        "--verify-roundtrip",
        action="store_true",
        help="check that text and bytecode read back as the same IR",
    )
    mlir.add_argument("--emit-bytecode", action="store_true")
    mlir.add_argument(
        "--run-reproducer", action="store_true", help="run the pipeline that the input has inside"
    )
    mlir.add_argument("--allow-unregistered-dialect", action="store_true")
    return parser


def _normalise(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Arguments in the one form that argparse takes: long options may be given with one dash, as MLIR's tools allow, and
    `--verify-each` without a value."""
    known = parser._option_string_actions
    doubled = [
        "-" + arg if "-" + arg.partition("=")[0] in known and arg.partition("=")[0] not in known else arg
        for arg in argv
    ]
    return ["--verify-each=true" if arg == "--verify-each" else arg for arg in doubled]


if __name__ == "__main__":
    sys.exit(main())
