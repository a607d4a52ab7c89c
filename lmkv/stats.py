"""Counters: every name exists from the start at 0, so a rate can be drawn before the first event."""

from __future__ import annotations

import threading
from collections import Counter

NAMES = (
    "lookups", "lookup_tokens", "hit_tokens", "retrieves", "retrieved_tokens", "retrieve_failures",
    "stores", "stored_chunks", "skipped_chunks", "dropped_chunks", "stored_bytes", "retrieved_bytes",
    "evicted_chunks", "expired_chunks", "promoted_chunks", "shared_reads", "voided_leases", "voided_reservations",
    "late_commits", "scanned_objects",
)  # fmt: skip


class Stats:
    """Named counters, and counted reasons under dotted names (``miss.checksum``, ``disk.write.full``)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(NAMES, 0))

    def add(self, name: str, count: int = 1) -> None:
        """Raise one counter."""
        with self._lock:
            self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """A copy of every counter."""
        with self._lock:
            return dict(self._counts)
