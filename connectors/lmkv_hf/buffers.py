"""Reusable memory for the cache of a generate call: key and value buffers of every layer.

Fresh memory costs several times a copy into warm memory (page faults), so buffers are kept and used
again. Host memory is mapped with huge pages, and only what is touched becomes resident.
"""

from __future__ import annotations

import contextlib
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
CPU = torch.device("cpu")

Pair = tuple[torch.Tensor, torch.Tensor]
Layers = Sequence["Pair | None"]


class LayerShape(NamedTuple):
    """Keys ``[batch, heads, tokens, key_dim]``, values ``[..., value_dim]``; window in tokens, None
    for full attention."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None


def allocate(nbytes: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
    """A flat uint8 tensor; its memory lives as long as any tensor that views it."""
    if device.type != "cpu" or pinned:
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    memory = mmap.mmap(-1, -(-nbytes // HUGE_PAGE) * HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: a slower first touch
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def carve(
    shapes: Sequence[LayerShape | None], batch: int, capacity: int, device: torch.device, pinned: bool
) -> list[Pair | None]:
    """Key and value buffers ``[batch, heads, capacity, dim]`` of each layer, in one allocation."""
    wanted = [
        ((batch, shape.heads, capacity, dim), shape.dtype)
        for shape in shapes
        if shape is not None
        for dim in (shape.key_dim, shape.value_dim)
    ]
    places = [-(-math.prod(size) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for size, dtype in wanted]
    # tensors made under the caller's inference mode could not be written outside of it
    with torch.inference_mode(False):
        parts = allocate(sum(places), device, pinned).split(places)
        tensors = iter(
            [part.view(dtype)[: math.prod(size)].view(size) for part, (size, dtype) in zip(parts, wanted, strict=True)]
        )
    return [None if shape is None else (next(tensors), next(tensors)) for shape in shapes]


def paged(spec: KVSpec, layers: Layers, row: int, column: int, threads: int) -> PagedKV:
    """lmkv's view of sequence ``row`` in host buffers: page 0 begins with its first token, which
    stands in ``column``."""
    groups = []
    for group in spec.groups:
        planes = []
        for index in group.layers:
            parts = [buffer[row, :, column:] for buffer in layers[index] or ()]
            planes.append(tuple(Plane.of(p, None, group.page_tokens, token_axis=1) for p in parts))
        groups.append(GroupView(tuple(planes)))
    return PagedKV(spec, groups, threads=threads, keep=layers)


class Buffers:
    """The ``layers`` of one call, and the ``host`` side where lmkv copies: the same memory, or
    buffers of the same shape when ``staged``, for a model on another device. A layer that caches
    nothing is None."""

    def __init__(
        self, shapes: Sequence[LayerShape | None], batch: int, capacity: int, device: torch.device, staged: bool
    ) -> None:
        self.batch, self.capacity = batch, capacity
        self.layers = carve(shapes, batch, capacity, device, pinned=False)
        self.host = self.layers
        if staged:
            self.host = carve(shapes, batch, capacity, CPU, pinned=device.type == "cuda")
        self._pages: dict[tuple[int, int], PagedKV] = {}

    def pages(self, spec: KVSpec, row: int, column: int, threads: int = 1) -> PagedKV:
        """`paged` of the host side, made once."""
        if (row, column) not in self._pages:
            self._pages[row, column] = paged(spec, self.host, row, column, threads)
        return self._pages[row, column]

    def push(self, row: int, columns: slice) -> None:
        """Bring columns of a row from the host side to the layers."""
        self._move(self.layers, self.host, row, columns)

    def pull(self, row: int, columns: slice) -> None:
        """Bring columns of a row from the layers to the host side."""
        self._move(self.host, self.layers, row, columns)

    def _move(self, into: Layers, source: Layers, row: int, columns: slice) -> None:
        if self.host is self.layers:
            return
        for pair, other in zip(into, source, strict=True):
            if pair is not None and other is not None:
                for target, origin in zip(pair, other, strict=True):
                    target[row, :, columns].copy_(origin[row, :, columns])


class BufferPool:
    """Buffers that come back after use; the ``keep`` last ones stay. Thread-safe."""

    def __init__(
        self, shapes: Sequence[LayerShape | None], step: int, device: torch.device, staged: bool, keep: int = 2
    ) -> None:
        self._shapes, self._step, self._device, self._staged = shapes, step, device, staged
        self._keep = keep
        self._free: list[Buffers] = []
        self._lock = threading.Lock()

    def take(self, batch: int, tokens: int) -> Buffers:
        """Buffers with room for ``tokens`` columns of ``batch`` sequences; their content is
        arbitrary."""
        with self._lock:
            for buffers in sorted(self._free, key=lambda each: each.capacity):
                if buffers.batch == batch and buffers.capacity >= tokens:
                    self._free.remove(buffers)
                    return buffers
        # an eighth more, in whole steps: the next turn of a conversation shall fit too
        capacity = -(-(tokens + tokens // 8) // self._step) * self._step
        return Buffers(self._shapes, batch, capacity, self._device, self._staged)

    def give(self, buffers: Buffers) -> None:
        """Back to the pool. The caller must not touch them any more."""
        with self._lock:
            self._free = [*self._free, buffers][-self._keep :]
