"""Chunks that clients on other machines want kept: pins, which end by themselves and hold no more than a share.

Only leaves of the prefix tree are evicted, so a pinned chunk also keeps every chunk that it continues: all of them
count. Chunks may grow, and get ancestors, after they were pinned, and a few small ones may keep many slabs of memory
from other sizes. So what pins hold is counted again while room is wanted, and the newest that hold too much end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from lmkv.backends.base import Status
from lmkv.index import MAX_TIERS, Entry
from lmkv.storage import StorageManager

MAX_PINS = 1 << 14
MAX_HELD = 1 << 16  # chunks
MAX_STEPS = 4 * MAX_HELD  # of one count: somebody may have made up prompts that are long to walk along
RECOUNT = 1.0  # seconds

Fits = Callable[[Entry], bool]


class Pins:
    """share: of host memory, of each tier's budget and of ``tenant_budget``, what pins may hold. Thread-safe."""

    def __init__(self, storage: StorageManager, share: float, tenant_budget: int | None = None) -> None:
        self.storage, self.share, self.tenant_budget = storage, share, tenant_budget
        self._pins: dict[Entry, dict[str, float]] = {}  # owners, and until when; the oldest pin first
        self._records = 0
        self._held = _Held(self)
        self._counted_at = self._next = 0.0  # -inf: some were unpinned since
        storage.room.expiring.append(self.trim)

    @property
    def limit(self) -> int:
        """Bytes that pins may hold."""
        budgets = [tier.budget for tier in self.storage.tiers if tier.budget is not None]
        return int(self.share * min([self.storage.arena.capacity, *budgets]))

    def usage(self) -> dict[str, int]:
        """How much is pinned, and kept by that."""
        with self.storage.lock:
            self._refresh()
            chunks = sum(entry.alive for entry in self._pins)
            return {"chunks": chunks, "held_bytes": self._held.nbytes, "limit_bytes": self.limit}

    def pin(self, owner: str, entries: Sequence[Entry | None], seconds: float) -> list[Status]:
        """Keep chunks for ``seconds`` from now, those that are pinned already too; None: there is no such chunk."""
        with self.storage.lock:
            self._refresh()
            self._held.steps = 0
            until = time.monotonic() + seconds
            ends = [self._pin(owner, entry, until) for entry in entries]
            self._next = min(self._next, until)
        for status in Status:
            if count := ends.count(status):
                self.storage.stats.add(f"remote.pin.{status.value}", count)
        return ends

    def _pin(self, owner: str, entry: Entry | None, until: float) -> Status:
        if entry is None or not entry.alive:
            return Status.MISSING
        owners = self._pins.get(entry, {})
        if owner not in owners:
            if self._records >= MAX_PINS or not self._held.take(entry):
                return Status.FULL
            if not owners:
                entry.pins += 1
                self._pins[entry] = owners
            self._records += 1
        owners[owner] = until
        return Status.OK

    def unpin(self, owner: str, entries: Sequence[Entry | None]) -> list[bool]:
        """Undo what the owner has pinned; True where it had."""
        with self.storage.lock:
            self._expire()
            return [self._unpin(entry, (owner,)) > 0 for entry in entries]

    def _unpin(self, entry: Entry | None, owners: Iterable[str]) -> int:
        if entry is None or entry not in self._pins:
            return 0
        gone = [owner for owner in owners if self._pins[entry].pop(owner, None) is not None]
        self._records -= len(gone)
        if not self._pins[entry]:
            del self._pins[entry]
            entry.pins -= 1
            self._counted_at = float("-inf")
        return len(gone)

    def trim(self) -> None:
        """Before anything is evicted: end what is past its time, and now and then what holds too much."""
        if self._pins:
            with self.storage.lock:
                self._refresh()

    def unblock(self) -> bool:
        """There is no slot to be had: end pins that keep more than the share of slabs from others. True: some did."""
        with self.storage.lock:
            held, slabs = _Held(self), set[object]()
            most = int(self.share * len(self.storage.arena.regions()))
            return self._keep(lambda entry: self._slabs(entry, held, slabs, most))

    def _slabs(self, entry: Entry, held: _Held, slabs: set[object], most: int) -> bool:
        """Add the slabs that a chunk and what it continues lie in to ``slabs``, if there are no more than ``most``."""
        chain, more = held.chain(entry), set[object]()
        for each in chain:
            for key in each.keys(0):
                if (slot := self.storage.cpu.hold(key)) is not None:
                    more.add(slot.slab)
                    self.storage.arena.release(slot)
        if len(slabs | more) > most or held.steps > MAX_STEPS:
            return False
        slabs |= more
        held.entries.update(chain)
        return True

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        for entry, owners in list(self._pins.items()):
            if late := [owner for owner, until in owners.items() if until <= now]:
                self.storage.stats.add("remote.pins_expired", self._unpin(entry, late))
        left = (until for owners in self._pins.values() for until in owners.values())
        self._next = min(left, default=float("inf"))

    def _refresh(self) -> None:
        """Count what is held, if that may have changed."""
        self._expire()
        if time.monotonic() - self._counted_at >= RECOUNT:
            self._held = _Held(self)
            self._keep(self._held.take)
            self._counted_at = time.monotonic()

    def _keep(self, fits: Fits) -> bool:
        """End the pins of chunks that do not fit, in the order in which they were pinned. True: there were some."""
        dropped = 0
        for entry in list(self._pins):
            if not entry.alive:
                self._unpin(entry, list(self._pins[entry]))
            elif not fits(entry):
                dropped += self._unpin(entry, list(self._pins[entry]))
        self.storage.stats.add("remote.pins_dropped", dropped)
        return dropped > 0


class _Held:
    """What pins keep: chunks and their bytes, in all and of each tenant."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self.nbytes = self.steps = 0
        self._tenants: Counter[bytes] = Counter()
        self.entries = set[Entry]()

    def chain(self, entry: Entry) -> list[Entry]:
        """The chunk and those that it continues, as far as they do not count yet."""
        found: dict[Entry, None] = {}
        scope = self._pins.storage.index.scopes[entry.scope]
        at: Entry | None = entry
        while at is not None and at not in found and at not in self.entries:
            found[at] = None
            self.steps += 1
            if self.steps > MAX_STEPS:
                break
            at = scope.by_parent_id.get(at.parent)
        return list(found)

    def take(self, entry: Entry) -> bool:
        """Count a chunk as kept; False, and nothing counted: that would be too much."""
        found = self.chain(entry)
        tenants = Counter[bytes]()
        for each in found:
            tenants[each.tenant] += _bytes(each)
        budget = self._pins.tenant_budget
        most = self._pins.limit if budget is None else min(self._pins.limit, int(self._pins.share * budget))
        fits = self.steps <= MAX_STEPS and len(self.entries) + len(found) <= MAX_HELD
        fits = fits and self.nbytes + tenants.total() <= self._pins.limit
        if not fits or any(self._tenants[tenant] + nbytes > most for tenant, nbytes in tenants.items()):
            return False
        self.nbytes += tenants.total()
        self._tenants += tenants
        self.entries.update(found)
        return True


def _bytes(entry: Entry) -> int:
    """Of all parts, each once: in the tier where it is largest."""
    largest: dict[int, int] = {}
    for place, nbytes in entry.sizes.items():
        largest[place // MAX_TIERS] = max(nbytes, largest.get(place // MAX_TIERS, 0))
    return sum(largest.values())
