"""`Host`: the host service as an engine's process uses it.

    host = Host()
    host.register([container_bytes])
    answer = host.lookup(Query("request-1", scope, digests, 256, need, lease=10.0), timeout=1.0)
    for run in host.fetch(keys, sizes, timeout=5.0):
        ...                                         # copy out of each slot: the bytes lie in this process

No call waits longer than its timeout. What fails raises Unavailable at once or in time, and a thread in the background
finds the service again, or starts another. After fork the child's calls raise Unavailable("forked").
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmkv.config import Config
from lmkv.errors import LmkvError, Unavailable
from lmkv.keys import ChunkKey
from lmkv.plan import Need
from lmkv.server import election
from lmkv.server import protocol as wire
from lmkv.server.link import Channel, Dialer, Fetched, Link, Reserved, register
from lmkv.server.service import settings_text

log = logging.getLogger(__name__)
CALL = 1.0  # seconds a call may take where its caller does not say
RECONNECT = 10.0
LONGEST_DELAY = 5.0
SHARE = 0.9  # of a call's timeout, for the service to answer in an orderly way
BATCH = 256

_HOSTS: weakref.WeakSet[Host] = weakref.WeakSet()


@dataclass(frozen=True)
class Query:
    """A lookup. digests: 32 bytes for each chunk of the prompt. lease: seconds to keep what is found for ``owner``,
    0 for none. first: chunks the caller has itself, which are neither leased nor counted by tier.
    """

    owner: str
    scope: bytes
    digests: bytes
    chunk_tokens: int
    need: Need
    lease: float = 0.0
    first: int = 0


class Answer(NamedTuple):
    """chunks: how many can be restored, from the start. tiers: those past ``first``, by the slowest tier each needs.
    reason: why it ends there."""

    chunks: int
    tiers: dict[str, int]
    reason: str


class Host:
    """This process's view of the host service. Thread-safe.

    socket: its path, by default ``$XDG_RUNTIME_DIR/lmkv/server.sock`` or ``/tmp/lmkv-<uid>/server.sock``. config: what
    a service is started with if none runs. spawn: start one. name: of this client, for people.
    """

    def __init__(self, socket: str = "", *, config: Config | None = None, spawn: bool = True, name: str = "") -> None:
        self.config = config or Config.load()
        settings = self.config.model_dump_json(exclude_unset=True)
        self._dialer = Dialer(election.socket_path(socket), name or f"process {os.getpid()}", settings)
        self._spawn = spawn
        self._sizes: set[int] = set()
        self._link: Link | None = None
        self._last: Link | None = None
        self._why = "not registered"
        self._cursors: dict[bytes, tuple[str, int]] = {}
        self._queue: deque[tuple[wire.Ask, Future[Answer]] | str | int] = deque()
        self._changed = threading.Condition()
        self._connecting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._started = self._forked = self._closed = False
        _HOSTS.add(self)

    # What it is connected to.

    @property
    def available(self) -> bool:
        """Calls can work now."""
        return self._link is not None and not self._forked

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers, host memory first; empty before `register`."""
        return self._last.tiers if self._last else ()

    @property
    def server_id(self) -> str:
        """Of the service last registered with; another one has another."""
        return self._last.server if self._last else ""

    def regions(self) -> list[tuple[int, int]]:
        """(address, bytes) of the arena in this process, for pinning; another one after a change of `server_id`."""
        return [(self._last.memory.address, self._last.memory.nbytes)] if self._last else []

    def register(self, sizes: Sequence[int], timeout: float = 20.0) -> None:
        """Connect, starting a service if needed, and say which container sizes will be used; may be called again.

        ConfigError: the service cannot take such containers, or speaks another version. Unavailable: anything else.
        """
        self._check()
        self._sizes |= set(sizes)
        self._connect(time.monotonic() + timeout)
        with self._changed:
            if not self._started:
                self._started = True
                self._start(self._pump, "lmkv-host")
                self._start(self._reconnect, "lmkv-host-reconnect")

    def _start(self, target: Any, name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _connect(self, deadline: float) -> None:
        if not self._connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Unavailable("still connecting")
        try:
            before, huge = self._last, self.config.cpu.huge_pages
            channel, welcome = self._dialer.dial(deadline, self._spawn)
            try:
                link = register(
                    self._dialer, channel, welcome.server, sorted(self._sizes), huge, before, deadline
                )  # fmt: skip
            except OSError as error:
                channel.close()
                raise Unavailable(f"the host service did not register this client: {error}") from None
            except BaseException:
                channel.close()
                raise
            with self._changed:
                if self._closed:
                    channel.close()
                    raise Unavailable("closed")
                link.idle.append(channel)
                self._link = self._last = link
                if link is not before:
                    if before:
                        before.stopped.set()
                    if self.config.cpu.touch:
                        self._start(link.touch, "lmkv-host-touch")
            if link is not before:
                self._compare(link)
        finally:
            self._connecting.release()

    def _compare(self, link: Link) -> None:
        """Warn where the service runs with other settings than ours."""
        theirs = dict(line.partition("=")[::2] for line in link.settings.splitlines())
        ours = dict(line.partition("=")[::2] for line in settings_text(self.config).splitlines())
        differ = [f"{key} is {theirs.get(key, 'unset')}, not {ours.get(key, 'unset')}"
                  for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]  # fmt: skip
        if differ:
            log.warning("the host service at %s keeps the settings of who came first: %s", self._dialer.path,
                        "; ".join(differ))  # fmt: skip

    def _lose(self, link: Link, error: Exception) -> Unavailable:
        """A call failed: whatever comes next waits for a new connection. Returns what to raise."""
        why = "the host service does not answer" if isinstance(error, TimeoutError) else f"host service: {error}"
        with self._changed:
            if self._link is link and not self._forked:
                self._link, self._why = None, why
                while link.idle:
                    link.idle.pop().close()
                self._changed.notify_all()
        return Unavailable(why)

    def _reconnect(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._link is None or self._closed)
                # Clients lose a service together; not all need to start the next one.
                self._changed.wait_for(lambda: self._closed, random.uniform(0, 0.2))  # noqa: S311
            delay = 0.1
            while not (self._closed or self._try_again()):
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, delay)
                delay = min(2 * delay, LONGEST_DELAY)
            if self._closed:
                return

    def _try_again(self) -> bool:
        try:
            self._connect(time.monotonic() + RECONNECT)
        except (LmkvError, OSError) as error:
            self._why = str(error)
        return self._link is not None

    def _check(self) -> Link | None:
        if self._forked or self._closed:
            raise Unavailable("forked" if self._forked else "closed")
        return self._link

    def _current(self) -> Link:
        link = self._check()
        if link is None:
            raise Unavailable(self._why)
        return link

    def _call(self, request: wire.Message, timeout: float = CALL, link: Link | None = None) -> Any:
        link = link or self._current()
        deadline = time.monotonic() + timeout
        channel: Channel | None = None
        try:
            channel = link.take(deadline)
            channel.send(request, deadline)
            reply = channel.recv(deadline)
        except BaseException as error:
            if channel:
                channel.close()
            if isinstance(error, OSError):
                raise self._lose(link, error) from None
            raise
        self._give(link, channel)
        if isinstance(reply, wire.Refused):
            raise Unavailable(reply.message)
        return reply

    def _give(self, link: Link, channel: Channel) -> None:
        with self._changed:
            if self._link is link:
                link.idle.append(channel)
                return
        channel.close()

    # Lookup.

    def lookup_later(self, query: Query) -> Future[Answer]:
        """Never blocks: what is asked while an answer is awaited goes in one message. Unavailable in the future."""
        future: Future[Answer] = Future()
        try:
            self._current()
            with self._changed:
                self._queue.append((_ask(query), future))
                self._changed.notify_all()
        except Unavailable as error:
            future.set_exception(error)
        return future

    def lookup(self, query: Query, timeout: float = CALL) -> Answer:
        """Ask now. Unavailable."""
        return _answers(self._call(wire.Lookup([_ask(query)]), timeout))[0]

    def release(self, *owners: str) -> None:
        """End their leases, soon; never blocks and never fails: a lease that is not heard of ends in time."""
        self._later(*owners)

    def _later(self, *items: str | int) -> None:
        if not (self._forked or self._closed):
            with self._changed:
                self._queue.extend(items)
                self._changed.notify_all()

    def _pump(self) -> None:
        """Send what was queued, in order, as few messages as that takes."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                batch: list[Any] = []
                while self._queue and len(batch) < BATCH and type(self._queue[0]) is type((batch or self._queue)[0]):
                    batch.append(self._queue.popleft())
                if not batch:
                    return
            self._send(batch)

    def _send(self, batch: list[Any]) -> None:
        last = self._last
        if isinstance(batch[0], tuple):
            batch = [(ask, future) for ask, future in batch if future.set_running_or_notify_cancel()]
        try:
            if isinstance(batch[0], str):
                self._call(wire.Release(batch))
            elif isinstance(batch[0], int):
                self._call(wire.LetGo(batch))
            else:
                answers = _answers(self._call(wire.Lookup([ask for ask, _ in batch])))
                for (_, future), answer in zip(batch, answers, strict=True):
                    future.set_result(answer)
        except Exception as error:
            for item in batch:
                if isinstance(item, tuple):
                    item[1].set_exception(error)
                elif isinstance(item, int) and last:
                    last.back([item], known=False)

    # Reading.

    def fetch(
        self, keys: Sequence[ChunkKey], sizes: Sequence[int], timeout: float
    ) -> Iterator[list[Fetched] | str]:  # fmt: skip
        """Bring containers into host memory and lend them: runs of consecutive ``keys``, in order.

        A run may be read until the iterator is advanced or closed. If not all can be had, the reason comes last, a
        string. sizes: bytes of each once decoded, as registered. Unavailable while iterating: the runs before it were
        good, and the last one still is until it is let go.
        """
        link = self._current()
        deadline = time.monotonic() + timeout
        (number,) = link.numbers(1)
        channel: Channel | None = None
        known, at, reason = False, 0, ""
        try:
            channel = link.take(deadline)
            channel.send(wire.Fetch(number, wire.pack_keys(keys), list(sizes), SHARE * timeout), deadline)
            while isinstance(reply := channel.recv(deadline), wire.Run):
                run = [
                    Fetched(link.memory.address + offset, sizes[at + i], link.tiers[tier], link)
                    for i, (offset, tier) in enumerate(reply.slots)
                ]
                at += len(run)
                try:
                    yield run
                except GeneratorExit:
                    self._finish(channel)
                    self._give(link, channel)
                    known, channel = True, None
                    raise
                if time.monotonic() >= deadline and at < len(keys):
                    reply, reason = self._finish(channel), "timeout"
                    break
                channel.send(wire.Ack(True), max(deadline, time.monotonic() + CALL))
            if not isinstance(reply, wire.End):
                raise ConnectionError(f"{type(reply).__name__} instead of a run")
            self._give(link, channel)
            known, channel = True, None
        except OSError as error:
            raise self._lose(link, error) from None
        finally:
            if channel:
                channel.close()
            link.back([number], known)
        if reason := reason or reply.reason:
            yield reason

    def _finish(self, channel: Channel) -> Any:
        """Let a run go and want no more."""
        deadline = time.monotonic() + CALL
        channel.send(wire.Ack(False), deadline)
        return channel.recv(deadline)

    # Writing.

    def reserve(self, owner: str, items: Sequence[tuple[ChunkKey, int]], timeout: float) -> list[Reserved | str]:
        """Slots to fill and commit within ``timeout`` seconds: (key, bytes as registered) each.

        A string instead: held (stored already), in flight (somebody is writing it), no slot, not registered.
        Whatever is returned must be committed or aborted, also after the time is over. Unavailable.
        """
        if not items:
            return []
        link = self._current()
        numbers = link.numbers(len(items))
        keys, sizes = wire.pack_keys([key for key, _ in items]), [nbytes for _, nbytes in items]
        try:
            reply = self._call(wire.Reserve(owner, numbers[0], keys, sizes, timeout), CALL, link)
        except BaseException:
            link.back(numbers, known=False)
            raise
        got: list[Reserved | str] = []
        for number, nbytes, slot in zip(numbers, sizes, reply.slots, strict=True):
            got.append(slot if isinstance(slot, str) else Reserved(link.memory.address + slot, nbytes, number, link))
            if isinstance(slot, str):
                link.back([number], known=True)
        return got

    def commit(self, reserved: Sequence[Reserved], masks: Sequence[int] = (), expires: int = 0) -> list[bool]:
        """Publish filled slots, in prefix order. masks: pages each holds, 0 (or none given) for all.

        expires: unix seconds, 0 never. False: it came too late, or the service is another by now. Unavailable: it is
        not known whether they were published. In any case none may be touched any more.
        """
        link = self._check() or self._last
        mine = [(each, mask) for each, mask in zip(reserved, masks or [0] * len(reserved), strict=True)
                if each.link is link]  # fmt: skip
        done: dict[int, bool] = {}
        if link and mine:
            numbers, packed = [each.number for each, _ in mine], [wire.to_bytes(mask) for _, mask in mine]
            try:
                reply = self._call(wire.Commit(numbers, packed, expires))
            except BaseException:
                link.back(numbers, known=False)
                raise
            link.back(numbers, known=True)
            done = dict(zip(numbers, reply.done, strict=True))
        return [each.link is link and done[each.number] for each in reserved]

    def abort(self, reserved: Sequence[Reserved]) -> None:
        """Give slots back unfilled; harmless after commit. Never blocks and never fails."""
        for each in reserved:
            if each.link is self._last and each.number in each.link.out:
                each.link.back([each.number], known=True)
                self._later(each.number)

    # The rest.

    def stats(self) -> dict[str, Any]:
        """Counters since the service's start, its tiers and its clients."""
        values: dict[str, Any] = self._call(wire.GetStats()).values
        return values

    def clear(self, scope: bytes) -> int:
        """Remove every chunk of a scope; returns how many there were. Waits for a scan at start to end."""
        return int(self._call(wire.Clear(scope), self.config.operation_timeout + CALL).count)

    def flush(self, timeout: float) -> bool:
        """Wait until what was committed is in every tier that takes it, or was given up; False: not in time."""
        return bool(self._call(wire.Flush(SHARE * timeout), timeout).count)

    def events(self, scope: bytes) -> list[tuple[str, str, bytes, int]]:
        """What changed since the last call: (stored, removed or cleared; tier; digest; group), in order.

        The first call subscribes. ("lost", "", b"", 0) comes first when changes in between are missing: too many, or
        another service.
        """
        link = self._current()
        server, cursor = self._cursors.get(scope, (link.server, 0))
        moved = server != link.server
        reply = self._call(wire.Events(scope, 0 if moved else cursor), CALL, link)
        self._cursors[scope] = (link.server, reply.cursor)
        lost = [("lost", "", b"", 0)] if moved or reply.lost else []
        return lost + [(kind, link.tiers[tier], digest, group) for kind, tier, digest, group in reply.events]

    def close(self) -> None:
        """Let go of everything and disconnect. What was handed out and is still in use stays mapped, and is the
        service's to take back when this process ends."""
        link = None if self._forked else self._link
        if link and not link.out:
            try:
                channel = link.take(time.monotonic() + CALL)
                channel.send(wire.Bye(), time.monotonic() + CALL)
                channel.close()
            except OSError:
                pass  # then it will notice
        self._stop()

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._link = None
            self._changed.notify_all()
        for channel in list(self._dialer.open):
            channel.shutdown()
        if self._last:
            self._last.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CALL)


def _ask(query: Query) -> wire.Ask:
    growing, trailing = wire.pack_need(query.need)
    return wire.Ask(
        query.owner, query.scope, query.digests, query.chunk_tokens, growing, trailing, query.lease, query.first
    )


def _answers(reply: Any) -> list[Answer]:
    return [Answer(each.chunks, dict(each.tiers), each.reason) for each in reply.found]


def _after_fork() -> None:
    for host in _HOSTS:
        host._forked = True
        for channel in list(host._dialer.open):
            channel.close()  # the parent's own stay open: a word from here would be taken for the parent's


def _at_exit() -> None:
    """A thread inside a native call must not meet the end of the interpreter; no Bye, since copies may still run."""
    for host in list(_HOSTS):
        if not host._forked:
            host._stop()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
