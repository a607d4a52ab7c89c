"""Connections to Redis servers, driven together: `exchange` makes the calls of any number of them from one thread.

Everything is written without waiting for replies, and replies are read while requests are still being written, so that
neither side can block the other. Payload goes straight between the caller's memory and the socket.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeAlias

from lmkv.backends.resp import BUFFER, Call, Replies, Reply, ReplyError

IN_FLIGHT = 64 << 20  # bytes of requests and of room for replies that one connection has under way
WAKE = 1 << 20  # bytes of payload that are worth a turn

Address: TypeAlias = tuple[str, int]


class LoginError(ConnectionError):
    """The server refused the password, the user or the database."""


class Connection:
    """One socket to one server, opened by its first `exchange`. A failed one is closed, and never used again.

    tls: None or the context. login: calls made once, before all others; see `LoginError`. used: had a good exchange.
    """

    def __init__(self, address: Address, tls: ssl.SSLContext | None, login: Sequence[Call]) -> None:
        self.address, self.used, self._pid = address, False, os.getpid()
        self._tls, self._login = tls, login
        self._socket: socket.socket | None = None
        self._replies, self._woken_at = Replies(), 1

    def fileno(self) -> int:
        return self._socket.fileno() if self._socket else -1

    @property
    def quiet(self) -> bool:
        """Can be used again: it is this process's, and nothing came after the last reply, neither bytes nor the end."""
        if self.fileno() < 0 or self._pid != os.getpid() or not self._replies.empty:
            return False
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        return not poller.poll(0)

    def close(self) -> None:
        if self._socket:
            self._socket.close()

    def run(self, calls: Sequence[Call], deadline: float) -> Iterator[int]:
        """Make the calls; yields the events to poll for whenever it would have to wait. OSError."""
        if self._socket is None:
            yield from self._open(deadline)
            yield from self._pipeline([*self._login, Call(b"CLIENT", b"SETNAME", b"lmkv")], deadline)
            for call in self._login:
                if isinstance(call.reply, ReplyError):
                    raise LoginError(call.reply)
            self._login = ()
        yield from self._pipeline(calls, deadline)

    def _open(self, deadline: float) -> Iterator[int]:
        places = resolve(*self.address, deadline)
        for last, (family, kind, protocol, _, place) in enumerate(places, 1 - len(places)):
            self._socket = link = socket.socket(family, kind, protocol)
            link.setblocking(False)
            if (code := link.connect_ex(place)) == errno.EINPROGRESS:
                yield select.POLLOUT
                code = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code:
                break
            link.close()
            if last == 0:
                raise OSError(code, os.strerror(code))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls:
            self._socket = secure = self._tls.wrap_socket(
                link, server_hostname=self.address[0], do_handshake_on_connect=False
            )
            while True:
                try:
                    secure.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    yield select.POLLIN
                except ssl.SSLWantWriteError:
                    yield select.POLLOUT

    def _pipeline(self, calls: Sequence[Call], deadline: float) -> Iterator[int]:
        unsent, waiting, flying = deque(calls), deque[Call](), 0
        out: deque[memoryview | bytes] = deque()
        parsing: Generator[memoryview, int, Reply] | None = None
        blocked = False  # the socket takes no more now
        while unsent or waiting:
            while unsent and (not waiting or flying + unsent[0].weight <= IN_FLIGHT):
                waiting.append(unsent.popleft())
                flying += waiting[-1].weight
                out.extend(waiting[-1].parts)
            while out and not blocked:
                blocked = not self._send(out)
            try:
                if parsing is None:
                    parsing = self._replies.reply(waiting[0].into, waiting[0].count)
                    want = next(parsing)
                if (received := self._receive(want)) is None:
                    self._wake_at(len(want))
                    yield select.POLLIN | (select.POLLOUT if out else 0)
                    blocked = False
                    continue
                if time.monotonic() > deadline:  # a peer that never pauses gets no more time either
                    raise TimeoutError("took too long")
                want = parsing.send(received)
            except StopIteration as done:
                call, parsing = waiting.popleft(), None
                call.reply, call.failure = done.value, None
                flying -= call.weight
        self._wake_at(1)

    def _send(self, out: deque[memoryview | bytes]) -> bool:
        """Send some of it; False when the socket takes nothing now."""
        link = self._socket
        try:
            if isinstance(link, ssl.SSLSocket):
                sent = link.send(out[0])
            else:
                sent = link.sendmsg(islice(out, 256)) if link else 0
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return False
        while out and sent >= len(out[0]):
            sent -= len(out.popleft())
        if sent:
            out[0] = memoryview(out[0])[sent:]
        return True

    def _wake_at(self, nbytes: int) -> None:
        """Have polls for input end when so many bytes are there: servers send a large value in many small pieces."""
        nbytes = min(nbytes, WAKE) if nbytes > BUFFER and not self._tls else 1
        if self._socket and nbytes != self._woken_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._woken_at = nbytes

    def _receive(self, into: memoryview) -> int | None:
        """Bytes received, at least 1; None when there are none now."""
        try:
            received = self._socket.recv_into(into) if self._socket else 0
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        if not received:
            raise ConnectionError("closed by the server")
        return received


