"""The compiler half of `topo-opt`: exported models in, a bundle (or the IR of a phase) out."""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topo_opt import driver, report
from topo_opt.errors import InputError
from topo_opt.model import torch_dialect
from topo_opt.pipeline import levels
from topo_opt.tools.opt_mlir import instruments_of
from topo_opt.tools.output import write_output
from topo_opt.tools.progress import Progress

DEFAULT_FUNCTION = "main"
BUNDLE_SUFFIX = ".bundle"
# What --to stops after, by the text that --emit writes then.
_TEXT_AFTER = {"import": "torch", "ingest": "structured", "schedule": "scheduled", "lower": "kernel"}
_MLIR_ONLY = (
    "pass_pipeline",
    "passes",
    "split_input_file",
    "verify_diagnostics",
    "emit_bytecode",
    "run_reproducer",
)


def run(arguments: argparse.Namespace) -> int:
    """Compiles what the command line names; returns the exit code.

    Raises:
        TopoError: anything that keeps the result from being made.
    """
    for option in _MLIR_ONLY:
        if getattr(arguments, option):
            flag = "-p" if option == "passes" else "--" + option.replace("_", "-")
            raise InputError(
                f"{flag} is for MLIR input", hint="topo-opt MODEL --emit=structured | topo-opt - does both"
            )
    sources = functions_of(arguments.inputs)
    options = driver.Options(
        topology=arguments.topology,
        level=arguments.level,
        strict=arguments.strict,
        buckets=buckets_of(arguments.bucket),
        trust=arguments.trust_model,
        verify_each=arguments.verify_each != "false",
        instruments=lambda: instruments_of(arguments),
        phase=Progress(quiet=arguments.quiet).phase,
    )
    if arguments.dump_pass_pipeline:
        print(levels.pipeline(options.level, topology=options.topology), file=sys.stderr)
    what = _TEXT_AFTER[arguments.to] if arguments.to else arguments.emit
    if what == "bundle":
        return _bundle(arguments, sources, options)
    write_output(_TEXTS[what](sources, options).encode(), arguments.output)
    return 0


def functions_of(inputs: list[str]) -> dict[str, Path]:
    """`name=file.pt2` or `file.pt2` -> function name -> path. One file without a name is called `main`, more by their file names.

    Raises:
        InputError: a name twice, or one that is not an identifier.
    """
    functions: dict[str, Path] = {}
    for text in inputs:
        name, _, file = text.rpartition("=")
        path = Path(file)
        if not name:
            name = DEFAULT_FUNCTION if len(inputs) == 1 else re.sub(r"\W", "_", path.stem)
        if not name.isidentifier():
            raise InputError(
                f"'{name}' cannot be the name of a function", hint="letters, digits and _, not a digit first"
            )
        if name in functions:
            raise InputError(f"two models are called '{name}'", hint="name them: prefill=a.pt2 decode=b.pt2")
        functions[name] = path
    return functions


def buckets_of(texts: list[str]) -> dict[str, tuple[int, ...]]:
    """`["batch=1,8", "seq=128"]` -> `{"batch": (1, 8), "seq": (128,)}`.

    Raises:
        InputError: text of another form, or a dim given twice.
    """
    buckets: dict[str, tuple[int, ...]] = {}
    for text in texts:
        match = re.fullmatch(r"([^=]+)=(\d+(?:,\d+)*)", text)
        if not match:
            raise InputError(
                f"'{text}' is not a bucket", hint="expected a dim and its sizes, such as batch=1,8,32"
            )
        if match[1] in buckets:
            raise InputError(f"dim '{match[1]}' has two buckets", hint=f"write {match[1]}=1,8 once")
        buckets[match[1]] = tuple(dict.fromkeys(int(size) for size in match[2].split(",")))
    return buckets


def _torch(sources: dict[str, Path], options: driver.Options) -> str:
    with options.phase("import"):
        return torch_dialect(sources, buckets=options.buckets, trust=options.trust)


def _structured(sources: dict[str, Path], options: driver.Options) -> str:
    return _text(driver.start(sources, options))


def _scheduled(sources: dict[str, Path], options: driver.Options) -> str:
    compilation = driver.start(sources, options)
    driver.schedule(compilation)
    return _text(compilation)


def _kernel(sources: dict[str, Path], options: driver.Options) -> str:
    compilation = driver.start(sources, options)
    driver.schedule(compilation)
    driver.choose_tiles(compilation)
    return _text(compilation)


def _triton(sources: dict[str, Path], options: driver.Options) -> str:
    compilation = driver.with_kernels(sources, options)
    driver.require_nothing_left(compilation)
    files = (f"# ==== kernels/{symbol}.py\n{source.source}" for symbol, source in compilation.sources.items())
    return "\n".join(files)


_TEXTS: dict[str, Callable[[dict[str, Path], driver.Options], str]] = {
    "torch": _torch,
    "structured": _structured,
    "scheduled": _scheduled,
    "kernel": _kernel,
    "triton": _triton,
}


def _text(compilation: Any) -> str:
    driver.require_nothing_left(compilation)
    return str(compilation.module)


def _bundle(arguments: argparse.Namespace, sources: dict[str, Path], options: driver.Options) -> int:
    out = Path(arguments.output) if arguments.output else _default_output(next(iter(sources.values())))
    finished = driver.compile(sources, options, out)
    if not arguments.quiet:
        report.render(finished.report, sys.stdout)
        print(f"wrote {out}")
    return 0


def _default_output(first: Path) -> Path:
    return Path(first.name).with_suffix(BUNDLE_SUFFIX)
