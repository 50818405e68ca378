"""Models that use one row of their last layer: it is computed for that row, and the kernels give what eager gives."""

from collections import Counter
from typing import Any

import model_zoo
import pytest
import torch
from float64_rule import check
from kernel_check import kernel_functions
from lowering import lowered
from topo_opt_case import compiled
from torch import Tensor, nn
from torch_mlir import ir

from topo_opt.passes.ingest.dead_ops import plan_functions
from topo_opt.pipeline import levels
from topo_opt.pipeline.run import run
from topo_opt.pipeline.spec import parse
from topo_opt.runtime.numerics import float64_outputs
from topo_opt.structured.graph import read

RAISED = "builtin.module(topo-raise-rotary, topo-raise-masks, topo-bubble-up-slices, topo-verify-structured)"


class LastLogits(nn.Module):
    """A causal model whose logits are kept for the last token alone; `late` takes them behind the head."""

    def __init__(self, model: Any, late: bool):
        super().__init__()
        self.model, self.late = model, late

    def forward(self, ids: Tensor) -> Tensor:
        if self.late:
            return self.model(input_ids=ids, use_cache=False).logits[:, -1]
        return self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits


class CachedPrompt(nn.Module):
    """A prompt that fills a cache, and the logits of its last token."""

    def __init__(self, generator: Any):
        super().__init__()
        self.generator = generator

    def forward(self, ids: Tensor, start: Tensor) -> Tensor:
        return self.generator(ids, start)[:, -1:]


class Pooled(nn.Module):
    """What an encoder's pooler makes of the first token."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask).pooler_output


def _model(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    spelling, _, late = name.partition(" ")
    case = model_zoo.ZOO[spelling](dtype)
    if spelling == "llama_cache_prefill":
        return CachedPrompt(case.module), case.args
    if spelling == "bert":
        return Pooled(case.module), (case.kwargs["input_ids"], case.kwargs["attention_mask"])
    return LastLogits(case.module, late == "late"), (case.kwargs["input_ids"],)


def _structured(module: nn.Module, args: tuple[Tensor, ...]) -> ir.Module:
    found = lowered(torch.export.export(module.eval(), args, strict=False))
    with found.context, ir.Location.unknown():
        run(parse(RAISED), found)
    return found


# How many products and attentions have so many rows: layers of seven products (six for BERT), of which only keys and values of
# the last layer need all rows; then the head, or the pooler with its rank of 2.
ROWS = {
    "llama_prefill": {"linalg.contract": {11: 7 + 2, 1: 5 + 1}, "topo.attention": {11: 1, 1: 1}},
    "llama_prefill late": {"linalg.contract": {11: 7 + 2, 1: 5 + 1}, "topo.attention": {11: 1, 1: 1}},
    "llama_cache_prefill": {"linalg.contract": {11: 7 + 2, 1: 5 + 1}, "topo.attention": {11: 1, 1: 1}},
    "gemma3": {"linalg.contract": {13: 14 + 2, 1: 5 + 1}, "topo.attention": {13: 2, 1: 1}},
    "bert": {"linalg.contract": {11: 6 + 2, 1: 4}, "topo.attention": {11: 1, 1: 1}},
}


@pytest.mark.parametrize("name", ROWS)
def test_one_row_of_the_last_layer(name: str) -> None:
    """Counts by the dimension of rows, the one before the last."""
    module, args = _model(name, torch.bfloat16)
    structured = _structured(module, args)
    (function,) = plan_functions(structured.operation)
    graph = read(function)
    length = args[0].shape[1]
    for op, expected in ROWS[name].items():
        found: Counter[int] = Counter()
        for node in graph.nodes:
            shape = graph.values[node.results[0]].shape or ()
            if node.name == op and len(shape) > 2:
                found[shape[-2]] += 1
        assert {rows: found[rows] for rows in (length, 1)} == expected


@pytest.mark.parametrize("name", ROWS)
def test_kernels_match_eager(name: str) -> None:
    """In f32, which allows the least; `test_models.py` runs the same models in every type."""
    module, args = _model(name, torch.float32)
    program = compiled(module, args)
    exact = float64_outputs(module, args, {})
    ours = program(*args)
    assert not program.fallbacks
    with torch.no_grad():
        check(ours, module(*args), exact)


class OneLayer(nn.Module):
    """Causal attention over a prompt between two products, of which the last row is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(512, 512), nn.Linear(512, 256), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (8, 64)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (4, 64)).transpose(1, 2).chunk(2, 1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return (x + self.o(mixed.transpose(1, 2).flatten(2)))[:, -1:]


def test_kernels_are_those_of_decoding() -> None:
    """Keys of the one row are split over programs, which hold all heads of a group; its products stream their weights."""
    with torch.device("meta"):
        module = OneLayer().to(torch.bfloat16).eval().requires_grad_(False)
        x = torch.empty(1, 2048, 512, dtype=torch.bfloat16)
    found = _structured(module, (x,))
    with found.context, ir.Location.unknown():
        run(levels.pipeline(2, ("schedule", "lower"), topology="h200-x1"), found)
    tiles: dict[str, list[dict[str, int]]] = {}
    for function in kernel_functions(found):
        kernel = function.attributes["topo.kernel"]
        tile = {entry.name: entry.attr.value for entry in kernel["tile"]}
        tiles.setdefault(kernel["family"].value, []).append(tile)
    (attention,) = tiles["attention"]
    assert attention["splits"] > 1 and attention["pack"] == 4
    assert sorted("m" in tile for tile in tiles["gemm"]) == [False, False, True]
