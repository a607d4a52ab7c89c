"""The data protocol: what a cache server and those who read and write its containers say to each other.

docs/protocol.md is its contract. Messages are frames as in `protocol`; a container follows, as its plain bytes, the
message or the head that told its size. Chunk keys travel packed, 72 bytes each; times are seconds from receipt.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

from msgspec import Meta

from lmkv.backends.base import ALIGNMENT, Status
from lmkv.keys import ChunkKey
from lmkv.server import protocol as wire
from lmkv.server.protocol import Message, Name, Number, Seconds, Text

VERSION = 1
MAX_KEYS = 1 << 14
MAX_FRAME = 4 << 20
MAX_GREETING = 8 << 10  # of a frame before its sender is known
MAX_CONTAINER = 1 << 40

KEY_BYTES = 72
_HEAD = struct.Struct("<BB6xQ")
HEAD_BYTES = _HEAD.size
STATUSES = (
    Status.OK,
    Status.MISSING,
    Status.CORRUPT,
    Status.FULL,
    Status.READ_ONLY,
    Status.TIMEOUT,
    Status.ERROR,
)  # a head says the place in this list

Keys = Annotated[bytes, Meta(max_length=MAX_KEYS * KEY_BYTES)]
Capacities = Annotated[list[Number], Meta(max_length=MAX_KEYS)]
ContainerBytes = Annotated[int, Meta(ge=ALIGNMENT, le=MAX_CONTAINER, multiple_of=ALIGNMENT)]
Sizes = Annotated[list[ContainerBytes], Meta(max_length=MAX_KEYS)]
Secret = Annotated[str, Meta(max_length=4096)]


# Requests.


class Hello(Message):
    """First on every connection. token: empty for none."""

    version: int
    client: Name
    token: Secret


class Contains(Message):
    keys: Keys


class Get(Message):
    """capacities: bytes there is room for, one a key. Answered by a head for each key, with the container if OK."""

    keys: Keys
    capacities: Capacities
    timeout: Seconds


class Put(Message):
    """The containers follow, in order. Answered by a head for each, once it is known what became of it."""

    keys: Keys
    sizes: Sizes


class Delete(Message):
    keys: Keys


class Pin(Message):
    """Keep the chunks of these containers from being evicted for ``seconds``. owner: who wants that, for `Unpin`."""

    owner: Name
    keys: Keys
    seconds: Annotated[float, Meta(gt=0, le=wire.DAY)]


class Unpin(Message):
    owner: Name
    keys: Keys


class List(Message):
    """The page after ``cursor``, 0 for the first; of what was there when the first was asked for on this connection."""

    cursor: Number


class GetUsage(Message):
    pass


class GetStats(Message):
    pass


class Ping(Message):
    pass


# Replies.


class Welcome(Message):
    """server: the name it was given, for people. generation: another one at every start. container_bytes: the most one
    may have."""

    version: int
    server: Name
    generation: Name
    container_bytes: Number


class Refused(Message):
    """The connection ends. why: version, token, or busy."""

    why: Name
    message: Text


class Contained(Message):
    """Bytes of each, 0 where it is not there."""

    sizes: list[Number]


class Deleted(Message):
    done: list[bool]


class Pinned(Message):
    """Of each the status as in a head: 0 ok, 1 missing, 3 full."""

    ended: list[Annotated[int, Meta(ge=0, lt=len(STATUSES))]]


class Unpinned(Message):
    """Whether the owner had pinned it."""

    done: list[bool]


class Page(Message):
    """cursor: for the next page, 0 after the last. created: unix seconds."""

    cursor: Number
    keys: bytes
    sizes: list[Number]
    created: list[float]


class Usage(Message):
    used: Number
    objects: Number


class Stats(Message):
    values: dict[str, Any]


class Pong(Message):
    pass


Request = Hello | Contains | Get | Put | Delete | Pin | Unpin | List | GetUsage | GetStats | Ping
Reply = Welcome | Refused | Contained | Deleted | Pinned | Unpinned | Page | Usage | Stats | Pong


def pack_head(status: Status, nbytes: int = 0, detail: str = "") -> bytes:
    """How one item ended: 16 bytes and then the detail. nbytes: of the container, which follows if it was asked for."""
    text = detail.encode()[:255]
    return _HEAD.pack(STATUSES.index(status), len(text), nbytes) + text


def unpack_head(head: bytes | bytearray | memoryview) -> tuple[Status, int, int]:
    """(status, bytes of detail that follow, bytes of the container). ConnectionError: a status there is none."""
    status, detail, nbytes = _HEAD.unpack(head)
    if status >= len(STATUSES):
        raise ConnectionError(f"status {status}")
    return STATUSES[status], detail, nbytes


def keys_of(packed: bytes, count: int | None = None) -> list[ChunkKey]:
    """The keys of a message; ConnectionError: not ``count`` of them, or part of one is missing."""
    return wire.unpack_keys(packed, len(packed) // KEY_BYTES if count is None else count)
