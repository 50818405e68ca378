"""What `-O0` to `-O3` run, phase by phase.

The phases are those of docs/architecture.md section 7. A level is text in the pipeline notation, so that what
`topo-opt --dump-pass-pipeline` prints can be given to `--pass-pipeline` as it is.
"""

from collections.abc import Sequence

from topo_opt.errors import InputError
from topo_opt.passes.base import quote
from topo_opt.pipeline.spec import ROOT, Group, parse

PHASES = ("ingest", "schedule", "lower")

# How far kernels are fused: one op each for debugging, only pointwise ops and reductions, epilogues too, and in the end
# values of some cost are computed again rather than stored.
_FUSE = {0: "fuse=none", 1: "fuse=cheap", 2: "fuse=full", 3: "fuse=full recompute=512"}


def _ingest(level: int, topology: str | None, split: Sequence[str]) -> list[str]:
    # Named ops first: torch-mlir's lowering would take them apart, and it refuses ops it does not know.
    return ["topo-raise-named-ops", "topo-lower-torch", "topo-verify-structured"]


# What models spell out and kernels want whole; not at -O0, where every op stays as it was written.
_RECOGNISE = ("topo-raise-rotary", "topo-raise-masks", "topo-count-recognised")


def _schedule(level: int, topology: str | None, split: Sequence[str]) -> list[str]:
    recognise = _RECOGNISE if level > 0 else ()
    # Experts' products come with kernels of their own, which the others are formed around.
    experts = "topo-form-expert-kernels" if level > 1 else "topo-form-expert-kernels{fuse=none}"
    # Behind recognition, which takes patterns whole, and before anything depends on how many rows there are.
    narrow = ("topo-bubble-up-slices",) if level > 0 else ()
    # Before anything is grouped: what moves behind a product decides what can become part of its kernel.
    sink = ("topo-sink-row-scale",) if level > 1 else ()
    # Before what depends on which dimension of a tensor is innermost in memory.
    layout = ("topo-channels-last", "topo-repeat-reads") if level > 0 else ()
    options = f"{{topology={quote(topology)}}}" if topology else ""
    rows = (f"topo-split-long-rows{options}",) if level > 1 else ()
    # What rows of a copy are long enough for depends on the kernel that reads them.
    align = (f"topo-align-operands{options}",) if level > 1 else ()
    form = f"topo-form-kernels{{{_FUSE[level]}}}"
    # Ops that were cloned for several consumers may have met again in one kernel.
    merge = ("cse",) if level > 0 else ()
    # Between kernels: which product makes the rows of which other.
    hand_over = ("topo-hand-over-norms",) if level > 1 else ()
    # Whether a kernel that reads a sum can make it is known of the kernel as a whole.
    exchange = (
        (f"topo-exchange-sums{options}", f"topo-exchange-parts{options}") if level > 0 and split else ()
    )
    once = ("topo-mark-load-time",) if level > 0 else ()
    return [
        *recognise,
        *narrow,
        *split,
        *layout,
        *sink,
        experts,
        form,
        *merge,
        *exchange,
        *hand_over,
        *rows,
        *align,
        # On whole kernels: which buffer dies where is known only after they are formed.
        "topo-mark-inout",
        *once,
    ]


def _lower(level: int, topology: str | None, split: Sequence[str]) -> list[str]:
    options = f"{{topology={quote(topology)}}}" if topology else ""
    passes = [f"topo-choose-tiles{options}"]
    if level > 0:
        passes.append(f"topo-mark-dependent-launch{options}")
    if level > 1:
        # What is immutable is told from all calls of a kernel, so before some of them move into packs.
        passes.append(f"topo-pack-siblings{options}")
        # Which launch is the one in front is known when no more are put together.
        passes += ["topo-mark-settled-arguments", "topo-mark-written-rows"]
    return passes


_BUILDERS = {"ingest": _ingest, "schedule": _schedule, "lower": _lower}


def pipeline(
    level: int, phases: tuple[str, ...] = PHASES, *, topology: str | None = None, split: Sequence[str] = ()
) -> Group:
    """The pipeline of an optimization level (0 to 3) for the given phases, in their order.

    Args:
        topology: name or file of the machine, which tiles depend on; None takes the default figures.
        split: passes that split the model over devices (`sharding.split_passes`), behind recognition, which takes patterns whole.

    Raises:
        InputError: no such level.
    """
    if level not in _FUSE:
        raise InputError(f"optimization level {level} does not exist", hint="there are -O0, -O1, -O2 and -O3")
    passes = [
        text for phase in PHASES if phase in phases for text in _BUILDERS[phase](level, topology, split)
    ]
    return parse(f"{ROOT}({','.join(passes)})")
