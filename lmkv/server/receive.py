"""Containers that are checked part by part as they come, while the rest is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmkv import chunk
from lmkv.errors import BadContainer
from lmkv.keys import ChunkKey
from lmkv.server.stream import Stream

CHECK_BYTES = 2 << 20


def receive_checked(stream: Stream[Any], view: memoryview, key: ChunkKey, deadline: float) -> bool:
    """Fill ``view``; True: this is the whole, sealed container of ``key``, every checksum right. False says only that
    it was not found to be. A small one is left to the caller, since nothing of it is still on its way."""
    if len(view) < 2 * CHECK_BYTES:
        stream.recv_into(view, deadline)
        return False
    stream.recv_into(view[: chunk.PAGE], deadline)
    try:
        header = chunk.parse(view[: chunk.PAGE], key)
        good = header.sealed and header.total_bytes == len(view)
    except BadContainer:
        good = False
    if not good:
        stream.recv_into(view[chunk.PAGE :], deadline)
        return False
    return not receive_parts(stream, view, header.parts, deadline)


def receive_parts(stream: Stream[Any], view: memoryview, parts: Sequence[chunk.Part], deadline: float) -> str:
    """Fill ``view`` from its second page on; what is wrong with the first bad part, or ''."""
    error, batches = "", _batches(parts)
    ends = [batch[-1].stop - chunk.PAGE for batch in batches]
    for batch, _ in zip(batches, stream.recv_parts(view[chunk.PAGE :], ends, deadline), strict=True):
        error = error or _damage(view, batch)
    return error


def _damage(view: memoryview, parts: tuple[chunk.Part, ...]) -> str:
    try:
        chunk.verify_parts(view, parts)
    except BadContainer as bad:
        return str(bad)
    return ""


def _batches(parts: Sequence[chunk.Part]) -> list[tuple[chunk.Part, ...]]:
    """Consecutive parts worth checking together."""
    batches: list[list[chunk.Part]] = [[]]
    for part in parts:
        if batches[-1] and part.stop - batches[-1][0].offset > CHECK_BYTES:
            batches.append([])
        batches[-1].append(part)
    return [tuple(batch) for batch in batches]
