"""Reads from the lower tiers into host slots, in prefix order, through a bounded window.

A read belongs to the store, not to the request that caused it: whoever else wants the same chunk joins it, each joiner
with its own deadline, and the chunk stays in host memory (promotion) even when every joiner has given up. A caller
never waits for a slot while others hold theirs: no slot means the hit ends there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lmkv import chunk, codec
from lmkv.arena import Slot
from lmkv.backends.base import SHORT, Read, Result, Status
from lmkv.codec.base import Unknown
from lmkv.errors import BadContainer
from lmkv.index import Entry, part_bit
from lmkv.keys import ChunkKey
from lmkv.tier import Tier

if TYPE_CHECKING:
    from lmkv.storage import StorageManager

BATCH_BYTES = 1 << 20
BATCH_ITEMS = 32


class Wanted(NamedTuple):
    """One container to fetch: its chunk's entry, its key, and its bytes once decoded, which nothing else may have."""

    entry: Entry
    key: ChunkKey
    raw_bytes: int


class Ready(NamedTuple):
    """A container in host memory, held for the receiver, who releases ``slot``; ``tier`` is where it came from."""

    slot: Slot
    tier: int


class Load:
    """One read in flight, shared by its joiners."""

    def __init__(self, wanted: Wanted, tier: Tier, nbytes: int, slot: Slot) -> None:
        self.entry, self.key, self.raw_bytes = wanted
        self.tier, self.nbytes, self.slot = tier, nbytes, slot
        self.joiners = 0
        self.reason = ""
        self.done = threading.Event()


