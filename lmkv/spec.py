"""What an engine's KV cache is made of, in numbers. Every size lmkv uses is computed here.

Layers that cache alike form a group: full attention, MLA latents, sliding window, recurrent state.
A :class:`KVSpec` is the groups that one shard (one rank) holds, and the tokens per chunk. B stands
for a boundary, a multiple of ``chunk_tokens``; a hit is always a whole number of chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from typing import Any

from lmkv import _native
from lmkv.errors import BadInput

MAX_PAGES = 256  # a container's page mask has 32 bytes
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
ITEM_BYTES |= {"float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}


class Kind(str, Enum):
    """How a group's cache grows: per token (FULL, MLA), up to a window, or not at all."""

    FULL = "full"
    MLA = "mla"
    SLIDING = "sliding"
    RECURRENT = "recurrent"


_SIZES = ("page_tokens", "kv_heads", "head_dim", "head_dim_v", "window", "state_bytes")
_NEEDED = {
    Kind.FULL: {"page_tokens", "kv_heads", "head_dim", "head_dim_v"},
    Kind.MLA: {"page_tokens", "kv_heads", "head_dim"},
    Kind.SLIDING: {"page_tokens", "kv_heads", "head_dim", "head_dim_v", "window"},
    Kind.RECURRENT: {"page_tokens", "state_bytes"},
}


@dataclass(frozen=True)
class LayerGroup:
    """Layers that cache alike, and the bytes of one of their pages.

    layers: model layer numbers, rising. page_tokens: tokens per page; for RECURRENT the engine's
    block (a chunk holds one state, that at its end). kv_heads, head_dim, head_dim_v: of one shard;
    V is as wide as K when None; MLA has none, its latent and rope parts are ``head_dim`` of one
    head. window: tokens that a SLIDING layer sees, its own included. state_bytes: RECURRENT, per
    layer. page_padding: bytes stored with each layer's page beside its tokens (packed formats);
    padding that only separates pages in memory is not stored and does not count.
    BadInput: sizes that are no sizes or belong to another kind, unknown dtypes.
    """

    kind: Kind
    layers: tuple[int, ...]
    page_tokens: int
    kv_heads: int = 0
    head_dim: int = 0
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    window: int = 0
    state_bytes: int = 0
    page_padding: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        needed = _NEEDED[self.kind]
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim if "head_dim_v" in needed else 0)
        if self.dtype not in ITEM_BYTES:
            raise BadInput(f"unknown dtype {self.dtype!r}; known: {', '.join(ITEM_BYTES)}")
        if not self.layers or list(self.layers) != sorted({n for n in self.layers if n >= 0}):
            raise BadInput(f"layers must be rising numbers from 0, not {self.layers}")
        for name in _SIZES:
            value = getattr(self, name)
            if value < 1 if name in needed else value != 0:
                rule = "must be at least 1" if name in needed else "must be left out"
                raise BadInput(f"{name} of a {self.kind.value} group {rule}, not {value}")
        if self.page_padding < 0:
            raise BadInput(f"page_padding must not be negative, not {self.page_padding}")

    @property
    def layer_token_bytes(self) -> int:
        """K and V of one token in one layer; 0 for RECURRENT."""
        return self.kv_heads * (self.head_dim + (self.head_dim_v or 0)) * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Of all layers of the group, page padding left out; 0 for RECURRENT."""
        return len(self.layers) * self.layer_token_bytes

    @property
    def layer_page_bytes(self) -> int:
        """Stored bytes of one page (RECURRENT: one state) of one layer."""
        return self.page_tokens * self.layer_token_bytes + self.state_bytes + self.page_padding

    @property
    def fixed_bytes(self) -> int:
        """Per sequence, however long: the window of SLIDING, the state of RECURRENT, else 0."""
        return self.window * self.bytes_per_token + self.state_bytes * len(self.layers)

    def pages(self, chunk_tokens: int) -> int:
        """Pages of one chunk; a RECURRENT group has one, its state at the chunk's end."""
        return 1 if self.kind is Kind.RECURRENT else chunk_tokens // self.page_tokens

    def chunk_bytes(self, chunk_tokens: int) -> int:
        """Payload of one chunk without container padding; every page has room, needed or not."""
        return len(self.layers) * self.pages(chunk_tokens) * self.layer_page_bytes


