"""What `two_gpus.py` measures: cases, and for each the ways in which it is split over two devices.

A way is `planned` (the planner's own choice of mesh and shardings) or pins on a mesh of two: `data` replicates the weights and splits the batch
(of inputs, caches, products and what layers add up), `tensor` splits heads and hidden units (TP2), `sequence` is `tensor` with what is added up between the products split by positions,
`experts` splits the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
# q, k, v, o, gate, up, down; q, k, v, o, up, down
DECODER_COLUMNS, BERT_COLUMNS = (7, (0, 1, 2, 4, 5)), (6, (0, 1, 2, 4))
BERT_TENSOR = [
    *(f"*.{name}.weight={AXIS},_" for name in ("query", "key", "value", "intermediate.dense")),
    f"*.output.dense.weight=_,{AXIS}",
]

Pins = Sequence[str]


@dataclass(frozen=True)
class Way:
    """How a case is split: pins; None leaves all to the planner.

    `residuals`: by which of its dimensions what layers add up is split, too. `columns`: of so many products a layer, those whose columns
    are split, in the order in which they run: else the planner may split rows, and gather the weights.
    """

    pins: Pins | None = None
    residuals: Literal["batch", "positions"] | None = None
    columns: tuple[int, tuple[int, ...]] | None = None


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
            ways = PLANNED | {"tensor": Way([*TENSOR, *HEADS], columns=DECODER_COLUMNS)}
            if batch > 1:
                ways["data"] = Way([*WHOLE, *BATCH], "batch")
            found[f"{name}-decode-b{batch}"] = Case(decode(shapes[name], batch, cache), ways, peer=True)

    def prompts(name: str, some: Sequence[int]) -> None:
        for length in some:
            shape = replace(shapes[name], positions=length)
            tensor = Way(TENSOR, columns=DECODER_COLUMNS)
            ways = PLANNED | {"tensor": tensor, "sequence": replace(tensor, residuals="positions")}
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
        PLANNED
        | {
            "data": Way([*BERT_WHOLE, f"ids={AXIS},_", f"mask={AXIS},_"]),
            "tensor": Way(BERT_TENSOR, columns=BERT_COLUMNS),
        },
    )
    prompts("llama8b", lengths[1:])
    decoders("llama8b", (8,))
    decoders("llama1b", (1, 8, 32))
    prompts("llama1b", lengths)
    return found


def options_of(case: Case, way: str, program: Any, work: Work, topology: str) -> Any:
    """How the compiler is called for a way of a case; "one" is a single device.

    Raises:
        ValueError: the plan does not name what layers add up.
    """
    from topo_opt import driver

    if way == "one":
        single = "cpu" if topology == "cpu" else "h200-x1"
        return driver.Options(topology=single, pack_weights=False)
    split = case.ways[way]
    mesh = f"{AXIS}=2" if split.pins is not None or topology == "cpu" else "auto"

    def pinned(pins: Sequence[str]) -> driver.Options:
        planner = {"pin": ";".join(pins)} if pins else {}
        return driver.Options(topology=topology, mesh=mesh, planner=planner, pack_weights=False)

    options = pinned(split.pins or ())
    if split.residuals is None and split.columns is None:
        return options
    looked = driver.start({"main": program}, options)
    driver.schedule(looked)
    graph = looked.plans[0].graph
    results = {v.name for v in graph.values if v.returned}
    values = [v for v in graph.values if v.name not in results and len(v.shape) == 3]
    return pinned([*(split.pins or ()), *_residual_pins(values, work, split), *_column_pins(values, split)])


def _residual_pins(values: Sequence[Any], work: Work, split: Way) -> list[str]:
    """Pins by which the sums between layers, and where the batch is split all products, are split by a dimension.

    Else the planner takes whole weights, too, by columns and rows. The names are those that it has for the values.
    """
    if split.residuals is None:
        return []
    batch = split.residuals == "batch"
    rows, names = tuple(work.inputs[0].shape), ("add", "linear") if batch else ("add",)
    sums = {value.name for value in values if value.name.startswith(names) and tuple(value.shape[:2]) == rows}
    if not sums:
        raise ValueError("the plan names no sums between layers")
    layout = f"{AXIS},_,_" if batch else f"_,{AXIS},_"
    return [f"{name}={layout}" for name in sorted(sums)]


def _column_pins(values: Sequence[Any], split: Way) -> list[str]:
    """Pins by which the columns of products are split.

    Raises:
        ValueError: the products that the plan names are no whole layers.
    """
    if split.columns is None:
        return []
    period, columns = split.columns
    products = list(dict.fromkeys(v.name for v in values if v.name.startswith("linear")))
    if not products or len(products) % period:
        raise ValueError(f"the plan names {len(products)} products, where a layer has {period}")
    return [f"{name}=_,_,{AXIS}" for i, name in enumerate(products) if i % period in columns]
