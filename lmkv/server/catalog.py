"""What the storage holds, as those see it who know it by whole keys: sizes, lists, totals, and each tenant's share.

The storage's index knows a chunk by scope and digest, which no two chunks share unless somebody makes them up. A
container whose digest another chunk has already is kept under a digest made of its whole key.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lmkv import _native
from lmkv.backends.base import Found, Status
from lmkv.errors import ConfigError
from lmkv.index import FOUND, Entry, Watch, part_bit, parts_of
from lmkv.keys import ChunkKey
from lmkv.leases import Reservation
from lmkv.server.pins import Pins
from lmkv.storage import StorageManager
from lmkv.writer import Tally

SETTLE = 1024  # entries to look at again
MARGIN = 16  # a full tenant makes room for a part of its budget, so that it need not for every chunk


class Record(NamedTuple):
    """What an entry counts: bytes and parts, each part once however many tiers have it."""

    nbytes: int
    parts: int
    created: float


class Place(NamedTuple):
    """A stored container: its chunk's entry, the key the storage has it under, its fastest tier, its bytes there."""

    entry: Entry
    name: ChunkKey
    tier: int
    nbytes: int


class Catalog(Watch):
    """Watches the index of ``storage``, and passes on what it hears to ``also``. Thread-safe.

    tenant_budget: bytes that the chunks of one tenant may take, None for any. pin_share: see `Pins`.
    """

    def __init__(
        self, storage: StorageManager, also: Watch, tenant_budget: int | None = None, pin_share: float = 0.5
    ) -> None:
        self.storage, self.also, self.tenant_budget = storage, also, tenant_budget
        self.pins = Pins(storage, pin_share, tenant_budget)
        arena = storage.arena
        self.container_bytes = arena.slab_bytes
        self._classes = max(0, arena.capacity // arena.slab_bytes // 8)  # sizes that may have slabs of their own
        self._sizes: set[int] = set()
        self._records: dict[Entry, Record] = {}
        self._tenants: Counter[bytes] = Counter()
        self._used = self._objects = 0
        self.filling = 0  # bytes of the slots that are being filled
        self._doubles: dict[bytes, bytes] = {}
        with storage.lock:
            self._changed = set(storage.index.entries())
            storage.index.watch = self

    # What changes.

    def changed(self, entry: Entry, tier: int, mask: int, present: bool) -> None:
        self.also.changed(entry, tier, mask, present)
        if len(self._changed) >= SETTLE:
            self._changed.discard(entry)  # it is changing now
            self._settle()
        self._changed.add(entry)

    def cleared(self, scope: bytes) -> None:
        self.also.cleared(scope)
        self._changed.update(entry for entry in self._records if entry.scope == scope)

    def _settle(self) -> None:
        """Count what has changed; under the storage's lock."""
        while self._changed:
            entry = self._changed.pop()
            old = self._records.get(entry)
            used = parts = 0
            if entry.alive:
                for group, shard in parts_of(entry.any):
                    parts += 1
                    used += _size(entry, part_bit(group, shard))
            if parts:
                found = entry.stamp + FOUND if entry.stamp < 0 else 0
                created = old.created if old else found if found > 1 else time.time()
                self._records[entry] = Record(used, parts, created)
            elif old:
                del self._records[entry]
                self._doubles.pop(entry.digest, None)
            self._used += used - (old.nbytes if old else 0)
            self._objects += parts - (old.parts if old else 0)
            self._tenants[entry.tenant] += used - (old.nbytes if old else 0)
            if not self._tenants[entry.tenant]:
                del self._tenants[entry.tenant]

    # Asking.

    def find(self, key: ChunkKey) -> Place | None:
        """Where a container is, as far as the index knows."""
        name, entry = key, self.storage.index.get(key)
        if self._doubles and (entry is None or not _is(entry, key)):
            name = _double(key)
            entry = self.storage.index.get(name)
        bit = part_bit(key.group, key.shard)
        if entry is None or not entry.any & bit or not _is(entry, name):
            return None
        if entry.expires and entry.expires <= time.time():
            self.storage.expire([entry])
            return None
        tier = next((tier for tier, mask in enumerate(entry.masks) if mask & bit), 0)
        return Place(entry, name, tier, entry.size(tier, bit))

    def locate(self, keys: Sequence[ChunkKey]) -> list[Place | None]:
        """`find` for each. Tiers that may hold more than the index knows (a scan is under way) are asked."""
        places = [self.find(key) for key in keys]
        missing = [key for key, place in zip(keys, places, strict=True) if place is None]
        if missing and self._probe(missing):
            places = [place or self.find(key) for key, place in zip(keys, places, strict=True)]
        return places

    def contains(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Bytes of each, 0 where it cannot be had."""
        places = self.locate(keys)
        failing = {tier.number for tier in self.storage.tiers if tier.breaker.open}
        return [place.nbytes if place and place.tier not in failing else 0 for place in places]

    def _probe(self, keys: Sequence[ChunkKey]) -> bool:
        found = False
        for tier in self.storage.tiers:
            if tier.probing and tier.breaker.allows():
                try:
                    sizes = tier.backend.contains(keys)
                except Exception:
                    tier.breaker.note(False)
                    continue
                with self.storage.lock:
                    for key, size in zip(keys, sizes, strict=False):
                        entry = self.storage.index.get(key)
                        if size and (entry is None or _is(entry, key)):
                            self.storage.index.add(key, tier.number, size, created=1)
                            found = True
        return found

    def usage(self) -> tuple[int, int]:
        """Bytes and containers, each once however many tiers have it."""
        with self.storage.lock:
            self._settle()
            return self._used, self._objects

    def entries(self) -> list[Entry]:
        """All there are now, to be listed page by page."""
        with self.storage.lock:
            self._settle()
            return list(self._records)

    def describe(self, entry: Entry) -> list[Found]:
        """The containers of one chunk, none once it has gone."""
        with self.storage.lock:
            self._settle()
            record = self._records.get(entry)
            if record is None:
                return []
            digest = self._doubles.get(entry.digest, entry.digest)
            return [
                Found(
                    entry.key(group, shard)._replace(digest=digest),
                    _size(entry, part_bit(group, shard)),
                    record.created,
                )
                for group, shard in parts_of(entry.any)
            ]

    # Changing.

    def pin(self, owner: str, keys: Sequence[ChunkKey], seconds: float) -> list[Status]:
        """Keep the chunks of containers that are there; see `Pins.pin`."""
        return self.pins.pin(owner, self._entries(keys), seconds)

    def unpin(self, owner: str, keys: Sequence[ChunkKey]) -> list[bool]:
        """Undo it."""
        return self.pins.unpin(owner, self._entries(keys))

    def _entries(self, keys: Sequence[ChunkKey]) -> list[Entry | None]:
        return [place.entry if place else None for place in self.locate(keys)]

    def reserve(self, key: ChunkKey, nbytes: int, deadline: float) -> Reservation | str:
        """A slot to fill for ``key``; a string says why there is none: held (there already), or no room.

        Several may fill the same one: the first to be committed stays.
        """
        storage = self.storage
        with storage.lock:
            if self.find(key) is not None:
                return "held"
            limit = storage.arena.capacity // 2
            if nbytes > self.container_bytes or (self.filling and self.filling + nbytes > limit):
                return "larger than a slab" if nbytes > self.container_bytes else "too much is under way"
            if not self._make_room(key.tenant, nbytes):
                return "tenant budget"
            slot = storage.room.alloc(nbytes)
            if slot is None and self.pins.unblock():
                slot = storage.room.alloc(nbytes)
            if slot is None:
                return "no slot"
            self.filling += nbytes
            self._tenants[key.tenant] += nbytes
            return Reservation("remote", key, slot, nbytes, deadline, slot.generation)

    def give_class(self, nbytes: int) -> None:
        """Let containers of this size have slabs of their own, if there are not too many sizes already."""
        if nbytes not in self._sizes and len(self._sizes) < self._classes:
            try:
                self.storage.add_sizes([nbytes])
            except ConfigError:
                return
            self._sizes.add(nbytes)

    def commit(self, reservation: Reservation, expires: int = 0, created: int = 0) -> bool:
        """Publish a filled slot; False: it came too late. created: unix seconds, 0 for now."""
        storage = self.storage
        with storage.lock:
            self._end(reservation)
            key = reservation.key
            entry = storage.index.get(key)
            if entry is not None and not _is(entry, key):
                reservation.key = _double(key)
                self._doubles[reservation.key.digest] = key.digest
        done = storage.commit([reservation], expires, Tally())[0]
        with storage.lock:
            entry = storage.index.get(reservation.key)
            self._settle()
            if entry in self._records and 0 < created < self._records[entry].created:
                self._records[entry] = self._records[entry]._replace(created=created)
        return done

    def abort(self, reservation: Reservation) -> None:
        """Give a slot back."""
        with self.storage.lock:
            self._end(reservation)
        self.storage.abort(reservation)

    def _end(self, reservation: Reservation) -> None:
        self.filling -= reservation.nbytes
        tenant = reservation.key.tenant
        self._tenants[tenant] -= reservation.nbytes
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Remove containers from every tier; True where there was one."""
        done: list[bool] = []
        doomed: dict[int, list[ChunkKey]] = {}
        self.locate(keys)  # outside the lock: it may ask
        with self.storage.lock:
            for key in keys:
                place = self.find(key)
                done.append(place is not None)
                if place:
                    self._take_out(place.entry, part_bit(key.group, key.shard), doomed)
        for number, names in doomed.items():
            self.storage.delete(self.storage.tiers[number - 1], names)
        return done

    def _take_out(self, entry: Entry, mask: int, doomed: dict[int, list[ChunkKey]]) -> None:
        """Forget parts of a chunk; ``doomed`` gets what is to be deleted of lower tiers."""
        for tier, present in enumerate(entry.masks):
            for group, shard in parts_of(present & mask):
                if tier:
                    doomed.setdefault(tier, []).append(entry.key(group, shard))
                else:
                    self.storage.cpu.pop(entry.key(group, shard))
                self.storage.index.remove(entry, tier, part_bit(group, shard))

    def _make_room(self, tenant: bytes, nbytes: int) -> bool:
        """Bring a tenant so far below its budget that ``nbytes`` fit, its own leaves first."""
        if self.tenant_budget is None:
            return True
        self._settle()
        over = self._tenants[tenant] + nbytes - self.tenant_budget
        if over <= 0 or nbytes > self.tenant_budget:
            return over <= 0
        self.pins.trim()
        aim, storage = over + self.tenant_budget // MARGIN, self.storage
        doomed: dict[int, list[ChunkKey]] = {}
        mine = [entry for entry in self._records if entry.tenant == tenant and not (entry.pins or entry.leases)]
        for entry in sorted(mine, key=storage.index.policy.rank):
            if aim <= 0:
                break
            if all(storage.index.is_leaf(entry, t) for t, mask in enumerate(entry.masks) if mask) and not any(
                map(storage.cpu.busy, entry.keys(0))
            ):
                aim -= self._records[entry].nbytes
                over -= self._records[entry].nbytes
                self._take_out(entry, entry.any, doomed)
                storage.stats.add("tenant_evicted_chunks")
        for number, names in doomed.items():
            storage.chores.submit(storage.delete, storage.tiers[number - 1], names)
        return over <= 0


def _is(entry: Entry | None, key: ChunkKey) -> bool:
    """The entry is of the key's chunk, and not of another with its digest."""
    return entry is not None and (entry.tenant, entry.parent, entry.depth) == (key.tenant, key.parent, key.depth)


def _size(entry: Entry, bit: int) -> int:
    """Bytes of a part in the fastest tier that has it."""
    return next((entry.size(tier, bit) for tier, mask in enumerate(entry.masks) if mask & bit), 0)


def _double(key: ChunkKey) -> ChunkKey:
    """The key under which a container is kept whose digest is another chunk's."""
    depth = key.depth.to_bytes(4, "little")
    return key._replace(digest=_native.blake3(key.scope + key.tenant + key.digest + key.parent + depth))
