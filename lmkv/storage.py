"""StorageManager: keys and opaque containers over host memory and the tiers below it.

Host memory (tier 0) is where chunks are filled, read from and promoted to; every other tier is written in the
background and read through it. One lock guards the index, the leases and the reservations; it is never held over I/O
or over a copy.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any

from lmkv import chunk
from lmkv.arena import PAGE, Arena, Slot, slab_bytes
from lmkv.backends.base import Found, Result, Status
from lmkv.backends.cpu import CpuBackend
from lmkv.codec import Meanings
from lmkv.config import Config, memory_limit
from lmkv.errors import BackendError, ConfigError
from lmkv.eviction import policy
from lmkv.index import Entry, Index, Watch, part_bit, parts_of
from lmkv.keys import ChunkKey, ChunkKeys
from lmkv.leases import LeaseTable, Reservation
from lmkv.loads import Loader, Ready, Wanted
from lmkv.plan import Need, Plan, lookup
from lmkv.room import Room
from lmkv.stats import Stats
from lmkv.tier import Tier, open_tiers
from lmkv.workers import Workers
from lmkv.writer import Job, Tally, Writer

_STORAGES: weakref.WeakSet[StorageManager] = weakref.WeakSet()


class StorageManager:
    """Storage in this process. ``sizes``: container bytes of each group; a budget that cannot hold one refuses to
    start. shared: host memory that other processes can map (`Arena`). meanings: of payload, for codecs; None: encoded
    containers stay as they are, in host memory too.
    """

    def __init__(
        self, config: Config, sizes: Sequence[int], meanings: Meanings | None = None, *, shared: bool = False
    ) -> None:
        self.config = config
        self.stats = Stats()
        self.meanings = meanings
        if config.origin("profiles") != "default":
            from lmkv.codec import profile  # heavy, and seldom needed

            profile.look_in([*config.profiles])
        self.tiers = open_tiers(config, max(sizes), meanings)
        self.names = ("cpu", *(tier.name for tier in self.tiers))
        try:
            self.index = Index(1 + len(self.tiers), policy(config.policy))
            budget = config.cpu.budget.resolve(memory_limit())
            slab = _slab_bytes(budget, sizes, config.cpu.slab)
            host = config.cpu
            self.arena = Arena(budget, slab, sizes, huge=host.huge_pages, touch=host.touch, shared=shared)
        except ConfigError:
            for tier in self.tiers:
                tier.backend.close()
            raise
        self.cpu = CpuBackend(budget=str(budget), arena=self.arena)
        self.lock = threading.RLock()
        self.leases = LeaseTable(self.arena.capacity // 2, self.lock, self.stats)
        self.room = Room(self)
        self.window = max((2 * tier.config.readers for tier in self.tiers), default=1)
        self.loader = Loader(self)
        self.writers = [Writer(tier, self) for tier in self.tiers]
        self.forked = self.closing = self.closed = False
        self._reservations: dict[ChunkKey, Reservation] = {}
        self.chores = Workers("chores", 1)
        self.calls = Workers("calls", 2)
        for tier in self.tiers:
            tier.backend.on_reset = partial(self.reset, tier)
        for tier in (tier for tier in self.tiers if not tier.scanned.is_set()):
            threading.Thread(target=self.scan, args=(tier,), name=f"lmkv-{tier.name}-scan", daemon=True).start()
        _STORAGES.add(self)

    @property
    def usable(self) -> str:
        """'' while calls can work, else why they are misses."""
        return "forked" if self.forked else "closed" if self.closed else ""

    def add_sizes(self, sizes: Sequence[int]) -> None:
        """Take containers of more sizes. ConfigError names what must be set for them at the next start."""
        largest = max(sizes)
        for tier in self.tiers:
            tier.check_budget(largest)
        if not self.arena.add_exact(sizes):
            if largest > self.config.cpu.slab:
                raise ConfigError("cpu.slab", f"{self.config.cpu.slab} bytes cannot hold a chunk of {largest}")
            raise ConfigError("cpu.budget", f"{self.arena.capacity} bytes are too few with chunks of {largest} beside")

    # Lookup and reading.

    def lookup(self, scope: bytes, keys: ChunkKeys, need: Need) -> Plan:
        """The longest prefix restorable from any tiers."""
        for tier in self.tiers:
            if tier.backend.remote:
                tier.backend.attend()
        return lookup(self, scope, keys, need)

    def probe(self, scope: bytes, keys: ChunkKeys, first: int, need: Need) -> bool:
        """Ask tiers that may hold more than the index knows: for everything at once where that is one round trip, else
        for the first missing chunk, and if it is there for all that follow."""
        found = False
        every, rest = need.growing | sum(each.bits for each in need.trailing), range(first, keys.chunks)
        for tier in self.tiers:
            if tier.probing and tier.breaker.allows():
                ask = tier.backend.remote or not need.growing
                ask = ask or self._ask(tier, scope, keys, range(first, first + 1), need.growing)
                found = (ask and self._ask(tier, scope, keys, rest, every)) or found
        return found

    def _ask(self, tier: Tier, scope: bytes, keys: ChunkKeys, chunks: range, bits: int) -> bool:
        asked = [keys.key(i, scope, group, shard) for i in chunks for group, shard in parts_of(bits)]
        try:
            sizes = tier.contains(asked)
            if len(sizes) != len(asked):
                raise ValueError(f"{len(sizes)} answers for {len(asked)} keys")
        except Exception:
            tier.breaker.note(False)
            return False
        if tier.breaker.open and any(sizes):
            tier.breaker.note(True)  # this was the one try, and the reads that follow need not wait for the next
        found = [(key, size) for key, size in zip(asked, sizes, strict=True) if size and not tier.refuses(key)]
        with self.lock:
            for key, size in found:
                self.index.add(key, tier.number, size, created=1)
        return bool(found)

    def fetch(self, wanted: Sequence[Wanted], deadline: float) -> Generator[list[Ready] | str, None, None]:
        """Bring containers into host memory, in order; see `Loader.fetch`."""
        return self.loader.fetch(wanted, deadline)

    def release(self, run: Iterable[Ready]) -> None:
        """Let go of fetched containers."""
        for ready in run:
            self.stats.add("retrieved_bytes", ready.slot.nbytes)
            self.arena.release(ready.slot)

    def touch(self, entries: Iterable[Entry | None]) -> None:
        """A prefix was used."""
        with self.lock:
            self.index.touch(entry for entry in entries if entry is not None)

    # Writing.

    def reserve(self, owner: str, key: ChunkKey, nbytes: int, deadline: float) -> Reservation | str:
        """A slot to fill for ``key``; a string says why there is none (held, in flight, no slot)."""
        with self.lock:
            entry = self.index.get(key)
            if entry is not None and entry.expires and entry.expires <= time.time():
                self.expire([entry])
            elif entry is not None and entry.any & part_bit(key.group, key.shard):
                return "held"
            before = self._reservations.get(key)
            if before is not None:
                if before.deadline > time.monotonic():
                    return "in flight"
                before.void = True
                self.stats.add("voided_reservations")
            slot = self.room.alloc(nbytes)
            if slot is None:
                return "no slot"
            reservation = Reservation(owner, key, slot, nbytes, deadline, slot.generation)
            self._reservations[key] = reservation
            return reservation

    def commit(self, reservations: Sequence[Reservation], expires: int, tally: Tally) -> list[bool]:
        """Publish filled slots, in prefix order, and queue their write-through; False where it came too late."""
        done = []
        with self.lock:
            for each in reservations:
                late = each.void or each.deadline <= time.monotonic() or each.slot.generation != each.generation
                if late:
                    self.stats.add("late_commits")
                elif self.cpu.put(each.key, each.slot, each.nbytes):
                    self.index.add(each.key, 0, each.nbytes, pages=each.pages, expires=expires)
                    self.stats.add("stored_bytes", each.nbytes)
                self._end(each)
                done.append(not late)
        self.write_through([each.key for each, ok in zip(reservations, done, strict=True) if ok], tally)
        return done

    def abort(self, reservation: Reservation) -> None:
        """Give a reservation back unfilled; harmless after commit."""
        with self.lock:
            if not reservation.ended:
                self._end(reservation)

    def _end(self, reservation: Reservation) -> None:
        reservation.ended = True
        if self._reservations.get(reservation.key) is reservation:
            del self._reservations[reservation.key]
        self.arena.release(reservation.slot)

    def write_through(self, keys: Sequence[ChunkKey], tally: Tally) -> None:
        """Queue what each tier's admission wants of ``keys`` (in host memory, prefix order)."""
        for writer in self.writers:
            jobs = []
            with self.lock:
                for key in keys:
                    entry = self.index.get(key)
                    if entry is not None and writer.wants(entry, key) and (job := self.job(entry, key, tally)):
                        jobs.append(job)
            if jobs:
                writer.offer(jobs)

    def job(self, entry: Entry, key: ChunkKey, tally: Tally | None = None) -> Job | None:
        """A write of one container in host memory, which it holds."""
        slot = self.cpu.hold(key)
        return (
            None
            if slot is None
            else Job(entry, key, slot, entry.size(0, part_bit(key.group, key.shard)), [tally] if tally else [])
        )

    def written(self, tier: Tier, job: Job, nbytes: int, expires: int, result: Result) -> str:
        """Account for one write; returns its outcome. A chunk cleared meanwhile is taken out again."""
        with self.lock:
            tier.pending -= nbytes
            if result.status is Status.OK and job.entry.alive:
                pages = (job.entry.pages or {}).get(part_bit(job.key.group, job.key.shard), 0)
                self.index.add(job.key, tier.number, nbytes, pages=pages, expires=expires)
                tier.replaced(job.key)
                return "written"
        if result.status is Status.OK:
            tier.backend.delete([job.key])
            return "cleared"
        if result.status is Status.FULL:
            self.room.shrink(tier, 2 * nbytes)
        return f"failed ({result.status.value})"

    # Forgetting.

    def delete(self, tier: Tier, keys: Sequence[ChunkKey]) -> None:
        """Delete from a lower tier what the index has forgotten already."""
        if keys:
            self._not_there(tier, keys)
            try:
                tier.backend.delete(keys)
            except Exception:
                self.stats.add(f"{tier.name}.delete.failed", len(keys))

    def _not_there(self, tier: Tier, keys: Sequence[ChunkKey]) -> None:
        """A scan under way may have seen these just before: it must not bring them back."""
        with self.lock:
            if tier.gone is None:
                return
            tier.gone.update(keys)
            for key in keys:
                if entry := self.index.get(key):
                    self.index.remove(entry, tier.number, part_bit(key.group, key.shard))

    def forget(self, entry: Entry, tier: Tier, key: ChunkKey, *, delete: bool) -> None:
        """A tier turned out not to hold a good copy of one part."""
        with self.lock:
            self.index.remove(entry, tier.number, part_bit(key.group, key.shard))
        if delete:
            self.delete(tier, [key])

    def reset(self, tier: Tier, lost: Callable[[Sequence[ChunkKey]], Sequence[bool]]) -> None:
        """Nothing that is known of the ``lost`` keys of a tier is certain any more: forget it, and ask again."""
        with self.lock:
            held = [entry for entry in self.index.entries() if entry.masks[tier.number]]
            for entry, gone in zip(held, lost([entry.key(0, 0) for entry in held]), strict=True):
                if gone:
                    self.index.remove(entry, tier.number)
        self.stats.add(f"{tier.name}.resets")

    def recount(self, entry: Entry, tier: Tier, key: ChunkKey) -> None:
        """Somebody has replaced a container by a larger one: ask for its size."""
        size = tier.contains([key])[0]
        with self.lock:
            if not size:
                self.index.remove(entry, tier.number, part_bit(key.group, key.shard))
            elif entry.alive:
                self.index.add(key, tier.number, size)

    def promote(self, entry: Entry, key: ChunkKey, slot: Slot, header: chunk.Header) -> None:
        """Keep a loaded container in host memory, unless its chunk was cleared meanwhile."""
        with self.lock:
            if entry.alive and self.cpu.put(key, slot, header.total_bytes):
                pages = 0 if header.page_mask == (1 << header.pages) - 1 else header.page_mask
                self.index.add(key, 0, header.total_bytes, pages=pages, expires=header.expires)
                if header.lossy and self.meanings is not None:
                    entry.lossy |= part_bit(key.group, key.shard)
                self.stats.add("promoted_chunks")

    def clear(self, match: Callable[[Entry], bool], tier: int | None = None, scope: bytes = b"") -> int:
        """Remove every chunk that matches, from one tier or all; returns how many chunks were there.

        scope: these are all chunks of a scope, so that whoever watches the index hears of them at once.

        Waits for the start-up scan, so that what an earlier process stored is found too; BackendError when that takes
        longer than ``operation_timeout``. Chunks being copied are invisible at once, their memory follows when the
        copy ends.
        """
        for each in self.tiers:
            if not each.scanned.wait(self.config.operation_timeout):
                raise BackendError(f"{each.name} is still being scanned: nothing was cleared")
        with self.lock:
            found = [entry for entry in self.index.entries() if match(entry)]
            count = sum(any(mask and tier in (None, t) for t, mask in enumerate(entry.masks)) for entry in found)
            watch, self.index.watch = self.index.watch, Watch() if scope else self.index.watch
            doomed = self._take_out(found, tier)
            self.index.watch = watch
            if scope:
                watch.cleared(scope)
        self._delete_all(doomed)
        return count

    def expire(self, entries: Sequence[Entry]) -> None:
        """Forget chunks past their time; what lower tiers hold of them is deleted in the background."""
        with self.lock:
            self.stats.add("expired_chunks", len(entries))
            doomed = self._take_out(entries, None)
        self.chores.submit(self._delete_all, doomed)

    def _take_out(self, entries: Iterable[Entry], tier: int | None) -> dict[int, list[ChunkKey]]:
        """Remove chunks from the index and host memory; returns the keys to delete by lower tier."""
        doomed: dict[int, list[ChunkKey]] = {}
        for entry in entries:
            for t, mask in enumerate(entry.masks):
                if mask and tier in (None, t):
                    doomed.setdefault(t, []).extend(entry.keys(t))
                    self.index.remove(entry, t)
        for key in doomed.pop(0, []):
            self.cpu.pop(key)
        return doomed

    def _delete_all(self, doomed: dict[int, list[ChunkKey]]) -> None:
        for number, keys in doomed.items():
            self.delete(self.tiers[number - 1], keys)

    def scan(self, tier: Tier) -> None:
        """Fill the index with what a tier already holds; then settle and enforce its budget."""
        tier.gone = set()
        try:
            for batch in tier.backend.scan():
                if self.closing:
                    break
                self._scanned(tier, batch)
        except Exception:
            self.stats.add(f"{tier.name}.scan.failed")
            tier.breaker.note(False)
        with self.lock:
            tier.gone = None
            if not tier.scanned.is_set():
                tier.settle(self.index.used[tier.number])
        self.room.shrink(tier, 0)
        tier.scanned.set()

    def _scanned(self, tier: Tier, batch: list[Found]) -> None:
        with self.lock:
            gone = tier.gone or ()
            for found in (each for each in batch if each.key not in gone and not tier.refuses(each.key)):
                self.index.add(found.key, tier.number, found.nbytes, created=max(1, int(found.created)))
        self.stats.add("scanned_objects", len(batch))

    # Life cycle.

    def flush(self, timeout: float | None) -> bool:
        """Wait until what is queued is written or given up; False when ``timeout`` seconds were not enough."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(
            writer.total.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for writer in self.writers
        )

    def usage(self) -> dict[str, Any]:
        """Per tier: bytes and chunks parts held, budget, measured speed."""
        host = {
            "bytes": self.cpu.usage().used,
            "objects": self.index.objects[0],
            "budget": self.arena.capacity,
            "leased_bytes": self.leases.held,
            "leases": len(self.leases),
            "reservations": len(self._reservations),
        }
        return {"cpu": host} | {
            tier.name: {
                "bytes": self.index.used[tier.number],
                "objects": self.index.objects[tier.number],
                "budget": tier.budget,
                "queued_bytes": writer.queued,
                "gb_per_s": tier.speeds(),
            }
            for tier, writer in zip(self.tiers, self.writers, strict=True)
        }

    def health(self) -> dict[str, Any]:
        """Per tier: ok, detail."""
        own = self.cpu.health()
        found: dict[str, Any] = {"cpu": {"ok": own.ok, "detail": own.detail}}
        return found | {tier.name: tier.health() for tier in self.tiers}

    def close(self, timeout: float) -> bool:
        """Stop within ``timeout`` seconds; False when a backend call is stuck (its memory is then left mapped)."""
        if self.closed or self.forked:
            self.closed = True
            return True
        self.closing = True
        deadline = time.monotonic() + timeout
        ended = [self.calls.close(deadline - 0.5 * timeout)]
        ended += [writer.close(deadline - 0.2 * timeout) for writer in self.writers]
        self.closed = True
        ended += [tier.readers.close(deadline) for tier in self.tiers]
        clean = self.chores.close(deadline) and all(ended) and not self.loader.in_flight
        for tier in self.tiers:
            tier.backend.close()
        if clean:
            self.cpu.close()
        return clean


def _slab_bytes(budget: int, sizes: Sequence[int], target: int) -> int:
    """Bytes of a slab: small enough that every container size gets slabs of its own."""
    classes, largest = len(set(sizes)), max(sizes)
    if budget < classes * largest:
        needed = classes * largest
        raise ConfigError("cpu.budget", f"{budget} bytes cannot hold one chunk; needs at least {needed}")
    slab = slab_bytes(largest, min(target, budget // (4 * classes)))
    return slab if slab * classes <= budget else budget // classes // PAGE * PAGE


def _after_fork() -> None:
    for storage in _STORAGES:
        storage.forked = True


def _at_exit() -> None:
    """A thread inside a native call must not meet the end of the interpreter."""
    for storage in list(_STORAGES):
        storage.close(storage.config.close_timeout)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
