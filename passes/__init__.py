"""The passes of topo-opt. `PASSES` names them all; a pass is imported when it is first used."""

from collections.abc import Iterator
from functools import cache
from importlib import import_module

from topo_opt.errors import PipelineError
from topo_opt.passes.base import Pass

# Name in textual pipelines -> "module:class", in the order in which a compile runs them.
PASSES = {
    "topo-raise-named-ops": "topo_opt.passes.ingest.raise_named_ops:RaiseNamedOps",
    "topo-lower-torch": "topo_opt.passes.ingest.lower_torch:LowerTorch",
    "topo-verify-structured": "topo_opt.passes.ingest.verify_structured:VerifyStructured",
    "topo-raise-rotary": "topo_opt.passes.ingest.raise_rotary:RaiseRotary",
    "topo-raise-masks": "topo_opt.passes.ingest.raise_masks:RaiseMasks",
    "topo-count-recognised": "topo_opt.passes.ingest.count_recognised:CountRecognised",
    "topo-bubble-up-slices": "topo_opt.passes.schedule.bubble_up_slices:BubbleUpSlices",
    "topo-plan-shardings": "topo_opt.passes.shard.plan_shardings:PlanShardings",
    "topo-propagate-shardings": "topo_opt.passes.shard.propagate_shardings:PropagateShardings",
    "topo-partition": "topo_opt.passes.shard.partition:Partition",
    "topo-sink-foreign-rows": "topo_opt.passes.shard.sink_foreign_rows:SinkForeignRows",
    "topo-simplify-collectives": "topo_opt.passes.shard.simplify_collectives:SimplifyCollectives",
    "topo-lower-slices": "topo_opt.passes.shard.lower_slices:LowerSlices",
    "topo-outline-collectives": "topo_opt.passes.shard.outline_collectives:OutlineCollectives",
    "topo-channels-last": "topo_opt.passes.schedule.channels_last:ChannelsLast",
    "topo-repeat-reads": "topo_opt.passes.schedule.repeat_reads:RepeatReads",
    "topo-sink-row-scale": "topo_opt.passes.schedule.sink_row_scale:SinkRowScale",
    "topo-form-expert-kernels": "topo_opt.passes.schedule.form_expert_kernels:FormExpertKernels",
    "topo-form-kernels": "topo_opt.passes.schedule.form_kernels:FormKernels",
    "topo-exchange-parts": "topo_opt.passes.schedule.exchange_parts:ExchangeParts",
    "topo-exchange-sums": "topo_opt.passes.schedule.exchange_sums:ExchangeSums",
    "topo-hand-over-norms": "topo_opt.passes.schedule.hand_over_norms:HandOverNorms",
    "topo-split-long-rows": "topo_opt.passes.schedule.split_long_rows:SplitLongRows",
    "topo-align-operands": "topo_opt.passes.schedule.align_operands:AlignOperands",
    "topo-mark-inout": "topo_opt.passes.schedule.mark_inout:MarkInout",
    "topo-mark-load-time": "topo_opt.passes.schedule.mark_load_time:MarkLoadTime",
    "topo-choose-tiles": "topo_opt.passes.lower.choose_tiles:ChooseTiles",
    "topo-mark-dependent-launch": "topo_opt.passes.schedule.mark_dependent_launch:MarkDependentLaunch",
    "topo-pack-siblings": "topo_opt.passes.schedule.pack_siblings:PackSiblings",
    "topo-mark-settled-arguments": "topo_opt.passes.schedule.mark_settled_arguments:MarkSettledArguments",
    "topo-mark-written-rows": "topo_opt.passes.schedule.mark_written_rows:MarkWrittenRows",
}


@cache
def pass_class(name: str) -> type[Pass]:
    """The class of a pass by its name in pipelines.

    Raises:
        PipelineError: no pass of ours has that name.
    """
    if name not in PASSES:
        raise PipelineError(
            f"'{name}' is not a pass of topo-opt", hint="topo-opt --list-passes names them all"
        )
    module, _, attribute = PASSES[name].partition(":")
    cls = getattr(import_module(module), attribute)
    if cls.name != name:
        raise TypeError(f"PASSES has '{name}' but {attribute}.name is '{cls.name}'")
    return cls


def all_passes() -> Iterator[type[Pass]]:
    """Every pass class, in the order of `PASSES`."""
    return map(pass_class, PASSES)
