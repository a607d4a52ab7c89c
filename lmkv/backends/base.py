"""What a backend is: one tier that keeps whole containers under chunk keys.

A container is an opaque byte string of ``n * 4096`` bytes, n >= 1. Headers, checksums and codecs belong to the storage
above, which verifies every byte it reads. So a backend has only five duties, checked by `lmkv.testing.BackendTests`;
docs/backends.md has a complete small one.

- **Whole or absent.** A reader sees all of one write or nothing of it, also beside writers of the same key and after
  ``kill -9``. Writing a key that exists replaces the object or keeps the old one; both are OK.
- **Results, not exceptions.** What concerns one item (missing, damaged, full, late, closed) is that item's result; the
  others of its batch go on. Only `scan` raises, and only BackendError.
- **Blocking and thread-safe.** Any thread may call at any time, also while another is in the middle of a `scan`.
- **Batches.** One result an item, in order. A batch may be empty, or name a key twice: then as if one by one, in order.
- **Bounded.** Nothing waits for ever: whatever can hang has a time limit inside and says TIMEOUT.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from lmkv.keys import ChunkKey

ALIGNMENT = 4096  # of containers' sizes; and buffers at multiples of it are the fastest
SHORT = "short buffer"  # the detail of a read whose object is larger than the room for it


class Status(Enum):
    OK = "ok"
    MISSING = "missing"  # no such object
    CORRUPT = "corrupt"  # there, but no whole container: the caller deletes it
    FULL = "full"  # no room: the caller evicts or drops
    READ_ONLY = "read_only"  # takes no writes
    TIMEOUT = "timeout"
    ERROR = "error"  # the call failed, which says nothing about the object; see Result.detail


class Result(NamedTuple):
    """How one item of a batch ended. ``nbytes``: size of the object read or written if OK, else 0. verified: the
    backend has checked what was read as `chunk.verify` does, the key included, so that nobody need do it again."""

    status: Status
    nbytes: int = 0
    detail: str = ""
    verified: bool = False


class Read(NamedTuple):
    key: ChunkKey
    into: memoryview  # writable, contiguous, at least of the object's size, which is read into its start


class Write(NamedTuple):
    key: ChunkKey
    data: memoryview  # contiguous, n * 4096 bytes with n >= 1, unchanged until the call ends


class Found(NamedTuple):
    """A stored object: bytes, and when it was written in unix seconds."""

    key: ChunkKey
    nbytes: int
    created: float


class Usage(NamedTuple):
    used: int  # bytes
    objects: int
    free: int | None  # bytes left on the medium, if that is known


class Health(NamedTuple):
    ok: bool  # reads and writes work now
    detail: str  # for a person, also on what is slow


class Backend(ABC):
    """One tier. The module docstring has the duties, each method adds its own.

    url: names the backend; `lmkv.backends.open` of it opens the same one; holds no secret. shared: others may add and
    delete objects behind our back, so an index miss is worth a `contains`, and somebody else evicts; may change during
    `scan`. remote: reached over a network, so a whole batch of `contains` is one round trip, and the storage asks it
    instead of listing it. on_reset: set by the storage; to be called, with a function that says which keys are
    concerned, when all that was heard of some is void, as a server was lost or began anew.
    """

    url: str
    shared: bool = False
    remote: bool = False
    on_reset: Callable[[Callable[[Sequence[ChunkKey]], Sequence[bool]]], None] | None = None

    def attend(self) -> None:  # noqa: B027
        """Called before each lookup of a remote tier, to tell `on_reset` what was lost. Asks nobody; microseconds."""

    @abstractmethod
    def contains(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        """Size in bytes of each object; None when it is missing, damaged or cannot be asked for."""

    @abstractmethod
    def read(self, reads: Sequence[Read]) -> list[Result]:
        """MISSING; CORRUPT: an object that is empty or no multiple of 4096; ERROR "short buffer": it is larger. Bytes
        of a buffer past the object, and all of them unless OK, are undefined afterwards."""

    @abstractmethod
    def write(self, writes: Sequence[Write]) -> list[Result]:
        """OK: everybody can read it now. FULL, READ_ONLY, TIMEOUT and ERROR, also for data that has no container's
        size, leave the key as it was and nothing else behind."""

    @abstractmethod
    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """True where this call removed an object. Reads under way may still succeed."""

    @abstractmethod
    def scan(self) -> Iterator[list[Found]]:
        """Everything stored, each object once, lazily, in batches of any size and order; what is written or deleted
        meanwhile may appear or not, and what is of other origin is skipped. BackendError: nothing can be listed."""

    @abstractmethod
    def usage(self) -> Usage:
        """Cheap, lists nothing: what an earlier process left in a persistent backend counts from the end of the first
        `scan`, and what others do to a shared one from the end of the next."""

    @abstractmethod
    def health(self) -> Health:
        """Ask the medium now, by a small real write and read where that is possible."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; any number of times. Later calls answer ERROR, None, False or nothing."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"
