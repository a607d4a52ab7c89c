"""Which engine pages hold which chunks: the caller's page ids as one row a chunk, and the copies by rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from lmkv import _native, chunk
from lmkv.errors import BadInput
from lmkv.keys import ChunkKey
from lmkv.pages import PagedKV
from lmkv.spec import KVSpec


class Slot(Protocol):
    """A container's memory, wherever it came from."""

    address: int


class PageRows:
    """The pages of tokens ``[start, stop)``: per group an array [chunks, pages a chunk] of page ids, -1 for none.

    start: a multiple of every group's page, rounded down to a chunk with -1 in front. stop: a multiple of the chunk.
    page_ids: per group, ids from ``start`` on, more than needed or -1 where there is no page. BadInput for anything
    else.
    """

    def __init__(self, spec: KVSpec, pages: PagedKV, page_ids: Sequence[Any], start: int, stop: int) -> None:
        if len(page_ids) != len(spec.groups):
            raise BadInput(f"{len(spec.groups)} groups need as many lists of page ids, not {len(page_ids)}")
        self.spec, self.pages = spec, pages
        self.first = start // spec.chunk_tokens
        self.rows: list[np.ndarray[Any, Any]] = []
        for g, given in enumerate(page_ids):
            per_chunk = spec.pages(g)
            page_tokens = spec.chunk_tokens // per_chunk
            ids = pages.check_ids(g, given[: (stop - start) // page_tokens], start, stop - start, absent=-1)
            before = np.full(start % spec.chunk_tokens // page_tokens, -1)
            self.rows.append(np.concatenate([before, ids]).reshape(-1, per_chunk))

    def complete(self, group: int) -> np.ndarray[Any, Any]:
        """Per chunk, whether all pages that a boundary can ask for are there."""
        mask = self.spec.page_mask(group)
        asked = [j for j in range(self.spec.pages(group)) if mask >> j & 1]
        return np.asarray((self.rows[group][:, asked] >= 0).all(axis=1))

    def page_mask(self, key: ChunkKey) -> int:
        """Mask of the pages of ``key``'s chunk that are there, 0 when all are."""
        there = self.rows[key.group][key.depth - self.first] >= 0
        return 0 if there.all() else sum(1 << int(j) for j in np.flatnonzero(there))

    def fill(self, containers: Sequence[tuple[ChunkKey, Slot]], expires: int = 0, after: Any = None) -> list[int]:
        """Make containers of the pages: headers, zeroed padding, one native gather a group.

        Each slot holds at least ``chunk.container_bytes``. Returns each one's page mask, 0 for all pages.
        """
        masks = [self.page_mask(key) for key, _ in containers]
        for (key, slot), mask in zip(containers, masks, strict=True):
            header = chunk.new_header(self.spec, key, mask, expires)
            view = _native.memory(slot.address, header.total_bytes)
            chunk.write_header(view, header)
            chunk.zero_padding(view, header)
        self.gather(containers, after)
        return masks

    def gather(self, containers: Iterable[tuple[ChunkKey, Slot]], after: Any = None) -> None:
        """Copy pages into containers, one native call a group; on a GPU once the event ``after`` has happened."""
        self._copy(self.pages.gather, containers, after)

    def scatter(self, containers: Iterable[tuple[ChunkKey, Slot]], after: Any = None) -> None:
        """Copy containers into pages, likewise."""
        self._copy(self.pages.scatter, containers, after)

    def _copy(self, call: Any, containers: Iterable[tuple[ChunkKey, Slot]], after: Any) -> None:
        copies = []
        slots = [np.zeros(self.first + len(rows), np.int64) for rows in self.rows]
        for key, slot in containers:
            slots[key.group][key.depth] = slot.address
        for g, rows in enumerate(self.rows):
            ids = np.where(slots[g][self.first :, None] > 0, rows, -1).ravel()
            pieces = self.pages.pieces(g, ids, self.first * self.spec.chunk_tokens)
            if len(pieces.page_ids):
                copies.append(call(g, slots[g][pieces.chunks], pieces.page_ids, pieces.starts, pieces.first, after))
        for copy in copies:
            copy.wait()
