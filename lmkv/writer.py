"""Write-through: what is committed in host memory goes to the lower tiers in the background.

One bounded queue a tier. A queued chunk holds its slot, so the queue may hold at most a quarter of the arena; as the
predicted delay nears the tier's ``max_write_delay`` a growing share of each store is left out, from its end, since a
suffix without its prefix is useless. What is left out is counted and reported by ``flush``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmkv import chunk, codec
from lmkv.arena import Slot
from lmkv.backends.base import Write
from lmkv.index import Entry, part_bit
from lmkv.keys import ChunkKey
from lmkv.tier import Tier

if TYPE_CHECKING:
    from lmkv.storage import StorageManager

BATCH_BYTES = 8 << 20
BATCH_ITEMS = 32


class Tally:
    """How the writes of one store (or of all, for flush) end: per tier, outcome -> chunks."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.pending = 0
        self.changed = threading.Condition()

    def expect(self, count: int) -> None:
        """``count`` more writes were queued."""
        with self.changed:
            self.pending += count

    def note(self, tier: str, outcome: str, count: int = 1, queued: bool = True) -> None:
        """``count`` writes ended; ``queued`` tells whether they were expected."""
        with self.changed:
            self.outcomes.setdefault(tier, Counter())[outcome] += count
            self.pending -= count if queued else 0
            self.changed.notify_all()

    def take(self) -> dict[str, Counter[str]]:
        """The outcomes since the last take."""
        with self.changed:
            taken, self.outcomes = self.outcomes, {}
            return taken

    def wait(self, timeout: float | None) -> bool:
        """True once nothing is pending."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.pending, timeout)


@dataclass(eq=False)
class Job:
    """One container to write; ``slot`` is held by the job."""

    entry: Entry
    key: ChunkKey
    slot: Slot
    nbytes: int
    tallies: list[Tally] = field(default_factory=list)

    def note(self, tier: str, outcome: str, queued: bool = True) -> None:
        """Tell every store that waits for this write how it ended."""
        for tally in self.tallies:
            tally.note(tier, outcome, queued=queued)


class Writer:
    """The queue and the writing threads of one tier."""

    def __init__(self, tier: Tier, storage: StorageManager) -> None:
        self.tier, self.storage = tier, storage
        self.limit = storage.arena.capacity // 4
        self.queued = 0
        self.total = Tally()
        self._debt = 0.0
        self._jobs: deque[Job] = deque()
        self._queued: dict[ChunkKey, Job] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"lmkv-{tier.name}-write-{i}", daemon=True)
            for i in range(tier.config.writers)
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, jobs: list[Job]) -> int:
        """Queue the jobs of one store in prefix order; returns how many are queued now.

        A key that is queued already is not written twice: its job tells both stores. What is left out is released
        and counted.
        """
        with self._wake:
            new = [job for job in jobs if not self._joined(job)]
            keep = [] if self._closing else self._admit(new)
            for job in keep:
                self._queued[job.key] = job
                self.queued += job.nbytes
                for tally in job.tallies:
                    tally.expect(1)
                job.tallies.append(self.total)
            self.total.expect(len(keep))
            self._jobs.extend(keep)
            self._wake.notify(len(keep))
            for job in new[len(keep) :]:
                self.storage.arena.release(job.slot)
                job.tallies.append(self.total)
                job.note(self.tier.name, "dropped", queued=False)
                self.storage.stats.add(f"{self.tier.name}.write.dropped")
        return len(jobs) - len(new) + len(keep)

    def _joined(self, job: Job) -> bool:
        """Let the job that is queued for the same key stand for this one too."""
        before = self._queued.get(job.key)
        if before is None or before.entry is not job.entry:
            return False
        for tally in job.tallies:
            tally.expect(1)
        before.tallies += job.tallies
        self.storage.arena.release(job.slot)
        return True

    def _admit(self, jobs: list[Job]) -> list[Job]:
        size = self.queued
        for fits, job in enumerate(jobs):
            size += job.nbytes
            if size > self.limit:
                jobs = jobs[:fits]
                break
        delay = self.tier.seconds_to_write(size) / self.tier.config.max_write_delay
        self._debt += max(0.0, min(1.0, 2 * delay - 1)) * len(jobs)
        drop = min(len(jobs), int(self._debt))
        self._debt -= drop
        return jobs[: len(jobs) - drop]

    def _run(self) -> None:
        while batch := self._take():
            try:
                outcomes = self._write(batch)
            except Exception as error:
                outcomes = [f"failed ({type(error).__name__})"] * len(batch)
            with self._wake:
                for job, outcome in zip(batch, outcomes, strict=True):
                    self._finish(job, outcome)
            del batch, job

    def _finish(self, job: Job, outcome: str) -> None:
        self.queued -= job.nbytes
        if self._queued.get(job.key) is job:
            del self._queued[job.key]
        self.storage.arena.release(job.slot)
        self.storage.stats.add(f"{self.tier.name}.write.{outcome}")
        job.note(self.tier.name, outcome)

    def _take(self) -> list[Job]:
        """The next batch, in order; empty when closing and nothing is left."""
        with self._wake:
            self._wake.wait_for(lambda: self._jobs or self._closing)
            batch: list[Job] = []
            size = 0
            while self._jobs and len(batch) < BATCH_ITEMS and (not batch or size < BATCH_BYTES):
                batch.append(self._jobs.popleft())
                size += batch[-1].nbytes
            return batch

    def _write(self, batch: list[Job]) -> list[str]:
        """Encode, make room, write, publish. One outcome a job."""
        outcomes = ["failed (breaker)"] * len(batch)
        if not self.tier.breaker.allows():
            return outcomes
        staged: list[Slot] = []
        writes: list[tuple[int, Write, int]] = []
        try:
            for i, job in enumerate(batch):
                if not job.entry.alive:
                    outcomes[i] = "cleared"
                    continue
                try:
                    header = chunk.parse(job.slot.view(job.nbytes))
                    if not self.tier.takes(header):
                        outcomes[i] = "lossy"
                        continue
                    data, header = self._body(job, header, staged)
                except Exception as error:
                    outcomes[i] = f"failed ({type(error).__name__})"
                    continue
                if self.storage.room.promise(self.tier, len(data)):
                    writes.append((i, Write(job.key, data), header.expires))
                else:
                    outcomes[i] = "dropped"
            results = self.tier.write([write for _, write, _ in writes])
            for (i, write, expires), result in zip(writes, results, strict=True):
                outcomes[i] = self.storage.written(self.tier, batch[i], len(write.data), expires, result)
        finally:
            for slot in staged:
                self.storage.arena.release(slot)
        return outcomes

    def _body(self, job: Job, header: chunk.Header, staged: list[Slot]) -> tuple[memoryview, chunk.Header]:
        """The bytes to write: encoded into a staging slot, or the sealed slot itself when that is not smaller."""
        view = job.slot.view(job.nbytes)
        meanings = self.storage.meanings
        if self.tier.codec.name != "raw" and meanings and (slot := self.storage.arena.alloc(job.nbytes)):
            staged.append(slot)
            out = slot.view(job.nbytes)
            try:
                encoded = codec.encode_container(view, header, self.tier.codec, out, meanings.shape_of)
            except Exception:  # a codec's fault, or a plug-in's: the chunk itself is good
                self.storage.stats.add(f"{self.tier.name}.encode.failed")
                encoded = None
            if encoded is None:
                self.storage.stats.add(f"{self.tier.name}.encode.raw")
            else:
                return out[: encoded.total_bytes], chunk.seal(out, encoded)
        return view, chunk.seal(view, header)

    def settled(self, entry: Entry, key: ChunkKey) -> bool:
        """The tier holds this part, or cannot take it as it is in host memory."""
        bit = part_bit(key.group, key.shard)
        return bool((entry.masks[self.tier.number] | (0 if self.tier.takes_any else entry.lossy)) & bit)

    def wants(self, entry: Entry, key: ChunkKey) -> bool:
        """Whether the tier's admission takes this part now."""
        if self.settled(entry, key):
            return False
        admission = self.tier.config.admission
        return admission == "all" or (admission == "second_touch" and entry.hits > 1)

    def close(self, deadline: float) -> bool:
        """Write what is queued until ``deadline`` (time.monotonic), drop the rest; False: a write is stuck."""
        self.total.wait(max(0.0, deadline - time.monotonic()))
        with self._wake:
            self._closing = True
            left, self._jobs = list(self._jobs), deque()
            for job in left:
                self._finish(job, "dropped")
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(max(0.05, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
