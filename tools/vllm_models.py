"""Write tiny checkpoints of real architectures that vLLM loads: config, safetensors, tokenizer.

Weights have a standard deviation of 0.15, far more than the usual 0.02: a tiny model whose weights are
smaller gives nearly the same next token whatever is in its KV cache, and a test would see no damage.
Shapes are those that vLLM's CPU kernels take (heads of 32 or 64, an MLA latent of 512 + 64).

    python tools/vllm_models.py                  # all of them -> .cache/vllm-models/<name>
    python tools/vllm_models.py gemma3 lfm2      # some
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "vllm-models"
MARK = ".complete"  # written last: its presence and version say that the folder is complete
VERSION = 5
SPECIAL = 32  # tokens after the 256 bytes
VOCABULARY = 256 + SPECIAL
PAD, BOS, EOS = 256, 257, 258

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}

MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}

# name -> keys for config.json that vLLM reads and this release of transformers does not write
EXTRA_KEYS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "lfm2": {"conv_dim": 256, "block_dim": 256},
}

FULL, SLIDING, LINEAR, CONV = "full_attention", "sliding_attention", "linear_attention", "conv"

# name -> (transformers' config class, what differs from COMMON)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "sliding_window": 256,
            "query_pre_attn_scalar": 32,
            "layer_types": [SLIDING] * 5 + [FULL],
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": [SLIDING, FULL] * 2,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", {**MLA, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", {**MLA, "q_lora_rank": 64}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": [LINEAR] * 3 + [FULL],
        },
    ),
    "lfm2": ("Lfm2Config", {"num_attention_heads": 8, "conv_L_cache": 3, "layer_types": [CONV, FULL] * 2}),
}


def build_model(name: str) -> Any:
    """A transformers model of the named architecture, bfloat16, the same one on every call."""
    import torch
    import transformers

    config_class, differences = MODELS[name]
    config = getattr(transformers, config_class)(**{**COMMON, **differences})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for weight_name, weight in model.named_parameters():
        if weight_name.endswith("dt_bias"):
            weight.data.fill_(-4)  # forget slowly: what a recurrent state holds must matter
    if config.tie_word_embeddings:  # else the last token itself is always the most likely next one
        model.get_input_embeddings().weight.data.mul_(0.15)
        model.model.norm.weight.data.fill_(6)
    return model


def build_tokenizer() -> Any:
    """One token a byte, then pad, bos, eos and unused ones: every id of the model decodes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<pad>", "<bos>", "<eos>", *(f"<unused{number}>" for number in range(SPECIAL - 3))]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in names])
    return tokenizer


TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": COMMON["max_position_embeddings"],
    "clean_up_tokenization_spaces": False,
    "pad_token": "<pad>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
}


def is_written(folder: Path) -> bool:
    try:
        return json.loads((folder / MARK).read_text())["version"] == VERSION
    except (OSError, ValueError, KeyError):
        return False


def write(name: str, root: Path = DEFAULT_FOLDER) -> Path:
    """Write ``root/name`` unless it is complete already, and return it. The folder is built beside its
    place and renamed, so an interruption leaves nothing half done."""
    folder = root / name
    if is_written(folder):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    build = Path(tempfile.mkdtemp(prefix=name + ".", dir=root))
    try:
        build_model(name).save_pretrained(build)
        config = json.loads((build / "config.json").read_text())
        (build / "config.json").write_text(json.dumps({**config, **EXTRA_KEYS.get(name, {})}, indent=2))
        build_tokenizer().save(str(build / "tokenizer.json"))
        (build / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2))
        (build / MARK).write_text(json.dumps({"version": VERSION}))
        build.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)  # an older version, or a folder without its mark
        os.replace(build, folder)
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], metavar="name", help=", ".join(MODELS))
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    arguments = parser.parse_args()
    for name in arguments.names or MODELS:
        print(write(name, arguments.folder))


if __name__ == "__main__":
    main()
