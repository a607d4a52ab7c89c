"""The connector's time and its background work, in the test's hands."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lmkv.workers import Workers


class Clock:
    """The connector's time: it moves when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()


class Manual:
    """`lmkv.workers.Workers` whose jobs run when the test says so, in the thread that says it."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.jobs: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []
        self.closed = False

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        assert not self.closed
        future: Future[Any] = Future()
        self.jobs.append((future, call, args))
        return future

    def run(self, at: int = 0) -> None:
        future, call, args = self.jobs.pop(at)
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    def close(self, deadline: float) -> bool:
        while self.jobs and not self.closed:
            self.run()
        self.closed = True
        return True


class Threaded(Workers):
    """The real thing, whose unfinished jobs are known so that an idle engine can wait for one."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name, count)
        self.pending: set[Future[Any]] = set()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future = super().submit(call, *args)
        self.pending.add(future)
        future.add_done_callback(self.pending.discard)
        return future
