"""Exporting Hugging Face causal language models with a key/value cache that lives in buffers.

    decoder = CausalLMWithStaticCache(model, batch_size=1, max_cache_len=1024)
    programs = decoder.export(prompt_length=128)        # {"prefill": ..., "decode": ...}, one set of weights

Both programs share parameters and cache buffers: run prefill once, then decode token by token.
"""

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from topo_opt.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CausalLMWithStaticCache(nn.Module):
    """A causal LM as a function of tokens and a position; its cache is the buffers `key_cache_i` and `value_cache_i`.

    Each buffer is `[batch_size, key heads, max_cache_len, head size]` in the model's dtype. Sliding-window layers get a
    buffer of full length too, with the window in the attention mask.

    Args:
        model: a causal LM of transformers; kept by reference, so that weights are shared.
        batch_size: number of sequences.
        max_cache_len: tokens that fit in the cache, prompt included.

    Raises:
        InputError: the model cannot take a static cache.
    """

    def __init__(self, model: "PreTrainedModel", *, batch_size: int = 1, max_cache_len: int):
        super().__init__()
        from transformers import StaticCache
        from transformers.cache_utils import StaticLayer

        parameters = inspect.signature(model.forward).parameters
        if "cache" not in parameters:
            raise InputError(
                f"{type(model).__name__}.forward has no 'cache' argument",
                hint="pass a ...ForCausalLM model of a transformers version whose models take cache=",
            )
        self.model = model
        self.batch_size, self.max_cache_len = batch_size, max_cache_len
        config = model.config.get_text_config(decoder=True)
        cache = StaticCache(config=config, max_cache_len=max_cache_len)
        for i, layer in enumerate(cache.layers):
            if type(layer) is not StaticLayer:  # the window layers branch on the position, which is data here
                cache.layers[i] = StaticLayer(max_cache_len)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache.early_initialization(batch_size, heads, size, model.dtype, model.device)
        for i, layer in enumerate(cache.layers):
            self.register_buffer(f"key_cache_{i}", layer.keys)
            self.register_buffer(f"value_cache_{i}", layer.values)
            layer.keys = layer.values = None
        self._template = cache

    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        """Logits `[batch_size, tokens, vocabulary]`.

        Args:
            input_ids: int64 `[batch_size, tokens]`.
            start: int64 `[1]`, the number of tokens already in the cache.
        """
        return self.model(input_ids=input_ids, cache=self._bound_cache(start), use_cache=True).logits

    def _bound_cache(self, start: Tensor) -> Any:
        """A cache object over the buffers. A new one for each call: export then sees each cache once, as a buffer, the
        position is no state, and no tensor of a trace outlives it."""
        cache = copy.copy(self._template)
        cache.layers = [copy.copy(layer) for layer in self._template.layers]
        for i, layer in enumerate(cache.layers):
            layer.keys, layer.values = getattr(self, f"key_cache_{i}"), getattr(self, f"value_cache_{i}")
            layer.cumulative_length = start[0].clone()
        return cache

    def reset(self) -> None:
        """Empties the cache."""
        for name, buffer in self.named_buffers(recurse=False):
            if name.startswith(("key_cache_", "value_cache_")):
                buffer.zero_()

    def example_inputs(self, tokens: int, *, start: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs of the right shape for `tokens` tokens at position `start`, all of token 0."""
        device = self.model.device
        ids = torch.zeros(self.batch_size, tokens, dtype=torch.int64, device=device)
        return ids, torch.tensor([start], device=device)

    def export(self, *, prompt_length: int, dynamic_prompt: bool = False) -> dict[str, ExportedProgram]:
        """The two programs of generation, sharing weights and cache.

        Args:
            prompt_length: tokens of the prompt; the upper bound with `dynamic_prompt`.
            dynamic_prompt: leave the prompt's length open from 2 to `prompt_length` (the symbol is `prompt`).

        Raises:
            InputError: the prompt does not fit in the cache.
        """
        if not 1 < prompt_length <= self.max_cache_len:
            raise InputError(
                f"a prompt of {prompt_length} tokens: 2 to max_cache_len = {self.max_cache_len} expected"
            )
        shapes: Any = None
        tokens = prompt_length
        if dynamic_prompt:
            shapes = {"input_ids": {1: Dim("prompt", min=2, max=prompt_length)}, "start": None}
            tokens = max(2, prompt_length - 1)
        prefill = torch.export.export(self, self.example_inputs(tokens), dynamic_shapes=shapes, strict=False)
        decode = torch.export.export(self, self.example_inputs(1, start=prompt_length - 1), strict=False)
        return {"prefill": prefill, "decode": decode}
