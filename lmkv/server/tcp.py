"""Where other machines come in: listening sockets, TLS, tokens, and the connections that are open.

Who has not said Hello yet is a newcomer: there are few places for these and the oldest leaves for the next, so that
those who only connect cannot keep others out.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from lmkv.config import ServerConfig
from lmkv.errors import ConfigError
from lmkv.server import stream

log = logging.getLogger(__name__)
BACKLOG = 256
NEWCOMERS = 64
GREETING = 5.0  # seconds for TLS and Hello
SILENCE = 10.0


def split_address(text: str, key: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``. ConfigError ``key``."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare) != (bare != host) or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(key, f"{text!r}: write HOST:PORT, and an IPv6 address in brackets")
    return bare, int(port)


class Access:
    """Who may come in: TLS, client certificates, tokens. ConfigError for what is missing or cannot be read."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.tokens = _read_tokens(config.token_file) if config.token_file else []
        self.tls: ssl.SSLContext | None = None
        if config.tls_cert:
            self.tls = _server_context(config)
        elif config.tls_key or config.tls_client_ca:
            raise ConfigError("server.tls_cert", "is needed for tls_key and tls_client_ca")

    def admits(self, token: str) -> bool:
        """Whether a client with this token may go on; as slow for a near miss as for any other."""
        given = token.encode("utf-8", "surrogatepass")
        return not self.tokens or any([hmac.compare_digest(given, each) for each in self.tokens])  # noqa: C419

    def listen(self, text: str) -> list[socket.socket]:
        """Sockets that listen at ``host:port``, one for each address of the host."""
        host, port = split_address(text, "server.listen")
        sockets: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in found[: None if port else 1]:
                if not (self.tokens or self.tls or ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback):
                    raise ConfigError(
                        "server.listen",
                        f"{text}: other machines could come in unasked; set server.token_file or server.tls_cert, "
                        "or listen at 127.0.0.1",
                    )
                sock = socket.socket(family, socket.SOCK_STREAM)
                sockets.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(address)
                sock.listen(BACKLOG)
                sock.setblocking(False)
        except BaseException as error:
            for sock in sockets:
                sock.close()
            if isinstance(error, OSError):
                raise ConfigError("server.listen", f"cannot listen at {text}: {error}") from None
            raise
        return sockets


def _read_tokens(path: str) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            tokens = [line.strip() for line in file if line.strip() and not line.startswith(b"#")]
    except OSError as error:
        raise ConfigError("server.token_file", f"cannot read it: {error}") from None
    if not tokens:
        raise ConfigError("server.token_file", f"{path} has no token: one a line")
    return tokens


def _server_context(config: ServerConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key or None)
    except (OSError, ValueError) as error:
        raise ConfigError("server.tls_cert", f"cannot use {config.tls_cert}: {error}") from None
    if config.tls_client_ca:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except (OSError, ValueError) as error:
            raise ConfigError("server.tls_client_ca", f"cannot use {config.tls_client_ca}: {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class Guest:
    """One accepted connection, for its whole life. It is an `lmkv.server.remote.Remote` that serves it."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock, self.address = sock, address
        self.since = time.monotonic()

    def secure(self, access: Access, deadline: float) -> None:
        """Set the connection up, with TLS where that is spoken. OSError."""
        stream.tune(self.sock)
        if access.tls:
            self.sock = tls = access.tls.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
            tls.settimeout(max(0.001, deadline - time.monotonic()))
            tls.do_handshake()

    def cut(self) -> None:
        """End it now, whatever it is at."""
        with suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class Door:
    """All listening sockets of a service, and who came in through them."""

    def __init__(self, config: ServerConfig, serve: Callable[[Guest], None]) -> None:
        self.config, self.access, self._serve = config, Access(config), serve
        self.listeners: dict[int, socket.socket] = {}
        self._newcomers: dict[Guest, None] = {}
        self._guests: set[Guest] = set()
        self._left = threading.Condition()
        self._silent_until = 0.0
        try:
            for text in config.listen:
                for sock in self.access.listen(text):
                    self.listeners[sock.fileno()] = sock
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> list[str]:
        """Where it listens."""
        return [_text(sock.getsockname()) for sock in self.listeners.values()]

    @property
    def crowd(self) -> int:
        """How many are inside."""
        return len(self._guests) + len(self._newcomers)

    def accept(self, fd: int) -> None:
        """Let in whoever waits at this listening socket."""
        try:
            sock, address = self.listeners[fd].accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                log.warning("a connection was lost: %s", error)
            return
        guest = Guest(sock, _text(address))
        with self._left:
            self._newcomers[guest] = None
            crowded = list(self._newcomers)[: max(0, len(self._newcomers) - NEWCOMERS)]
        for each in crowded:
            each.cut()
        threading.Thread(target=self._run, args=(guest,), name=f"lmkv-remote-{guest.address}", daemon=True).start()

    def _run(self, guest: Guest) -> None:
        try:
            self._serve(guest)
        except OSError as error:
            known = guest not in self._newcomers  # others could fill the log
            log.log(logging.INFO if known else logging.DEBUG, "%s: %s", guest.address, error)
        except Exception:
            log.exception("%s", guest.address)
        finally:
            guest.sock.close()
            with self._left:
                self._newcomers.pop(guest, None)
                self._guests.discard(guest)
                self._left.notify_all()

    def stay(self, guest: Guest) -> bool:
        """A newcomer has greeted; False: there are too many."""
        with self._left:
            self._newcomers.pop(guest, None)
            if len(self._guests) >= self.config.max_connections:
                return False
            self._guests.add(guest)
            return True

    def refused(self, guest: Guest, why: str) -> None:
        """Tell the log, but not of each one."""
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + SILENCE
            log.warning("%s was refused: %s", guest.address, why)

    def wait_empty(self, deadline: float) -> bool:
        """Wait until all have left; at the deadline (time.monotonic) the others are cut."""
        with self._left:
            if self._left.wait_for(lambda: not self.crowd, max(0.0, deadline - time.monotonic())):
                return True
            left: Sequence[Guest] = [*self._newcomers, *self._guests]
        for guest in left:
            guest.cut()
        with self._left:
            return self._left.wait_for(lambda: not self.crowd, 1.0)

    def close(self) -> None:
        """Listen no more."""
        for sock in self.listeners.values():
            sock.close()
        self.listeners = {}


def _text(address: tuple[object, ...]) -> str:
    host = str(address[0])
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"
