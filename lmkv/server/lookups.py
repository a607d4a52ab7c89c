"""Lookups that an engine's scheduler sends and reads itself, between other things: no thread, no waiting.

An engine core spins its Python loop while it waits for an answer, so a thread of its process would get the interpreter
late. Here the asking thread writes to a connection of its own that never blocks, and whoever looks whether an answer
has come reads what has arrived. The service answers in the order of asking.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lmkv.errors import BadInput, Unavailable
from lmkv.server import protocol as wire
from lmkv.server.link import Channel

PIECE = 1 << 16


class Asked:
    """A question on its way. `done` reads what has arrived; `result` and `exception` may wait."""

    def __init__(self, asker: Asker, read: Callable[[Any], Any]) -> None:
        self._asker, self._read = asker, read
        self._answer: Any = None
        self._error: Exception | None = None
        self._settled = False
        self.since = time.monotonic()

    def done(self) -> bool:
        """The answer, or a failure, is there. Never waits."""
        if not self._settled:
            self._asker.poll()
        return self._settled

    def exception(self, timeout: float = 0.0) -> Exception | None:
        """What went wrong (Unavailable), None for nothing; TimeoutError after ``timeout`` seconds without either."""
        if not self.done():
            self._asker.wait(self, timeout)
        if not self._settled:
            raise TimeoutError("no answer yet")
        return self._error

    def result(self, timeout: float = 0.0) -> Any:
        """The answer; raises what went wrong, or TimeoutError."""
        if error := self.exception(timeout):
            raise error
        return self._answer

    def settle(self, reply: wire.Message | None, error: Exception | None = None) -> None:
        """Take the reply or the failure."""
        with suppress(Exception):
            self._answer = None if reply is None else self._read(reply)
        unread = self._answer is None and error is None and reply is not None
        self._error = Unavailable("an answer of another kind") if unread else error
        self._settled = True


class Asker:
    """One connection for questions. lost: called with the failure that ended it. Thread-safe."""

    def __init__(self, patience: float, lost: Callable[[OSError], Unavailable]) -> None:
        self.patience, self._lost = patience, lost
        self._channel: Channel | None = None
        self._out, self._in = bytearray(), bytearray()
        self._waiting: deque[Asked] = deque()
        self._lock = threading.Lock()

    def attach(self, channel: Channel) -> None:
        """Ask over this greeted connection from now on."""
        channel.sock.setblocking(False)
        with self._lock:
            self._fail(ConnectionError("another host service has taken over"))
            self._channel = channel

    def ask(self, message: wire.Message, read: Callable[[Any], Any]) -> Asked:
        """Send a question; ``read`` makes the answer of the reply. Failures are in what is returned."""
        asked = Asked(self, read)
        with self._lock:
            if self._channel is None:
                asked.settle(None, Unavailable("not connected"))
                return asked
            try:
                self._out += wire.frame(message)
            except BadInput as error:
                asked.settle(None, Unavailable(str(error)))
                return asked
            self._waiting.append(asked)
        self.poll()
        return asked

    def poll(self) -> None:
        """Send and read what can be without waiting."""
        error: OSError | None = None
        with self._lock:
            if self._channel is None:
                return
            try:
                self._push(self._channel)
                self._pull(self._channel)
                if self._waiting and time.monotonic() - self._waiting[0].since > self.patience:
                    raise TimeoutError("timed out")
            except OSError as caught:
                error = caught
                self._fail(error)
        if error is not None:
            self._lost(error)

    def wait(self, asked: Asked, timeout: float) -> None:
        """Poll until ``asked`` is settled, at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not asked.done() and (left := deadline - time.monotonic()) > 0:
            channel = self._channel
            if channel is not None:
                events = select.POLLIN | (select.POLLOUT if self._out else 0)
                poller = select.poll()
                with suppress(OSError, ValueError):  # closed meanwhile
                    poller.register(channel.sock, events)
                    poller.poll(1000 * min(left, self.patience))

    def _push(self, channel: Channel) -> None:
        with suppress(BlockingIOError):
            while self._out:
                del self._out[: channel.sock.send(self._out)]

    def _pull(self, channel: Channel) -> None:
        with suppress(BlockingIOError):
            while True:
                piece = channel.sock.recv(PIECE)
                if not piece:
                    raise ConnectionError("the other side is gone")
                self._in += piece
        while (reply := channel.unframe(self._in)) is not None:
            if not self._waiting:
                raise ConnectionError("an answer to nothing")
            self._waiting.popleft().settle(reply)

    def _fail(self, error: OSError) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._out.clear()
        self._in.clear()
        why = "the host service does not answer" if isinstance(error, TimeoutError) else f"host service: {error}"
        while self._waiting:
            self._waiting.popleft().settle(None, Unavailable(why))

    def close(self) -> None:
        """End the connection; what is still asked fails."""
        with self._lock:
            self._fail(ConnectionError("closed"))
