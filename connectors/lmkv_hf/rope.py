"""How a model rotates its keys, for codecs that store them unrotated.

The frequencies are those that transformers computed from the config; which layers use which of them, and how channels
are paired, is seen from the keys themselves: of the same token at the positions 0 and 1, the second must be the first
rotated by one step. Where that does not hold nothing is said, and codecs leave keys as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lmkv.codec import Rope

TOLERANCE = 0.01  # relative error of a layer's keys; rounding to bfloat16 leaves 0.003


def ropes(model: Any, keys: Sequence[torch.Tensor | None]) -> list[Rope | None]:
    """For each layer its rope, None where it has none that is known.

    keys: [1, heads, 2, dim] of each layer, of one token twice from position 0 on.
    """
    frequencies = list(_frequencies(model))
    candidates = [Rope(each, interleaved, factor) for each, factor in frequencies for interleaved in (False, True)]
    pairs = [None if each is None else each[0].double().cpu() for each in keys]
    found = [None if each is None else _best(each, candidates) for each in pairs]
    if len(frequencies) == 1 and found[0]:
        # Above layer 0 attention sinks tell the positions apart; only layers that rotate nothing are another case.
        found = [
            each or (found[0] if pair is not None and not _alike(pair) else None)
            for each, pair in zip(found, pairs, strict=True)
        ]
    return found


def _frequencies(model: Any) -> Iterator[tuple[tuple[float, ...], float]]:
    """Radians per token and the factor of cos and sin, of each rotary module and layer type."""
    seen = set()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and not name.endswith("original_inv_freq") and buffer.dim() == 1:
                scaling = getattr(module, name.removesuffix("inv_freq") + "attention_scaling", 1.0)
                found = tuple(buffer.double().tolist()), float(scaling)
                if found not in seen:
                    seen.add(found)
                    yield found


def _best(keys: torch.Tensor, candidates: Sequence[Rope]) -> Rope | None:
    """The rope under which keys [heads, 2, dim] of one token are one step apart."""
    first, second = keys[:, 0], keys[:, 1]
    errors = [
        (float((turned(first, rope) - second).norm() / second.norm()), number)
        for number, rope in enumerate(candidates)
        if 2 * len(rope.inv_freq) <= keys.shape[-1]
    ]
    error, number = min(errors, default=(1.0, 0))
    return candidates[number] if error < TOLERANCE else None


def _alike(keys: torch.Tensor) -> bool:
    return float((keys[:, 1] - keys[:, 0]).norm() / keys[:, 1].norm()) < TOLERANCE


def turned(keys: torch.Tensor, rope: Rope, steps: int = 1) -> torch.Tensor:
    """Keys [..., dim] in fp64, rotated by so many steps more."""
    count = len(rope.inv_freq)
    angles = steps * torch.tensor(rope.inv_freq, dtype=torch.float64)
    pairs = torch.arange(2 * count).view(count, 2) if rope.interleaved else torch.arange(2 * count).view(2, count).T
    a, b = keys[..., pairs[:, 0]], keys[..., pairs[:, 1]]
    result = keys.clone()
    result[..., pairs[:, 0]] = a * angles.cos() - b * angles.sin()
    result[..., pairs[:, 1]] = a * angles.sin() + b * angles.cos()
    return result
