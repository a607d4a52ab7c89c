"""`Host`: the host service as an engine's process uses it.

    host = Host()
    host.register([container_bytes])
    answer = host.lookup(Query("request-1", scope, digests, 256, need, lease=10.0))
    for run in host.fetch(keys, sizes, timeout=5.0):
        ...                                         # copy out of each slot: the bytes lie in this process

No call waits longer than its timeout, one second where it has none. What fails raises Unavailable at once or in time,
and a thread in the background finds the service again, or starts another. After fork the child's calls raise
Unavailable("forked").
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmkv.errors import BadInput, Unavailable
from lmkv.keys import DIGEST_BYTES, SCOPE_BYTES, ChunkKey
from lmkv.plan import Need
from lmkv.server import protocol as wire
from lmkv.server.caller import CALL, Caller
from lmkv.server.link import Channel, Fetched, Reserved
from lmkv.server.lookups import Asked

__all__ = ["Answer", "Fetched", "Host", "Query", "Reserved", "Unavailable"]

SHARE = 0.9  # of a call's timeout, for the service to answer in an orderly way
BATCH = 64
LOST = ("lost", "", b"", 0)


@dataclass(frozen=True)
class Query:
    """A lookup. digests: 32 bytes for each chunk of the prompt. lease: seconds to keep what is found for ``owner``,
    0 for none. first: chunks the caller has itself, which need no lease.
    """

    owner: str
    scope: bytes
    digests: bytes
    chunk_tokens: int
    need: Need
    lease: float = 0.0
    first: int = 0

    def ask(self) -> wire.Ask:
        """As it travels. BadInput."""
        if len(self.scope) != SCOPE_BYTES or len(self.digests) % DIGEST_BYTES:
            raise BadInput(f"a scope of {len(self.scope)} bytes, {len(self.digests)} bytes of digests")
        growing, trailing = wire.pack_need(self.need)
        lease = wire.seconds(self.lease)
        return wire.Ask(
            wire.owner(self.owner), self.scope, self.digests, self.chunk_tokens, growing, trailing, lease, self.first
        )  # fmt: skip


class Answer(NamedTuple):
    """places: for each chunk that can be restored, from the first on, the number (in `Host.tiers`) of the slowest tier
    it needs. reason: why it ends there."""

    places: bytes
    reason: str

    @property
    def chunks(self) -> int:
        """How many chunks can be restored."""
        return len(self.places)


class Host(Caller):
    """This process's view of the host service. Thread-safe.

    socket: its path, by default ``$XDG_RUNTIME_DIR/lmkv/server.sock`` or ``/tmp/lmkv-<uid>/server.sock``. config, and
    over it linger: what a service is started with if none runs. spawn: start one. name: of this client, for people.
    patience: seconds after which a service that leaves a `lookup_later` unanswered counts as lost, at least 1.
    """

    def __init__(self, socket: str = "", **options: Any) -> None:
        self._cursors: dict[bytes, tuple[str, int]] = {}
        self._queue: deque[bytes | Reserved] = deque()
        super().__init__(socket, **options)

    # Lookup.

    def lookup(self, query: Query, timeout: float = CALL) -> Answer:
        """Ask now. Unavailable."""
        return _answers(self._call(wire.Lookup([query.ask()]), timeout))[0]

    def lookup_later(self, query: Query) -> Asked:
        """Ask, and go on: never blocks, and needs no thread to run in between. Failures are in what is returned."""
        if self.available:
            return self._asker.ask(wire.Lookup([query.ask()]), lambda reply: _answers(reply)[0])
        asked = Asked(self._asker, _answers)
        try:
            self._current()
            raise Unavailable(self._why)
        except Unavailable as error:
            asked.settle(None, error)
        return asked

    def release(self, *owners: str) -> None:
        """End their leases, soon; never blocks and never fails: a lease also ends by itself."""
        if self.available:
            self._asker.ask(wire.Release([wire.owner(name) for name in owners]), lambda reply: reply)

    def _later(self, *items: bytes | Reserved) -> None:
        if not (self._forked or self._closed):
            with self._changed:
                self._queue.extend(items)
                self._changed.notify_all()

    def _send_later(self) -> None:
        """Send what was queued, in order, in as few messages as that takes."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            if not batch:
                return
            slots = [item for item in batch if isinstance(item, Reserved)]
            try:
                if slots:
                    self._call(wire.LetGo([each.number for each in slots]))
            except Exception:
                for each in slots:
                    each.link.back([each.number], known=False)
            for scope in batch:
                if isinstance(scope, bytes):
                    with suppress(Unavailable):
                        self._call(wire.Clear(scope, False))
            del batch, slots

    # Reading.

    def fetch(self, keys: Sequence[ChunkKey], sizes: Sequence[int], timeout: float) -> Iterator[list[Fetched] | str]:
        """Bring containers into host memory and lend them: runs of consecutive ``keys``, in order.

        A run may be read until the iterator is advanced or closed. If not all can be had, the reason comes last, a
        string. sizes: bytes of each once decoded, as registered. Unavailable while iterating: the runs before were
        good.
        """
        link, deadline = self._current(), time.monotonic() + timeout
        (number,) = self._dialer.numbers(1)
        link.out.add(number)
        channel: Channel | None = None
        known, at, reason = False, 0, ""
        try:
            channel = link.take(deadline)
            request = wire.Fetch(number, wire.pack_keys(keys), list(sizes), wire.seconds(SHARE * timeout))
            channel.send(request, deadline)
            while isinstance(reply := channel.recv(deadline), wire.Run):
                places = zip(reply.slots, sizes[at:], strict=False)
                base, at = link.memory.address, at + len(reply.slots)
                yield [Fetched(base + offset, nbytes, tier, link) for (offset, tier), nbytes in places]
                if at < len(keys) and time.monotonic() >= deadline:
                    reason, reply = "timeout", _finish(channel)
                    break
                channel.send(wire.Ack(True), time.monotonic() + CALL)
                deadline = max(deadline, time.monotonic() + CALL) if at == len(keys) else deadline
            if not isinstance(reply, wire.End):
                raise ConnectionError(f"{type(reply).__name__} instead of a run")
            known, reason = True, reason or reply.reason
        except GeneratorExit:
            with suppress(OSError):
                known = channel is not None and isinstance(_finish(channel), wire.End)
            raise
        except OSError as error:
            raise self._lose(link, error) from None
        finally:
            link.back([number], known)
            if channel and known:
                self._give(link, channel)
            elif channel:
                channel.close()
        if reason:
            yield reason

    # Writing.

    def reserve(self, owner: str, items: Sequence[tuple[ChunkKey, int]], timeout: float) -> list[Reserved | str]:
        """Slots to fill and commit within ``timeout`` seconds: (key, bytes as registered) each.

        A string instead: held (stored already), in flight (somebody is writing it), no slot, not registered.
        Whatever is returned must be committed or aborted, also after the time is over. Unavailable.
        """
        if not items:
            return []
        link, numbers = self._current(), self._dialer.numbers(len(items))
        keys, sizes = wire.pack_keys([key for key, _ in items]), [nbytes for _, nbytes in items]
        try:
            reply = self._call(wire.Reserve(owner, numbers[0], keys, sizes, wire.seconds(timeout)), CALL, link)
        except BaseException:
            link.back(numbers, known=False)
            raise
        got = [
            slot if isinstance(slot, str) else Reserved(link.memory.address + slot, nbytes, number, link)
            for number, nbytes, slot in zip(numbers, sizes, reply.slots, strict=True)
        ]
        link.out.update(each.number for each in got if isinstance(each, Reserved))
        return got

    def commit(self, reserved: Sequence[Reserved], masks: Sequence[int] = (), expires: int = 0) -> list[bool]:
        """Publish filled slots, in prefix order. masks: pages each holds, 0 (or none given) for all.

        expires: unix seconds, 0 never. False: it came too late, or the service is another by now. Unavailable: it is
        not known whether they were published. In any case none may be touched any more.
        """
        self._check()
        link = self._last
        mine = [(n, each) for n, each in enumerate(reserved) if each.link is link]
        done = [False] * len(reserved)
        if link and mine:
            numbers = [each.number for _, each in mine]
            packed = [wire.to_bytes(masks[n] if masks else 0) for n, _ in mine]
            known = False
            try:
                reply = self._call(wire.Commit(numbers, packed, expires), CALL, link)
                known = True
            finally:
                link.back(numbers, known)
            for (n, _), published in zip(mine, reply.done, strict=True):
                done[n] = published
        return done

    def abort(self, reserved: Sequence[Reserved]) -> None:
        """Give slots back unfilled; harmless after commit. Never blocks and never fails."""
        mine = [each for each in reserved if each.number in each.link.out]
        for each in mine:
            each.link.out.discard(each.number)
        self._later(*mine)

    # The rest.

    def stats(self) -> dict[str, Any]:
        """Counters since the service's start, its tiers and its clients."""
        values: dict[str, Any] = self._call(wire.GetStats()).values
        return values

    def clear(self, scope: bytes) -> int:
        """Remove every chunk of a scope; returns how many there were. Waits for a scan at start to end."""
        return int(self._call(wire.Clear(scope, True), self.config.operation_timeout + CALL).count)

    def clear_later(self, scope: bytes) -> None:
        """The same in the background; never blocks and never fails, and may be forgotten with the service."""
        self._later(scope)

    def flush(self, timeout: float) -> bool:
        """Wait until what was committed is in every tier that takes it, or was given up; False: not in time."""
        return bool(self._call(wire.Flush(wire.seconds(SHARE * timeout)), timeout).count)

    def events(self, scope: bytes) -> list[tuple[str, str, bytes, int]]:
        """What changed since the last call: (stored, removed or cleared; tier; digest; group), in order.

        The first call subscribes. LOST comes first when changes are missing: too many, or another service.
        """
        link = self._current()
        server, cursor = self._cursors.get(scope, (link.server, 0))
        moved = server != link.server
        reply = self._call(wire.Events(scope, 0 if moved else cursor), CALL, link)
        self._cursors[scope] = (link.server, reply.cursor)
        found = [(kind, link.tiers[tier], digest, group) for kind, tier, digest, group in reply.events]
        return [LOST, *found] if moved or reply.lost else found


def _answers(reply: Any) -> list[Answer]:
    return [Answer(each.places, each.reason) for each in reply.found]


def _finish(channel: Channel) -> wire.Reply:
    """Let a run go and want no more. OSError."""
    deadline = time.monotonic() + CALL
    channel.send(wire.Ack(False), deadline)
    return channel.recv(deadline)
