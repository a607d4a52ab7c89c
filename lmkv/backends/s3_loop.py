"""An event loop on a thread of its own, for callers that block: many small tasks, one deadline, and an end in time."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

Do = Callable[[Any], Coroutine[Any, Any, Any]]
GRACE = 0.25  # seconds for what was given up to end
_used_in = 0  # the process in which obstore has threads, which do not live on in its forked children


def usable() -> bool:
    """Whether obstore can work in this process: not when it was used before the process was forked."""
    return _used_in in (0, os.getpid())


class Loop:
    """Runs from the start until `close`; the last thing it does is cancel what is left."""

    def __init__(self, name: str) -> None:
        self._pid, self._loop, self._stop = os.getpid(), asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a transfer that ends while the interpreter does would crash it

    @property
    def forked(self) -> bool:
        """This is a child of the process whose thread it was."""
        return self._pid != os.getpid()

    def each(self, do: Do, items: Sequence[Any], timeout: float, turns: asyncio.Semaphore) -> list[Any]:
        """What ``do`` gives for each item, or the exception it raised; TimeoutError for what did not end in time.

        Items begin in order, as many at once as ``turns`` allows. What has to be cancelled has `GRACE` to end.
        """
        global _used_in  # noqa: PLW0603
        _used_in = self._pid
        working = self._all(do, items, timeout, turns)
        try:
            future = asyncio.run_coroutine_threadsafe(working, self._loop)
        except RuntimeError:  # closed
            working.close()
            return [TimeoutError()] * len(items)
        try:
            return future.result(timeout + 4 * GRACE)
        except (FutureTimeout, CancelledError):
            future.cancel()
            return [TimeoutError()] * len(items)

    async def _all(self, do: Do, items: Sequence[Any], timeout: float, turns: asyncio.Semaphore) -> list[Any]:
        async def one(item: Any) -> Any:
            async with turns:
                return await do(item)

        tasks = [asyncio.ensure_future(one(item)) for item in items]
        try:
            _, late = await asyncio.wait(tasks, timeout=timeout)
        except asyncio.CancelledError:
            late = set(tasks)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=2 * GRACE)
        return [_end(task) for task in tasks]

    def close(self) -> None:
        """Cancel what runs, and end the thread. In a forked child there is nothing to end."""
        if self.forked:
            return
        atexit.unregister(self.close)
        with suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not threading.current_thread():
            self._thread.join(8 * GRACE)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        await self._stop.wait()
        if running := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=4 * GRACE)


def settle(future: asyncio.Future[None]) -> None:
    """From any thread: the future is done."""
    with suppress(RuntimeError):  # the loop was closed
        future.get_loop().call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _end(task: asyncio.Task[Any]) -> Any:
    if not task.done() or task.cancelled():
        return TimeoutError()
    return task.exception() or task.result()
