"""What the report counts as recognised in transformers' models."""

import pytest
import torch
from model_zoo import ZOO
from torch_mlir import ir

from topo_opt.codegen.triton.kernel import plain
from topo_opt.frontend.ingest import structured_module
from topo_opt.pipeline.run import run
from topo_opt.pipeline.spec import parse

RECOGNISE = (
    "builtin.module(topo-raise-rotary, topo-raise-masks, topo-count-recognised, topo-verify-structured)"
)

# Two layers each, three in Gemma.
EXPECTED = {
    "llama_cache_decode": {
        "attention": 2, "attention.grouped": 2, "attention.length": 2, "cache_append": 4, "gated_activation": 2,
        "norm.rms": 5, "rotary.half": 4,
    },
    "qwen3": {
        "attention": 2, "attention.causal": 2, "attention.grouped": 2, "gated_activation": 2, "norm.query_key": 4,
        "norm.rms": 9, "rotary.half": 4,
    },
    "gemma3": {
        "attention": 3, "attention.causal": 3, "attention.grouped": 3, "attention.window": 2, "gated_activation": 3,
        "norm.query_key": 6, "norm.rms": 19, "rotary.half": 6,
    },
    "phi3": {
        "attention": 2, "attention.causal": 2, "gated_activation": 2, "norm.rms": 5, "rotary.half": 4,
        "rotary.partial": 4,
    },
    "bert": {"attention": 2, "attention.padding": 2, "norm.layer": 5},
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_counts(name: str) -> None:
    case = ZOO[name](torch.bfloat16)
    module = structured_module(case.module, case.args, case.kwargs)
    with module.context:
        run(parse(RECOGNISE), module)
    (main,) = [f.operation for f in module.body.operations if "topo.function" in f.operation.attributes]
    assert plain(ir.DictAttr(main.attributes["topo.recognised"])) == EXPECTED[name]
