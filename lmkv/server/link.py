"""A client's tie to one running service: the arena as it lies in this process, and connections to it."""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import weakref
from collections.abc import Iterable
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
    """How this process reaches the service: everything it has open to it, and numbers nothing else has had."""

    def __init__(self, path: str, name: str, settings: str) -> None:
        self.path, self.name, self.settings = path, name, settings
        self.session = secrets.token_bytes(16)
        self.open: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._next = 0
        self._lock = threading.Lock()

    def numbers(self, count: int) -> range:
        """``count`` fresh numbers for slots."""
        with self._lock:
            self._next += count
            return range(self._next - count, self._next)

    def channels(self) -> list[Channel]:
        """All that is open."""
        with self._lock:
            return list(self.open)

    def dial(self, deadline: float, spawn: bool) -> tuple[Channel, str]:
        """A greeted connection and the service's id; ``spawn`` starts one where none listens. Unavailable,
        ConfigError."""
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
            with self._lock:
                self.open.add(channel)
            try:
                channel.send(wire.Hello(wire.VERSION, self.session, self.name), deadline)
                reply = channel.recv(deadline)
            except OSError as error:
                channel.close()
                if isinstance(error, TimeoutError):
                    raise Unavailable("the host service does not answer") from None
                continue  # it is ending: the next try waits for its successor
            if isinstance(reply, wire.Welcome):
                return channel, reply.server
            channel.close()
            if isinstance(reply, wire.Refused):
                raise ConfigError(reply.key, reply.message)
        raise Unavailable("the host service closes its connections")


@dataclass(eq=False)
class Link:
    """One registered service. out: numbers of slots in use here. lost: of slots that are not, unknown to it."""

    dialer: Dialer
    server: str
    tiers: tuple[str, ...]
    settings: str
    memory: _native.Slab
    idle: list[Channel] = field(default_factory=list)
    out: set[int] = field(default_factory=set)
    lost: list[int] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def take(self, deadline: float) -> Channel:
        """An idle connection, or a new one. OSError: there is none, or it is to another service by now."""
        with suppress(IndexError):
            return self.idle.pop()
        try:
            channel, server = self.dialer.dial(deadline, spawn=False)
        except (Unavailable, ConfigError) as error:
            raise ConnectionError(str(error)) from None
        if server != self.server:
            channel.close()
            raise ConnectionError("another host service has taken over")
        return channel

    def back(self, numbers: Iterable[int], known: bool) -> None:
        """These slots are not in use here any more; ``known``: and the service knows."""
        numbers = list(numbers)
        self.out.difference_update(numbers)
        if not known:
            self.lost.extend(numbers)

    def tell(self, channel: Channel, deadline: float) -> None:
        """Tell the service what was lost. OSError."""
        while lost := self.lost[: wire.MAX_ITEMS]:
            channel.send(wire.LetGo(lost), deadline)
            channel.recv(deadline)
            del self.lost[: len(lost)]

    def close(self) -> None:
        """Close idle connections and stop touching. The arena stays mapped while anything of it is referred to."""
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


def register(
    dialer: Dialer,
    channel: Channel,
    server: str,
    request: wire.Register,
    huge: bool,
    before: Link | None,
    deadline: float,
) -> Link:
    """The link to a greeted service; ``before`` itself if it was to the same. OSError, ConfigError, Unavailable."""
    channel.send(request, deadline)
    reply, fd = channel.recv_fd(deadline)
    try:
        if isinstance(reply, wire.Refused):
            raise ConfigError(reply.key, reply.message)
        if not isinstance(reply, wire.Registered) or fd is None:
            raise ConnectionError("no arena came with the answer")
        if before is not None and before.server == server:
            before.tell(channel, deadline)
            return before
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ConnectionError("the arena's size is not sealed")
        return Link(
            dialer, server, tuple(reply.tiers), reply.settings, _native.Slab(reply.arena_bytes, huge, fd)
        )  # fmt: skip
    except MemoryError:
        raise Unavailable("the arena cannot be mapped") from None
    finally:
        if fd is not None:
            os.close(fd)


@dataclass(eq=False)
class Reserved:
    """A slot to fill: ``nbytes`` from ``address`` on, ours until committed or aborted, mapped while this lives."""

    address: int
    nbytes: int
    number: int = field(repr=False)
    link: Link = field(repr=False)

    def view(self, nbytes: int | None = None) -> memoryview:
        """The first ``nbytes`` (default: all)."""
        return _native.memory(self.address, self.nbytes if nbytes is None else nbytes)


@dataclass(eq=False)
class Fetched:
    """A container to copy from until its run is over. tier: the number of where it came from."""

    address: int
    nbytes: int
    tier: int
    link: Link = field(repr=False)

    def view(self, nbytes: int | None = None) -> memoryview:
        """The first ``nbytes`` (default: all)."""
        return _native.memory(self.address, self.nbytes if nbytes is None else nbytes)
