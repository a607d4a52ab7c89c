"""A host service in memory with the interface of `lmkv.server.client.Host`, where every answer can be made to fail.

`Service` holds the chunks and says what goes wrong; `FakeHost` is one client. With ``later`` lookups are answered when
the test says so.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from lmkv.errors import Unavailable
from lmkv.index import part_bit
from lmkv.keys import DIGEST_BYTES, ChunkKey
from lmkv.plan import Need
from lmkv.server.client import Answer, Query

ALIGN = 4096


class Memory:
    """``nbytes`` of memory at ``address``."""

    def __init__(self, nbytes: int, fill: int = 0xA5) -> None:
        self.nbytes = nbytes
        self._array = np.full(nbytes + ALIGN, fill, np.uint8)
        skip = -self._array.ctypes.data % ALIGN
        self.array = self._array[skip : skip + nbytes]
        self.address = self.array.ctypes.data


class Lent(Memory):
    """A container lent to a reader for one run, or to a writer until commit."""

    def __init__(self, nbytes: int, key: ChunkKey, tier: int = 0, fill: int = 0xA5) -> None:
        super().__init__(nbytes, fill)
        self.key, self.tier, self.done = key, tier, False


@dataclass
class Stored:
    """One part of a chunk."""

    data: np.ndarray[Any, Any]
    mask: int
    expires: int
    tier: int


@dataclass
class Faults:
    """Chances, from 0 to 1, of what can go wrong; ``late``: lookups are answered when the test says so."""

    lookup_lost: float = 0.0
    lookup_error: float = 0.0
    fetch_reason: float = 0.0
    fetch_error: float = 0.0
    reserve_refused: float = 0.0
    reserve_error: float = 0.0
    commit_refused: float = 0.0
    commit_error: float = 0.0
    late: bool = False


@dataclass
class Service:
    """What all clients share. parts: how many containers there is room for; disk: so many more on the second tier."""

    parts: int = 1 << 30
    faults: Faults = field(default_factory=Faults)
    random: random.Random = field(default_factory=lambda: random.Random(0))
    tiers: tuple[str, ...] = ("cpu", "disk")

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.stored: OrderedDict[ChunkKey, Stored] = OrderedDict()
        self.leases: dict[tuple[int, str], frozenset[bytes]] = {}
        self.writing: dict[ChunkKey, Lent] = {}
        self.reading = 0
        self.asked: list[tuple[FakeHost, Query, Future[Answer]]] = []
        self.lookups = self.fetches = 0
        self.cleared: list[bytes] = []
        self.gate: dict[str, threading.Event] = {}
        self.entered: dict[str, threading.Event] = {}

    def chance(self, probability: float) -> bool:
        with self.lock:
            return probability > 0 and self.random.random() < probability

    def pause(self, where: str) -> None:
        """Where a test set a gate (reserve, commit, fetch), wait until it opens it."""
        if where in self.gate:
            self.entered[where].set()
            assert self.gate[where].wait(60), f"nobody opened the gate at {where}"

    def hold(self, where: str) -> None:
        self.gate[where], self.entered[where] = threading.Event(), threading.Event()

    def open(self, where: str) -> None:
        self.gate.pop(where).set()

    # Lookup.

    def answer(self, count: int = 1 << 30) -> int:
        """Answer up to ``count`` queued lookups, the oldest first; some never. Returns how many were taken."""
        with self.lock:
            taken, self.asked = self.asked[:count], self.asked[count:]
        for host, query, future in taken:
            if self.chance(self.faults.lookup_lost):
                continue
            try:
                future.set_result(self.lookup(host, query))
            except Unavailable as error:
                future.set_exception(error)
        return len(taken)

    def lookup(self, host: FakeHost, query: Query, faults: bool = True) -> Answer:
        """What `Host.lookup` answers, and the lease that goes with it."""
        if faults and self.chance(self.faults.lookup_error):
            raise Unavailable("the host service does not answer")
        digests = [query.digests[i : i + DIGEST_BYTES] for i in range(0, len(query.digests), DIGEST_BYTES)]
        with self.lock:
            self.lookups += 1
            by_digest: dict[bytes, Any] = {}
            for key, part in self.stored.items():
                if key.scope == query.scope and not 0 < part.expires <= time.time():
                    entry = by_digest.setdefault(key.digest, SimpleNamespace(any=0, pages={}, tier=0))
                    bit = part_bit(key.group, key.shard)
                    entry.any |= bit
                    entry.tier = max(entry.tier, part.tier)
                    if part.mask:
                        entry.pages[bit] = part.mask
            entries: list[Any] = []
            growing = query.need.growing
            for digest in digests:
                entry = by_digest.get(digest)
                if growing and (entry is None or entry.any & growing != growing):
                    break
                entries.append(entry)
            chunks = Need(growing, query.need.trailing).boundary(entries, len(entries))
            if query.lease:
                self.leases[id(host), query.owner] = frozenset(digests[:chunks])
            places = bytes(0 if entry is None else entry.tier for entry in entries[:chunks])
            return Answer(places, "end of prompt" if chunks == len(digests) else "not stored")

    def room(self) -> bool:
        """Make room for one more container: the oldest that is not leased has to go."""
        leased = frozenset().union(*self.leases.values())
        while len(self.stored) + len(self.writing) >= self.parts:
            key = next((key for key in self.stored if key.digest not in leased), None)
            if key is None:
                return False
            del self.stored[key]
        return True

    def evict(self, count: int) -> None:
        """Lose ``count`` random containers, leased or not."""
        with self.lock:
            for key in self.random.sample(list(self.stored), min(count, len(self.stored))):
                del self.stored[key]

    def demote(self, count: int) -> None:
        """Move ``count`` random containers to the second tier."""
        with self.lock:
            for key in self.random.sample(list(self.stored), min(count, len(self.stored))):
                self.stored[key].tier = 1


class FakeHost:
    """One client of a `Service`."""

    def __init__(self, service: Service, socket: str = "", **settings: Any) -> None:
        self.service, self.settings = service, settings
        self.tiers: tuple[str, ...] = ()
        self.server_id = "fake"
        self.available, self.closed = False, False
        self.sizes: set[int] = set()

    def register(self, sizes: Sequence[int], timeout: float = 20.0, meanings: object = None) -> None:
        self.sizes |= set(sizes)
        self.tiers, self.available = self.service.tiers, True

    @property
    def region(self) -> tuple[int, int]:
        return 0, 0

    def lookup_later(self, query: Query) -> Future[Answer]:
        future: Future[Answer] = Future()
        with self.service.lock:
            self.service.asked.append((self, query, future))
        if not self.service.faults.late:
            self.service.answer()
        return future

    def lookup(self, query: Query, timeout: float = 1.0) -> Answer:
        return self.service.lookup(self, query)

    def release(self, *owners: str) -> None:
        """As with the real service, what was asked before is answered before the release is heard."""
        service = self.service
        with service.lock:
            asked = [each for each in service.asked if each[0] is self and each[1].owner in owners]
            service.asked = [each for each in service.asked if each not in asked]
            for _, query, future in asked:
                future.set_result(service.lookup(self, query, faults=False))
            for owner in owners:
                service.leases.pop((id(self), owner), None)

    def fetch(self, keys: Sequence[ChunkKey], sizes: Sequence[int], timeout: float) -> Iterator[list[Lent] | str]:
        service = self.service
        service.pause("fetch")
        with service.lock:
            service.fetches += 1
        at = 0
        while at < len(keys):
            if service.chance(service.faults.fetch_error):
                raise Unavailable("the host service does not answer")
            if service.chance(service.faults.fetch_reason):
                yield service.random.choice(["timeout", "no slot", "checksum"])
                return
            run: list[Lent] = []
            with service.lock:
                stop = at + service.random.randint(1, 4)
                for key, size in zip(keys[at:stop], sizes[at:stop], strict=True):
                    part = service.stored.get(key)
                    if part is None:
                        break
                    lent = Lent(size, key, part.tier)
                    lent.array[:] = part.data
                    run.append(lent)
                    part.tier = 0
                service.reading += 1
            missing = len(run) < len(keys[at:stop])
            try:
                if run:
                    yield run
            finally:
                with service.lock:
                    service.reading -= 1
                for lent in run:
                    lent.array[:] = 0xEE
            if missing:
                yield "not stored"
                return
            at += len(run)

    def reserve(self, owner: str, items: Sequence[tuple[ChunkKey, int]], timeout: float) -> list[Lent | str]:
        service = self.service
        service.pause("reserve")
        if service.chance(service.faults.reserve_error):
            raise Unavailable("the host service does not answer")
        got: list[Lent | str] = []
        with service.lock:
            for key, size in items:
                assert size in self.sizes, "not registered"
                if key in service.stored:
                    got.append("held")
                elif key in service.writing:
                    got.append("in flight")
                elif (
                    (got and got[-1] == "no slot")
                    or service.chance(service.faults.reserve_refused)
                    or not service.room()
                ):
                    got.append("no slot")
                else:
                    lent = service.writing[key] = Lent(size, key)
                    got.append(lent)
        return got

    def commit(self, reserved: Sequence[Lent], masks: Sequence[int] = (), expires: int = 0) -> list[bool]:
        service = self.service
        service.pause("commit")
        lost = service.chance(service.faults.commit_error)
        done = []
        with service.lock:
            for lent, mask in zip(reserved, masks or [0] * len(reserved), strict=True):
                assert not lent.done, "committed or aborted before"
                lent.done = True
                del service.writing[lent.key]
                good = not lost and not service.chance(service.faults.commit_refused)
                if good:
                    service.stored[lent.key] = Stored(lent.array.copy(), mask, expires, 0)
                done.append(good)
                lent.array[:] = 0xDD
        if lost:
            raise Unavailable("the host service does not answer")
        return done

    def abort(self, reserved: Sequence[Lent]) -> None:
        with self.service.lock:
            for lent in reserved:
                if not lent.done:
                    lent.done = True
                    del self.service.writing[lent.key]

    def clear(self, scope: bytes) -> int:
        with self.service.lock:
            self.service.cleared.append(scope)
            gone = [key for key in self.service.stored if key.scope == scope]
            for key in gone:
                del self.service.stored[key]
            return len(gone)

    def clear_later(self, scope: bytes) -> None:
        self.clear(scope)

    def events(self, scope: bytes) -> list[tuple[str, str, bytes, int]]:
        return []

    def stats(self) -> dict[str, Any]:
        return {}

    def flush(self, timeout: float) -> bool:
        return True

    def close(self) -> None:
        self.available, self.closed = False, True
        with self.service.lock:
            for name in [each for each in self.service.leases if each[0] == id(self)]:
                del self.service.leases[name]
