"""`Stream`: a TCP connection, plain or TLS, that carries messages and containers, with a deadline for every call.

The socket blocks in the kernel, with the kernel's own timeouts: one system call moves a whole container between the
socket and the memory it belongs in. Whatever ends a stream is an OSError: TimeoutError, else ConnectionError.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from lmkv.server import data
from lmkv.server import protocol as wire

T = TypeVar("T")

_TIMEVAL = struct.Struct("@ll")
_SIZE = struct.Struct("<I")
_SHORTEST = 0.001  # zero means for ever
MAX_BUFFERS = min(256, os.sysconf("SC_IOV_MAX"))
TLS_PIECE = 1 << 20
BULK = 1 << 18
SLACK = 0.05
_LATE = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_NOWHERE = memoryview(bytearray(1 << 20))  # what is drained goes here, from all threads at once


class Stream(Generic[T]):
    """One connection. One thread sends and one receives at a time. Deadlines are of time.monotonic.

    kind: the messages it receives. limit: bytes of the largest frame it takes.
    """

    def __init__(self, sock: socket.socket, kind: Any, limit: int = data.MAX_FRAME) -> None:
        sock.settimeout(None)
        self.sock, self.limit = sock, limit
        self.tls = isinstance(sock, ssl.SSLSocket)
        self._flags = 0 if self.tls else socket.MSG_WAITALL
        self._armed: dict[int, float] = {}  # seconds that the kernel waits
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def send(self, message: wire.Message, deadline: float) -> None:
        """One message whole. BadInput, and nothing sent: it is too large."""
        self.send_buffers([wire.frame(message)], deadline)

    def send_buffers(self, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
        """All of these, in order, from where they lie."""
        if self.tls:
            for each in buffers:
                self._send_tls(memoryview(each), deadline)
            return
        at, left = 0, list(buffers)
        while at < len(left):
            self._arm(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self.sock.sendmsg(left[at : at + MAX_BUFFERS])
            except _LATE:
                raise TimeoutError("timed out") from None
            while at < len(left) and sent >= len(left[at]):
                sent -= len(left[at])
                at += 1
            if sent:
                left[at] = memoryview(left[at])[sent:]

    def _send_tls(self, view: memoryview, deadline: float) -> None:
        for at in range(0, len(view), TLS_PIECE):
            self._arm(socket.SO_SNDTIMEO, deadline)
            try:
                self.sock.sendall(view[at : at + TLS_PIECE])
            except _LATE:
                raise TimeoutError("timed out") from None

    def recv(self, deadline: float) -> T:
        """The next message. Memory is taken as bytes arrive."""
        (size,) = _SIZE.unpack(self.recv_bytes(_SIZE.size, deadline))
        if not 0 < size <= self.limit:
            raise ConnectionError(f"a frame of {size} bytes")
        body = self.recv_bytes(size, deadline)
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ConnectionError(f"a bad frame: {error}") from None

    def recv_bytes(self, size: int, deadline: float) -> bytes:
        """Exactly ``size`` bytes, which is a small number or one that was checked."""
        pieces: list[bytes] = []
        while size:
            self._arm(socket.SO_RCVTIMEO, deadline)
            try:
                piece = self.sock.recv(min(size, wire.PIECE), self._flags)
            except _LATE:
                raise TimeoutError("timed out") from None
            if not piece:
                raise ConnectionError("the other side is gone")
            pieces.append(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def recv_into(self, view: memoryview, deadline: float) -> None:
        """Fill ``view``."""
        for _ in self.recv_parts(view, (len(view),), deadline):
            pass

    def recv_parts(self, view: memoryview, ends: Sequence[int], deadline: float) -> Iterator[int]:
        """Fill ``view``, and say when its bytes up to each of ``ends`` are there; the last one is its size."""
        # While more than BULK bytes are still to come, BULK of them may gather before the kernel wakes us.
        at, calm = 0, 0 if self.tls or len(view) < 4 * BULK else len(view) - BULK
        if calm and not self._gather(BULK):
            calm = 0
        for end in ends:
            for stop in (min(end, calm), end):
                while at < stop:
                    at += self._recv_some(view[at:stop], deadline)
                if calm and at == calm:
                    calm = 0
                    self._gather(1)
            yield end

    def _gather(self, nbytes: int) -> bool:
        """Be woken for no less; False: the system knows no such thing."""
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        except OSError:
            return False
        return True

    def _recv_some(self, view: memoryview, deadline: float) -> int:
        self._arm(socket.SO_RCVTIMEO, deadline)
        try:
            got = self.sock.recv_into(view, len(view), self._flags)
        except _LATE:
            raise TimeoutError("timed out") from None
        if not got:
            raise ConnectionError("the other side is gone")
        return got

    def drain(self, size: int, deadline: float) -> None:
        """Receive ``size`` bytes and keep none."""
        while size:
            piece = min(size, len(_NOWHERE))
            self.recv_into(_NOWHERE[:piece], deadline)
            size -= piece

    def wait(self, deadline: float) -> bool:
        """Wait until something comes; False: the other side is gone."""
        if self.tls and self.sock.pending():  # type: ignore[attr-defined]
            return True
        self._arm(socket.SO_RCVTIMEO, deadline)
        try:
            return bool(socket.socket.recv(self.sock, 1, socket.MSG_PEEK))
        except _LATE:
            raise TimeoutError("nothing was asked for a long time") from None

    def usable(self) -> bool:
        """Nothing has come, nor has it ended, while nothing was asked."""
        try:
            return not (self.tls and self.sock.pending()) and not _readable(self.sock)  # type: ignore[attr-defined]
        except (OSError, ValueError):
            return False

    def _arm(self, option: int, deadline: float) -> None:
        """Let the kernel end the next call at the deadline, or up to SLACK later."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        seconds = min(max(left, _SHORTEST), wire.DAY)
        if not seconds <= self._armed.get(option, 0.0) <= seconds + SLACK:
            whole = int(seconds)
            self.sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, int((seconds - whole) * 1e6)))
            self._armed[option] = seconds

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """Wake whoever waits on it, here and on the other side."""
        with suppress(OSError):  # already closed
            socket.socket.shutdown(self.sock, how)

    def close(self) -> None:
        """Close it; another thread that waits on it is told to give up first by `shutdown`."""
        self.sock.close()


def _readable(sock: socket.socket) -> bool:
    try:
        socket.socket.recv(sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and find out in time that the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
