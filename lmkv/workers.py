"""Daemon worker threads behind one queue.

Unlike concurrent.futures' pools these never keep the interpreter from exiting: a worker stuck in a hung backend is
left behind. Results are ordinary ``concurrent.futures.Future`` objects.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """``count`` daemon threads that run submitted calls in order of submission; ``begin`` runs first on each."""

    def __init__(self, name: str, count: int, begin: Callable[[], object] | None = None) -> None:
        self._begin = begin
        self._queue: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"lmkv-{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Run ``call(*args)`` on a worker; the future carries its result or exception."""
        future: Future[T] = Future()
        self._queue.put((future, call, args))
        return future

    def _run(self) -> None:
        if self._begin:
            self._begin()
        while (job := self._queue.get()) is not None:
            future, call, args = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)
            del job, future, call, args

    def close(self, deadline: float) -> bool:
        """Stop after the queued calls; wait until ``deadline`` (time.monotonic). False: a worker is stuck."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
