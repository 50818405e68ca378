"""Small models with random weights, one builder each: what the compiler is tested on.

Sizes are small enough for a second or two on a CPU and odd enough to matter: grouped query heads, head sizes that are no
power of two, sequence lengths that are no multiple of a tile.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vision_models import ResNet, UNet

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """A model ready to run or export.

    `left_to_aten` names the ops the compiler may leave to ATen for this model.
    """

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None
    left_to_aten: tuple[str, ...] = ()


ZOO: dict[str, Callable[[torch.dtype], Case]] = {}


def zoo(builder: Callable[[torch.dtype], Case]) -> Callable[[torch.dtype], Case]:
    """Registers a builder under its function's name; it runs with a fixed seed."""

    def build(dtype: torch.dtype) -> Case:
        torch.manual_seed(0)
        case = builder(dtype)
        case.module.eval().requires_grad_(False)
        return case

    ZOO[builder.__name__] = build
    return build


def _hf(model_class: type, config: Any, dtype: torch.dtype) -> Any:
    """As `from_pretrained(dtype=...)` would: weights in `dtype`, rotary tables in float32."""
    return model_class._from_config(config, dtype=dtype)


def _tokens(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(3, vocabulary, shape)


def _decoder_sizes(**changes: Any) -> dict[str, Any]:
    sizes = dict(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return sizes | changes


def llama_config() -> Any:
    """Head size 8, three query heads for each key head."""
    from transformers import LlamaConfig

    return LlamaConfig(**_decoder_sizes())


@zoo
def llama_prefill(dtype: torch.dtype) -> Case:
    from transformers import LlamaForCausalLM

    model = _hf(LlamaForCausalLM, llama_config(), dtype)
    return Case(model, kwargs={"input_ids": _tokens(101, 2, 11), "use_cache": False})


def llama_generator(dtype: torch.dtype) -> Any:
    """A Llama with its cache of 24 tokens in buffers."""
    from transformers import LlamaForCausalLM

    from topo_opt.frontend.huggingface import CausalLMWithStaticCache

    return CausalLMWithStaticCache(
        _hf(LlamaForCausalLM, llama_config(), dtype), batch_size=2, max_cache_len=24
    )


def _filled(generator: Any, tokens: int) -> Any:
    """The generator after a prompt of `tokens` tokens."""
    with torch.no_grad():
        generator(_tokens(101, 2, tokens), torch.tensor([0]))
    return generator


@zoo
def llama_cache_prefill(dtype: torch.dtype) -> Case:
    return Case(llama_generator(dtype), (_tokens(101, 2, 11), torch.tensor([0])))


@zoo
def llama_cache_decode(dtype: torch.dtype) -> Case:
    return Case(_filled(llama_generator(dtype), 11), (_tokens(101, 2, 1), torch.tensor([11])))


@zoo
def qwen3(dtype: torch.dtype) -> Case:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = _hf(Qwen3ForCausalLM, Qwen3Config(**_decoder_sizes(head_dim=20)), dtype)
    return Case(model, kwargs={"input_ids": _tokens(101, 1, 13), "use_cache": False})


@zoo
def gemma3(dtype: torch.dtype) -> Case:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes = _decoder_sizes(num_hidden_layers=3, head_dim=16, layer_types=layers, sliding_window=5)
    model = _hf(Gemma3ForCausalLM, Gemma3TextConfig(**sizes, query_pre_attn_scalar=16), dtype)
    return Case(model, kwargs={"input_ids": _tokens(101, 1, 13), "use_cache": False})


@zoo
def phi3(dtype: torch.dtype) -> Case:
    from transformers import Phi3Config, Phi3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = Phi3Config(**_decoder_sizes(num_attention_heads=4, num_key_value_heads=4), rope_parameters=rope)
    return Case(
        _hf(Phi3ForCausalLM, config, dtype), kwargs={"input_ids": _tokens(101, 2, 9), "use_cache": False}
    )


@zoo
def gpt2(dtype: torch.dtype) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=101, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return Case(
        _hf(GPT2LMHeadModel, config, dtype), kwargs={"input_ids": _tokens(101, 2, 11), "use_cache": False}
    )


def _encoder_sizes() -> dict[str, Any]:
    return dict(
        vocab_size=101,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
    )


def _padded_batch() -> dict[str, Tensor]:
    """Two sequences of 11 tokens, the second padded after 7."""
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, 7:] = 0
    return {"input_ids": _tokens(101, 2, 11) * mask, "attention_mask": mask}


@zoo
def bert(dtype: torch.dtype) -> Case:
    from transformers import BertConfig, BertModel

    return Case(_hf(BertModel, BertConfig(**_encoder_sizes()), dtype), kwargs=_padded_batch())


@zoo
def roberta(dtype: torch.dtype) -> Case:
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(**_encoder_sizes(), pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return Case(_hf(RobertaForMaskedLM, config, dtype), kwargs=_padded_batch())


@zoo
def vit(dtype: torch.dtype) -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=96,
        image_size=24,
        patch_size=8,
    )
    pixels = torch.randn(2, 3, 24, 24).to(dtype)
    return Case(_hf(ViTForImageClassification, config, dtype), kwargs={"pixel_values": pixels})


def _whisper(dtype: torch.dtype) -> Any:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        vocab_size=101,
        num_mel_bins=16,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=20,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return _hf(WhisperModel, config, dtype)


@zoo
def whisper_encoder(dtype: torch.dtype) -> Case:
    features = torch.randn(1, 16, 40).to(dtype)
    return Case(_whisper(dtype).encoder, kwargs={"input_features": features}, left_to_aten=("convolution",))


@zoo
def whisper_decoder(dtype: torch.dtype) -> Case:
    hidden = torch.randn(1, 20, 48).to(dtype)
    inputs = {"input_ids": _tokens(101, 1, 7), "encoder_hidden_states": hidden, "use_cache": False}
    return Case(_whisper(dtype).decoder, kwargs=inputs)


@zoo
def t5_encoder(dtype: torch.dtype) -> Case:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=101,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return Case(_hf(T5EncoderModel, config, dtype), kwargs=_padded_batch())


@zoo
def clip_text(dtype: torch.dtype) -> Case:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        **_encoder_sizes(), projection_dim=24, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    ids = _tokens(101, 2, 9)
    ids[:, -1] = 2
    return Case(_hf(CLIPTextModelWithProjection, config, dtype), kwargs={"input_ids": ids})


@zoo
def clip_vision(dtype: torch.dtype) -> Case:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=24,
        patch_size=8,
        projection_dim=24,
    )
    pixels = torch.randn(2, 3, 24, 24).to(dtype)
    model = _hf(CLIPVisionModelWithProjection, config, dtype)
    return Case(model, kwargs={"pixel_values": pixels})


