"""A small Llama with random weights: export it, optimize it, then run a prompt and a few decode steps on the CPU.

    python examples/llama.py [--topology cpu] [--level 2] [--steps 4] [--dtype float32]

Prints the report of the compile, the check of every step against eager PyTorch, and the kernels of the bundle.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
import transformers

import topo_opt
from topo_opt import driver, report, runtime
from topo_opt.frontend.huggingface import CausalLMWithStaticCache
from topo_opt.runtime.numerics import compare

PROMPT_LENGTH, CACHE_LENGTH = 12, 32


def small_llama(dtype: torch.dtype) -> transformers.LlamaForCausalLM:
    """Two layers, grouped query heads, random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CACHE_LENGTH,
    )
    return transformers.LlamaForCausalLM(config).eval().to(dtype)


def eager_logits(model: transformers.LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the last token, computed by eager PyTorch from the whole sequence."""
    return model(input_ids=tokens, use_cache=False).logits[:, -1]


@torch.no_grad()
def main() -> int:
    """Runs the example; returns 1 when a step does not match eager."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topology", default="cpu")
    parser.add_argument("--level", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--out", type=Path, default=Path("llama.bundle"))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)

    model = small_llama(getattr(torch, arguments.dtype))
    exact = small_llama(torch.float32).double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    decoder = CausalLMWithStaticCache(model, max_cache_len=CACHE_LENGTH)
    programs = decoder.export(prompt_length=PROMPT_LENGTH)

    print(f"topo-opt {topo_opt.__version__}: compiling {', '.join(programs)} for {arguments.topology}")
    options = driver.Options(arguments.topology, level=arguments.level)
    finished = driver.compile(programs, options, arguments.out)
    report.render(finished.report, sys.stdout)

    # Strict: a call that the kernels cannot answer is an error here, instead of a fallback that is logged.
    program = runtime.load(finished.path, device="cpu", strict=True)
    tokens = torch.randint(0, model.config.vocab_size, (1, PROMPT_LENGTH))
    logits = program.prefill(tokens, torch.tensor([0]))[:, -1]
    good = True
    for step in range(arguments.steps + 1):
        verdict = compare(logits, eager_logits(model, tokens), eager_logits(exact, tokens), "logits")
        good &= verdict.passed
        print(f"{'prefill' if step == 0 else f'decode {step}'}: {verdict}")
        if step == arguments.steps:
            break
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
        logits = program.decode(tokens[:, -1:], torch.tensor([tokens.shape[1] - 1]))[:, -1]
    print("generated tokens:", *tokens[0, PROMPT_LENGTH:].tolist())
    print("every step matches eager" if good else "a step does NOT match eager")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
