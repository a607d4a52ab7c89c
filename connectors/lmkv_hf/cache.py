"""Cache layers that write into buffers prepared beforehand.

transformers' own layers grow by concatenation: every step copies the whole cache, and a restored
prefix is copied once more before the first token. Here a layer has ``[batch, kv_heads, capacity,
head_dim]`` buffers, lmkv scatters a stored prefix straight into them, ``update`` writes the new
tokens behind it and returns views.

A sliding-window layer keeps the columns before its window too (what it returns, and all that
transformers sees, is cut to the window), so that every chunk boundary of a prompt that ran through
the model in one piece can be stored. During prefill transformers holds as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .buffers import Layers, LayerShape, Pair

GROWTH = 256  # columns added at least when a buffer turns out too small


class _Buffered:
    """What both layers share. ``past``: how many columns before its own a token may look at."""

    past: int | None = None

    def fill(self, buffers: Pair, length: int) -> None:
        """Use buffers that hold ``length`` columns, or at least the last ``past`` of them."""
        self.buffers, self.cumulative_length = buffers, length
        self.valid_from = self._first(length)
        self.dtype, self.device = buffers[0].dtype, buffers[0].device
        self.is_initialized = True
        self._refresh()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> Pair:
        start, stop = self.cumulative_length, self.cumulative_length + key_states.shape[-2]
        if stop > self.buffers[0].shape[-2]:
            self._grow(stop)
        keys, values = self.buffers
        keys[:, :, start:stop] = key_states
        values[:, :, start:stop] = value_states
        self.cumulative_length = stop
        self._refresh()
        visible = slice(self._first(start), stop)
        return keys[:, :, visible], values[:, :, visible]

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reset(self) -> None:
        self.fill(self.buffers, 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``|tokens_to_remove|`` columns. ValueError: an absolute length;
        RuntimeError: columns would be needed that were never restored."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes a negative number: how many tokens to remove")
        length = max(self.cumulative_length + tokens_to_remove, 0)
        if self._first(length) < self.valid_from:
            raise RuntimeError("crop would need columns before the window that was restored")
        self.cumulative_length = length
        self._refresh()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._each(lambda buffer: buffer.index_select(0, beam_idx.to(buffer.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda buffer: buffer.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._each(lambda buffer: buffer[indices, ...])

    def _first(self, length: int) -> int:
        """First column that a step after ``length`` columns may look at."""
        return 0 if self.past is None else max(length - self.past, 0)

    def _refresh(self) -> None:
        # what transformers' own code reads: exactly the columns its layers would hold
        held = slice(self._first(self.cumulative_length), self.cumulative_length)
        self.keys, self.values = (buffer[:, :, held] for buffer in self.buffers)

    def _grow(self, columns: int) -> None:
        capacity, length = columns + max(GROWTH, columns // 2), self.cumulative_length

        def grown(buffer: torch.Tensor) -> torch.Tensor:
            larger = buffer.new_empty((*buffer.shape[:2], capacity, buffer.shape[-1]))
            larger[:, :, :length] = buffer[:, :, :length]
            return larger

        self._each(grown)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.buffers = change(self.buffers[0]), change(self.buffers[1])
        self._refresh()


class BufferedLayer(_Buffered, DynamicLayer):
    """Full attention: everything so far is visible."""


class BufferedSlidingLayer(_Buffered, DynamicSlidingWindowLayer):
    """Sliding or chunked attention: a token sees itself and ``sliding_window - 1`` before it."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.past = sliding_window - 1


def cache_over(config: Any, shapes: Sequence[LayerShape | None], layers: Layers, columns: int) -> DynamicCache:
    """transformers' cache for a decoder config over buffers of which ``columns`` are filled."""
    cache = DynamicCache(config=config)
    for index, (shape, pair) in enumerate(zip(shapes, layers, strict=True)):
        if shape is not None and pair is not None:
            window = shape.window
            layer = BufferedLayer() if window is None else BufferedSlidingLayer(window)
            layer.fill(pair, columns)
            cache.layers[index] = layer
    return cache