@zoo
def mixtral(dtype: torch.dtype) -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = _decoder_sizes(
        intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    )
    model = _hf(MixtralForCausalLM, MixtralConfig(**sizes), dtype)
    return Case(model, kwargs={"input_ids": _tokens(101, 1, 11), "use_cache": False})


@zoo
def qwen3_moe(dtype: torch.dtype) -> Case:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = _decoder_sizes(head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
    model = _hf(Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes), dtype)
    return Case(model, kwargs={"input_ids": _tokens(101, 1, 11), "use_cache": False})


@zoo
def deepseek_v3(dtype: torch.dtype) -> Case:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = _decoder_sizes(
        num_attention_heads=4,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=12,
    )
    model = _hf(DeepseekV3ForCausalLM, DeepseekV3Config(**sizes), dtype)
    return Case(model, kwargs={"input_ids": _tokens(101, 1, 11), "use_cache": False})


@zoo
def mamba(dtype: torch.dtype) -> Case:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=101,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        conv_kernel=4,
        expand=2,
        time_step_rank=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    inputs = {"input_ids": _tokens(101, 1, 9), "use_cache": False}
    return Case(_hf(MambaForCausalLM, config, dtype), kwargs=inputs)


@zoo
def resnet(dtype: torch.dtype) -> Case:
    model = ResNet(width=8, blocks=(1, 2, 1, 1), classes=10)
    return Case(model.to(dtype), (torch.randn(2, 3, 33, 33).to(dtype),), left_to_aten=("convolution",))


@zoo
def unet(dtype: torch.dtype) -> Case:
    model = UNet(channels=8, depth=2).to(dtype)
    inputs = (torch.randn(1, 3, 16, 24).to(dtype), torch.tensor([17.0]).to(dtype))
    return Case(model, inputs, left_to_aten=("convolution",))
