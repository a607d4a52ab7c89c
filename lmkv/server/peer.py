"""`Peer`: one cache server as a process talks to it over TCP: connections that are kept, and calls that end in time.

A call takes an idle connection or makes one, so that threads that call at once have one each. What fails closes its
connection; where that one had been idle, a fresh one is tried at once. A server that did not answer in time is asked in
the background until it does, and until then whoever calls is told so at once.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from lmkv.errors import ConfigError
from lmkv.server import data
from lmkv.server.stream import Stream, tune
from lmkv.workers import Workers

T = TypeVar("T")
Replies = Stream[data.Reply]

log = logging.getLogger(__name__)
CONNECT = 3.0
PROBE = 1.0  # seconds for one try in the background
FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0


@dataclass(frozen=True)
class Credentials:
    """How to be let in. token_file, token_env: where the token is, if one is needed. tls: None for plain TCP."""

    token_file: str = ""
    token_env: str = ""
    tls: ssl.SSLContext | None = None

    def token(self) -> str:
        """As it is now: it may be exchanged while we run. OSError, KeyError."""
        if self.token_env:
            return os.environ[self.token_env].strip()
        if not self.token_file:
            return ""
        with open(self.token_file, encoding="utf-8") as file:
            return next((line.strip() for line in file if line.strip() and not line.startswith("#")), "")


class Peer:
    """One server, ``name`` being its address as written. Thread-safe; calls raise OSError, TimeoutError if late."""

    def __init__(self, name: str, host: str, port: int, credentials: Credentials) -> None:
        self.name, self.host, self.port, self.credentials = name, host, port, credentials
        self.generation = ""  # of the server last greeted
        self.container_bytes = data.MAX_CONTAINER
        self.closed = False
        self.on_lost: Callable[[], None] = lambda: None  # what was heard from it may be void
        self._heard = False  # since `on_lost` was called last
        self._told = ""
        self._open: weakref.WeakSet[Replies] = weakref.WeakSet()
        self._reset()

    def _reset(self) -> None:
        self.client = f"{socket.gethostname()} process {os.getpid()}"[:256]
        self._lock = threading.Lock()
        self._idle: list[Replies] = []
        self._down = ""
        self._probing: threading.Thread | None = None
        self._wake = threading.Event()
        self._resolver: Workers | None = None

    def call(self, work: Callable[[Replies], T], deadline: float) -> T:
        """``work`` over a connection of its own, again over a fresh one if a kept one turned out to be dead."""
        if self._down:
            raise ConnectionError(self._down)
        if time.monotonic() >= deadline:  # which is no fault of the server
            raise TimeoutError("timed out")
        stream = self._kept()
        if stream is not None:
            try:
                return self._run(stream, work)
            except TimeoutError as error:
                raise self._lost(error) from None
            except OSError:
                self._drop_idle()
        try:
            return self._run(self._dial(min(deadline, time.monotonic() + CONNECT)), work)
        except TimeoutError as error:
            raise self._lost(error) from None
        except ConnectionRefusedError:
            self._void()
            raise

    def attend(self) -> None:
        """Find out, without asking, whether its connections ended while nobody used them."""
        with self._lock:
            if not self._idle or self._idle[-1].usable():
                return
        self._drop_idle()
        self._void()

    def _void(self) -> None:
        heard, self._heard = self._heard, False
        if heard:
            self.on_lost()

    def take(self, deadline: float) -> Replies:
        """A fresh connection for the caller alone, who closes it."""
        return self._dial(min(deadline, time.monotonic() + CONNECT))

    def _run(self, stream: Replies, work: Callable[[Replies], T]) -> T:
        try:
            result = work(stream)
        except BaseException:
            stream.close()
            raise
        with self._lock:
            if not self.closed:
                self._idle.append(stream)
                return result
        stream.close()
        return result

    def _kept(self) -> Replies | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                stream = self._idle.pop()
            if stream.usable():
                return stream
            stream.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    # Connecting.

    def _dial(self, deadline: float) -> Replies:
        """A greeted connection. OSError."""
        if self.closed:
            raise ConnectionError("closed")
        sock = self._connect(deadline)
        try:
            tune(sock)
            if self.credentials.tls:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock = self.credentials.tls.wrap_socket(sock, server_hostname=self.host)
            stream = Stream[data.Reply](sock, data.Reply)
            stream.send(data.Hello(data.VERSION, self.client, self._token()), deadline)
            reply = stream.recv(deadline)
            if isinstance(reply, data.Refused):
                self._tell(f"{self.name} refuses this client ({reply.why}): {reply.message}")
                raise ConnectionError(f"refused ({reply.why})")
            if not isinstance(reply, data.Welcome):
                raise ConnectionError(f"{type(reply).__name__} instead of Welcome")
        except BaseException as error:
            sock.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                self._tell(f"{self.name}: {error}")
            raise
        with self._lock:
            self._open.add(stream)
            stale = self.generation not in ("", reply.generation)
            self.generation, self.container_bytes, self._told = reply.generation, reply.container_bytes, ""
        if stale:
            log.info("%s was started again", self.name)
            self._drop_idle()
            self._void()
        self._heard = True
        return stream

    def _connect(self, deadline: float) -> socket.socket:
        failed: OSError = ConnectionError(f"{self.host} has no address")
        for family, address in self._addresses(deadline):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock.connect(address)
                return sock
            except OSError as error:
                sock.close()
                failed = error
        raise failed

    def _addresses(self, deadline: float) -> list[tuple[int, Any]]:
        """Looked up by another thread, since a resolver may take its time."""
        with suppress(ValueError):
            version = ipaddress.ip_address(self.host).version
            return [(socket.AF_INET if version == 4 else socket.AF_INET6, (self.host, self.port))]
        with self._lock:
            self._resolver = self._resolver or Workers("resolve", 1)
        found = self._resolver.submit(socket.getaddrinfo, self.host, self.port, 0, socket.SOCK_STREAM)
        try:
            return [(int(each[0]), each[4]) for each in found.result(max(0.0, deadline - time.monotonic()))]
        except OSError:
            raise
        except Exception:  # on Python 3.10 the futures' TimeoutError is none of the built-in ones
            raise TimeoutError(f"no address of {self.host} in time") from None

    def _token(self) -> str:
        try:
            return self.credentials.token()
        except (OSError, KeyError, ValueError) as error:
            self._tell(f"no token for {self.name}: {error!r}")
            raise ConnectionError("no token") from None

    def _tell(self, what: str) -> None:
        if self._told != what:
            self._told = what
            log.warning("%s", what)

    # While it does not answer.

    def _lost(self, error: TimeoutError) -> TimeoutError:
        """It was late: from now on it is asked in the background. Returns what to raise."""
        self._drop_idle()
        with self._lock:
            if not self.closed and self._probing is None:
                self._down = f"{self.name} does not answer"
                self._probing = threading.Thread(target=self._probe, name=f"lmkv-probe-{self.name}", daemon=True)
                self._probing.start()
        return error

    def _probe(self) -> None:
        delay, up = 0.0, False
        while not up and not self._wake.wait(delay):
            try:
                self._dial(time.monotonic() + PROBE).close()
                up = True
            except OSError as error:
                up = not isinstance(error, TimeoutError)  # a call fails as fast now
            delay = min(max(FIRST_DELAY, 2 * delay), LONGEST_DELAY)
        with self._lock:
            self._down, self._probing = "", None

    def close(self) -> None:
        """End every connection, also those in use; later calls fail."""
        with self._lock:
            self.closed = True
            streams, idle, probing = list(self._open), self._idle, self._probing
            self._idle = []
        self._wake.set()
        for stream in streams:
            stream.shutdown()  # whoever uses it closes it
        for stream in idle:
            stream.close()
        if probing:
            probing.join(PROBE)

    def after_fork(self) -> None:
        """In the child: let go of what is the parent's."""
        for stream in list(self._open):
            stream.close()
        self._open = weakref.WeakSet()
        self._reset()


def check_credentials(credentials: Credentials, key: str) -> Credentials:
    """Themselves. ConfigError ``key``: the token is not there."""
    try:
        if (credentials.token_file or credentials.token_env) and not credentials.token():
            raise ConfigError(key, "lmkv: the token is empty")
    except KeyError:
        raise ConfigError(key, f"lmkv: token_env={credentials.token_env!r} is not set in the environment") from None
    except (OSError, ValueError) as error:
        raise ConfigError(key, f"lmkv: cannot read the token: {error}") from None
    return credentials


def client_context(ca: str, cert: str, key: str, setting: str) -> ssl.SSLContext:
    """TLS against these files, '' for none. ConfigError ``setting``."""
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if cert:
            context.load_cert_chain(cert, key or None)
        elif key:
            raise ConfigError(setting, "lmkv: key= needs cert=")
    except (OSError, ValueError) as error:
        raise ConfigError(setting, f"lmkv: cannot use ca={ca!r}, cert={cert!r}, key={key!r}: {error}") from None
    return context
