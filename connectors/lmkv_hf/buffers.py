"""Reusable memory for the cache of a generate call: key and value buffers of every layer.

Fresh memory costs several times a copy into warm memory (page faults), so buffers are kept and used again. Host memory
is mapped with huge pages, and only what is touched becomes resident.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lmkv.pages import GroupView, PagedKV, Plane
from lmkv.spec import KVSpec

HUGE_PAGE = 2 << 20
ALIGNMENT = 4096

Pair = tuple[torch.Tensor, torch.Tensor]


class LayerShape(NamedTuple):
    """Keys ``[batch, heads, tokens, key_dim]``, values ``[..., value_dim]``; window in tokens, None for full."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """A flat uint8 tensor; its memory lives as long as any tensor that views it."""
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, -(-nbytes // HUGE_PAGE) * HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: slower first touch, nothing else
            pass
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def paged(spec: KVSpec, layers: Sequence[Pair | None], row: int, column: int, threads: int) -> PagedKV:
    """lmkv's view of sequence ``row`` in these buffers, whose first token stands in ``column``: it begins page 0."""
    groups = []
    for group in spec.groups:
        planes = []
        for pair in (layers[index] for index in group.layers):
            assert pair is not None
            parts = (buffer[row, :, column:] for buffer in pair)
            planes.append(tuple(Plane.of(part, None, group.page_tokens, token_axis=1) for part in parts))
        groups.append(GroupView(tuple(planes)))
    return PagedKV(spec, groups, threads=threads, keep=layers)


class Buffers:
    """``[batch, heads, capacity, dim]`` key and value buffers of each layer (None: the layer caches nothing)."""

    def __init__(
        self, shapes: Sequence[LayerShape | None], batch: int, capacity: int, device: torch.device
    ) -> None:
        self.batch, self.capacity = batch, capacity
        self.layers: list[Pair | None] = []
        self._pages: dict[tuple[int, int], PagedKV] = {}
        sizes = [
            -(-batch * shape.heads * capacity * dim * shape.dtype.itemsize // ALIGNMENT) * ALIGNMENT
            for shape in shapes
            if shape is not None
            for dim in (shape.key_dim, shape.value_dim)
        ]
        # tensors made under the caller's inference mode could not be written outside of it
        with torch.inference_mode(False):
            parts = iter(allocate(sum(sizes), device).split(sizes))
            for shape in shapes:
                pair = None
                if shape is not None:
                    pair = (self._cut(shape, shape.key_dim, next(parts)), self._cut(shape, shape.value_dim, next(parts)))
                self.layers.append(pair)

    def _cut(self, shape: LayerShape, dim: int, part: torch.Tensor) -> torch.Tensor:
        wanted = (self.batch, shape.heads, self.capacity, dim)
        return part.view(shape.dtype)[: math.prod(wanted)].view(wanted)

    def pages(self, spec: KVSpec, row: int, column: int, threads: int = 1) -> PagedKV:
        """`paged` of these buffers, made once."""
        if (row, column) not in self._pages:
            self._pages[row, column] = paged(spec, self.layers, row, column, threads)
        return self._pages[row, column]


class BufferPool:
    """Buffers that come back after use; the ``keep`` last ones stay. Thread-safe."""

    def __init__(
        self, shapes: Sequence[LayerShape | None], step: int, device: torch.device, keep: int = 2
    ) -> None:
        self._shapes, self._step, self._device, self._keep = shapes, step, device, keep
        self._free: list[Buffers] = []
        self._lock = threading.Lock()

    def take(self, batch: int, tokens: int) -> Buffers:
        """Buffers with room for ``tokens`` columns of ``batch`` sequences; their content is arbitrary."""
        with self._lock:
            for buffers in sorted(self._free, key=lambda each: each.capacity):
                if buffers.batch == batch and buffers.capacity >= tokens:
                    self._free.remove(buffers)
                    return buffers
        # an eighth more, in whole steps: the next turn of a conversation shall fit too
        capacity = -(-(tokens + tokens // 8) // self._step) * self._step
        return Buffers(self._shapes, batch, capacity, self._device)

    def give(self, buffers: Buffers) -> None:
        """Back to the pool. The caller must not touch them any more."""
        with self._lock:
            self._free = [*self._free, buffers][-self._keep :]
