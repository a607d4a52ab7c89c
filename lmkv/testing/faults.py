"""A backend that misbehaves on command, to test what stands above it."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmkv.backends.base import Backend, Found, Health, Read, Result, Usage, Write
from lmkv.errors import BackendError
from lmkv.keys import ChunkKey


class Gate:
    """Holds calls up. ``reached`` is set when the first one waits; ``open()`` lets all go on."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()
        self.open = self._opened.set

    def wait(self) -> None:
        """TimeoutError after two minutes, so that a forgotten gate fails its test instead of hanging it."""
        self.reached.set()
        if not self._opened.wait(120):
            raise TimeoutError("the gate was never opened")


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one call, in this order. ``only`` limits the last three to the keys for which it is true.

    delay: seconds before anything else. gate: then wait until it is opened. raises: then raise. result: answer this for
    the items (delete: False, contains: None, scan: BackendError) and do not pass them on. flip: invert the byte at this
    offset of what is read or stored. truncate: keep this many bytes of it; a read says so, a write claims all.
    """

    delay: float = 0.0
    gate: Gate | None = None
    raises: Exception | None = None
    result: Result | None = None
    flip: int | None = None
    truncate: int | None = None
    only: Callable[[ChunkKey], bool] = lambda _: True

    def damaged(self, key: ChunkKey, data: memoryview) -> memoryview:
        """``data`` itself, or a damaged copy."""
        if not data.nbytes or (self.flip is None and self.truncate is None) or not self.only(key):
            return data
        copy = memoryview(bytearray(data))
        if self.flip is not None:
            copy[self.flip] ^= 0xFF
        return copy[: self.truncate]


class FaultyBackend(Backend):
    """``inner``, with faults. Thread-safe.

    ``script(operation, ...)`` gives the next calls of "read", "write", "contains", "delete", "scan", "usage", "health"
    or "close" a fault each, None for none; ``always`` is for the calls after those. ``calls`` counts by operation.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner, self.url, self.shared = inner, inner.url, inner.shared
        self.calls: Counter[str] = Counter()
        self._scripts: defaultdict[str, deque[Fault | None]] = defaultdict(deque)
        self._always: dict[str, Fault | None] = {}
        self._mutex = threading.Lock()

    def script(self, operation: str, *faults: Fault | None) -> None:
        self._scripts[operation].extend(faults)

    def always(self, operation: str, fault: Fault | None) -> None:
        self._always[operation] = fault

    def contains(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        return self._pass(self._enter("contains"), self.inner.contains, keys, None)

    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._pass(self._enter("delete"), self.inner.delete, keys, False)

    def read(self, reads: Sequence[Read]) -> list[Result]:
        fault = self._enter("read")
        results = self._pass(fault, self.inner.read, reads, fault.result)
        for i, (key, into) in enumerate(reads):
            left = fault.damaged(key, into[: results[i].nbytes])
            into[: left.nbytes], results[i] = left, results[i]._replace(nbytes=left.nbytes)
        return results

    def write(self, writes: Sequence[Write]) -> list[Result]:
        fault = self._enter("write")
        stored = [Write(key, fault.damaged(key, data)) for key, data in writes]
        results = self._pass(fault, self.inner.write, stored, fault.result)
        return [each._replace(nbytes=each.nbytes and w.data.nbytes) for each, w in zip(results, writes, strict=True)]

    def scan(self) -> Iterator[list[Found]]:
        fault = self._enter("scan")
        if fault.result is not None:
            raise BackendError(fault.result.detail)
        yield from self.inner.scan()
        self.shared = self.inner.shared

    def usage(self) -> Usage:
        self._enter("usage")
        return self.inner.usage()

    def health(self) -> Health:
        fault = self._enter("health")
        return Health(False, fault.result.detail) if fault.result else self.inner.health()

    def close(self) -> None:
        self._enter("close")
        self.inner.close()

    def _enter(self, operation: str) -> Fault:
        with self._mutex:
            self.calls[operation] += 1
            script = self._scripts[operation]
            fault = (script.popleft() if script else self._always.get(operation)) or Fault()
        time.sleep(fault.delay)
        if fault.gate:
            fault.gate.wait()
        if fault.raises:
            raise fault.raises
        return fault

    def _pass(self, fault: Fault, call: Callable[[Any], list[Any]], items: Sequence[Any], refused: Any) -> list[Any]:
        """``call`` for the items that the fault leaves alone, ``refused`` for the others, in order."""
        hit = [fault.result is not None and fault.only(getattr(item, "key", item)) for item in items]
        answers = iter(call([item for item, bad in zip(items, hit, strict=True) if not bad]))
        return [refused if bad else next(answers) for bad in hit]