def exchange(
    work: Sequence[tuple[Connection, Sequence[Call]]], deadline: float, enough: Callable[[], bool] = bool
) -> None:
    """Make all calls until ``deadline`` (time.monotonic); each has a reply or a failure afterwards.

    A connection that failed, or was not done in time (TimeoutError), is closed. enough: asked whenever a connection is
    done; True ends it.
    """
    poller, waiting, unfinished = select.poll(), dict[int, tuple[Connection, Iterator[int]]](), dict(work)
    for call in (call for calls in unfinished.values() for call in calls):
        call.reply, call.failure = None, ConnectionError("not asked")
    ready = [(link, link.run(calls, deadline)) for link, calls in unfinished.items()]
    try:
        while ready:
            for link, steps in ready:
                try:
                    events = next(steps)
                except StopIteration:  # noqa: PERF203
                    link.used = True
                    del unfinished[link]
                    if enough():
                        return
                except OSError as error:
                    _fail(link, unfinished.pop(link), error)
                else:
                    waiting[link.fileno()] = link, steps
                    poller.register(link.fileno(), events)
            left = deadline - time.monotonic()
            answering = poller.poll(math.ceil(left * 1000)) if waiting and left > 0 else []
            ready = [waiting.pop(number) for number, _ in answering]
            for number, _ in answering:
                poller.unregister(number)
    finally:
        for link, calls in unfinished.items():
            _fail(link, calls, TimeoutError("no answer in time"))


def _fail(link: Connection, calls: Sequence[Call], error: OSError) -> None:
    link.close()
    reason = "{}:{}: {}".format(*link.address, error.strerror or error)
    for call in calls:
        if call.failure:
            call.failure = TimeoutError(reason) if isinstance(error, TimeoutError) else ConnectionError(reason)


def resolve(host: str, port: int, deadline: float) -> list[Any]:
    """getaddrinfo that ends by ``deadline``, whatever the name servers do. OSError."""

    def look_up(flags: int) -> list[Any]:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))

    with suppress(socket.gaierror, UnicodeError):
        return look_up(socket.AI_NUMERICHOST)
    answer = list[list[Any] | OSError | UnicodeError]()
    done = threading.Event()

    def ask() -> None:
        try:
            answer.append(look_up(0))
        except (OSError, UnicodeError) as error:
            answer.append(error)
        done.set()

    threading.Thread(target=ask, name="lmkv-resolve", daemon=True).start()
    if not done.wait(max(0.0, deadline - time.monotonic())):
        raise TimeoutError(f"no address of {host!r} in time")
    (found,) = answer
    if not isinstance(found, list):
        raise ConnectionError(f"no address of {host!r}: {found}")
    return found
