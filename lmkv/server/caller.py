"""`Caller`: a tie to the host service that heals itself, and calls over it that end in time.

A call that fails loses the link; whatever is asked meanwhile fails at once, and a thread in the background finds the
service again or starts another. The arena of a service that is gone stays mapped while anything refers to it.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

from lmkv.codec import Known, Meaning
from lmkv.config import Config
from lmkv.errors import ConfigError, LmkvError, Unavailable
from lmkv.server import election
from lmkv.server import protocol as wire
from lmkv.server.link import Channel, Dialer, Link, register
from lmkv.server.lookups import Asker
from lmkv.server.service import settings_text

log = logging.getLogger(__name__)
CALL = 1.0
RECONNECT, LONGEST_DELAY = 20.0, 15.0

_CALLERS: weakref.WeakSet[Caller] = weakref.WeakSet()


class Caller:
    """What `Host` stands on."""

    def __init__(
        self,
        socket: str,
        *,
        config: Config | None = None,
        spawn: bool = True,
        linger: float | None = None,
        name: str = "",
        patience: float = CALL,
    ) -> None:
        self.config = config or Config.load()
        if linger is not None:
            self.config = self.config.override(linger=linger)
        settings = self.config.model_dump_json(exclude_unset=True)
        self._dialer = Dialer(election.socket_path(socket), name or f"process {os.getpid()}", settings)
        self._spawn = spawn
        self._sizes: set[int] = set()
        self._meanings: dict[int, Sequence[Meaning | None]] = {}
        self._link: Link | None = None  # None while unavailable
        self._last: Link | None = None
        self._why = "not registered"
        self._changed = threading.Condition()
        self._connecting = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._asker = Asker(max(CALL, patience), self._lose_current)
        self._forked = self._closed = False
        _CALLERS.add(self)

    # The service.

    @property
    def available(self) -> bool:
        """Calls can work now."""
        return self._link is not None and not self._forked

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers, host memory first; empty before a service was found."""
        return self._last.tiers if self._last else ()

    @property
    def server_id(self) -> str:
        """Of the service last registered with; another one has another."""
        return self._last.server if self._last else ""

    @property
    def region(self) -> tuple[int, int]:
        """(address, bytes) of the arena in this process, another one with every `server_id`; zeros before."""
        return (self._last.memory.address, self._last.memory.nbytes) if self._last else (0, 0)

    def register(self, sizes: Sequence[int], timeout: float = 20.0, meanings: Known | None = None) -> None:
        """Connect, starting a service if needed, and say which container sizes will be used; may be called again.

        meanings: by `KVSpec.geometry_id`, what the payload of each group means, for the codecs of tiers. ConfigError:
        the service cannot take them, or speaks another version. Unavailable: none could be reached; it will be tried
        again in the background.
        """
        self._check()
        before, self._sizes = self._sizes, self._sizes | set(sizes)
        self._meanings |= meanings or {}
        try:
            self._connect(time.monotonic() + timeout)
        except ConfigError:
            self._sizes = before
            raise
        finally:
            if self._sizes:
                self._start("lmkv-host-send", self._send_later)
                self._start("lmkv-host-reconnect", self._reconnect)

    def _start(self, name: str, target: Callable[[], None]) -> None:
        with self._changed:
            if name not in self._threads:
                self._threads[name] = threading.Thread(target=target, name=name, daemon=True)
                self._threads[name].start()

    def _connect(self, deadline: float) -> None:
        if not self._connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Unavailable("still connecting")
        try:
            before, huge = self._last, self.config.cpu.huge_pages
            channel, server = self._dialer.dial(deadline, self._spawn)
            try:
                request = wire.Register(sorted(self._sizes), wire.pack_meanings(self._meanings))
                link = register(self._dialer, channel, server, request, huge, before, deadline)
                self._asker.attach(link.take(deadline))
                with self._changed:
                    if self._closed:
                        raise Unavailable("closed")
                    link.idle.append(channel)
                    self._link = self._last = link
                    self._changed.notify_all()
            except BaseException as error:
                channel.close()
                if isinstance(error, OSError):
                    raise Unavailable(f"the host service did not register this client: {error}") from None
                raise
        finally:
            self._connecting.release()
        if link is not before:
            if before:
                before.close()
            if self.config.cpu.touch:
                self._start(f"lmkv-host-touch-{link.server}", link.touch)
            self._compare(link.settings)

    def _compare(self, settings: str) -> None:
        """Warn where the service runs with other settings than those that were set here."""
        theirs, ours = (
            dict(line.partition("=")[::2] for line in text.splitlines())
            for text in (settings, settings_text(self.config))
        )
        differ = [key for key in ours if theirs.get(key) != ours[key] and self.config.origin(key) != "default"]
        if differ:
            texts = (f"{key} is {theirs.get(key, 'not set')}, not {ours[key]}" for key in differ)
            log.warning("the host service keeps its first client's settings: %s", "; ".join(texts))

    def _reconnect(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._link is None or self._closed)
                # Clients lose a service together; not all need to start the next one.
                self._changed.wait_for(lambda: self._closed, random.uniform(0, 0.2))  # noqa: S311
            delay = 0.1
            while not (self._closed or self._reconnected()):
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, delay)
                delay = min(2 * delay, LONGEST_DELAY)

    def _reconnected(self) -> bool:
        try:
            self._connect(time.monotonic() + RECONNECT)
        except (LmkvError, OSError) as error:
            self._why = str(error)
        return self._link is not None

    # Calls.

    def _check(self) -> None:
        if self._forked or self._closed:
            raise Unavailable("forked" if self._forked else "closed")

    def _current(self) -> Link:
        self._check()
        link = self._link
        if link is None:
            raise Unavailable(self._why)
        return link

    def _call(self, request: wire.Message, timeout: float = CALL, link: Link | None = None) -> Any:
        """One request and its reply; over ``link``, if given, or not at all."""
        current, deadline = self._current(), time.monotonic() + timeout
        if link not in (None, current):
            raise Unavailable(self._why or "another host service has taken over")
        channel: Channel | None = None
        try:
            channel = current.take(deadline)
            channel.send(request, deadline)
            reply = channel.recv(deadline)
        except BaseException as error:
            if channel:
                channel.close()
            if isinstance(error, OSError):
                raise self._lose(current, error) from None
            raise
        self._give(current, channel)
        if isinstance(reply, wire.Refused):
            raise Unavailable(reply.message)
        return reply

    def _give(self, link: Link, channel: Channel) -> None:
        with self._changed:
            if self._link is link:
                link.idle.append(channel)
                return
        channel.close()

    def _lose(self, link: Link, error: OSError) -> Unavailable:
        """A call failed: what comes next waits for a new connection. Returns what to raise."""
        if self._forked:
            return Unavailable("forked")
        why = "the host service does not answer" if isinstance(error, TimeoutError) else f"host service: {error}"
        with self._changed:
            if self._link is link:
                self._link, self._why = None, why
                while link.idle:
                    link.idle.pop().close()
                self._changed.notify_all()
        return Unavailable(why)

    def _lose_current(self, error: OSError) -> Unavailable:
        """The questions' connection ended."""
        link = self._link
        return self._lose(link, error) if link else Unavailable(self._why)

    def _send_later(self) -> None:
        """A thread of its own for what was queued; until closed."""

    def close(self) -> None:
        """Let go of everything and disconnect. What was handed out and is still in use stays mapped, and is the
        service's to take back when this process ends."""
        link = self._link
        if link and not link.out and not self._forked:
            with suppress(OSError), closing(link.take(time.monotonic() + CALL)) as channel:
                channel.send(wire.Bye(), time.monotonic() + CALL)
        self._stop()

    def _stop(self) -> None:
        if self._forked:
            return
        with self._changed:
            self._closed, self._link = True, None
            self._changed.notify_all()
        self._asker.close()
        for channel in self._dialer.channels():
            channel.shutdown()  # whoever waits on it closes it
        if self._last:
            self._last.close()
        for thread in self._threads.values():
            thread.join(CALL)


def _after_fork() -> None:
    for caller in _CALLERS:
        caller._forked = True
        for channel in list(caller._dialer.open):
            channel.close()  # or the child's words would be taken for the parent's


def _at_exit() -> None:
    """A thread inside a native call must not meet the end of the interpreter; no Bye, since copies may still run."""
    for caller in list(_CALLERS):
        caller._stop()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
