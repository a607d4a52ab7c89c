"""Host memory: containers in arena slots.

Beside the backend contract, whose reads and writes copy, it offers what the storage above uses for tier 0 without a
copy: `put` a filled slot, `hold` one for reading, `pop` one that leaves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from lmkv.arena import Arena, Slot, slab_bytes
from lmkv.backends.base import ALIGNMENT, Backend, Found, Health, Read, Result, Status, Usage, Write
from lmkv.config import Size, memory_limit
from lmkv.errors import ConfigError
from lmkv.keys import ChunkKey


class CpuBackend(Backend):
    """``cpu://?budget=1GiB``, or over an existing arena. Holds what fits and evicts nothing: storage does that."""

    def __init__(self, url: str = "cpu://", *, budget: str = "64MiB", arena: Arena | None = None) -> None:
        if url != "cpu://":
            raise ConfigError("tiers.url", f"{url!r}: host memory has no place, it is written cpu://")
        self.url = f"cpu://?budget={budget}"
        if arena is None:
            try:
                size = Size.parse(budget).resolve(memory_limit())
            except ValueError as error:
                raise ConfigError("cpu.budget", f"{budget!r} {error}") from None
            arena = Arena(size, slab_bytes(ALIGNMENT, min(16 << 20, size // 4)), touch=False)
        self.arena = arena
        self._slots: dict[ChunkKey, tuple[Slot, int, float]] = {}
        self._used = 0
        self._closed = False
        self._lock = threading.Lock()

    def put(self, key: ChunkKey, slot: Slot, nbytes: int) -> bool:
        """Publish a filled slot under ``key``, taking one hold of its own. False: closed, or the key is there."""
        with self._lock:
            if self._closed or key in self._slots:
                return False
            self.arena.hold(slot)
            self._slots[key] = (slot, nbytes, time.time())
            self._used += nbytes
            return True

    def hold(self, key: ChunkKey) -> Slot | None:
        """The slot of ``key``, held once for the caller, or None."""
        with self._lock:
            found = self._slots.get(key)
            if found is None:
                return None
            self.arena.hold(found[0])
            return found[0]

    def pop(self, key: ChunkKey) -> bool:
        """Unpublish ``key``; its memory is reused when the last holder lets go."""
        with self._lock:
            found = self._slots.pop(key, None)
            if found is None:
                return False
            self._used -= found[1]
            self.arena.release(found[0])
            return True

    def busy(self, key: ChunkKey) -> bool:
        """Somebody beside the store itself holds the slot."""
        found = self._slots.get(key)
        return found is not None and found[0].holders > 1

    def contains(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        found = [self._slots.get(key) for key in keys]
        return [each[1] if each else None for each in found]

    def read(self, reads: Sequence[Read]) -> list[Result]:
        return [self._read(each) for each in reads]

    def _read(self, read: Read) -> Result:
        if self._closed:
            return Result(Status.ERROR, detail="closed")
        slot = self.hold(read.key)
        if slot is None:
            return Result(Status.MISSING)
        try:
            nbytes = self._slots[read.key][1]
            if len(read.into) < nbytes:
                return Result(Status.ERROR, detail="short buffer")
            read.into[:nbytes] = slot.view(nbytes)
            return Result(Status.OK, nbytes)
        except KeyError:
            return Result(Status.MISSING)
        finally:
            self.arena.release(slot)

    def write(self, writes: Sequence[Write]) -> list[Result]:
        return [self._write(each) for each in writes]

    def _write(self, write: Write) -> Result:
        nbytes = len(write.data)
        if self._closed or not nbytes or nbytes % ALIGNMENT:
            return Result(Status.ERROR, detail="closed" if self._closed else "not a container's size")
        if nbytes > self.arena.slab_bytes or (slot := self.arena.alloc(nbytes)) is None:
            return Result(Status.FULL)
        try:
            slot.view(nbytes)[:] = write.data
            self.put(write.key, slot, nbytes)
            return Result(Status.OK, nbytes)
        finally:
            self.arena.release(slot)

    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [self.pop(key) for key in keys]

    def scan(self) -> Iterator[list[Found]]:
        with self._lock:
            found = [Found(key, nbytes, created) for key, (_, nbytes, created) in self._slots.items()]
        if found:
            yield found

    def usage(self) -> Usage:
        return Usage(self._used, len(self._slots), self.arena.capacity - self.arena.used)

    def health(self) -> Health:
        warm = "" if self.arena.warmed.is_set() else ", still being touched"
        state = "closed" if self._closed else f"{self.arena.used} of {self.arena.capacity} bytes in use{warm}"
        return Health(not self._closed, state)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            slots, self._slots = self._slots, {}
            self._used = 0
        for slot, _, _ in slots.values():
            self.arena.release(slot)
        self.arena.close()
