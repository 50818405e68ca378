"""What `two_gpus.py` measures: cases, and for each the ways in which it is split over two devices.

A way is `planned` (the planner's own choice of mesh and shardings) or pins on a mesh of two: `data` replicates the weights and splits the batch,
`tensor` splits heads and hidden units (TP2), `sequence` is `tensor` with what is added up between the products split by positions,
`experts` splits the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench_models import LLAMA_1B, LLAMA_8B, DecoderShape, Work, bert, decode, prefill, qwen3_moe_block

AXIS = "x"
COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("o", "down")
SMALL = DecoderShape(128, 8, 4, 16, 256, 2, 512, positions=64)

TENSOR = [
    *(f"layers.*.{name}.weight={AXIS},_" for name in COLUMNS),
    *(f"layers.*.{name}.weight=_,{AXIS}" for name in ROWS),
]
HEADS = [f"layers.*.{name}=_,{AXIS},_,_" for name in ("keys", "values")]
WHOLE = [*(f"layers.*.{name}.weight=_,_" for name in (*COLUMNS, *ROWS)), "head.weight=_,_"]
BATCH = [f"ids={AXIS},_", *(f"layers.*.{name}={AXIS},_,_,_" for name in ("keys", "values"))]
BERT_WHOLE = [f"*.{name}.weight=_,_" for name in ("query", "key", "value", "dense")]
BERT_TENSOR = [
    *(f"*.{name}.weight={AXIS},_" for name in ("query", "key", "value", "intermediate.dense")),
    f"*.output.dense.weight=_,{AXIS}",
]

Pins = Sequence[str]


@dataclass(frozen=True)
class Way:
    """How a case is split: pins; None leaves all to the planner. `residuals` splits what layers add up by its positions, too."""

    pins: Pins | None = None
    residuals: bool = False


@dataclass(frozen=True)
class Case:
    """A module with its inputs, and the ways to split it."""

    build: Callable[[str], Work]
    ways: Mapping[str, Way] = field(default_factory=dict)
    peer: bool = False
    """Whether PyTorch's tensor parallelism is measured beside it."""


PLANNED = {"planned": Way()}


def cases(small: bool) -> dict[str, Case]:
    """All cases, those first that tell most.

    Args:
        small: sizes for a try without GPUs.
    """
    shapes = {"llama8b": SMALL, "llama1b": SMALL} if small else {"llama8b": LLAMA_8B, "llama1b": LLAMA_1B}
    cache, lengths = (32, (32, 64)) if small else (1024, (2048, 8192))
    found: dict[str, Case] = {}

    def decoders(name: str, batches: Sequence[int]) -> None:
        for batch in batches:
            ways = PLANNED | {"tensor": Way([*TENSOR, *HEADS])}
            if batch > 1:
                ways["data"] = Way([*WHOLE, *BATCH])
            found[f"{name}-decode-b{batch}"] = Case(decode(shapes[name], batch, cache), ways, peer=True)

    def prompts(name: str, some: Sequence[int]) -> None:
        for length in some:
            shape = replace(shapes[name], positions=length)
            ways = PLANNED | {"tensor": Way(TENSOR), "sequence": Way(TENSOR, residuals=True)}
            found[f"{name}-prefill-{length}"] = Case(prefill(shape, length), ways, peer=True)

    decoders("llama8b", (1, 32))
    prompts("llama8b", lengths[:1])
    if small:
        return found
    found["qwen3moe-block-t2048"] = Case(
        qwen3_moe_block(2048),
        PLANNED
        | {
            "experts": Way([f"experts.{name}={AXIS},_,_" for name in ("gate_up_proj", "down_proj")]),
            "data": Way([f"hidden_states=_,{AXIS},_", "experts.*_proj=_,_,_"]),
        },
    )
    found["bert-base-8x512"] = Case(
        bert(8, 512),
        PLANNED | {"data": Way([*BERT_WHOLE, f"ids={AXIS},_", f"mask={AXIS},_"]), "tensor": Way(BERT_TENSOR)},
    )
    prompts("llama8b", lengths[1:])
    decoders("llama8b", (8,))
    decoders("llama1b", (1, 8, 32))
    prompts("llama1b", lengths)
    return found


def residual_pins(plan: Any, work: Work) -> list[str]:
    """Pins by which the sums between layers, by the names that the planner has for them, are split by positions."""
    rows = tuple(work.inputs[0].shape)
    sums = {
        value.name
        for value in plan.graph.values
        if value.name.startswith("add") and len(value.shape) == 3 and tuple(value.shape[:2]) == rows
    }
    if not sums:
        raise ValueError("the plan names no sums between layers")
    return [f"{name}=_,{AXIS},_" for name in sorted(sums)]
