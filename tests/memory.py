"""A stand-in for an inference engine's memory: numpy pages for any spec, with every byte known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmkv import GroupView, Kind, KVSpec, LayerGroup, PagedKV, Plane

CHUNK, PAGE = 16, 4


def full(layers: int = 2, heads: int = 2, dim: int = 8, page: int = PAGE) -> LayerGroup:
    return LayerGroup(Kind.FULL, tuple(range(layers)), page, heads, dim, dtype="float32")


def sliding(window: int, layers: Sequence[int] = (2, 3), page: int = PAGE) -> LayerGroup:
    return LayerGroup(Kind.SLIDING, tuple(layers), page, 2, 8, dtype="float32", window=window)


def recurrent(layers: Sequence[int] = (4,), state_bytes: int = 512) -> LayerGroup:
    return LayerGroup(Kind.RECURRENT, tuple(layers), CHUNK, dtype="float32", state_bytes=state_bytes)


def spec(*groups: LayerGroup, chunk: int = CHUNK, shards: int = 1) -> KVSpec:
    return KVSpec(groups or (full(),), chunk, shards)


class Memory:
    """``pages`` pages a group; each layer is a byte array [pages, page bytes] of its own."""

    def __init__(self, of: KVSpec, pages: int = 64, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.spec = of
        self.arrays = []
        for group in of.groups:
            shape = (len(group.layers), pages, group.layer_page_bytes)
            self.arrays.append(rng.integers(0, 256, shape, dtype=np.uint8))
        views = [GroupView(tuple((Plane.of(layer),) for layer in layers)) for layers in self.arrays]
        self.pages = PagedKV(of, views, keep=self.arrays)

    def ids(self, tokens: int, seed: int = 1, first: int = 0) -> list[np.ndarray]:
        """Random distinct page ids for tokens [first, first + tokens), one list a group."""
        rng = np.random.default_rng(seed)
        found = []
        for g in range(len(self.spec.groups)):
            unit = self.spec.chunk_tokens // self.spec.pages(g)
            found.append(rng.permutation(self.pages.pages(g))[: tokens // unit].astype(np.int64))
        return found

    def read(self, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The bytes of the named pages, per group [layers, n, page bytes]."""
        return [array[:, each] for array, each in zip(self.arrays, ids, strict=True)]

    def wipe(self) -> None:
        for array in self.arrays:
            array[:] = 0
