"""What a vLLM engine's bytes stand for: the weights, and how its block hashes are made."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkv.errors import ConfigError
from lmkv.fingerprint import fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_HEADER = 100 << 20  # of a safetensors file, as its own library bounds it


def weights_of(config: VllmConfig, weights_id: str) -> str:
    """A name for the weights: ``weights_id``, or a fingerprint of the checkpoint's safetensors files.

    ConfigError when neither is there: bytes computed by other weights could be served.
    """
    model = config.model_config
    problem = "set weights_id in kv_connector_extra_config to name the weights"
    if weights_id:
        return f"id {weights_id}"
    if config.load_config.load_format == "dummy":
        raise ConfigError("weights_id", f"dummy weights cannot be told apart: {problem}")
    folder = _folder(model.model, model.revision)
    files = sorted(folder.glob("*.safetensors")) if folder else []
    if not files:
        raise ConfigError("weights_id", f"no safetensors files found for {model.model!r}: {problem}")
    return fingerprint(_tensors(files), model_text(config))


def model_text(config: VllmConfig) -> str:
    """What the engine makes of the weights, overrides included: the model's config, dtype and quantization."""
    model = config.model_config
    settings = json.loads(model.hf_config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version"):
        settings.pop(name, None)
    return json.dumps([settings, str(model.dtype), str(model.quantization)], sort_keys=True)


def _folder(model: str, revision: str | None) -> Path | None:
    if os.path.isdir(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:
        return None


def _tensors(files: list[Path]) -> Iterator[tuple[str, tuple[int, ...], str, memoryview]]:
    """Name, shape, dtype and bytes of every tensor; the files are mapped, not read."""
    for path in files:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        (length,) = struct.unpack("<Q", data[:8])
        if length > min(MAX_HEADER, len(data) - 8):
            raise ConfigError("weights_id", f"{path.name} is not a safetensors file")
        header: dict[str, Any] = json.loads(bytes(data[8 : 8 + length]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            yield name, tuple(entry["shape"]), entry["dtype"], data[8 + length + begin : 8 + length + end]


def hash_name(config: VllmConfig, block_tokens: int) -> str:
    """Which block hash names the chunks; ConfigError for one that differs from process to process."""
    algorithm = config.cache_config.prefix_caching_hash_algo
    seed = os.environ.get("PYTHONHASHSEED", "")
    if algorithm in ("sha256", "sha256_cbor"):
        return f"vllm {algorithm} {block_tokens}"
    if not seed.isdigit():
        raise ConfigError(
            "prefix_caching_hash_algo",
            f"{algorithm} starts from a random number in every process, so nothing stored would ever be found: "
            "use --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED to one number everywhere",
        )
    return f"vllm {algorithm} {block_tokens} seed {seed}"
