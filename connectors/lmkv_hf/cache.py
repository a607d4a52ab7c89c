"""Cache layers that write into buffers prepared beforehand.

transformers' own layers grow by concatenation: every step copies the whole cache, and a restored prefix is copied once
more before the first token. Here a layer owns ``[batch, kv_heads, capacity, head_dim]`` buffers, lmkv scatters a stored
prefix straight into them, ``update`` writes the new tokens behind it and returns views.

The token axis counts from the first column of the batch. A sliding-window layer keeps the columns before its window too
(its returned views, and all that transformers sees, are cut to the window): every chunk boundary of a prompt that ran
through the model in one piece can then be stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

GROWTH = 256  # columns added at least when a buffer turns out too small


class _Buffered:
    """What the full and the sliding layer share. ``window`` is the number of past columns a step may look at."""

    window: int | None = None

    def attach(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Use these ``[batch, kv_heads, capacity, head_dim]`` buffers; the layer is empty afterwards."""
        self.key_buffer, self.value_buffer = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.restore(0, 0)

    def restore(self, length: int, valid_from: int) -> None:
        """Declare columns ``[valid_from, length)`` of the buffers to hold the sequence's keys and values."""
        self.cumulative_length = length
        self.valid_from = valid_from
        self._refresh()

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key_buffer, self.value_buffer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.attach(key_states[:, :, :0], value_states[:, :, :0])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, start = self._first(), self.cumulative_length
        stop = start + key_states.shape[-2]
        if stop > self.key_buffer.shape[-2]:
            self._grow(stop)
        self.key_buffer[:, :, start:stop] = key_states
        self.value_buffer[:, :, start:stop] = value_states
        self.cumulative_length = stop
        self._refresh()
        return self.key_buffer[:, :, first:stop], self.value_buffer[:, :, first:stop]

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reset(self) -> None:
        if self.is_initialized:
            self.restore(0, 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``|tokens_to_remove|`` columns; like transformers' layers, refuses an absolute length."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes a negative number: how many tokens to remove from the end")
        length = max(self.cumulative_length + tokens_to_remove, 0)
        if self._first(length) < self.valid_from:
            raise RuntimeError("crop would need columns before the window that was restored")
        self.restore(length, self.valid_from)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._each(lambda buffer: buffer.index_select(0, beam_idx.to(buffer.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda buffer: buffer.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._each(lambda buffer: buffer[indices, ...])

    def _first(self, length: int | None = None) -> int:
        """First column that the next step may look at."""
        length = self.cumulative_length if length is None else length
        return 0 if self.window is None else max(length - self.window, 0)

    def _refresh(self) -> None:
        # the attributes transformers' own code reads: exactly the columns its layers would hold
        columns = slice(self._first(), self.cumulative_length)
        self.keys, self.values = self.key_buffer[:, :, columns], self.value_buffer[:, :, columns]

    def _grow(self, columns: int) -> None:
        capacity = columns + max(GROWTH, columns // 2)

        def grown(buffer: torch.Tensor) -> torch.Tensor:
            larger = buffer.new_empty((*buffer.shape[:2], capacity, buffer.shape[-1]))
            larger[:, :, : self.cumulative_length] = buffer[:, :, : self.cumulative_length]
            return larger

        self._each(grown)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.is_initialized:
            self.key_buffer, self.value_buffer = change(self.key_buffer), change(self.value_buffer)
            self._refresh()


class BufferedLayer(_Buffered, DynamicLayer):
    """Full attention: everything so far is visible."""


class BufferedSlidingLayer(_Buffered, DynamicSlidingWindowLayer):
    """Sliding (or chunked) attention: a token sees itself and the ``sliding_window - 1`` tokens before it."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.window = sliding_window - 1
