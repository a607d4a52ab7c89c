"""What a backend is: one tier that keeps whole containers under chunk keys.

A container is an opaque byte string of ``n * 4096`` bytes, n >= 1. A backend never looks inside:
headers, checksums and codecs belong to the storage above it, which verifies every byte it reads.
So a backend has only five duties:

- **Whole or absent.** A reader sees all of one write or nothing of it, also beside writers of the
  same key and after ``kill -9``. Writing a key that exists replaces the object or keeps the old
  one; both are OK.
- **Results, not exceptions.** What concerns one item (missing, damaged, full, late, closed) is that
  item's result; the others of its batch go on. Only `scan` raises, and only BackendError.
- **Blocking and thread-safe.** Calls block until done; any thread may call at any time, also while
  another is in the middle of a `scan`.
- **Batches.** A batch method gives one result an item, in order. A batch may be empty, and may name
  a key twice: then as if one by one, in order.
- **Bounded.** Nothing waits for ever: whatever can hang has a time limit inside and says TIMEOUT.

`lmkv.testing.BackendTests` checks them; docs/backends.md has a complete small backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from lmkv.keys import ChunkKey

ALIGNMENT = 4096


class Status(Enum):
    """How one item of a batch ended."""

    OK = "ok"
    MISSING = "missing"  # no such object
    CORRUPT = "corrupt"  # there, but no whole container: the caller deletes it
    FULL = "full"  # no room: the caller evicts or drops
    READ_ONLY = "read_only"  # takes no writes
    TIMEOUT = "timeout"
    ERROR = "error"  # the call failed, which says nothing about the object; see Result.detail


class Result(NamedTuple):
    """``nbytes``: size of the object read or written if OK, else 0. ``detail``: a short reason."""

    status: Status
    nbytes: int = 0
    detail: str = ""


class Read(NamedTuple):
    """Read an object into the start of ``into``: writable, contiguous, at least its size."""

    key: ChunkKey
    into: memoryview


class Write(NamedTuple):
    """Store ``data``: contiguous, n * 4096 bytes with n >= 1, unchanged until the call ends."""

    key: ChunkKey
    data: memoryview


class Found(NamedTuple):
    """One stored object: size in bytes, and when it was written in unix seconds."""

    key: ChunkKey
    nbytes: int
    created: float


class Usage(NamedTuple):
    """``used`` bytes in ``objects`` objects; ``free`` bytes left on the medium, None if unknown."""

    used: int
    objects: int
    free: int | None


class Health(NamedTuple):
    """``ok``: reads and writes work now. ``detail``: a line for a person, also on what is slow."""

    ok: bool
    detail: str


class Backend(ABC):
    """One tier. The module docstring has the duties, each method adds its own.

    Attributes, set in ``__init__``:
        url: names the backend; `lmkv.backends.open` of it opens the same one. Holds no secret.
        shared: others may add and delete objects behind our back, so an index miss is worth a
            `contains`, and somebody else evicts. May change during `scan`: read it each time.
        alignment: buffers at multiples of this address are the fastest. Others work as well.
    """

    url: str
    shared: bool = False
    alignment: int = ALIGNMENT

    @abstractmethod
    def contains(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        """Size in bytes of each object; None when it is missing, damaged or cannot be asked for."""

    @abstractmethod
    def read(self, reads: Sequence[Read]) -> list[Result]:
        """Fill the buffers.

        MISSING; CORRUPT for an object that is empty or no multiple of 4096; ERROR "short buffer"
        for a buffer smaller than the object. Bytes of a buffer past the object, and all of them
        unless OK, are undefined afterwards.
        """

    @abstractmethod
    def write(self, writes: Sequence[Write]) -> list[Result]:
        """Store the objects; each can be read by everybody once the call returned OK for it.

        FULL, READ_ONLY, TIMEOUT and ERROR leave the key as it was and nothing else behind. Data
        that has no container's size is an ERROR.
        """

    @abstractmethod
    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Remove objects: True where this call removed one. Reads under way may still succeed."""

    @abstractmethod
    def scan(self) -> Iterator[list[Found]]:
        """Everything stored, each object once, lazily, in batches of any size and order.

        Objects written or deleted meanwhile may appear or not. Things of other origin are skipped.
        BackendError when nothing can be listed. A closed backend yields nothing.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """What is stored; cheap, lists nothing.

        A persistent backend counts what an earlier process left only from the end of its first
        `scan`, and what others do to a shared one from the end of the next.
        """

    @abstractmethod
    def health(self) -> Health:
        """Ask the medium now, by a small real write and read where that is possible."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; any number of times. Later calls answer ERROR, None or False."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"


def address_of(buffer: memoryview) -> int:
    """Address of a contiguous buffer's first byte, for native calls. The caller keeps it alive.

    ValueError or BufferError when the buffer is not contiguous.
    """
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
