"""The service process: accepts clients of this host and of others, and owns their storage.

One that an engine started ends some time after its last client has gone.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import secrets
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lmkv.arena import PAGE
from lmkv.codec import Known, Meanings
from lmkv.config import Config
from lmkv.errors import ConfigError
from lmkv.server import election
from lmkv.server import protocol as wire
from lmkv.server.catalog import Catalog
from lmkv.server.connection import Connection, Session
from lmkv.server.events import Rings
from lmkv.server.metrics import exporter
from lmkv.server.remote import Remote
from lmkv.server.tcp import Door, Guest
from lmkv.storage import StorageManager

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 512
SO_PEERPIDFD = 77  # Linux 6.5; the socket module has no name for it
SWITCH_INTERVAL = 0.0005  # so that a lookup waits less for threads that verify and write


class Service:
    """One storage behind a listening socket for this host, or behind the addresses of ``config.server``, or both.

    ConfigError, BackendError: what is set for other machines cannot be done.
    """

    def __init__(self, listener: socket.socket | None, config: Config) -> None:
        self.config, self.listener = config, listener
        self.name = secrets.token_hex(8)
        self.settings = settings_text(config)
        self.storage: StorageManager | None = None
        self.catalog: Catalog | None = None
        self.rings = Rings()
        self._sessions: dict[tuple[int, bytes], Session] = {}
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._idle_since = time.monotonic()
        self.stays = False
        self._stopping = False
        self._remotes: set[Remote] = set()
        self.door: Door | None = None
        self.metrics = exporter(config.server.metrics, self._figures) if config.server.metrics else None
        try:
            if config.server.listen:
                _check_settings(config, listener is not None)
                self.door = Door(config.server, self._serve_remote)
                self.prepare([PAGE])
        except BaseException:
            if self.door:
                self.door.close()
            if self.metrics:
                self.metrics.close()
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.epoll()
        for fd in (*([listener.fileno()] if listener else []), *(self.door.listeners if self.door else []), self._wake):
            self._poll.register(fd, select.EPOLLIN)

    # Storage.

    def prepare(self, sizes: Sequence[int], meanings: Known | None = None) -> StorageManager:
        """The storage, made at the first call, with room for containers of ``sizes``. ConfigError, BackendError.

        meanings: by geometry id, what payload means.
        """
        with self._making:
            if self.storage is None:
                # A server for other machines only keeps containers as their engines have encoded them.
                known = Meanings.of(meanings or {}) if self.listener else None
                storage = StorageManager(self.config, sizes, known, shared=self.listener is not None)
                storage.index.watch = self.rings
                if self.door:
                    share = self.config.server.tenant_budget
                    budget = share.resolve(storage.arena.capacity) if share else None
                    self.catalog = Catalog(storage, self.rings, budget, self.config.server.pin_share)
                self.storage = storage
            else:
                self.storage.add_sizes(sizes)
                if meanings and self.storage.meanings is not None:
                    for tier in self.storage.tiers:
                        tier.check(Meanings.of(meanings))
                    self.storage.meanings.add(meanings)
            return self.storage

    def stats(self, storage: StorageManager) -> dict[str, Any]:
        """Counters, tiers, and the clients with what they hold."""
        with self._lock:
            clients = [
                {"name": each.name, "connections": len(each.connections), "holds": each.holding}
                for each in self._sessions.values()
            ]
            clients += [{"name": each.name, "connections": 1, "holds": 0} for each in self._remotes]
        found = {**storage.stats.snapshot(), "tiers": storage.usage(), "clients": clients, "server": self.name}
        if self.catalog:
            found |= {"filling_bytes": self.catalog.filling, "pins": self.catalog.pins.usage()}
        return found

    def _figures(self) -> dict[str, Any]:
        return self.stats(self.storage) if self.storage else {"server": self.name}

    # Clients on other machines.

    def _serve_remote(self, guest: Guest) -> None:
        if self.door and self.catalog:
            remote = Remote(self, self.door, self.catalog, guest)
            with self._lock:
                self._remotes.add(remote)
            try:
                remote.serve()
            finally:
                with self._lock:
                    self._remotes.discard(remote)

    # Sessions and connections.

    def join(self, connection: Connection, hello: wire.Hello) -> Session:
        """The session a new connection belongs to: that of its process and of the name the process gives itself."""
        key = (connection.peer, hello.session)
        with self._lock:
            session = self._sessions.get(key)
            if session is None:
                session = self._sessions[key] = Session(self, key, hello.client, connection.pidfd)
                connection.pidfd = -1
                self._poll.register(session.pidfd, select.EPOLLIN)
            session.connections.add(connection)
            connection.session = session
        return session

    def closed(self, connection: Connection) -> None:
        """A connection has ended; with a session's last one go its leases, and the session if it holds nothing."""
        connection.channel.close()
        session = connection.session
        with self._lock:
            self._connections.discard(connection)
            if connection.pidfd >= 0:
                os.close(connection.pidfd)
            if session is None:
                return
            session.connections.discard(connection)
            last = not session.connections
            if last and not session.holding:
                self._forget(session)  # at once: its client may be joining again
        if last:
            session.drop_leases()

    def end(self, session: Session) -> None:
        """Nothing of this client is touched by it any more."""
        with self._lock:
            self._forget(session)
            connections = list(session.connections)
        session.end()
        for connection in connections:
            connection.channel.shutdown()

    def _forget(self, session: Session) -> None:
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]
            self._poll.unregister(session.pidfd)
            os.close(session.pidfd)
            if not self._sessions:
                self._idle_since = time.monotonic()
                os.eventfd_write(self._wake, 1)

    # The main loop.

    def run(self) -> None:
        """Serve until stopped or, unless it ``stays``, until nobody has been there for ``linger`` seconds."""
        while not self._stopping:
            with self._lock:
                stays = self.stays or self._sessions or self.door
                left = None if stays else self._idle_since + self.config.linger - time.monotonic()
            if left is not None and left <= 0:
                break
            for fd, _ in self._poll.poll(left):
                if self.listener and fd == self.listener.fileno():
                    self._accept(self.listener)
                elif self.door and fd in self.door.listeners:
                    self.door.accept(fd)
                elif fd == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._reap(fd)

    def stop(self, *_: object) -> None:
        """End soon; may be called from a signal handler."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def _reap(self, pidfd: int) -> None:
        with self._lock:
            gone = [each for each in self._sessions.values() if each.pidfd == pidfd and each.gone()]
        for session in gone:
            log.info("%s is gone", session.name)
            self.end(session)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            log.warning("a connection was lost: %s", error)
            return
        try:
            peer, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.geteuid() or len(self._connections) >= MAX_CONNECTIONS:
                raise ConnectionError(f"user {uid}, {len(self._connections)} connections")
            pidfd = _pidfd(sock, peer)
        except OSError as error:
            log.warning("a connection was refused: %s", error)
            sock.close()
            return
        connection = Connection(self, wire.Channel(sock, wire.Request), peer, pidfd)
        with self._lock:
            self._connections.add(connection)
        threading.Thread(target=connection.serve, name=f"lmkv-client-{peer}", daemon=True).start()

    def close(self) -> None:
        """Take no more clients, finish what others are at, write what is queued, release everything."""
        deadline = time.monotonic() + self.config.close_timeout
        if self.listener:
            self.listener.close()
        with self._lock:
            connections, remotes = list(self._connections), list(self._remotes)
        for connection in connections:
            connection.channel.shutdown()
        if self.door:
            self.door.close()
            for remote in remotes:
                remote.leave()
            self.door.wait_empty(deadline)
        if self.metrics:
            self.metrics.close()
        if self.storage:
            self.storage.close(self.config.close_timeout)


def _pidfd(sock: socket.socket, pid: int) -> int:
    """A descriptor of the peer's process; OSError when it is gone or the kernel (before 5.3) has none."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    return os.pidfd_open(pid)  # before Linux 6.5; the number could be another's if the peer has ended just now


