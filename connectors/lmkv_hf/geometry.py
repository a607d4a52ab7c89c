"""What a model caches, found out by asking it, and which models are refused.

A forward over two tokens fills transformers' own cache; its layers say what each one keeps: kind,
heads, widths, dtype, window. That holds for architectures this file has never heard of, and shows
which ones to refuse.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from lmkv.codec import Rope
from lmkv.errors import BadInput
from lmkv.fingerprint import fingerprint
from lmkv.spec import Kind, KVSpec, LayerGroup

from .buffers import CPU, Buffers, LayerShape
from .rope import ropes
from .weights import sampled_tensors

# the name of the cache argument: past_key_values was renamed during transformers 5
_NAMES = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _NAMES else "past_key_values"

SMALLEST_PAGE = 16
AXES = "kv head token dim"  # of a page as `buffers.paged` lays it out


@dataclass(frozen=True)
class Geometry:
    """What an `lmkv.Engine` must be opened with to serve a model, and the layers' shapes."""

    shapes: list[LayerShape | None]
    device: torch.device
    spec: KVSpec
    weights: str
    ropes: tuple[Rope | None, ...]

    @classmethod
    def of(cls, model: Any, chunk_tokens: int, weights_id: str | None) -> Geometry:
        """BadInput for models that cannot be restored exactly."""
        check_model(model)
        shapes, device, keys = probe(model)
        spec = kv_spec(shapes, chunk_tokens)
        config = model.config.to_dict()
        weights = weights_id or fingerprint(sampled_tensors(model), config)
        turned = ropes(model, keys)
        by_group = (dict.fromkeys(turned[layer] for layer in group.layers) for group in spec.groups)
        return cls(shapes, device, spec, weights, tuple(next(iter(s)) if len(s) == 1 else None for s in by_group))

    @property
    def layout(self) -> str:
        """The payload order of all buffers of this geometry, whatever their batch and capacity."""
        buffers = Buffers(self.shapes, 1, self.spec.chunk_tokens, CPU, staged=False)
        return buffers.pages(self.spec, 0, 0).layout


def check_model(model: Any) -> None:
    """BadInput when stored keys and values would not be exact, with what is in the way."""
    config = model.config
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise BadInput("encoder-decoder models are not supported: their cache depends on the input")
    if model.training:
        raise BadInput("the model is in training mode, dropout would be stored: call model.eval()")
    both_ways = getattr(text, "use_bidirectional_attention", None)
    if both_ways or getattr(text, "is_causal", True) is False:
        raise BadInput("attention is not causal: a token's cache depends on the tokens after it")
    for rope in _rope_settings(text):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("dynamic", "longrope"):
            raise BadInput(f"rope type {kind!r} is not supported: keys depend on the total length")
        if rope.get("mrope_section"):
            raise BadInput("multi-dimensional rope is not supported: positions depend on images")


def _rope_settings(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rope settings, also where each layer type has its own."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    settings = settings or {}
    yield settings
    yield from (value for value in settings.values() if isinstance(value, Mapping))


def probe(model: Any) -> tuple[list[LayerShape | None], torch.device, list[torch.Tensor | None]]:
    """What each layer caches (None: nothing), on which device, and the keys of one token twice.
    BadInput when lmkv_hf cannot restore it exactly."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer):
            raise BadInput(
                f"layer {index} caches as {type(layer).__name__}: only full and sliding-window"
                " attention can be restored, no recurrent, indexed or compressed state"
            )
    tokens = torch.ones((1, 2), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=True, **{CACHE: cache})
    shapes: list[LayerShape | None] = []
    found: list[torch.Tensor | None] = []
    devices = set()
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DummyLayer):
            shapes.append(None)
            found.append(None)
            continue
        keys, values = layer.keys, layer.values
        if keys is None or keys.dim() != 4 or keys.shape[2] != 2:
            raise BadInput(f"layer {index} does not cache as attention does: it cannot be restored")
        if keys.dtype != values.dtype or keys.shape[:3] != values.shape[:3]:
            raise BadInput(f"layer {index}: keys and values differ in dtype or heads")
        devices.add(keys.device)
        found.append(keys)
        window = getattr(layer, "sliding_window", None)
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, window))
    if len(devices) != 1:
        raise BadInput(f"the layers' caches lie on {len(devices)} devices: lmkv_hf needs one")
    return shapes, devices.pop(), found


def kv_spec(shapes: Sequence[LayerShape | None], chunk_tokens: int) -> KVSpec:
    """Layers of equal shape form a group. A chunk of full attention is one page (its tokens lie
    together in the buffers); window groups have smaller ones, to store little beside the window."""
    groups = []
    for shape in dict.fromkeys(shape for shape in shapes if shape is not None):
        page = chunk_tokens if shape.window is None else math.gcd(chunk_tokens, shape.window)
        groups.append(
            LayerGroup(
                Kind.FULL if shape.window is None else Kind.SLIDING,
                tuple(index for index, each in enumerate(shapes) if each == shape),
                page_tokens=page if page >= SMALLEST_PAGE else chunk_tokens,
                kv_heads=shape.heads,
                head_dim=shape.key_dim,
                head_dim_v=shape.value_dim,
                dtype=str(shape.dtype),
                window=shape.window or 0,
            )
        )
    return KVSpec(tuple(groups), chunk_tokens)
