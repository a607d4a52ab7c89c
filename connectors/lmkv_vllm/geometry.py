"""What a rank's KV cache looks like: a KVSpec and views of its pages, from vLLM's numbers and the tensors' strides.

Nothing here asks which attention backend made the pages, except to name it: bytes laid out by another backend or
instruction set must not be taken for ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

from lmkv.codec import Rope
from lmkv.errors import ConfigError
from lmkv.pages import GroupView, Plane
from lmkv.spec import ITEM_BYTES, Kind, KVSpec, LayerGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


@dataclass(frozen=True)
class Group:
    """A vLLM cache group that is stored: its number there, its kind, tokens a block, window (0: none)."""

    number: int
    kind: Kind
    block_tokens: int
    window: int


@dataclass(frozen=True)
class Plan:
    """How a model's prompts are cut, the same on the scheduler and on every rank.

    chunk_tokens: a multiple of every group's block. hash_tokens: tokens of one vLLM block hash. shards: distinct ones
    over all ranks; replicas: neighbouring tensor-parallel ranks that hold the same bytes.
    """

    groups: tuple[Group, ...]
    chunk_tokens: int
    hash_tokens: int
    shards: int
    replicas: int

    @property
    def recurrent(self) -> bool:
        """Some layers keep a state instead of tokens."""
        return any(group.kind is Kind.RECURRENT for group in self.groups)

    @property
    def by_blocks(self) -> bool:
        """A failed load can be told block by block: every prefix of what was loaded stands for itself."""
        return len(self.groups) == 1 and self.groups[0].kind in (Kind.FULL, Kind.MLA)

    @classmethod
    def of(cls, config: VllmConfig, cache: KVCacheConfig, chunk_tokens: int) -> Plan:
        """The plan for a model; ConfigError names what cannot be stored exactly."""
        parallel = config.parallel_config
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise ConfigError("decode_context_parallel_size", "context parallelism is not supported by LMKVConnector")
        if config.speculative_config is not None and config.speculative_config.use_eagle():
            raise ConfigError("speculative_config", "EAGLE and MTP drafters are not supported by LMKVConnector")
        groups = tuple(_group(n, cache.kv_cache_groups[n].kv_cache_spec) for n in cache.prefix_cacheable_group_ids)
        if not groups:
            raise ConfigError("kv_cache_groups", "the model has no cache that prefixes could share")
        blocks = [group.block_tokens for group in groups]
        unit = lcm(*blocks)
        if any(group.kind is Kind.RECURRENT for group in groups):
            chunk_tokens = unit
        hashes = cache.hash_block_size or gcd(*blocks)
        chunk = -(-chunk_tokens // unit) * unit
        if chunk % hashes:
            raise ConfigError("chunk_tokens", f"{chunk} is not a multiple of the {hashes} tokens of a block hash")
        replicas = max(1, cache.kv_tp_replicas)
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return cls(groups, chunk, hashes, ranks // replicas, replicas)


def _group(number: int, spec: KVCacheSpec) -> Group:
    """One group's kind, known by vLLM's own classes."""
    from vllm.v1 import kv_cache_interface as vllm

    specs = list(vllm.iter_layer_specs(spec))
    first, kinds = specs[0], {_kind(each) for each in specs}
    if len(kinds) != 1:
        raise ConfigError("kv_cache_groups", f"group {number} mixes {sorted(kind.value for kind in kinds)} layers")
    kind = kinds.pop()
    if isinstance(first, vllm.MambaSpec) and first.mamba_cache_mode != "align":
        raise ConfigError(
            "mamba_cache_mode", f"{first.mamba_cache_mode!r} keeps no states to store: enable prefix caching (align)"
        )
    window = first.sliding_window + first.extra_retained_tokens if isinstance(first, vllm.SlidingWindowSpec) else 0
    return Group(number, kind, first.block_size, window)


def _kind(spec: KVCacheSpec) -> Kind:
    from vllm.v1 import kv_cache_interface as vllm

    for cls, kind in (
        (vllm.MambaSpec, Kind.RECURRENT), (vllm.SlidingWindowSpec, Kind.SLIDING), (vllm.MLAAttentionSpec, Kind.MLA),
        (vllm.SinkFullAttentionSpec, None), (vllm.RSWASpec, None), (vllm.FullAttentionSpec, Kind.FULL),
    ):  # fmt: skip
        if isinstance(spec, cls) and kind:
            return kind
        if isinstance(spec, cls):
            break
    raise ConfigError("kv_cache_groups", f"{type(spec).__name__} layers are not supported by LMKVConnector")


def pages_needed(group: Group, chunk_tokens: int) -> tuple[int, ...]:
    """Page masks that a boundary needs of a window or recurrent group's last chunks, the last one first; see
    ``KVSpec.page_mask``."""
    more: dict[str, Any] = {"kv_heads": 1, "head_dim": 1, "window": group.window}
    if group.kind is Kind.RECURRENT:
        more = {"state_bytes": 1}
    spec = KVSpec((LayerGroup(group.kind, (0,), group.block_tokens, dtype="uint8", **more),), chunk_tokens)
    return tuple(spec.page_mask(0, back) for back in range(spec.window_chunks(0) or 0))


def describe(
    plan: Plan, cache: KVCacheConfig, tensors: Mapping[str, Any]
) -> tuple[KVSpec, list[GroupView], tuple[int, ...]]:
    """A rank's spec, the views of its pages, and for each group of the spec the group of the plan it belongs to.

    A vLLM group whose layers' pages differ in size becomes a group of the spec for each size.
    """
    groups: list[LayerGroup] = []
    views: list[GroupView] = []
    numbers: list[int] = []
    for place, group in enumerate(plan.groups):
        spec = cache.kv_cache_groups[group.number].kv_cache_spec
        each = getattr(spec, "kv_cache_specs", {})
        names = [name for name in cache.kv_cache_groups[group.number].layer_names if name in tensors]
        by_size: dict[int, list[tuple[str, tuple[Plane, ...]]]] = {}
        for name in sorted(names, key=lambda name: (_layer_number(name), name)):
            planes = _planes(tensors[name], cache.num_blocks)
            by_size.setdefault(sum(plane.page_bytes for plane in planes), []).append((name, planes))
        if not by_size:
            raise ConfigError("pipeline_parallel_size", f"a rank holds no layer of cache group {group.number}")
        for size, layers in by_size.items():
            first = each.get(layers[0][0], spec)
            groups.append(_layer_group(group, first, size, _numbers([name for name, _ in layers])))
            views.append(GroupView(tuple(planes for _, planes in layers)))
            numbers.append(place)
    return KVSpec(tuple(groups), plan.chunk_tokens, plan.shards), views, tuple(numbers)


def axes(spec: KVSpec, views: Sequence[GroupView]) -> list[str]:
    """For codecs, the order of the axes in a stored page of each group, as its strides say. "" where a page is not
    plainly [head, token, K and V]. For pages of GPUs: CPU backends pack theirs by rules of their own."""
    found = []
    for group, view in zip(spec.groups, views, strict=True):
        content = group.head_dim + (group.head_dim_v or 0)
        box, inner = (group.kv_heads, group.page_tokens, content), "kv dim" if group.head_dim_v else "dim"
        planes = {plane for layer in view.layers for plane in layer}
        plain = all(len(layer) == 1 for layer in view.layers) and all(plane.shape == box for plane in planes)
        names = "head", "token", inner
        orders = {
            " ".join(name for _, name in sorted(zip(plane.strides, names, strict=True), reverse=True))
            for plane in (planes if plain else ())
        }
        found.append(orders.pop() if len(orders) == 1 else "")
    return found


def rope(spec: KVSpec, config: VllmConfig) -> Rope | None:
    """For codecs, how keys were rotated: by the one rotary embedding that vLLM made for the model. None where it made
    none or several, where angles depend on more than the position, or where not all layers rotate alike."""
    from vllm.model_executor.layers import rotary_embedding as vllm

    text = config.model_config.hf_text_config
    unlike = any(getattr(text, name, None) for name in ("no_rope_layers", "no_rope_layer_interval"))
    found = {_rope(each) for each in vllm._ROPE_DICT.values()}
    if unlike or len(found) != 1 or [group.kind for group in spec.groups] != [Kind.FULL]:
        return None
    one = found.pop()
    return one if one and 2 * len(one.inv_freq) <= spec.groups[0].head_dim else None


def _rope(module: Any) -> Rope | None:
    from vllm.model_executor.layers import rotary_embedding as vllm

    if type(module) in (vllm.RotaryEmbedding, vllm.Llama3RotaryEmbedding):
        frequencies, factor = module._compute_inv_freq(module.base), 1.0
    elif type(module) is vllm.YaRNScalingRotaryEmbedding:
        frequencies, factor = module._compute_inv_freq(module.scaling_factor), module.mscale
    else:
        return None
    return Rope(tuple(frequencies.double().tolist()), not module.is_neox_style, factor)


def _planes(tensor: Any, blocks: int) -> tuple[Plane, ...]:
    """A layer's pages, one for each of vLLM's blocks; kernel blocks that split one are put together again."""
    tensors = tensor if isinstance(tensor, (list, tuple)) else [tensor]
    planes = []
    for each in tensors:
        if each.shape[0] % blocks:
            raise ConfigError("kv_cache_layout", f"{each.shape[0]} kernel blocks do not make {blocks} whole blocks")
        planes.append(Plane.of(each if each.shape[0] == blocks else each.unflatten(0, (blocks, -1))))
    return tuple(planes)


def _layer_group(group: Group, spec: Any, page_bytes: int, layers: tuple[int, ...]) -> LayerGroup:
    """The numbers of one group: heads and dtype where they account for the page, else just its bytes."""
    tokens = group.block_tokens
    if group.kind is Kind.RECURRENT:
        return LayerGroup(group.kind, layers, tokens, dtype="uint8", state_bytes=page_bytes)
    more: dict[str, Any] = {"window": group.window} if group.kind is Kind.SLIDING else {}
    mla = group.kind is Kind.MLA
    dtype = str(spec.dtype).removeprefix("torch.")
    heads, width, width_v = (1 if mla else spec.num_kv_heads), spec.head_size, (0 if mla else spec.head_size_v)
    known = tokens * heads * (width + width_v) * ITEM_BYTES.get(dtype, 0)
    if not 0 < known <= page_bytes:
        each = page_bytes // tokens
        dtype, heads, width_v = "uint8", 1, 0 if mla else each // 2
        width, known = each - width_v, tokens * each
    return LayerGroup(
        group.kind,
        layers,
        tokens,
        heads,
        width,
        None if mla else width_v,
        dtype,
        page_padding=page_bytes - known,
        **more,
    )


def _layer_number(name: str) -> int:
    found = re.findall(r"\.(\d+)(?=\.|$)", name)
    return int(found[0]) if found else 0


def _numbers(names: Sequence[str]) -> tuple[int, ...]:
    """The model's layer numbers where they tell the layers apart, else places."""
    numbers = tuple(_layer_number(name) for name in names)
    return numbers if list(numbers) == sorted(set(numbers)) else tuple(range(len(names)))


def backend_text(config: VllmConfig, tensors: Mapping[str, Any]) -> str:
    """Names whatever arranges bytes inside a page: device, and on a CPU its instruction set."""
    import torch
    from vllm.platforms import current_platform

    first = next(iter(tensors.values()))
    first = first[0] if isinstance(first, (list, tuple)) else first
    text = f"{first.device.type} {config.cache_config.cache_dtype}"
    if first.device.type == "cpu":
        flags = (torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported())
        text += f" {current_platform.get_cpu_architecture().name} amx={flags[0]} avx512={flags[1]}"
    backend = config.attention_config.backend
    return f"{text} attention={backend.name if backend else 'auto'}"
