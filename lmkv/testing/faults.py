"""A backend that misbehaves on command, to test what stands above it."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lmkv.backends.base import Backend, Found, Health, Read, Result, Status, Usage, Write
from lmkv.errors import BackendError
from lmkv.keys import ChunkKey

_LIMIT = 120.0  # seconds after which a forgotten gate fails its test instead of hanging it
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class Gate:
    """Holds calls up. ``reached`` is set when the first one waits; ``open()`` lets all go on."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()

    def open(self) -> None:
        self._opened.set()

    def wait(self) -> None:
        """TimeoutError after two minutes."""
        self.reached.set()
        if not self._opened.wait(_LIMIT):
            raise TimeoutError("the gate was never opened")


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one call, in this order.

    delay: seconds before anything else. gate: then wait until it is opened. raises: then raise.
    result: answer this for the items (delete: False, contains: None, scan: BackendError) and do
    not pass them on. flip: invert the byte at this offset of what is read or stored. truncate:
    keep this many bytes of what is read or stored; a read says so, a write claims all. ``only``
    limits the last three to the keys for which it is true.
    """

    delay: float = 0.0
    gate: Gate | None = None
    raises: Exception | None = None
    result: Result | None = None
    flip: int | None = None
    truncate: int | None = None
    only: Callable[[ChunkKey], bool] = lambda _: True


class FaultyBackend(Backend):
    """``inner``, with faults.

    ``script(operation, ...)`` gives the next calls of an operation ("read", "write", "contains",
    "delete", "scan", "usage", "health", "close") a fault each, None for none; ``always`` is for the
    calls after those. ``calls`` counts by operation; all of it is thread-safe.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner, self.url, self.alignment = inner, inner.url, inner.alignment
        self.shared = inner.shared
        self.calls: Counter[str] = Counter()
        self._scripts: dict[str, deque[Fault | None]] = {}
        self._always: dict[str, Fault | None] = {}
        self._mutex = threading.Lock()

    def script(self, operation: str, *faults: Fault | None) -> None:
        with self._mutex:
            self._scripts.setdefault(operation, deque()).extend(faults)

    def always(self, operation: str, fault: Fault | None) -> None:
        with self._mutex:
            self._always[operation] = fault

    def contains(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        fault = self._enter("contains")
        return _pass(fault, keys, keys, self.inner.contains, None)

    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        fault = self._enter("delete")
        return _pass(fault, keys, keys, self.inner.delete, False)

    def read(self, reads: Sequence[Read]) -> list[Result]:
        fault, keys = self._enter("read"), [read.key for read in reads]
        results = _pass(fault, keys, reads, self.inner.read, fault.result)
        for i, (key, into) in enumerate(reads):
            if results[i].status is Status.OK and fault.only(key):
                kept = _damage(fault, into[: results[i].nbytes])
                results[i] = Result(Status.OK, kept.nbytes)
        return results

    def write(self, writes: Sequence[Write]) -> list[Result]:
        fault, keys = self._enter("write"), [write.key for write in writes]
        stored = list(writes)
        if fault.flip is not None or fault.truncate is not None:
            for i, (key, data) in enumerate(writes):
                if fault.only(key):
                    stored[i] = Write(key, _damage(fault, memoryview(bytearray(data))))
        results = _pass(fault, keys, stored, self.inner.write, fault.result)
        return [
            Result(Status.OK, write.data.nbytes) if result.status is Status.OK else result
            for write, result in zip(writes, results, strict=True)
        ]

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
            script = self._scripts.get(operation)
            fault = script.popleft() if script else self._always.get(operation)
        fault = fault or Fault()
        time.sleep(fault.delay)
        if fault.gate is not None:
            fault.gate.wait()
        if fault.raises is not None:
            raise fault.raises
        return fault


def _pass(
    fault: Fault,
    keys: Sequence[ChunkKey],
    items: Sequence[_Item],
    call: Callable[[Sequence[_Item]], list[_Answer]],
    refused: _Answer | None,
) -> list[_Answer]:
    """``call`` for the items that the fault leaves alone, ``refused`` for the others, in order."""
    hit = [fault.result is not None and fault.only(key) for key in keys]
    answers = iter(call([item for item, bad in zip(items, hit, strict=True) if not bad]))
    return [refused if bad else next(answers) for bad in hit]  # type: ignore[misc]


def _damage(fault: Fault, data: memoryview) -> memoryview:
    if fault.flip is not None:
        data[fault.flip] ^= 0xFF
    return data[: fault.truncate]
