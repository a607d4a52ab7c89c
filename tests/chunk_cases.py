"""Containers for tests: a spec, a key, sealed bytes, and ways to spoil them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from lmkv import chunk
from lmkv.chunk import Header
from lmkv.errors import BadContainer
from lmkv.keys import ChunkKey
from lmkv.spec import Kind, KVSpec, LayerGroup

GOLDEN = Path(__file__).parent / "data" / "container_v1.txt"
SPEC = KVSpec(
    (
        LayerGroup(Kind.FULL, (0, 2), 16, 1, 8),
        LayerGroup(Kind.SLIDING, (1, 3, 5), 16, 8, 128, window=100, page_padding=16),
    ),
    chunk_tokens=256,
    shards=2,
)
KEY = ChunkKey(
    bytes(range(16)), b"tenant-8", bytes(range(32, 64)), bytes(range(24, 32)), 5, 1, 1
)  # fmt: skip
MASK = 0xFE00
U64 = struct.Struct("<Q")


def body(nbytes: int) -> bytes:
    """Payload byte i of the golden container, counted from the container's start: (i * 7 + i // 4096) % 256."""
    at = np.arange(nbytes, dtype=np.uint32)
    return ((at * 7 + at // 4096) % 256).astype(np.uint8).tobytes()


def sealed(spec: KVSpec = SPEC, key: ChunkKey = KEY, **more: Any) -> tuple[memoryview, Header]:
    header = chunk.new_header(spec, key, created=1_700_000_000, **more)
    view = memoryview(bytearray(body(header.total_bytes)))
    return view, chunk.seal(view, header)


def reseal(page: bytearray) -> memoryview:
    """Give a header page that was tampered with a checksum that is right again."""
    U64.pack_into(page, 4088, xxhash.xxh3_64_intdigest(bytes(page[:4088])))
    return memoryview(page)


def reason(view: Any, key: ChunkKey | None = None) -> str:
    with pytest.raises(BadContainer) as caught:
        chunk.parse(memoryview(view), key)
    return caught.value.reason


def tampered(offset: int, layout: str, *values: Any) -> str:
    page = bytearray(sealed()[0][:4096])
    struct.pack_into(layout, page, offset, *values)
    return reason(reseal(page))
