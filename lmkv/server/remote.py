"""One remote client as the cache server sees it: its greeting, its requests, its containers.

A container goes straight between the socket and its slot. What is put gets a slot before its bytes are read, or they
are read away; its checksums are checked part by part while the rest is on its way. A slot is held no longer than its
bytes may take on the way, so that a client that stalls keeps nothing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from lmkv import chunk
from lmkv.arena import PAGE, Slot
from lmkv.backends.base import Found, Status
from lmkv.errors import BadContainer, BadInput
from lmkv.index import Entry
from lmkv.keys import ChunkKey
from lmkv.leases import Reservation
from lmkv.loads import Wanted
from lmkv.server import data
from lmkv.server import protocol as wire
from lmkv.server.catalog import Catalog, Place
from lmkv.server.receive import receive_parts
from lmkv.server.stream import Stream
from lmkv.server.tcp import GREETING, Door, Guest

if TYPE_CHECKING:
    from lmkv.server.service import Service

GATHER_BYTES, GATHER_ITEMS = 1 << 20, 64  # small containers leave together
PAGE_KEYS = 1024  # of a listing, and those of one chunk more
SLOWEST = 1 << 20  # bytes a second
_FLAGS, _TOTAL = 10, 16  # where a container has its flags and its size
_PASSING = ("timeout", "error", "full", "read_only", "no slot", "failed")  # reasons that say nothing of the container

_sealing = threading.Lock()


class Remote:
    """Serves one connection until it ends."""

    def __init__(self, service: Service, door: Door, catalog: Catalog, guest: Guest) -> None:
        self.service, self.door, self.catalog, self.guest = service, door, catalog, guest
        self.config = service.config.server
        self.name = guest.address
        self._listing: list[Entry] = []
        self._waits = self._leaving = False
        self._lock = threading.Lock()
        self.stream: Stream[data.Request] = Stream(guest.sock, data.Request, data.MAX_GREETING)

    def serve(self) -> None:
        """Until the peer leaves, says what it must not, is silent for too long, or `leave` is called. OSError."""
        if not self._greet():
            return
        while self._next():
            message = self.stream.recv(self._limit())
            match message:
                case data.Get():
                    self._get(message)
                case data.Put():
                    self._put(message)
                case _:
                    self.stream.send(self._reply(message), self._limit())

    def leave(self) -> None:
        """End after the request under way, or at once where there is none."""
        with self._lock:
            self._leaving = True
            if self._waits:
                self.stream.shutdown(socket.SHUT_RD)

    def _greet(self) -> bool:
        deadline = time.monotonic() + GREETING
        self.guest.secure(self.door.access, deadline)
        if self.stream.sock is not self.guest.sock:
            self.stream = Stream(self.guest.sock, data.Request, data.MAX_GREETING)
        hello = self.stream.recv(deadline)
        if not isinstance(hello, data.Hello):
            raise ConnectionError(f"{type(hello).__name__} before Hello")
        if hello.version != data.VERSION:
            self._refuse("version", f"the server speaks version {data.VERSION}, not {hello.version}", deadline)
        elif not self.door.access.admits(hello.token):
            self._refuse("token", "the server does not know this token", deadline)
        elif not self.door.stay(self.guest):
            self._refuse("busy", "too many connections", deadline)
        else:
            self.name = f"{hello.client} at {self.guest.address}"
            self.stream.limit = data.MAX_FRAME
            host, most = socket.gethostname(), self.catalog.container_bytes
            self.stream.send(data.Welcome(data.VERSION, host, self.service.name, most), deadline)
            return True
        return False

    def _refuse(self, why: str, message: str, deadline: float) -> None:
        self.door.refused(self.guest, message)
        self.stream.send(data.Refused(why, message), deadline)

    def _next(self) -> bool:
        """Wait for a request; False: to leave."""
        with self._lock:
            if self._leaving:
                return False
            self._waits = True
        try:
            came = self.stream.wait(time.monotonic() + self.config.idle_timeout)
        finally:
            with self._lock:
                self._waits = False
        return came

    def _limit(self, nbytes: int = 0) -> float:
        """When ``nbytes`` must have passed."""
        return time.monotonic() + self.config.message_timeout + nbytes / SLOWEST

    def _reply(self, message: data.Request) -> data.Reply:
        catalog = self.catalog
        match message:
            case data.Contains():
                return data.Contained(catalog.contains(data.keys_of(message.keys)))
            case data.Delete():
                return data.Deleted(catalog.delete(data.keys_of(message.keys)))
            case data.Pin():
                ended = catalog.pin(message.owner, data.keys_of(message.keys), message.seconds)
                return data.Pinned(list(map(data.STATUSES.index, ended)))
            case data.Unpin():
                return data.Unpinned(catalog.unpin(message.owner, data.keys_of(message.keys)))
            case data.List():
                return self._list(message.cursor)
            case data.GetUsage():
                return data.Usage(*catalog.usage())
            case data.GetStats():
                return data.Stats(self.service.stats(catalog.storage))
            case data.Ping():
                return data.Pong()
        raise ConnectionError(f"{type(message).__name__} out of place")

    def _list(self, cursor: int) -> data.Page:
        if not cursor:
            self._listing = self.catalog.entries()
        found: list[Found] = []
        after = cursor
        while after < len(self._listing) and len(found) < PAGE_KEYS:
            found += self.catalog.describe(self._listing[after])
            after += 1
        if after >= len(self._listing):
            after, self._listing = 0, []
        packed = wire.pack_keys([each.key for each in found])
        return data.Page(after, packed, [each.nbytes for each in found], [each.created for each in found])

    # Reading.

    def _get(self, message: data.Get) -> None:
        deadline = time.monotonic() + message.timeout
        keys = data.keys_of(message.keys, len(message.capacities))
        storage = self.catalog.storage
        places = self.catalog.locate(keys)
        storage.touch(dict.fromkeys(place.entry for place in places if place and place.name.shard == 0))
        leaving = Leaving(self)
        try:
            with closing(self._containers(keys, deadline)) as found:
                for capacity, each in zip(message.capacities, found, strict=True):
                    leaving.add(each, capacity)
            leaving.send()
        finally:
            leaving.release()

    def _containers(self, keys: Sequence[ChunkKey], deadline: float) -> Generator[Outgoing, None, None]:
        """Each key's container, its slot held for the caller; those of lower tiers are read ahead."""
        at = 0
        while at < len(keys):
            place, slot = self._hold(keys[at])
            if place is None:
                yield Outgoing(keys[at], Status.MISSING)
                at += 1
            elif slot is not None:
                yield Outgoing(keys[at], Status.OK, slot=slot, nbytes=place.nbytes)
                at += 1
            elif not place.tier:
                yield Outgoing(keys[at], Status.ERROR, "the server is ending")
                at += 1
            else:
                wanted = []
                for key in keys[at:]:
                    place = self.catalog.find(key)
                    if place is None or not place.tier:
                        break
                    wanted.append(Wanted(place.entry, place.name, place.nbytes))
                for each in self._load(wanted, deadline):
                    yield each
                    at += 1

    def _hold(self, key: ChunkKey) -> tuple[Place | None, Slot | None]:
        storage = self.catalog.storage
        with storage.lock:
            place = self.catalog.find(key)
            return place, storage.cpu.hold(place.name) if place and not place.tier else None

    def _load(self, wanted: Sequence[Wanted], deadline: float) -> Iterator[Outgoing]:
        """Bring containers into host memory, up to and with the first that cannot be had."""
        storage, left = self.catalog.storage, deque(wanted)
        with closing(storage.fetch(wanted, deadline)) as runs:
            for run in runs:
                if isinstance(run, str):
                    yield Outgoing(left[0].key, _status(run), run)
                    return
                ready = deque(run)
                try:
                    while ready:
                        want, slot = left.popleft(), ready.popleft().slot
                        yield Outgoing(want.key, Status.OK, slot=slot, nbytes=want.raw_bytes)
                finally:
                    for each in ready:
                        storage.arena.release(each.slot)

    # Writing.

    def _put(self, message: data.Put) -> None:
        keys = data.keys_of(message.keys, len(message.sizes))
        stats, heads, untold = self.catalog.storage.stats, bytearray(), 0
        for key, nbytes in zip(keys, message.sizes, strict=True):
            if nbytes > self.catalog.container_bytes:
                raise ConnectionError(f"a container of {nbytes} bytes")
            status, detail = self._take(key, nbytes, self._limit(nbytes))
            stats.add(f"remote.put.{status.value}")
            stats.add("remote.put_bytes", nbytes if status is Status.OK else 0)
            heads += data.pack_head(status, 0, detail)
            untold += nbytes
            if untold >= GATHER_BYTES:
                self.stream.send_buffers([bytes(heads)], self._limit())
                heads, untold = bytearray(), 0
        if heads:
            self.stream.send_buffers([bytes(heads)], self._limit())
        self.catalog.storage.room.evict_ahead()

    def _take(self, key: ChunkKey, nbytes: int, deadline: float) -> tuple[Status, str]:
        """Receive one container, in any case to its end; what became of it."""
        page = memoryview(self.stream.recv_bytes(PAGE, deadline))
        header: chunk.Header | None = None
        if self.config.verify:
            try:
                header = _check(page, key, nbytes, self.catalog.storage.meanings is None)
            except BadContainer as bad:
                self.stream.drain(nbytes - PAGE, deadline)
                return Status.FULL if bad.reason == "expired" else Status.ERROR, str(bad)
            if header.codec == "raw":  # encoded ones are of all sizes
                self.catalog.give_class(nbytes)
        slot = self.catalog.reserve(key, nbytes, deadline)
        if isinstance(slot, str):
            self.stream.drain(nbytes - PAGE, deadline)
            return (Status.OK, "") if slot == "held" else (Status.FULL, slot)
        try:
            error = self._fill(slot, page, header, deadline)
        except BaseException:
            self.catalog.abort(slot)
            raise
        if error:
            self.catalog.abort(slot)
            return Status.ERROR, error
        if header and header.page_mask != (1 << header.pages) - 1:
            slot.pages = header.page_mask
        if self.catalog.commit(slot, *((header.expires, header.created) if header else ())):
            return Status.OK, ""
        return Status.TIMEOUT, "too late"

    def _fill(self, slot: Reservation, page: memoryview, header: chunk.Header | None, deadline: float) -> str:
        """Receive a container into its slot and check each part as it comes. Returns what is wrong with it, or ''."""
        view = slot.slot.view(slot.nbytes)
        view[:PAGE] = page
        if header is None:
            self.stream.recv_into(view[PAGE:], deadline)
            return ""
        return receive_parts(self.stream, view, header.parts, deadline)