def settings_text(config: Config) -> str:
    """What a service was started with, as lines of ``key=value``, of the settings that concern it."""
    ours = ("cpu.", "tiers.", "policy", "profiles")
    return "\n".join(f"{key}={value}" for key, value, _ in config.rows() if key.startswith(ours))


def _check_settings(config: Config, shared: bool) -> None:
    """ConfigError for what does not go with serving other machines."""
    for number, tier in enumerate(config.tiers):
        if tier.codec != "raw":
            raise ConfigError(
                f"tiers.{number}.codec",
                "must be raw below a server that listens, which knows no pages: set it in the engines' lmkv:// tier",
            )
    if not config.server.verify and (shared or config.tiers):
        raise ConfigError("server.verify", "must be on where engines of this host, or tiers, have the same containers")


def main(path: str | None, config: Config, ready: int = -1, stays: bool = False) -> bool:
    """Be the service at ``path``, and at the addresses of ``config.server``, until it ends; False at once where there
    is one. path: None for other machines only. ready: told when it listens."""
    elected = election.listen(path) if path else (None, -1)
    if elected:
        listener, lock = elected
        if path:
            os.ftruncate(lock, 0)
            os.write(lock, b"%d\n" % os.getpid())
        sys.setswitchinterval(SWITCH_INTERVAL)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        try:
            service = Service(listener, config)
        except BaseException:
            _end(path, listener, lock)
            raise
        service.stays = stays
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, service.stop)
    if ready >= 0:
        with suppress(BrokenPipeError):  # who started us has waited long enough, and will find us
            os.write(ready, b"listening")
        os.close(ready)
    if elected:
        places = [*([path] if path else []), *(service.door.addresses if service.door else [])]
        log.info("process %d serves %s", os.getpid(), " and ".join(places))
        if service.metrics:
            log.info("metrics at %s", service.metrics.url)
        try:
            service.run()
        finally:
            if path:
                with suppress(FileNotFoundError):
                    os.unlink(path)
            service.close()
            _end(None, None, lock)
            log.info("process %d has ended", os.getpid())
    return elected is not None


def _end(path: str | None, listener: socket.socket | None, lock: int) -> None:
    """Listen at ``path`` no more, and give the lock back."""
    if path:
        with suppress(FileNotFoundError):
            os.unlink(path)
    if listener:
        listener.close()
    if lock >= 0:
        os.close(lock)
