"""Small models as vLLM describes them: VllmConfig, the specs of their layers, and the KVCacheConfig made of those."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    kv_cache_groups_tp_replicas,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

BLOCK = 4
WINDOW = 11
MAX_LEN = 256
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 512,
    "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip


def full(**changes: Any) -> FullAttentionSpec:
    """A layer of full attention; its page has 256 bytes."""
    numbers = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**numbers, **changes})


def sliding(**changes: Any) -> SlidingWindowSpec:
    """The same with a window of 11 tokens."""
    numbers = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return SlidingWindowSpec(**{**numbers, "sliding_window": WINDOW, **changes})


def mamba(**changes: Any) -> MambaSpec:
    """A recurrent layer with two states in one page, padded to the size of an attention page."""
    numbers = {"block_size": BLOCK, "shapes": ((3, 5), (2, 3, 4)), "dtypes": (torch.bfloat16, torch.float32)}
    return MambaSpec(**{**numbers, "page_size_padded": 256, "mamba_cache_mode": "align", **changes})


def mla(**changes: Any) -> MLAAttentionSpec:
    """A layer of latents."""
    numbers = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 24, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**{**numbers, **changes})


@dataclass(frozen=True)
class Model:
    """A model by its layers, and how it is run.

    chunk: tokens of a chunk; blocks: enough for one request of 110 tokens; ranks: of tensor parallelism; stages: of a
    pipeline; retention: of vLLM's checkpoints, None keeps all; match_unit: tokens that vLLM's own hits are a multiple
    of, where not a block.
    """

    name: str
    layers: tuple[KVCacheSpec, ...]
    chunk: int = 2 * BLOCK
    blocks: int = 32
    ranks: int = 1
    stages: int = 1
    retention: int | None = 0
    match_unit: int | None = None
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def recurrent(self) -> bool:
        return any(isinstance(spec, MambaSpec) for spec in self.layers)

    @property
    def workers(self) -> int:
        return self.ranks * self.stages


MODELS = {
    model.name: model
    for model in (
        Model("full", (full(),) * 3),
        Model("mla", (mla(),) * 3),
        Model("window", (sliding(),) * 2),
        Model("full+window", (sliding(), sliding(), full()), blocks=66),
        Model("full+window dense", (sliding(), full()), blocks=48, retention=None),
        Model("full+mamba", (mamba(), mamba(), full()), chunk=BLOCK, blocks=44),
        Model("full+mamba dense", (mamba(), full()), chunk=BLOCK, blocks=40, retention=None),
        Model("full+window of other blocks", (sliding(num_kv_heads=4), full()), blocks=42),
        Model("full+mamba, half blocks", (mamba(), full()), chunk=BLOCK, blocks=40, match_unit=BLOCK // 2),
        Model("full tp2", (full(),) * 2, ranks=2),
        Model("mla tp2", (mla(max_tp_shards=1),) * 2, ranks=2),
        Model("full+mamba tp2", (mamba(), full()), chunk=BLOCK, blocks=40, ranks=2),
        Model("full pp2", (full(),) * 3, stages=2),
        Model("full+window pp2", (sliding(), full(), sliding(), full()), blocks=48, stages=2),
    )
}


@functools.cache
def _model_config() -> ModelConfig:
    folder = tempfile.mkdtemp(prefix="lmkv-sim-")
    (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
    return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=MAX_LEN)


@functools.cache
def _vllm_config() -> VllmConfig:
    return VllmConfig(
        model_config=_model_config(),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True, prefix_caching_hash_algo="sha256_cbor"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=6, max_num_batched_tokens=48, max_model_len=MAX_LEN, enable_chunked_prefill=True,
            is_encoder_decoder=False, async_scheduling=False,
        ),
        kv_transfer_config=_transfer({}),
        device_config=DeviceConfig("cpu"),
    )  # fmt: skip


def _transfer(extra: dict[str, Any]) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="LMKVConnector",
        kv_connector_module_path="lmkv_vllm",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )


@dataclass
class Setup:
    """What an engine core works out before it makes its scheduler."""

    model: Model
    config: VllmConfig
    caches: list[KVCacheConfig]
    scheduler_cache: KVCacheConfig
    block_tokens: int
    hash_tokens: int
    specs: dict[str, KVCacheSpec]


def vllm_config(model: Model, options: dict[str, Any] | None = None, **cache: Any) -> VllmConfig:
    """A VllmConfig of its own for ``model``; ``options``: the connector's extra config, ``cache``: of CacheConfig."""
    config = copy.copy(_vllm_config())
    config.cache_config = copy.copy(config.cache_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.model_config = copy.copy(config.model_config)
    config.kv_transfer_config = _transfer(
        {"weights_id": "sim", "chunk_tokens": model.chunk, "worth_it": False, **dict(model.extra), **(options or {})}
    )
    parallel: ParallelConfig = config.parallel_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = model.ranks, model.stages
    parallel.world_size = model.workers
    config.cache_config.prefix_cache_retention_interval = model.retention
    config.cache_config.prefix_match_unit = model.match_unit
    config.cache_config.kv_cache_layout = "LBHNC"
    if model.recurrent:
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.mamba_block_size = BLOCK
    for name, value in cache.items():
        setattr(config.cache_config, name, value)
    return config


def setup(model: Model, blocks: int, config: VllmConfig) -> Setup:
    """As vLLM's engine core does it: groups, placement, block sizes, one copy for the scheduler."""
    specs: dict[str, KVCacheSpec] = {f"model.layers.{i}.attn": spec for i, spec in enumerate(model.layers)}
    groups = get_kv_cache_groups(config, dict(specs))
    for group in groups:  # vLLM may have changed the block size of some layers, so that all pages have one size
        each = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        specs.update({name: each.get(name, group.kv_cache_spec) for name in group.layer_names})
    config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in groups)
    config.cache_config.num_gpu_blocks = blocks
    caches = [_cache(model, stage, groups, blocks, config) for stage in range(model.stages) for _ in range(model.ranks)]
    scheduler_cache = generate_scheduler_kv_cache_config(caches)
    block_tokens, hash_tokens = resolve_kv_cache_block_sizes(scheduler_cache, config)
    aligned = resolve_cache_hit_alignment_tokens(scheduler_cache, config, block_tokens, hash_tokens)
    for each in (*caches, scheduler_cache):
        each.hash_block_size, each.cache_hit_alignment_tokens = hash_tokens, aligned
    return Setup(model, config, caches, scheduler_cache, block_tokens, hash_tokens, specs)


def _cache(
    model: Model, stage: int, groups: list[KVCacheGroupSpec], blocks: int, config: VllmConfig
) -> KVCacheConfig:  # fmt: skip
    """What one worker has: the layers of its stage."""
    count = -(-len(model.layers) // model.stages)
    names = {f"model.layers.{i}.attn" for i in range(stage * count, (stage + 1) * count)}
    own = [replace(group, layer_names=[name for name in group.layer_names if name in names]) for group in groups]
    one = get_kv_cache_config_from_groups(config, own, 1 << 30)
    per_block = one.kv_cache_tensors[0].size // one.num_blocks
    cache = get_kv_cache_config_from_groups(config, own, per_block * blocks)
    cache.kv_cache_layout = config.cache_config.kv_cache_layout
    cache.kv_tp_replicas = kv_cache_groups_tp_replicas(groups, model.ranks)
    return cache
