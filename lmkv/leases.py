"""Leases on what a request was promised, and reservations of memory to be filled.

Each has an owner and a deadline, a reservation also the generation of its slot. A deadline *voids*: a void lease
promises nothing any more, and a void reservation cannot be committed. The memory itself comes back only when its
holder lets go, so bytes under a copy are never reused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from lmkv.arena import Slot
from lmkv.index import Entry
from lmkv.keys import ChunkKey
from lmkv.stats import Stats

if TYPE_CHECKING:
    from lmkv.plan import Plan


@dataclass(eq=False)
class Reservation:
    """A slot being filled by ``owner``; invisible until committed.

    generation: the slot's when it was reserved. pages: mask of the pages filled, 0 for all.
    """

    owner: str
    key: ChunkKey
    slot: Slot
    nbytes: int
    deadline: float
    generation: int
    pages: int = 0
    void: bool = False
    ended: bool = False


@dataclass(eq=False)
class Lease:
    """The first ``plan.tokens`` tokens stay readable for ``owner`` until released or ``deadline`` (time.monotonic)."""

    owner: str
    plan: Plan
    deadline: float
    entries: list[Entry]
    host_bytes: int
    asked: Plan = field(repr=False)
    table: LeaseTable = field(repr=False)
    using: int = 0
    void: bool = False
    released: bool = False

    @property
    def tokens(self) -> int:
        """Tokens promised; 0 once void."""
        return 0 if self.void else self.plan.tokens

    def release(self) -> None:
        """Let go; any number of times."""
        self.table.release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class LeaseTable:
    """All live leases; at most ``limit`` bytes of host memory are held by them."""

    def __init__(self, limit: int, lock: threading.RLock, stats: Stats) -> None:
        self.limit = limit
        self.held = 0
        self._stats = stats
        self._lock = lock
        self._by_owner: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_owner)

    def acquire(self, owner: str, plan: Plan, timeout: float) -> Lease:
        """Lease the plan's chunks, cut where the limit is reached. The same plan again returns the same lease."""
        with self._lock:
            self.expire()
            before = self._by_owner.get(owner)
            if before is not None:
                if before.asked.same_chunks(plan):
                    before.deadline = time.monotonic() + timeout
                    return before
                self.release(before)
            asked, room = plan, self.limit - self.held
            count, size = 0, 0
            for entry in plan.entries:
                if entry is not None:
                    if not entry.alive:
                        break
                    if not entry.leases:
                        size += entry.host_bytes()
                    if size > room:
                        break
                count += 1
            if count < len(plan.entries):
                plan = plan.cut(count, "lease limit" if size > room else "evicted")
            taken = [entry for entry in plan.entries if entry is not None]
            lease = Lease(owner, plan, time.monotonic() + timeout, taken, 0, asked, self)
            for entry in taken:
                if not entry.leases:
                    lease.host_bytes += entry.host_bytes()
                entry.leases += 1
            self.held += lease.host_bytes
            self._by_owner[owner] = lease
            return lease

    def release(self, lease: Lease) -> None:
        """End a lease; its entries are unleased once no retrieve is using it."""
        with self._lock:
            lease.void = True
            if self._by_owner.get(lease.owner) is lease:
                del self._by_owner[lease.owner]
            if lease.using or lease.released:
                return
            lease.released = True
            for entry in lease.entries:
                entry.leases -= 1
            self.held -= lease.host_bytes

    def drop(self, owners: Iterable[str]) -> None:
        """End the leases of these owners, where they have one."""
        with self._lock:
            for owner in owners:
                if lease := self._by_owner.get(owner):
                    self.release(lease)

    def drop_all(self, prefix: str) -> None:
        """End the leases of all owners whose names begin so."""
        with self._lock:
            self.drop([owner for owner in self._by_owner if owner.startswith(prefix)])

    def use(self, lease: Lease) -> bool:
        """A retrieve starts to touch the leased chunks; False when the lease is void."""
        with self._lock:
            self.expire()
            if lease.void:
                return False
            lease.using += 1
            return True

    def done(self, lease: Lease) -> None:
        """The retrieve has stopped touching them; a lease voided meanwhile ends now."""
        with self._lock:
            lease.using -= 1
            if lease.void:
                self.release(lease)

    def expire(self) -> None:
        """Void what is past its deadline."""
        now = time.monotonic()
        with self._lock:
            for lease in [each for each in self._by_owner.values() if each.deadline <= now]:
                self._stats.add("voided_leases")
                self.release(lease)
