"""What one process knows of a remote store that it shares with others: which objects exist, and how much they are.

`Existence` answers repeated lookups without a round trip, for a while. `Accounts` keeps `Backend.usage`: exact for what
this process wrote and deleted, set right about everything else at the end of each complete listing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from lmkv.keys import ChunkKey

_NOTHING = (0, float("-inf"), float("-inf"))


class Existence:
    """The last word on each object: its size, or 0 that there is none.

    positive, negative: seconds that a size, or a 0, is believed. What this process did itself beats an answer to a
    question that was asked before. Holds ``capacity`` keys; the oldest word goes first.
    """

    def __init__(
        self, positive: float, negative: float, capacity: int = 1 << 16, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._positive, self._negative, self._capacity, self.clock = positive, negative, capacity, clock
        self._words: dict[ChunkKey, tuple[int, float, float]] = {}  # size, until when, our own last doing
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> int | None:
        """Bytes, 0 for an object that is missing, None when there is no word fresh enough."""
        size, until, _ = self._words.get(key, _NOTHING)
        return size if self.clock() < until else None

    def heard(self, key: ChunkKey, size: int, asked: float) -> None:
        """The store's answer to a question that was sent at ``asked`` (of `clock`)."""
        with self._lock:
            own = self._words.get(key, _NOTHING)[2]
            if own < asked:
                self._set(key, size, asked + (self._positive if size else self._negative), own)

    def did(self, key: ChunkKey, size: int) -> None:
        """This process wrote the object, or with 0 deleted it."""
        with self._lock:
            now = self.clock()
            self._set(key, size, now + (self._positive if size else self._negative), now)

    def doubt(self, key: ChunkKey) -> None:
        """The object may have changed: believe nothing of it, nor answers that are under way."""
        with self._lock:
            self._set(key, *_NOTHING[:2], self.clock())

    def _set(self, key: ChunkKey, size: int, until: float, own: float) -> None:
        self._words.pop(key, None)
        self._words[key] = (size, until, own)
        if len(self._words) > self._capacity:
            del self._words[next(iter(self._words))]


class Accounts:
    """Bytes and objects of a store, by name. Names are listed in ascending order, as S3 does."""

    def __init__(self) -> None:
        self.used = self.objects = 0
        self._listings: list[Listing] = []
        self._lock = threading.Lock()

    def changed(self, name: str, was: int, now: int) -> None:
        """This process changed an object's size; 0 stands for none."""
        with self._lock:
            # What was there before the first listing was never counted, so its deletion can lead below zero.
            self.used = max(0, self.used + now - was)
            self.objects = max(0, self.objects + bool(now) - bool(was))
            for listing in self._listings:
                listing._changed(name, was, now)

    def listing(self) -> Listing:
        """Begin to list. Nothing comes of it unless `Listing.finish` is called."""
        with self._lock:
            self._listings.append(Listing(self, self._lock))
            return self._listings[-1]

    def _end(self, listing: Listing) -> None:
        if listing in self._listings:
            self._listings.remove(listing)


class Listing:
    """A count in progress, kept right about what this process does meanwhile, before and behind its place."""

    def __init__(self, accounts: Accounts, lock: threading.Lock) -> None:
        self._accounts, self._lock = accounts, lock
        self._place, self._used, self._objects = "", 0, 0
        self._ahead: dict[str, int] = {}  # sizes of what changed before the listing came there

    def add(self, page: Iterable[tuple[str, int]]) -> None:
        """Names and sizes, in order, each name above those of the pages before."""
        with self._lock:
            for name, size in page:
                self._place = name
                if name not in self._ahead:
                    self._used, self._objects = self._used + size, self._objects + 1

    def finish(self) -> None:
        """Everything was listed: from here on the accounts go on from its sum."""
        with self._lock:
            self._accounts.used = self._used + sum(self._ahead.values())
            self._accounts.objects = self._objects + sum(map(bool, self._ahead.values()))
            self._accounts._end(self)

    def drop(self) -> None:
        """Given up, or finished before."""
        with self._lock:
            self._accounts._end(self)

    def _changed(self, name: str, was: int, now: int) -> None:
        if name > self._place or name in self._ahead:
            self._ahead[name] = now
        else:
            self._used, self._objects = self._used + now - was, self._objects + bool(now) - bool(was)