class Loader:
    """Starts, shares and finishes reads for a storage."""

    def __init__(self, storage: StorageManager) -> None:
        self.storage = storage
        self._loads: dict[ChunkKey, Load] = {}
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> int:
        """Reads not finished yet, stuck ones included."""
        return len(self._loads)

    def fetch(self, wanted: Sequence[Wanted], deadline: float) -> Generator[list[Ready] | str, None, None]:
        """Yield consecutive runs of ``wanted`` as they become ready; the reason of a failure, a string, is last.

        deadline: time.monotonic. Runs already in host memory come in one piece; reads run a window ahead.
        """
        window: deque[Ready | Load] = deque()
        try:
            rest = deque(wanted)
            while rest or window:
                blocked = self._fill(window, rest)
                if not window:
                    yield blocked
                    return
                run: list[Ready] = []
                while window and (not run or self._is_ready(window[0])):
                    ready = self._take(window.popleft(), deadline)
                    if isinstance(ready, str):
                        self._pass_over(wanted[-len(window) - len(rest) - 1 :])
                        if run:
                            yield run
                        yield ready
                        return
                    run.append(ready)
                yield run
        finally:
            for item in window:
                self._leave(item)

    def _pass_over(self, wanted: Sequence[Wanted]) -> None:
        """Where the first of these turned out to be for other readers, the chunks behind it are taken to be so too: one
        after the other, each lookup would find but one more."""
        for tier in self.storage.tiers:
            if reason := tier.refuses(wanted[0].key):
                for each in wanted[1:]:
                    if each.entry.size(tier.number, part_bit(each.key.group, each.key.shard)):
                        tier.refuse(each.key, reason)
                        self.storage.forget(each.entry, tier, each.key, delete=False)

    def _fill(self, window: deque[Ready | Load], rest: deque[Wanted]) -> str:
        """Move as much of ``rest`` into the window as may run ahead; returns why it stopped."""
        starting: list[Load] = []
        reading = sum(isinstance(item, Load) for item in window)
        blocked = ""
        while rest and not blocked:
            wanted = rest[0]
            slot = self.storage.cpu.hold(wanted.key)
            if slot is not None:
                window.append(Ready(slot, 0))
            elif reading >= self.storage.window:
                break
            else:
                load = self._join(wanted, starting)
                if isinstance(load, str):
                    blocked = load
                    break
                reading += 1
                window.append(load)
            rest.popleft()
        self._submit(starting)
        return blocked

    def _join(self, wanted: Wanted, starting: list[Load]) -> Load | str:
        """The read in flight for a key, or a new one; a string says why there can be none."""
        with self._lock:
            load = self._loads.get(wanted.key)
            if load is not None:
                self.storage.stats.add("shared_reads")
                load.joiners += 1
                return load
            bit = part_bit(wanted.key.group, wanted.key.shard)
            reason = "not stored"
            for tier in self.storage.tiers:
                nbytes = wanted.entry.size(tier.number, bit)
                if not nbytes:
                    continue
                if not tier.breaker.allows():
                    reason = f"{tier.name} is failing"
                    continue
                # Encoded containers have all sizes: classes of their own would split memory up.
                slot = self.storage.room.alloc(max(nbytes, wanted.raw_bytes))
                if slot is None:
                    return "no slot"
                load = self._loads[wanted.key] = Load(wanted, tier, nbytes, slot)
                load.joiners = 1
                starting.append(load)
                return load
            return reason

    def _submit(self, loads: list[Load]) -> None:
        """Hand reads to their tiers' readers, small ones in batches."""
        while loads:
            tier, size = loads[0].tier, 0
            batch: list[Load] = []
            while loads and loads[0].tier is tier and len(batch) < BATCH_ITEMS and size < BATCH_BYTES:
                batch.append(loads.pop(0))
                size += batch[-1].nbytes
            tier.readers.submit(self._read, tier, batch)

    def _read(self, tier: Tier, batch: list[Load]) -> None:
        results = tier.read([Read(load.key, load.slot.view(load.nbytes)) for load in batch])
        for load, result in zip(batch, results, strict=True):
            try:
                load.reason = self._admit(load, result)
            except Exception as error:
                load.reason = f"failed ({type(error).__name__})"
            if load.reason:
                self.storage.stats.add(f"miss.{load.reason}")
            with self._lock:
                del self._loads[load.key]
                for _ in range(0 if load.reason else load.joiners):
                    self.storage.arena.hold(load.slot)
                self.storage.arena.release(load.slot)
                load.done.set()

    def _admit(self, load: Load, result: Result) -> str:
        """Verify what was read, decode it, publish it in host memory. Returns the reason it is a miss, or ''."""
        if result.status is not Status.OK:
            if result.detail == SHORT:
                self.storage.recount(load.entry, load.tier, load.key)
            elif result.status in (Status.MISSING, Status.CORRUPT):
                self.storage.forget(load.entry, load.tier, load.key, delete=result.status is Status.CORRUPT)
            return str(result.status.value)
        try:
            view = load.slot.view(result.nbytes)
            header = chunk.parse(view)
            if not result.verified:
                chunk.verify(view, header, load.key)
            decodes = header.codec != "raw" and self.storage.meanings is not None
            nbytes = header.raw_bytes if decodes else header.total_bytes
            if nbytes != load.raw_bytes:
                raise BadContainer("bounds", f"{nbytes} bytes decoded instead of {load.raw_bytes}")
            if header.expires and header.expires <= time.time():
                raise BadContainer("expired")
            if not load.tier.takes(header):
                raise Unknown("lossy")
            if decodes:
                raw = self.storage.room.alloc(header.raw_bytes)
                if raw is None:
                    return "no slot"
                load.slot, staging = raw, load.slot
                try:
                    out = raw.view(header.raw_bytes)
                    header = codec.decode_container(view, header, out)
                    chunk.write_header(out, header)
                finally:
                    self.storage.arena.release(staging)
        except BadContainer as error:
            others = isinstance(error, Unknown) or error.reason == "profile"  # a good one, to other readers
            if others:
                load.tier.refuse(load.key, error.reason)
            self.storage.forget(load.entry, load.tier, load.key, delete=not others)
            return error.reason
        self.storage.promote(load.entry, load.key, load.slot, header)
        return ""

    def _is_ready(self, item: Ready | Load) -> bool:
        return isinstance(item, Ready) or item.done.is_set()

    def _take(self, item: Ready | Load, deadline: float) -> Ready | str:
        if isinstance(item, Ready):
            return item
        if not item.done.wait(max(0.0, deadline - time.monotonic())):
            self._leave(item)
            self.storage.stats.add("miss.timeout")
            return "timeout"
        return item.reason or Ready(item.slot, item.tier.number)

    def _leave(self, item: Ready | Load) -> None:
        """Give up what was not taken."""
        if isinstance(item, Ready):
            self.storage.arena.release(item.slot)
            return
        with self._lock:
            if not item.done.is_set():
                item.joiners -= 1
            elif not item.reason:
                self.storage.arena.release(item.slot)