def _check(page: memoryview, key: ChunkKey, nbytes: int, encoded: bool) -> chunk.Header:
    """The header of a container that may be stored, raw or, if that may be, ``encoded``. BadContainer."""
    header = chunk.parse(page, key)
    if header.total_bytes != nbytes:
        raise BadContainer("bounds", f"{header.total_bytes} bytes in {nbytes}")
    if not header.sealed:
        raise BadContainer("unsealed")
    if header.codec != "raw" and not encoded:
        raise BadContainer("codec", f"{header.codec}: engines of the server's host share its memory; leave codec out")
    if header.expires and header.expires <= time.time():
        raise BadContainer("expired")
    return header


def _status(reason: str) -> Status:
    """Of a container that could not be brought into host memory."""
    if reason == "timeout":
        return Status.TIMEOUT
    return Status.ERROR if reason.startswith(_PASSING) or reason.endswith("is failing") else Status.MISSING


class Outgoing(NamedTuple):
    """The answer for one key: how it ended, and if well a slot that is held for it."""

    key: ChunkKey
    status: Status
    detail: str = ""
    slot: Slot | None = None
    nbytes: int = 0


class Leaving:
    """Answers on their way out: small ones leave together. Each slot is released when its bytes have gone."""

    def __init__(self, remote: Remote) -> None:
        self.remote, self.storage = remote, remote.catalog.storage
        self._buffers: list[bytes | memoryview] = []
        self._slots: list[Slot] = []
        self._nbytes = 0

    def add(self, each: Outgoing, capacity: int) -> None:
        """Send this next, or soon. OSError."""
        status, detail = each.status, each.detail
        body: memoryview | None = None
        if each.slot is not None:
            self._slots.append(each.slot)
            if each.nbytes > capacity:
                status, detail = Status.ERROR, "short buffer"
            else:
                try:
                    body = self._body(each, each.slot)
                except (BadContainer, BadInput) as error:
                    status, detail = Status.MISSING, str(error)
        self._buffers.append(data.pack_head(status, len(body) if body else 0, detail))
        self.storage.stats.add(f"remote.get.{status.value}")
        if body:
            self._buffers.append(body)
            self._nbytes += len(body)
        if self._nbytes >= GATHER_BYTES or len(self._buffers) >= GATHER_ITEMS:
            self.send()

    def _body(self, each: Outgoing, slot: Slot) -> memoryview:
        """The container's bytes, with their checksums, which engines of this host have left out. BadContainer."""
        view = slot.view(slot.nbytes)[: each.nbytes]
        if self.remote.config.verify:
            if not view[_FLAGS] & chunk.SEALED:
                with _sealing:
                    chunk.seal(view, chunk.parse(view))
            if int.from_bytes(view[_TOTAL : _TOTAL + 8], "little") != len(view):
                raise BadContainer("bounds", "replaced meanwhile")
        return view

    def send(self) -> None:
        """Send what is left. OSError."""
        if self._buffers:
            limit = self.remote._limit(self._nbytes)
            self.remote.stream.send_buffers(self._buffers, limit)
            self.storage.stats.add("remote.get_bytes", self._nbytes)
        self.release()

    def release(self) -> None:
        """Let go of everything."""
        self._buffers, self._nbytes = [], 0
        slots, self._slots = self._slots, []
        for slot in slots:
            self.storage.arena.release(slot)
