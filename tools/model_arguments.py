"""What the command line says about models, and what of it can be refused before torch and the compiler are imported."""

import argparse
import re
from pathlib import Path

from topo_opt import topology
from topo_opt.errors import InputError, OptionError
from topo_opt.output_folder import check_bundle_folder
from topo_opt.sharding.pins import ShardingPin
from topo_opt.tools.output import check_destination
from topo_opt.tuning.settings import Settings

DEFAULT_FUNCTION = "main"
BUNDLE_SUFFIX = ".bundle"
_MLIR_ONLY = (
    "pass_pipeline",
    "passes",
    "split_input_file",
    "verify_diagnostics",
    "verify_roundtrip",
    "emit_bytecode",
    "run_reproducer",
    "allow_unregistered_dialect",
)


def check(arguments: argparse.Namespace) -> None:
    """What can be wrong with the options, then with the files that they name.

    Raises:
        OptionError: an option of MLIR, a value of another form, or options that exclude each other.
        InputError: a file that is not there, faults in the topology, or a place that can't be written.
    """
    _check_options(arguments)
    sources = functions_of(arguments.inputs)
    for path in sources.values():
        if not path.exists():
            raise InputError(f"{path} does not exist")
    machine = topology.load(arguments.topology)
    if arguments.mesh is not None or arguments.shard:
        from topo_opt.sharding.split_passes import split_passes

        split_passes(arguments.topology, machine, arguments.mesh, arguments.shard, planner_options(arguments))
    if writes_bundle(arguments):
        check_bundle_folder(output_of(arguments, sources))
    else:
        check_destination(arguments.output)


def _check_options(arguments: argparse.Namespace) -> None:
    for option in _MLIR_ONLY:
        if getattr(arguments, option):
            flag = "-p" if option == "passes" else "--" + option.replace("_", "-")
            raise OptionError(
                f"{flag} is for MLIR input", hint="topo-opt MODEL --emit=structured | topo-opt - does both"
            )
    functions_of(arguments.inputs)
    buckets_of(arguments.bucket)
    for text in arguments.pin:
        ShardingPin.parse(text)
    if arguments.memory_limit is not None and arguments.memory_limit < 1:
        raise OptionError(
            f"--memory-limit {arguments.memory_limit}: expected bytes above 0",
            hint="such as 60000000000; without it a plan may take nine tenths of a device",
        )
    asked = [*planner_options(arguments), *(["wide-sums"] if arguments.wide_sums else [])]
    if asked and arguments.mesh is None and not arguments.explain:
        raise OptionError(
            f"--{asked[0]} is for models that are split over devices, and nothing asks for that",
            hint="add --mesh auto, a mesh such as --mesh x=2, or --explain=sharding",
        )
    Settings.of(
        arguments.level,
        arguments.tune,
        arguments.tuning_cache,
        arguments.tuning_data,
        arguments.tuning_time,
    )


def planner_options(arguments: argparse.Namespace) -> dict[str, str]:
    """The options of `topo-plan-shardings` that the command line names, as text."""
    found = {}
    if arguments.objective != "latency":
        found["objective"] = arguments.objective
    if arguments.memory_limit is not None:
        found["memory-limit"] = str(arguments.memory_limit)
    if arguments.pin:
        found["pin"] = ";".join(arguments.pin)
    return found


def writes_bundle(arguments: argparse.Namespace) -> bool:
    """Whether the result is a bundle, not text."""
    return arguments.to is None and arguments.emit == "bundle" and not arguments.explain


def output_of(arguments: argparse.Namespace, sources: dict[str, Path]) -> Path:
    """The folder of the bundle: `-o`, or the name of the first model in the current folder."""
    if arguments.output:
        return Path(arguments.output)
    return Path(next(iter(sources.values())).name).with_suffix(BUNDLE_SUFFIX)


def functions_of(inputs: list[str]) -> dict[str, Path]:
    """`name=file.pt2` or `file.pt2` -> function name -> path. One file without a name is called `main`, more by their file names.

    Raises:
        OptionError: a name twice, or one that is not an identifier.
    """
    functions: dict[str, Path] = {}
    for text in inputs:
        name, _, file = text.rpartition("=")
        path = Path(file)
        if not name:
            name = DEFAULT_FUNCTION if len(inputs) == 1 else re.sub(r"\W", "_", path.stem)
        if not name.isidentifier():
            raise OptionError(
                f"'{name}' cannot be the name of a function", hint="letters, digits and _, not a digit first"
            )
        if name in functions:
            raise OptionError(f"two models are called '{name}'", hint="name them: prefill=a.pt2 decode=b.pt2")
        functions[name] = path
    return functions


def buckets_of(texts: list[str]) -> dict[str, tuple[int, ...]]:
    """`["batch=1,8", "seq=128"]` -> `{"batch": (1, 8), "seq": (128,)}`.

    Raises:
        OptionError: text of another form, or a dim given twice.
    """
    buckets: dict[str, tuple[int, ...]] = {}
    for text in texts:
        match = re.fullmatch(r"([^=]+)=(\d+(?:,\d+)*)", text)
        if not match:
            raise OptionError(
                f"'{text}' is not a bucket", hint="expected a dim and its sizes, such as batch=1,8,32"
            )
        if match[1] in buckets:
            raise OptionError(f"dim '{match[1]}' has two buckets", hint=f"write {match[1]}=1,8 once")
        buckets[match[1]] = tuple(dict.fromkeys(int(size) for size in match[2].split(",")))
    return buckets
