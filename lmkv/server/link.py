"""A client's tie to one running service: the arena as it lies in this process, and the connections to it."""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lmkv import _native
from lmkv.arena import SEALS
from lmkv.errors import ConfigError, Unavailable
from lmkv.server import election
from lmkv.server import protocol as wire

Channel = wire.Channel[wire.Reply]
STEP = 64 << 20
TRIES = 3


class Dialer:
    """How this process reaches the service, and everything it has open to it."""

    def __init__(self, path: str, name: str, settings: str) -> None:
        self.path, self.name, self.settings = path, name, settings
        self.session = secrets.token_bytes(16)
        self.open: weakref.WeakSet[Channel] = weakref.WeakSet()

    def dial(self, deadline: float, spawn: bool) -> tuple[Channel, wire.Welcome]:
        """A connection that was greeted; ``spawn`` starts a service where none listens. Unavailable, ConfigError."""
        for _ in range(TRIES):
            try:
                channel = Channel(election.dial(self.path, deadline), wire.Reply)
            except (FileNotFoundError, ConnectionRefusedError):
                if not spawn:
                    raise Unavailable(f"no host service listens at {self.path}") from None
                election.spawn(self.path, self.settings, deadline)
                continue
            except OSError as error:
                raise Unavailable(f"{self.path}: {error}") from None
            self.open.add(channel)
            try:
                channel.send(wire.Hello(wire.VERSION, self.session, self.name), deadline)
                reply = channel.recv(deadline)
            except TimeoutError:
                channel.close()
                raise Unavailable("the host service does not answer") from None
            except OSError:
                channel.close()  # it is ending: the next try waits for its successor
                continue
            if isinstance(reply, wire.Welcome):
                return channel, reply
            channel.close()
            if isinstance(reply, wire.Refused):
                raise ConfigError(reply.key, reply.message)
        raise Unavailable("the host service closes its connections")


@dataclass(eq=False)
class Link:
    """One registered service. ``lost``: numbers of slots that are not touched here but of which it may not know."""

    dialer: Dialer
    server: str
    tiers: tuple[str, ...]
    settings: str
    memory: _native.Slab
    idle: list[Channel] = field(default_factory=list)
    out: set[int] = field(default_factory=set)
    lost: list[int] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, deadline: float) -> Channel:
        """An idle connection, or a new one. OSError: there is none, or it is to another service by now."""
        with suppress(IndexError):
            return self.idle.pop()
        try:
            channel, welcome = self.dialer.dial(deadline, spawn=False)
        except (Unavailable, ConfigError) as error:
            raise ConnectionError(str(error)) from None
        if welcome.server != self.server:
            channel.close()
            raise ConnectionError("another host service has taken over")
        return channel

    def numbers(self, count: int) -> range:
        """``count`` numbers never used before in this session; they count as handed out."""
        with self._lock:
            first = self._next
            self._next += count
            self.out.update(range(first, self._next))
        return range(first, first + count)

    def back(self, numbers: Iterable[int], known: bool) -> None:
        """These slots are not touched here any more; ``known``: the service knows."""
        with self._lock:
            numbers = list(numbers)
            self.out.difference_update(numbers)
            self.lost += [] if known else numbers

    def take_lost(self) -> list[int]:
        """The lost numbers, which the caller now tells of."""
        with self._lock:
            lost, self.lost = self.lost[: wire.MAX_ITEMS], self.lost[wire.MAX_ITEMS :]
            return lost

    def close(self) -> None:
        """Close idle connections. The arena stays mapped while anything of it is in use."""
        self.stopped.set()
        while self.idle:
            self.idle.pop().close()

    def touch(self) -> None:
        """Fault the arena in for this process, step by step."""
        with suppress(ValueError, MemoryError, OSError):
            for start in range(0, self.memory.nbytes, STEP):
                if self.stopped.is_set():
                    break
                self.memory.touch(start, min(start + STEP, self.memory.nbytes))


def register(dialer: Dialer, channel: Channel, server: str, sizes: Sequence[int], huge: bool, before: Link | None,
             deadline: float) -> Link:  # fmt: skip
    """The link to a greeted service; ``before`` itself if it was to the same one. OSError, ConfigError."""
    channel.send(wire.Register(list(sizes)), deadline)
    reply, fd = channel.recv_fd(deadline)
    try:
        if isinstance(reply, wire.Refused):
            raise ConfigError(reply.key, reply.message)
        if not isinstance(reply, wire.Registered) or fd is None:
            raise ConnectionError("no arena came with the answer")
        link = before
        if link is None or link.server != server:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ConnectionError("the arena's file is not sealed")
            try:
                memory = _native.Slab(reply.arena_bytes, huge, fd)
            except MemoryError:
                raise Unavailable(f"{reply.arena_bytes} bytes of the arena cannot be mapped") from None
            link = Link(dialer, server, tuple(reply.tiers), reply.settings, memory)
    finally:
        if fd is not None:
            os.close(fd)
    while lost := link.take_lost():
        channel.send(wire.LetGo(lost), deadline)
        channel.recv(deadline)
    return link


@dataclass(eq=False)
class Reserved:
    """A slot to fill: ``nbytes`` from ``address`` on, ours until committed or aborted."""

    address: int
    nbytes: int
    number: int = field(repr=False)
    link: Link = field(repr=False)

    def view(self, nbytes: int | None = None) -> memoryview:
        """The first ``nbytes`` (default: all), writable; valid while this object lives and is not committed."""
        return _native.memory(self.address, self.nbytes if nbytes is None else nbytes)


@dataclass(eq=False)
class Fetched:
    """A container in host memory to copy from, until its run is over. tier: the name of where it came from."""

    address: int
    nbytes: int
    tier: str
    link: Link = field(repr=False)

    def view(self, nbytes: int | None = None) -> memoryview:
        """The first ``nbytes`` (default: all)."""
        return _native.memory(self.address, self.nbytes if nbytes is None else nbytes)
