"""One client process as the service sees it: what it holds, and the requests that come over its connections.

Bytes of a slot may be touched by the client until it says that it lets go, or its process is gone. A closed socket
proves neither, so what a *session* holds outlives its connections; leases, which promise and touch nothing, do not.
"""

from __future__ import annotations

import itertools
import logging
import select
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from lmkv.errors import ConfigError, LmkvError
from lmkv.index import Entry
from lmkv.keys import DIGEST_BYTES, ChunkKey, ChunkKeys
from lmkv.leases import Reservation
from lmkv.loads import Ready, Wanted
from lmkv.plan import Plan
from lmkv.server import protocol as wire
from lmkv.storage import StorageManager
from lmkv.writer import Tally

if TYPE_CHECKING:
    from lmkv.server.service import Service

log = logging.getLogger(__name__)
Hold = Reservation | list[Ready]
_numbers = itertools.count()


class Session:
    """What one client process holds. ``pidfd`` (ours) tells when it is gone."""

    def __init__(self, service: Service, key: tuple[int, bytes], name: str, pidfd: int) -> None:
        self.service, self.key, self.name, self.pidfd = service, key, name, pidfd
        self.prefix = f"{next(_numbers)} "
        self.ended = False
        self.connections: set[Connection] = set()
        self._holds: dict[int, Hold] = {}
        self._lock = threading.Lock()

    def hold(self, number: int, what: Hold) -> None:
        """Note a hold under the client's number. ConnectionError, and let go: the number is taken, or all is over."""
        with self._lock:
            good = not self.ended and number not in self._holds
            if good:
                self._holds[number] = what
        if not good:
            self._release(what)
            raise ConnectionError(f"number {number} is taken" if not self.ended else "the session has ended")

    def take(self, number: int) -> Hold | None:
        """The hold of that number, which the caller now has to end."""
        with self._lock:
            return self._holds.pop(number, None)

    def let_go(self, numbers: Iterable[int]) -> int:
        """End holds; returns how many there were."""
        found = [what for what in map(self.take, numbers) if what is not None]
        for what in found:
            self._release(what)
        return len(found)

    def _release(self, what: Hold) -> None:
        if storage := self.service.storage:
            if isinstance(what, Reservation):
                storage.abort(what)
            else:
                storage.release(what)

    @property
    def holding(self) -> int:
        """Reservations and runs held."""
        return len(self._holds)

    def gone(self) -> bool:
        """The client's process has ended."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def drop_leases(self) -> None:
        """End every lease of this client."""
        if self.service.storage:
            self.service.storage.leases.drop_all(self.prefix)

    def end(self) -> None:
        """Let go of everything, for good."""
        with self._lock:
            self.ended = True
            left = list(self._holds)
        self.drop_leases()
        self.let_go(left)


class Connection:
    """Serves one socket on a thread of its own, a request at a time."""

    def __init__(self, service: Service, channel: wire.Channel[wire.Request], peer: int, pidfd: int) -> None:
        self.service, self.channel, self.peer, self.pidfd = service, channel, peer, pidfd
        self.session: Session | None = None

    def serve(self) -> None:
        """Until the peer leaves or says what it must not."""
        try:
            session = self._greet()
            while session:
                message = self.channel.recv()
                if isinstance(message, wire.Bye):
                    self.service.end(session)
                    break
                self._answer(session, message)
        except OSError as error:
            log.info("connection of process %d: %s", self.peer, error)
        except Exception:
            log.exception("connection of process %d", self.peer)
        finally:
            self.service.closed(self)

    def _greet(self) -> Session | None:
        hello = self.channel.recv()
        if not isinstance(hello, wire.Hello):
            raise ConnectionError(f"{type(hello).__name__} before Hello")
        if hello.version != wire.VERSION:
            text = f"the host service speaks version {wire.VERSION}, {hello.client} version {hello.version}: stop it"
            self.channel.send(wire.Refused("server", text))
            return None
        session = self.service.join(self, hello)
        self.channel.send(wire.Welcome(wire.VERSION, self.service.name))
        return session

    def _answer(self, session: Session, message: wire.Request) -> None:
        storage = self.service.storage
        if isinstance(message, wire.Register):
            self._register(message)
        elif storage is None:
            raise ConnectionError(f"{type(message).__name__} before Register")
        elif isinstance(message, wire.Fetch):
            self._fetch(storage, session, message)
        elif isinstance(message, wire.Reserve):
            self._reserve(storage, session, message)
        else:
            reply: wire.Message
            try:
                reply = self._reply(storage, session, message)
            except LmkvError as error:
                reply = wire.Refused("", str(error))
            self.channel.send(reply)

    def _reply(self, storage: StorageManager, session: Session, message: wire.Request) -> wire.Message:
        match message:
            case wire.Lookup():
                return wire.Answers([self._lookup(storage, session, ask) for ask in message.asks])
            case wire.Release():
                storage.leases.drop([session.prefix + owner for owner in message.owners])
                return wire.Done(len(message.owners))
            case wire.Commit():
                return wire.Committed(self._commit(storage, session, message))
            case wire.LetGo():
                return wire.Done(session.let_go(message.numbers))
            case wire.Clear():
                clearing = storage.calls.submit(
                    storage.clear, lambda entry: entry.scope == message.scope, None, message.scope
                )
                return wire.Done(clearing.result() if message.wait else 0)
            case wire.Flush():
                return wire.Done(int(storage.flush(message.timeout)))
            case wire.Events():
                return wire.Changes(*self.service.rings.since(message.scope, message.cursor))
            case wire.GetStats():
                return wire.Stats(self.service.stats(storage))
        raise ConnectionError(f"{type(message).__name__} out of place")

    def _register(self, message: wire.Register) -> None:
        try:
            meanings = {int.from_bytes(geometry, "little"): groups for geometry, groups in message.meanings}
            storage = self.service.prepare(message.sizes, meanings)
        except ConfigError as error:
            self.channel.send(wire.Refused(error.key, error.message))
            return
        except LmkvError as error:
            self.channel.send(wire.Refused("tiers", str(error)))
            return
        arena, settings = storage.arena, self.service.settings
        self.channel.send(wire.Registered(arena.capacity, list(storage.names), settings), fds=[arena.fd])

    def _lookup(self, storage: StorageManager, session: Session, ask: wire.Ask) -> wire.Found:
        packed = ask.digests
        if len(packed) % DIGEST_BYTES:
            raise ConnectionError(f"{len(packed)} bytes of digests")
        digests = [packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)]
        keys = ChunkKeys.from_digests(digests, ask.chunk_tokens)
        plan = storage.lookup(ask.scope, keys, wire.unpack_need(ask.growing, ask.trailing))
        storage.stats.add("lookups")
        storage.stats.add("lookup_tokens", keys.tokens)
        storage.stats.add("hit_tokens", plan.tokens)
        if ask.lease:
            plan = self._lease(storage, session.prefix + ask.owner, plan, ask)
        return wire.Found(plan.places, plan.reason)

    def _lease(self, storage: StorageManager, owner: str, plan: Plan, ask: wire.Ask) -> Plan:
        """Keep what the plan adds to the chunks the client has itself; the plan may become shorter."""
        have = ask.first
        if len(plan.entries) <= have:
            storage.leases.drop([owner])
            return plan
        # Windows and states look back over chunks the client has, so that their boundary needs all entries.
        entries = plan.entries if plan.need.trailing else (None,) * have + plan.entries[have:]
        leased = storage.leases.acquire(owner, Plan(plan.keys, plan.need, entries, plan.reason, plan.names), ask.lease)
        return leased.plan

    def _fetch(self, storage: StorageManager, session: Session, message: wire.Fetch) -> None:
        deadline = time.monotonic() + message.timeout
        keys = wire.unpack_keys(message.keys, len(message.sizes))
        wanted: list[Wanted] = []
        reason = ""
        for key, nbytes in zip(keys, message.sizes, strict=True):
            entry = storage.index.get(key)
            if entry is None or not storage.arena.is_exact(nbytes):
                reason = "not stored" if entry is None else "not registered"
                break
            wanted.append(Wanted(entry, key, nbytes))
        storage.stats.add("retrieves")
        self._touch(storage, keys)  # first, so that making room for the last chunks does not evict the first
        got = 0
        with closing(storage.fetch(wanted, deadline)) as runs:
            for run in runs:
                if isinstance(run, str):
                    reason = run
                    storage.stats.add("retrieve_failures")
                    break
                if any(ready.slot.nbytes < want.raw_bytes for ready, want in zip(run, wanted[got:], strict=False)):
                    storage.release(run)
                    reason = "bounds"
                    break
                got += len(run)
                if not self._deliver(storage, session, message.number, run):
                    break
        storage.write_through(keys[:got], Tally())
        self.channel.send(wire.End(reason))

    def _deliver(self, storage: StorageManager, session: Session, number: int, run: Sequence[Ready]) -> bool:
        """Hand over a run and wait until it is let go; False: no more is wanted."""
        base = storage.arena.base
        session.hold(number, list(run))
        self._send_held(session, [number], wire.Run([(ready.slot.address - base, ready.tier) for ready in run]))
        ack = self.channel.recv()
        if not isinstance(ack, wire.Ack):
            raise ConnectionError(f"{type(ack).__name__} instead of Ack")
        session.let_go([number])
        return ack.more

    def _send_held(self, session: Session, numbers: Iterable[int], message: wire.Message) -> None:
        """Send what tells of new holds; a client that cannot hear of them does not have them."""
        try:
            self.channel.send(message)
        except BaseException:
            session.let_go(numbers)
            raise

    def _reserve(self, storage: StorageManager, session: Session, message: wire.Reserve) -> None:
        deadline = time.monotonic() + message.timeout
        keys = wire.unpack_keys(message.keys, len(message.sizes))
        slots: list[int | str] = []
        held: list[ChunkKey] = []
        for number, (key, nbytes) in enumerate(zip(keys, message.sizes, strict=True), message.first):
            if not storage.arena.is_exact(nbytes):
                slots.append("not registered")
                continue
            if slots and slots[-1] == "no slot":  # eviction has tried already
                slots.append("no slot")
                continue
            got = storage.reserve(session.prefix + message.owner, key, nbytes, deadline)
            if isinstance(got, Reservation):
                session.hold(number, got)
                slots.append(got.slot.address - storage.arena.base)
            else:
                slots.append(got)
                held += [key] if got == "held" else []
        self._touch(storage, held)
        storage.write_through(held, Tally())
        numbers = range(message.first, message.first + len(keys))
        self._send_held(session, numbers, wire.Granted(slots))

    def _commit(self, storage: StorageManager, session: Session, message: wire.Commit) -> list[bool]:
        if len(message.masks) != len(message.numbers):
            raise ConnectionError("as many masks as numbers are needed")
        taken: list[Reservation | None] = []
        for number, mask in zip(message.numbers, message.masks, strict=True):
            what = session.take(number)
            if isinstance(what, list):
                storage.release(what)
                what = None
            if what:
                what.pages = wire.to_mask(mask)
            taken.append(what)
        mine = [each for each in taken if each]
        done = iter(storage.commit(mine, message.expires, Tally()))
        result = [each is not None and next(done) for each in taken]
        self._touch(storage, [each.key for each in mine])
        storage.room.evict_ahead()
        storage.stats.add("stored_chunks", sum(result))
        return result

    def _touch(self, storage: StorageManager, keys: Iterable[ChunkKey]) -> None:
        """Chunks were used: once, however many groups and shards ask for their parts."""
        used: dict[bytes, Entry | None] = {key.digest: storage.index.get(key) for key in keys if key.shard == 0}
        storage.touch(used.values())
