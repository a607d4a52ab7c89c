"""Making room: eviction from host memory and from budgeted tiers, leaves of the prefix tree first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lmkv.arena import Slot
from lmkv.index import Entry
from lmkv.keys import ChunkKey
from lmkv.tier import Tier

if TYPE_CHECKING:
    from lmkv.storage import StorageManager

AHEAD = 8


class Room:
    """The evictor of a storage; everything here runs under the storage lock, deletions in tiers outside it."""

    def __init__(self, storage: StorageManager) -> None:
        self.storage = storage
        self.expiring: list[Callable[[], None]] = [storage.leases.expire]  # called before anything is evicted

    def alloc(self, nbytes: int) -> Slot | None:
        """A slot, evicting from host memory as needed; None when everything left is in use."""
        storage = self.storage
        with storage.lock:
            slot = storage.arena.alloc(nbytes)
            if slot is None:
                for expire in self.expiring:
                    expire()
                for entry in storage.index.victims(0, self._busy):
                    if self._must_write_first(entry):
                        continue
                    for key in entry.keys(0):
                        storage.cpu.pop(key)
                    storage.index.remove(entry, 0)
                    storage.stats.add("evicted_chunks")
                    if slot := storage.arena.alloc(nbytes):
                        break
            return slot

    def _busy(self, entry: Entry) -> bool:
        return any(self.storage.cpu.busy(key) for key in entry.keys(0))

    def _must_write_first(self, entry: Entry) -> bool:
        """Queue a victim for the tiers that take chunks on eviction; it can leave once they have it."""
        waiting = False
        for writer in self.storage.writers:
            if writer.tier.config.admission != "on_eviction" or writer.tier.breaker.open:
                continue
            for key in entry.keys(0):
                if not writer.settled(entry, key) and (job := self.storage.job(entry, key)):
                    waiting = bool(writer.offer([job])) or waiting
        return waiting

    def evict_ahead(self) -> None:
        """With less than an eighth of host memory free, start writing the next victims of on-eviction tiers."""
        storage = self.storage
        if all(tier.config.admission != "on_eviction" for tier in storage.tiers):
            return
        with storage.lock:
            if storage.arena.capacity - storage.arena.used < storage.arena.capacity // 8:
                for _, entry in zip(range(AHEAD), storage.index.victims(0, self._busy), strict=False):
                    self._must_write_first(entry)

    def promise(self, tier: Tier, nbytes: int) -> bool:
        """Promise ``nbytes`` of a tier's budget to a write, evicting first. False: nothing more can leave."""
        tier.scanned.wait()
        if tier.rescan_due():
            self.storage.chores.submit(self.storage.scan, tier)
        with self.storage.lock:
            victims = self._take(tier, self._over(tier, nbytes))
            fits = tier.evicts_elsewhere or self._over(tier, nbytes) <= 0
            tier.pending += nbytes if fits else 0
        self.storage.delete(tier, victims)
        return fits

    def shrink(self, tier: Tier, nbytes: int) -> None:
        """Bring a tier under its budget, or, when its medium is fuller than that, down by ``nbytes``."""
        with self.storage.lock:
            victims = self._take(tier, max(nbytes, self._over(tier, 0)))
        self.storage.delete(tier, victims)

    def _over(self, tier: Tier, nbytes: int) -> int:
        """Bytes above the budget if ``nbytes`` more were written."""
        return -1 if tier.budget is None else self.storage.index.used[tier.number] + tier.pending + nbytes - tier.budget

    def _take(self, tier: Tier, nbytes: int) -> list[ChunkKey]:
        """Take leaves worth ``nbytes`` out of the index; returns the keys to delete."""
        keys: list[ChunkKey] = []
        if nbytes > 0 and not tier.evicts_elsewhere:
            for expire in self.expiring:
                expire()
            for entry in self.storage.index.victims(tier.number, lambda _: False):
                keys += entry.keys(tier.number)
                nbytes -= self.storage.index.remove(entry, tier.number)
                self.storage.stats.add(f"{tier.name}.evicted_chunks")
                if nbytes <= 0:
                    break
        return keys
