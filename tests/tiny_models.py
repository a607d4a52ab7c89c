"""Tiny checkpoints of real architectures, with weights large enough that attention matters.

Weights have a standard deviation of 0.15, not the usual 0.02: with that a tiny model's next token
hardly depends on anything but the last one, and a corrupted cache would go unnoticed.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from lmkv_hf.geometry import CACHE

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}

# name -> (config class, what differs from COMMON). Windows are far shorter than the tests' prompts.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 1}),
    "mistral": ("MistralConfig", {"sliding_window": 40}),
    "gemma3": ("Gemma3TextConfig", {"num_hidden_layers": 7, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    ),
}


def tiny(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model of the named architecture, the same one on every call, in evaluation mode."""
    torch.set_num_threads(1)  # its products are so small that waking a second thread costs more
    config_class, differences = MODELS[name]
    config = getattr(transformers, config_class)(**{**COMMON, **differences, **changes})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    return model


def tokens(count: int, *, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """Random token ids ``[batch, count]``, none of them the padding or the beginning token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, COMMON["vocab_size"], (batch, count), generator=generator)


@torch.no_grad()
def cropped_cache(
    model: PreTrainedModel, ids: torch.Tensor, length: int, mask: torch.Tensor | None = None
) -> DynamicCache:
    """The oracle: transformers' own cache of ``ids``, run in one piece, cropped to ``length``."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.activate_past_recording()  # window layers must keep what cropping brings back
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # as generate counts them in a padded batch
    model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: cache})
    cache.crop(length - ids.shape[1])
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False
    return cache