@dataclass(frozen=True)
class KVSpec:
    """Groups that one shard holds, cut into chunks; ``shards`` such shards make the whole model.

    BadInput: ``chunk_tokens`` is no multiple of a group's page, or more than 256 pages.
    """

    groups: tuple[LayerGroup, ...]
    chunk_tokens: int = 256
    shards: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups or self.shards < 1 or self.chunk_tokens < 1:
            raise BadInput("a KVSpec needs a group, chunk_tokens >= 1 and shards >= 1")
        for number, group in enumerate(self.groups):
            page = group.page_tokens
            if self.chunk_tokens % page or group.pages(self.chunk_tokens) > MAX_PAGES:
                raise BadInput(
                    f"chunk_tokens must be 1 to {MAX_PAGES} times the page_tokens of every group "
                    f"({page} in group {number}), not {self.chunk_tokens}"
                )

    def __hash__(self) -> int:
        return self.geometry_id

    @property
    def bytes_per_token(self) -> int:
        """What each further token adds: the groups that grow (FULL, MLA)."""
        return sum(g.bytes_per_token for g in self.groups if not g.fixed_bytes)

    @property
    def fixed_bytes(self) -> int:
        """What a sequence costs beside that: windows and states."""
        return sum(group.fixed_bytes for group in self.groups)

    @property
    def kv_dtype(self) -> str:
        """The groups' dtypes, each once, joined by commas; for ``Scope.kv_dtype``."""
        return ",".join(dict.fromkeys(group.dtype for group in self.groups))

    def geometry(self) -> str:
        """Canonical text of everything here that changes stored bytes; for ``Scope.geometry``."""
        lines = [f"chunk_tokens={self.chunk_tokens} shards={self.shards}"]
        for group in self.groups:
            values = {f.name: getattr(group, f.name) for f in fields(group)}
            values |= {"kind": group.kind.value, "layers": ",".join(map(str, group.layers))}
            lines.append(" ".join(f"{name}={value}" for name, value in values.items()))
        return "\n".join(lines)

    @cached_property
    def geometry_id(self) -> int:
        """64 bits of BLAKE3 of :meth:`geometry`, as containers carry it."""
        return int.from_bytes(_native.blake3(self.geometry().encode())[:8], "little")

    def pages(self, group: int) -> int:
        """Pages of a group in one chunk."""
        return self.groups[group].pages(self.chunk_tokens)

    def chunk_bytes(self, group: int) -> int:
        """Payload bytes of a group in one chunk."""
        return self.groups[group].chunk_bytes(self.chunk_tokens)

    def window_chunks(self, group: int) -> int | None:
        """How many chunks before a boundary B a hit needs of a group; None: all of them.

        SLIDING: those that meet tokens [B - (window - 1), B), which the token at B looks back on.
        """
        kind, window = self.groups[group].kind, self.groups[group].window
        if kind is Kind.SLIDING:
            return -(-(window - 1) // self.chunk_tokens)
        return 1 if kind is Kind.RECURRENT else None

    def needed_chunks(self, group: int, chunks: int) -> range:
        """The chunks that a hit of the first ``chunks`` chunks needs of a group."""
        window = self.window_chunks(group)
        return range(0 if window is None else max(0, chunks - window), chunks)

    def page_mask(self, group: int, from_end: int = 0) -> int:
        """Pages (bit j = page j) that a hit needs of the chunk ``from_end`` before its last one.

        ``page_mask(group)`` covers whatever any hit can need of a chunk: it is what to store.
        """
        pages = needed = self.pages(group)
        kind, window = self.groups[group].kind, self.groups[group].window
        if kind is Kind.RECURRENT:
            needed = 1 if from_end == 0 else 0
        elif kind is Kind.SLIDING:
            tokens = window - 1 - from_end * self.chunk_tokens
            needed = min(pages, max(0, -(-tokens // self.groups[group].page_tokens)))
        return (1 << pages) - (1 << (pages - needed))

    @classmethod
    def from_hf_config(
        cls, config: Mapping[str, Any], chunk_tokens: int = 256, page_tokens: int = 16, dtype: str | None = None
    ) -> KVSpec:
        """The spec of a model from its Hugging Face ``config.json``, all of it in one shard.

        dtype: of the cache, by default the config's. MLA models as serving engines cache them (one
        latent per token). BadInput names what is missing, unknown or not supported.
        """
        text = {**config, **(config.get("text_config") or {})}
        dtype = dtype or text.get("dtype") or text.get("torch_dtype")
        if not dtype:
            raise BadInput("the config has no dtype: pass dtype=")
        if text.get("model_type") in _MLA_MODELS:
            heads, width = 1, _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")
        else:
            query_heads = _count(text, "num_attention_heads")
            heads = text.get("num_key_value_heads") or query_heads
            width = text.get("head_dim") or _count(text, "hidden_size") // query_heads
        kinds = _layer_kinds(text)
        groups = []
        for kind in sorted(set(kinds), key=list(Kind).index):
            layers = tuple(i for i, each in enumerate(kinds) if each is kind)
            window = _count(text, "sliding_window") if kind is Kind.SLIDING else 0
            groups.append(LayerGroup(kind, layers, page_tokens, heads, width, dtype=dtype, window=window))
        return cls(tuple(groups), chunk_tokens)


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise BadInput(f"{key} in the config must be a positive integer, not {value!r}")
    return value


_MLA_MODELS = ("deepseek_v2", "deepseek_v3")
_MODELS = {"llama", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "mistral", "mixtral"}
_MODELS |= {"phi3", "qwen2", "qwen3", "qwen3_moe", *_MLA_MODELS}
_UNSUPPORTED = ("use_bidirectional_attention", "index_head_dim", "num_kv_shared_layers")
_LAYER_TYPES = {"full_attention": Kind.FULL, "sliding_attention": Kind.SLIDING}


def _layer_kinds(config: Mapping[str, Any]) -> list[Kind]:
    """Each layer's kind, as ``layer_types`` says or by the model's own rule."""
    model, types = config.get("model_type"), config.get("layer_types")
    layers = range(_count(config, "num_hidden_layers"))
    for key in _UNSUPPORTED:
        if config.get(key):
            raise BadInput(f"{key} = {config[key]!r} is not supported")
    if model not in _MODELS:
        raise BadInput(f"model_type {model!r} is not known: build the KVSpec from LayerGroups")
    if model in _MLA_MODELS:
        return [Kind.MLA for _ in layers]
    if types is None:
        return [Kind.SLIDING if _slides(config, model, i) else Kind.FULL for i in layers]
    if len(types) != len(layers) or not set(types) <= set(_LAYER_TYPES):
        raise BadInput(f"layer_types: {len(types)} for {len(layers)} layers, {sorted(set(types))}")
    return [_LAYER_TYPES[each] for each in types]


def _slides(config: Mapping[str, Any], model: str, layer: int) -> bool:
    """Whether a layer slides when ``layer_types`` is absent, as transformers decides it."""
    if model in ("gemma2", "gpt_oss"):
        return layer % 2 == 0
    if model in ("gemma3", "gemma3_text"):
        return (layer + 1) % int(config.get("sliding_window_pattern") or 6) != 0
    if model in ("mistral", "mixtral", "phi3"):
        if "sliding_window" not in config:
            raise BadInput("sliding_window is missing in the config (null for none)")
        return config["sliding_window"] is not None
    if model in ("qwen2", "qwen3", "qwen3_moe") and config.get("use_sliding_window"):
        return model == "qwen3_moe" or layer >= int(config.get("max_window_layers", 28))
    return False


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    shape: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": layers}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return shape | {"hidden_size": hidden, "dtype": "bfloat16"} | more


_GEMMA = {"model_type": "gemma3_text", "head_dim": 128, "sliding_window": 1024}
_GPT_OSS = {"model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128}
_DEEPSEEK = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
# What `from_hf_config` reads of these models' config.json.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _shape(30, 576, 9, 3),
    "llama-3.1-8b": _shape(32, 4096, 32, 8),
    "llama-3.1-70b": _shape(80, 8192, 64, 8),
    "qwen3-32b": _shape(64, 5120, 64, 8, model_type="qwen3", head_dim=128),
    "gemma-3-27b": _shape(62, 5376, 32, 16, **_GEMMA),
    "gpt-oss-120b": _shape(36, 2880, 64, 8, **_GPT_OSS),
    "deepseek-v3": _shape(61, 7168, 128, 128, **_DEEPSEEK),
}
