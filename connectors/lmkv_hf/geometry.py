"""What a model caches, found out by asking it, and which models are refused.

A forward over two tokens fills transformers' own cache; its layers say what each one keeps: kind, heads, widths, dtype,
window. That holds for architectures this file has never heard of, and it fails for those it must refuse.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from lmkv.errors import BadInput
from lmkv.spec import Kind, KVSpec, LayerGroup

from .buffers import LayerShape

# what generate and forward call the cache argument: past_key_values was renamed in transformers 5.2x
_NAMES = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _NAMES else "past_key_values"

SMALLEST_PAGE = 16


def check_model(model: Any) -> None:
    """BadInput for a model whose stored keys and values would not be exact, with what is in the way."""
    config = model.config
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise BadInput("encoder-decoder models are not supported: their cache depends on the encoder's input")
    if model.training:
        raise BadInput("the model is in training mode, dropout would be stored: call model.eval()")
    if getattr(text, "use_bidirectional_attention", None) or getattr(text, "is_causal", True) is False:
        raise BadInput("attention is not causal: a token's keys and values depend on the tokens after it")
    for rope in _rope_settings(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("dynamic", "longrope"):
            raise BadInput(f"rope type {kind!r} is not supported: keys depend on the length of the whole sequence")
        if rope.get("mrope_section"):
            raise BadInput("multi-dimensional rope is not supported: positions depend on images")


def _rope_settings(parameters: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The rope settings, also where each layer type has its own."""
    parameters = parameters or {}
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, Mapping))


def probe(model: Any) -> tuple[list[LayerShape | None], torch.device]:
    """What each layer caches (None: nothing), and where. BadInput when lmkv_hf cannot restore it exactly."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer):
            raise BadInput(
                f"layer {index} caches as {type(layer).__name__}: only full and sliding-window attention can be"
                " restored, not recurrent, convolutional, indexed or compressed state"
            )
    tokens = torch.ones((1, 2), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=True, **{CACHE: cache})
    shapes: list[LayerShape | None] = []
    devices = set()
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DummyLayer):
            shapes.append(None)
            continue
        if layer.keys is None or layer.get_seq_length() != 2 or layer.keys.dim() != 4:
            raise BadInput(f"layer {index} does not use the cache as attention does: it cannot be restored")
        keys, values = layer.keys, layer.values
        if keys.dtype != values.dtype or keys.shape[1] != values.shape[1]:
            raise BadInput(f"layer {index}: keys and values differ in dtype or heads, which is not supported")
        devices.add(keys.device)
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, window))
    if len(devices) != 1:
        raise BadInput(f"the layers' caches lie on {len(devices)} devices; lmkv_hf needs them on one")
    return shapes, devices.pop()


def kv_spec(shapes: Sequence[LayerShape | None], chunk_tokens: int) -> KVSpec:
    """Layers of equal shape form a group. A chunk of a full-attention group is one page (its tokens lie together in
    the buffers); a window group has smaller pages, so that little beside the window is stored."""
    groups = []
    for shape in dict.fromkeys(shape for shape in shapes if shape is not None):
        layers = tuple(index for index, each in enumerate(shapes) if each == shape)
        page = chunk_tokens if shape.window is None else math.gcd(chunk_tokens, shape.window)
        groups.append(
            LayerGroup(
                Kind.FULL if shape.window is None else Kind.SLIDING,
                layers,
                page_tokens=page if page >= SMALLEST_PAGE else chunk_tokens,
                kv_heads=shape.heads,
                head_dim=shape.key_dim,
                head_dim_v=shape.value_dim,
                dtype=str(shape.dtype),
                window=shape.window or 0,
            )
        )
    return KVSpec(tuple(groups), chunk_tokens)
