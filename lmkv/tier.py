"""One storage tier below host memory: its backend, its budget, its breaker and its measured speed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lmkv import backends
from lmkv.backends.base import SHORT, Backend, Read, Result, Status, Write
from lmkv.chunk import Header
from lmkv.codec import classes
from lmkv.codec.shape import Meanings
from lmkv.config import Config, TierConfig
from lmkv.errors import ConfigError, LmkvError
from lmkv.index import MAX_TIERS
from lmkv.keys import ChunkKey
from lmkv.workers import Workers

FAILURES_TO_OPEN = 5
COOL_DOWN = 5.0
RESCAN = 60.0
LATE = 0.5  # seconds of a lookup that found nothing
REFUSED = 1 << 16  # keys remembered
BROKEN = {Status.TIMEOUT, Status.ERROR}


class Breaker:
    """Stops asking a tier that keeps failing: open after five failures in a row, one probe every five seconds."""

    def __init__(self) -> None:
        self._failures = 0
        self._retry_at = 0.0
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """The tier is being left alone."""
        return self._failures >= FAILURES_TO_OPEN

    def allows(self) -> bool:
        """Whether to try now; while open, true once per cool-down."""
        with self._lock:
            if not self.open:
                return True
            if time.monotonic() < self._retry_at:
                return False
            self._retry_at = time.monotonic() + COOL_DOWN
            return True

    def note(self, ok: bool) -> None:
        """Record how a try ended."""
        with self._lock:
            self._failures = 0 if ok else self._failures + 1
            if self._failures == FAILURES_TO_OPEN:
                self._retry_at = time.monotonic() + COOL_DOWN


class Tier:
    """Number 0 is host memory and has no Tier; the first Tier is number 1, the fastest asked first.

    meanings: what is known of the payload, for the codec; None where containers are kept as they come, whatever their
    codec. ConfigError: it is not enough for the codec that is set.
    """

    def __init__(self, number: int, name: str, config: TierConfig, meanings: Meanings | None) -> None:
        self.number, self.name, self.config = number, name, config
        self.url_scheme = config.url.partition(":")[0]
        self.codec, self._limit = classes.choose(config, meanings, f"tiers.{number - 1}")
        if meanings is None:
            self._limit = math.inf
        self._refused: dict[ChunkKey, tuple[float, str]] = {}
        self.backend: Backend = backends.open(config.url)
        self._free = self.backend.usage().free
        self.budget: int | None = None
        self.settle(0)
        self.pending = 0  # bytes promised to writes in flight
        self.breaker = Breaker()
        self.readers = Workers(f"{name}-read", config.readers)
        self.scanned = threading.Event()
        self.gone: set[ChunkKey] | None = None  # deleted while a scan is under way
        if self.backend.remote:
            self.scanned.set()  # it is asked, never listed
        self._rescan_at = time.monotonic() + RESCAN
        self._ask_at = 0.0
        self._write_speed = self._read_speed = 0.0

    def settle(self, used: int) -> None:
        """Fix the budget in bytes: a fraction is of the space free at start plus what the tier itself ``used`` then."""
        budget = self.config.budget
        if budget is not None and (budget.nbytes or self._free is not None):
            self.budget = budget.resolve((self._free or 0) + used)

    def check(self, meanings: Meanings) -> None:
        """ConfigError: the codec that is set by name has no use for any of that payload, or the profile is of another
        model."""
        classes.choose(self.config, meanings, f"tiers.{self.number - 1}")

    def check_budget(self, largest: int) -> None:
        """ConfigError: it cannot hold one container of ``largest`` bytes."""
        if self.budget is not None and self.budget < largest:
            key = f"tiers.{self.number - 1}.budget"
            raise ConfigError(key, f"{self.budget} bytes cannot hold one chunk; needs at least {largest}")

    @property
    def takes_any(self) -> bool:
        """Containers of any error are good here."""
        return self._limit == math.inf

    def takes(self, header: Header) -> bool:
        """A container is as exact as this tier's codec promises."""
        return not header.lossy or self.takes_any or classes.error(header) < self._limit

    def refuse(self, key: ChunkKey, reason: str) -> None:
        """Remember that the container there is for others (lossy, codec, profile), so that it is not found again at
        once."""
        if len(self._refused) >= REFUSED:
            self._refused.clear()
        self._refused[key] = time.monotonic() + RESCAN, reason

    def replaced(self, key: ChunkKey) -> None:
        """Another container is there now."""
        self._refused.pop(key, None)

    def refuses(self, key: ChunkKey) -> str:
        """Why what this tier had under ``key`` less than a minute ago was of no use here, '' otherwise."""
        until, reason = self._refused.get(key, (0.0, "")) if self._refused else (0.0, "")
        return reason if until > time.monotonic() else ""

    @property
    def evicts_elsewhere(self) -> bool:
        """Another process owns the backend and evicts; this one only reads and writes."""
        return self.backend.shared

    def rescan_due(self) -> bool:
        """Once a minute for a shared backend: a scan is also the try to become the one who evicts."""
        if not self.backend.shared or self.backend.remote or time.monotonic() < self._rescan_at:
            return False
        self._rescan_at = time.monotonic() + RESCAN
        return True

    @property
    def probing(self) -> bool:
        """The index may not know everything the backend holds, and asking is not known to be in vain."""
        return (self.backend.shared or not self.scanned.is_set()) and time.monotonic() >= self._ask_at

    def contains(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        """The backend's answers, or its exception. A hung one is left alone for a while: lookups come one by one, and
        each would wait as long."""
        started = time.monotonic()
        sizes = self.backend.contains(keys)
        if time.monotonic() - started > LATE and not any(sizes):
            self._ask_at = time.monotonic() + COOL_DOWN
        return sizes

    def read(self, reads: Sequence[Read]) -> list[Result]:
        """The backend's read, never raising, timed, and told to the breaker."""
        return self._call(self.backend.read, reads, "_read_speed")

    def write(self, writes: Sequence[Write]) -> list[Result]:
        """The backend's write, likewise."""
        return self._call(self.backend.write, writes, "_write_speed")

    def _call(self, call: Callable[[Sequence[Any]], list[Result]], items: Sequence[Any], speed: str) -> list[Result]:
        started = time.monotonic()
        try:
            results = call(items) if items else []
            if len(results) != len(items):
                raise ValueError(f"{len(results)} results for {len(items)} items")
        except Exception as error:
            results = [Result(Status.ERROR, detail=repr(error))] * len(items)
        for result in results:
            self.breaker.note(result.status not in BROKEN or result.detail == SHORT)
        if done := sum(each.nbytes for each in results if each.status is Status.OK):
            now, before = (time.monotonic() - started) / done, getattr(self, speed)
            setattr(self, speed, 0.8 * before + 0.2 * now if before else now)
        return results

    def seconds_to_write(self, nbytes: int) -> float:
        """Predicted seconds to write ``nbytes``, 0 before anything was measured."""
        return nbytes * self._write_speed / self.config.writers

    def speeds(self) -> dict[str, float]:
        """Measured GB/s of one reader and one writer."""
        return {
            name: round(1e-9 / each, 3)
            for name, each in (("read", self._read_speed), ("write", self._write_speed))
            if each
        }

    def health(self) -> dict[str, Any]:
        """The backend's own word and the breaker's state."""
        own = self.backend.health()
        return {"ok": own.ok and not self.breaker.open, "detail": own.detail, "breaker_open": self.breaker.open}


def open_tiers(config: Config, largest: int, meanings: Meanings | None) -> list[Tier]:
    """All tiers of a configuration, or none. ConfigError: one cannot be opened, or cannot hold ``largest`` bytes."""
    if len(config.tiers) >= MAX_TIERS:
        raise ConfigError("tiers", f"{len(config.tiers)} tiers; at most {MAX_TIERS - 1}")
    tiers: list[Tier] = []
    for number, each in enumerate(config.tiers, 1):
        scheme = each.url.partition(":")[0]
        same = sum(tier.url_scheme == scheme for tier in tiers)
        try:
            tiers.append(Tier(number, f"{scheme}-{same + 1}" if same else scheme, each, meanings))
            tiers[-1].check_budget(largest)
        except LmkvError:
            for opened in tiers:
                opened.backend.close()
            raise
    return tiers
