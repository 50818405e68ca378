"""Every model of the zoo in every dtype: structured and kernel IR evaluated, against eager under the float64 rule."""

from typing import Any

import model_zoo
import pytest
import torch
from float64_rule import check, tensors
from lowering import left_to_aten, lowered
from torch.export import ExportedProgram
from torch_mlir import ir

from topo_opt import reference
from topo_opt.frontend.huggingface import CausalLMWithStaticCache
from topo_opt.frontend.ingest import bytecode, parse
from topo_opt.pipeline import levels
from topo_opt.pipeline.run import run
from topo_opt.runtime.numerics import float64_outputs


def _state(program: ExportedProgram) -> dict[str, Any]:
    """Parameters, buffers and constants by name; copies, since eager runs afterwards and mutates its own."""
    named = {**program.state_dict, **program.constants}
    return {name: value.clone() for name, value in named.items() if isinstance(value, torch.Tensor)}


def _run(structured: ir.Module, state: dict[str, Any], inputs: list[torch.Tensor]) -> Any:
    arguments = reference.bind_inputs(structured, "main", state, inputs)
    return reference.split_results(structured, "main", reference.run(structured, "main", arguments))


def _scheduled(structured: ir.Module) -> list[tuple[str, ir.Module]]:
    """Kernel IR at each level."""
    found = []
    for level in range(3):
        module = parse(bytecode(structured))
        run(levels.pipeline(level, ("schedule",)), module)
        found.append((f"-O{level}", module))
    return found


def _cases() -> list[Any]:
    return [
        pytest.param(name, dtype, marks=[] if dtype == "bfloat16" else pytest.mark.thorough)
        for name in model_zoo.ZOO
        for dtype in model_zoo.DTYPES
    ]


@pytest.mark.parametrize(("name", "dtype"), _cases())
def test_model(name: str, dtype: str) -> None:
    case = model_zoo.ZOO[name](model_zoo.DTYPES[dtype])
    program = torch.export.export(case.module, case.args, case.kwargs, strict=False)
    structured = lowered(program)
    assert left_to_aten(structured) <= set(case.left_to_aten)
    state, inputs = _state(program), tensors((case.args, case.kwargs))
    exact = float64_outputs(case.module, case.args, case.kwargs)
    with torch.no_grad():
        eager = case.module(*case.args, **case.kwargs)
    buffers = dict(case.module.named_buffers())  # eager has just written its own
    for stage, module in [("structured", structured), *_scheduled(structured)]:
        outputs, mutated = _run(module, state, inputs)
        check(outputs, eager, exact, [f"{stage}, output {i}" for i in range(len(outputs))])
        for buffer, value in mutated.items():
            torch.testing.assert_close(value, buffers[buffer], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_prefill_and_decode_share_weights_and_cache(dtype: str) -> None:
    """Three steps of generation through the two programs, against one pass over the whole sequence."""
    torch.manual_seed(0)
    generator = model_zoo.llama_generator(model_zoo.DTYPES[dtype]).eval()
    programs = generator.export(prompt_length=6)
    state = _state(programs["prefill"])
    names = [set(p.state_dict) for p in programs.values()]
    assert names[0] == names[1]
    weight = "model.model.embed_tokens.weight"
    pointers = {p.state_dict[weight].data_ptr() for p in programs.values()}
    assert len(pointers) == 1, "one set of weights"

    structured = {name: lowered(program) for name, program in programs.items()}
    tokens = torch.randint(3, 101, (2, 9))
    steps = [("prefill", tokens[:, :6], 0)] + [("decode", tokens[:, i : i + 1], i) for i in range(6, 9)]
    found = []
    for name, ids, start in steps:
        (logits,), mutated = _run(structured[name], state, [ids, torch.tensor([start])])
        assert set(mutated) == {"key_cache_0", "value_cache_0", "key_cache_1", "value_cache_1"}
        state |= mutated
        found.append(logits)
    whole = {"input_ids": tokens, "use_cache": False}
    with torch.no_grad():
        eager = generator.model(**whole).logits
    check(torch.cat(found, 1), eager, float64_outputs(generator.model, (), whole)["logits"])


def test_static_cache_of_a_model_with_sliding_windows() -> None:
    """Beyond the window: the cache has full length and the mask the window."""
    model = model_zoo.ZOO["gemma3"](torch.float32).module
    generator = CausalLMWithStaticCache(model, max_cache_len=16).eval()
    tokens = torch.randint(3, 101, (1, 12))
    with torch.no_grad():
        logits = [generator(tokens[:, :9], torch.tensor([0]))]
        logits += [generator(tokens[:, i : i + 1], torch.tensor([i])) for i in range(9, 12)]
        whole = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(torch.cat(logits, 1), whole)


def test_dynamic_prompt_length() -> None:
    generator = model_zoo.llama_generator(torch.float32).eval()
    program = generator.export(prompt_length=8, dynamic_prompt=True)["prefill"]
    sizes = program.range_constraints.values()
    assert [(int(r.lower), int(r.upper)) for r in sizes] == [(2, 8)]
