"""Calibration: a Hugging Face model reads some texts, and a profile for `klt` comes out.

The Fisher information of a channel is the mean square of the gradient, with respect to it in the cached prefix, of the
log probability of tokens drawn from the model's own distribution after that prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lmkv.codec.fit import BITS, Statistics, fit, places
from lmkv.codec.profile import Profile
from lmkv.codec.shape import Rope, Shape

if TYPE_CHECKING:
    import torch

STEP = 512  # tokens of one forward pass


def calibrate(
    model: Any,
    texts: Sequence[torch.Tensor],
    *,
    rope: Rope | None,
    name: str = "",
    dtype: str = "bfloat16",
    chunk_tokens: int = 256,
    layers: int = 3,
    heads: int = 0,
    joint: bool = True,
    bits: Sequence[float] = BITS,
    gradients: int = 2,
    measure: Callable[[Profile, int], float] | None = None,
    most_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Profile:
    """A profile of ``model`` (transformers, decoder only, all layers alike) from token ids [n] of each text.

    rope: how its keys are rotated. dtype: of the caches that will be coded. chunk_tokens: of the engine, since blocks
    do not cross a container's part. layers, heads (0: all), joint: the block. bits: a value, of each level.
    gradients: backward passes of each text, after as many prefixes. measure: the KL divergence of a level, in nats.
    most_bytes: of the profile; None: a tenth of the weights in two bytes each. progress: told how many texts are done.
    """
    found = gather(model, texts, rope, dtype, gradients, progress)
    weights = sum(each.numel() for each in model.parameters())
    blocks = places(found.geometry, chunk_tokens, layers, heads, joint)
    return fit(found, name or model.config.model_type, blocks, bits, measure, most_bytes or weights * 2 // 10)


def gather(
    model: Any,
    texts: Sequence[torch.Tensor],
    rope: Rope | None,
    dtype: str = "bfloat16",
    gradients: int = 2,
    progress: Callable[[int], None] | None = None,
) -> Statistics:
    """The model's KV on the texts, and its Fisher information. Texts of less than 64 tokens are left out."""
    import torch

    found: Statistics | None = None
    for number, ids in enumerate(each for each in texts if len(each) >= 64):
        kv = _prefill(model, ids, getattr(torch, dtype))
        k, v = kv[0]
        heads, dim, dim_v = k.shape[0], k.shape[2], v.shape[2]
        if found is None:
            found = Statistics(Shape(dtype, len(kv), 1, 1, heads, dim, dim_v, "kv head token dim", rope=rope))
        found.add(memoryview(_raw(kv)), len(ids))
        for i in range(gradients):
            split = len(ids) * (i + 1) // (gradients + 1)
            stop = min(len(ids), split + 96)
            found.add_gradient(_gradient(model, ids[:stop], kv, split, rope, found.sinks))
        if progress:
            progress(number + 1)
    if found is None:
        raise ValueError("no text of 64 tokens or more")
    return found


def _prefill(model: Any, ids: torch.Tensor, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V [heads, tokens, dim] of each layer."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.no_grad():
        for at in range(0, len(ids), STEP):
            _forward(model, ids[at : at + STEP], cache)
    layers: list[Any] = cache.layers
    return [(layer.keys[0].to(dtype), layer.values[0].to(dtype)) for layer in layers]


def _gradient(
    model: Any,
    ids: torch.Tensor,
    kv: list[tuple[torch.Tensor, torch.Tensor]],
    split: int,
    rope: Rope | None,
    sinks: int,
) -> np.ndarray[Any, Any]:
    """Of the tokens from ``split`` on, drawn anew, with respect to the prefix: fp32 [layers, channels, tokens]."""
    import torch
    from transformers import DynamicCache

    wide = next(model.parameters()).dtype
    leaves = [each[:, :split].to(wide).requires_grad_(True) for pair in kv for each in pair]
    cache = DynamicCache()
    for layer in range(len(kv)):
        cache.update(leaves[2 * layer][None], leaves[2 * layer + 1][None], layer)
    with torch.enable_grad():
        chances = _forward(model, ids[split:], cache).logits[0].float().log_softmax(-1)
        drawn = torch.multinomial(
            chances.detach().exp(), 1, generator=torch.Generator(chances.device).manual_seed(split)
        )
        gradients = torch.autograd.grad(chances.gather(1, drawn).sum(), leaves)
    layers = []
    for k, v in zip(gradients[::2], gradients[1::2], strict=True):
        pair = (_turned_back(k.double(), rope) if rope else k, v)
        layers.append(torch.cat([each.float().transpose(1, 2).reshape(-1, split) for each in pair]))
    return torch.stack(layers)[:, :, sinks:].cpu().numpy()


def _turned_back(k: torch.Tensor, rope: Rope) -> torch.Tensor:
    """The gradient [heads, tokens, dim] with respect to un-rotated K: the transpose of the rotation, times factor."""
    import torch

    from lmkv.codec.klt_reference import pairs

    angles = torch.arange(k.shape[1], dtype=torch.float64)[:, None] * torch.tensor(rope.inv_freq, dtype=torch.float64)
    cos, sin = (rope.factor * each.to(k.device) for each in (angles.cos(), angles.sin()))
    one, two = pairs(rope, k.shape[2])
    out = k.clone()
    out[..., one] = k[..., one] * cos + k[..., two] * sin
    out[..., two] = k[..., two] * cos - k[..., one] * sin
    return out


def _forward(model: Any, ids: torch.Tensor, cache: Any) -> Any:
    import inspect

    from transformers import GenerationMixin

    # the argument was renamed during transformers 5
    names = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return model(
        ids[None].to(model.device), use_cache=True, **{"cache" if "cache" in names else "past_key_values": cache}
    )


def _raw(kv: list[tuple[torch.Tensor, torch.Tensor]]) -> bytes:
    """Layer by layer K and V, [heads, tokens, dim] each, as bytes."""
    import torch

    return b"".join(each.contiguous().cpu().view(torch.uint8).numpy().tobytes() for pair in kv for each in pair)
