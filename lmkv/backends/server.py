"""Cache servers: `lmkv server --listen` on other machines, one or several, each key on one of them.

All parts of a chunk are on the server that ranks highest for its digest (rendezvous hashing), so one more server takes
over its share of the chunks and moves no others. Each server is asked on its own: one that is down or late makes its
own keys fail, in time, and no others. Containers go straight between the sockets and the given memory.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from typing import TypeVar
from urllib.parse import urlencode

import numpy as np

from lmkv import chunk
from lmkv.backends.base import ALIGNMENT, Backend, Found, Health, Read, Result, Status, Usage, Write
from lmkv.errors import BackendError, ConfigError
from lmkv.keys import ChunkKey
from lmkv.server import data
from lmkv.server import protocol as wire
from lmkv.server.peer import Credentials, Peer, Replies, check_credentials, client_context
from lmkv.server.receive import receive_checked
from lmkv.server.tcp import split_address
from lmkv.units import parse_seconds
from lmkv.workers import Workers

T = TypeVar("T")
A = TypeVar("A")
R = TypeVar("R")

KEY = "tiers.url"
SHARE = 0.9  # of what is left, for the server to answer in an orderly way
BATCH = 1024  # containers in one message
THREADS = 4  # for each server, where there are several
_CLOSED = Result(Status.ERROR, detail="closed")
_SWITCH = dict.fromkeys(("0", "off", "false", False), False) | dict.fromkeys(("1", "on", "true", True), True)


class ServerBackend(Backend):
    """``lmkv://host:port,host2:port2``. Everybody who shares these servers writes their addresses alike.

    timeout: of one read, write or delete. lookup_timeout: of one `contains`. token_file, token_env: where the token is
    that the servers want. tls: speak TLS, and check the servers' certificates against ``ca`` (a file; else the
    system's). cert, key: our own certificate. Servers keep containers as engines encode them.
    """

    shared = True
    remote = True

    def __init__(
        self, url: str, *, timeout: float | str = "10s", lookup_timeout: float | str = "1s", token_file: str = "",
        token_env: str = "", tls: bool | str = False, ca: str = "", cert: str = "", key: str = "",
    ) -> None:  # fmt: skip
        scheme, _, place = url.partition("://")
        if "@" in place:
            raise ConfigError(KEY, "lmkv: a secret has no place in a URL; use token_file= or token_env=")
        names = place.split(",")
        if scheme != "lmkv" or len(set(names)) < len(names) or len(names) > 256:
            raise ConfigError(KEY, f"{url!r}: write lmkv://host:port or lmkv://a:1,b:1, and no server twice")
        if tls not in _SWITCH or (token_file and token_env):
            raise ConfigError(KEY, f"lmkv: tls={tls!r} must be 0 or 1; token_file or token_env, not both")
        self._timeout, self._lookup_timeout = _seconds("timeout", timeout), _seconds("lookup_timeout", lookup_timeout)
        context = client_context(ca, cert, key, KEY) if _SWITCH[tls] else None
        if (ca or cert or key) and not context:
            raise ConfigError(KEY, "lmkv: ca, cert and key need tls=1")
        credentials = check_credentials(Credentials(token_file, token_env, context), KEY)
        self._peers = [Peer(name, *split_address(name, KEY), credentials) for name in names]
        for number, peer in enumerate(self._peers):
            peer.on_lost = partial(self._lost, number)
        given = {
            "timeout": "" if self._timeout == 10 else f"{self._timeout:g}s",
            "lookup_timeout": "" if self._lookup_timeout == 1 else f"{self._lookup_timeout:g}s",
            "token_file": token_file, "token_env": token_env, "tls": "1" if context else "",
            "ca": ca, "cert": cert, "key": key,
        }  # fmt: skip
        query = urlencode({name: value for name, value in given.items() if value}, safe="/")
        self.url = f"lmkv://{place}{'?' * bool(query)}{query}"
        self._seeds = np.array([[_seed(name)] for name in names], np.uint64)
        self._usage = [(0, 0)] * len(names)
        self._closed = False
        self._workers: dict[int, Workers] = {}
        self._lock = threading.Lock()
        _opened.add(self)

    def contains(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        deadline = time.monotonic() + self._lookup_timeout

        def ask(peer: Peer, some: Sequence[ChunkKey]) -> list[int | None]:
            sizes = _ask_each(peer, some, data.Contains, data.Contained, lambda reply: reply.sizes, deadline)
            return [size if size > 0 and size % ALIGNMENT == 0 else None for size in sizes]

        return self._each(keys, keys, ask, lambda _: None)

    def read(self, reads: Sequence[Read]) -> list[Result]:
        deadline = time.monotonic() + self._timeout

        def load(peer: Peer, some: Sequence[Read]) -> list[Result]:
            return _batches(some, lambda batch, results: peer.call(_Reading(batch, results, deadline), deadline))

        return self._each([each.key for each in reads], reads, load, _failed)

    def write(self, writes: Sequence[Write]) -> list[Result]:
        deadline = time.monotonic() + self._timeout

        def store(peer: Peer, some: Sequence[Write]) -> list[Result]:
            return _batches(some, lambda batch, results: peer.call(_Writing(peer, batch, results, deadline), deadline))

        return self._each([each.key for each in writes], writes, store, _failed)

    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        deadline = time.monotonic() + self._timeout

        def remove(peer: Peer, some: Sequence[ChunkKey]) -> list[bool]:
            return _ask_each(peer, some, data.Delete, data.Deleted, lambda reply: reply.done, deadline)

        return self._each(keys, keys, remove, lambda _: False)

    def pin(self, owner: str, keys: Sequence[ChunkKey], seconds: float) -> list[Status]:
        """Ask the servers to keep the chunks of these containers for ``seconds``, a day at most; again: from now on.

        OK, MISSING, or FULL where the server keeps no more for its clients. owner: whose pins these are.
        """
        deadline = time.monotonic() + self._timeout

        def keep(peer: Peer, some: Sequence[ChunkKey]) -> list[Status]:
            make = partial(data.Pin, owner, seconds=seconds)
            return [
                data.STATUSES[end]
                for end in _ask_each(peer, some, make, data.Pinned, lambda reply: reply.ended, deadline)
            ]

        return self._each(keys, keys, keep, lambda error: _failed(error).status)

    def unpin(self, owner: str, keys: Sequence[ChunkKey]) -> list[bool]:
        """Undo `pin`; True where this owner had pinned it."""
        deadline = time.monotonic() + self._timeout

        def let_go(peer: Peer, some: Sequence[ChunkKey]) -> list[bool]:
            make = partial(data.Unpin, owner)
            return _ask_each(peer, some, make, data.Unpinned, lambda reply: reply.done, deadline)

        return self._each(keys, keys, let_go, lambda _: False)

    def scan(self) -> Iterator[list[Found]]:
        failed: OSError | None = None
        for number, peer in enumerate(self._peers):
            try:
                for found in self._list(peer):
                    places = self._places([each.key for each in found])
                    if mine := [each for each, place in zip(found, places, strict=True) if place == number]:
                        yield mine
            except OSError as error:  # noqa: PERF203
                failed = error
        if failed and not self._closed:
            raise BackendError(f"lmkv: cannot list {self.url}: {_why(failed)}") from failed

    def _list(self, peer: Peer) -> Iterator[list[Found]]:
        if self._closed:
            return
        stream = peer.take(time.monotonic() + self._timeout)
        try:
            cursor, more = 0, True
            while more and not self._closed:
                deadline = time.monotonic() + self._timeout
                stream.send(data.List(cursor), deadline)
                reply = stream.recv(deadline)
                if not isinstance(reply, data.Page) or not len(reply.sizes) == len(reply.created):
                    raise ConnectionError("no page of a listing")
                keys = data.keys_of(reply.keys, len(reply.sizes))
                yield [Found(*each) for each in zip(keys, reply.sizes, reply.created, strict=True)]
                cursor = reply.cursor
                more = cursor > 0
        finally:
            stream.close()

    def usage(self) -> Usage:
        """As the servers count; what cannot be asked now counts as when it was asked last."""
        deadline = time.monotonic() + self._lookup_timeout

        def ask(number: int) -> tuple[int, int]:
            reply = _ask(self._peers[number], data.GetUsage(), data.Usage, deadline)
            return reply.used, reply.objects

        answers = self._all([] if self._closed else list(range(len(self._peers))), ask)
        for number, answer in answers.items():
            if not isinstance(answer, BaseException):
                self._usage[number] = answer
        used, objects = (sum(column) for column in zip(*self._usage, strict=True))
        return Usage(used, objects, None)

    def health(self) -> Health:
        """Every server stores a small container, gives it back and deletes it."""
        if self._closed:
            return Health(False, "closed")
        deadline = time.monotonic() + self._timeout
        answers = self._all(list(range(len(self._peers))), lambda number: _probe(self._peers[number], deadline))
        texts = [answer if isinstance(answer, str) else _why(answer) for answer in answers.values()]
        notes = [f"{peer.name}: {text}" for peer, text in zip(self._peers, texts, strict=True) if text]
        return Health(not notes, "; ".join(notes) or "ok")

    def close(self) -> None:
        self._closed = True
        for peer in self._peers:
            peer.close()
        for workers in self._workers.values():
            workers.close(time.monotonic())

    def attend(self) -> None:
        for peer in self._peers:
            peer.attend()

    def _lost(self, number: int) -> None:
        """What one server had may be gone, as it was lost or began anew."""
        if self.on_reset:
            self.on_reset(lambda keys: [place == number for place in self._places(keys)])

    # To which server, and several at once.

    def _places(self, keys: Sequence[ChunkKey]) -> list[int]:
        """The number of each key's server: the highest of the hashes of its digest with each server's seed."""
        if len(self._peers) == 1 or not keys:
            return [0] * len(keys)
        words = np.frombuffer(b"".join([key.digest for key in keys]), "<u8").reshape(len(keys), -1)
        mixed = np.bitwise_xor.reduce(words, axis=1) ^ self._seeds
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        places: list[int] = (mixed ^ (mixed >> np.uint64(31))).argmax(axis=0).tolist()
        return places

    def _each(
        self, keys: Sequence[ChunkKey], items: Sequence[A], call: Callable[[Peer, Sequence[A]], list[R]],
        failed: Callable[[BaseException], R],
    ) -> list[R]:  # fmt: skip
        """``call`` for the items of each server, on all servers at once; the answers in the items' order."""
        if self._closed:
            return [failed(ConnectionError("closed"))] * len(items)
        mine: dict[int, list[int]] = {}
        for at, place in enumerate(self._places(keys)):
            mine.setdefault(place, []).append(at)
        found = self._all(list(mine), lambda place: call(self._peers[place], [items[at] for at in mine[place]]))
        results: dict[int, R] = {}
        for place, answer in found.items():
            for number, at in enumerate(mine[place]):
                results[at] = failed(answer) if isinstance(answer, BaseException) else answer[number]
        return [results[at] for at in range(len(items))]

    def _all(self, places: list[int], call: Callable[[int], T]) -> dict[int, T | BaseException]:
        """``call`` for several servers at once, the last of them by this thread."""
        waiting: dict[int, Future[T]] = {place: self._pool(place).submit(call, place) for place in places[:-1]}
        found: dict[int, T | BaseException] = {}
        if places:
            try:
                found[places[-1]] = call(places[-1])
            except Exception as error:
                found[places[-1]] = error
        for place, future in waiting.items():
            found[place] = future.exception() or future.result()
        return {place: found[place] for place in places}

    def _pool(self, place: int) -> Workers:
        with self._lock:
            if place not in self._workers:
                self._workers[place] = Workers(self._peers[place].name, THREADS)
            return self._workers[place]

    def _after_fork(self) -> None:
        self._workers, self._lock = {}, threading.Lock()
        for peer in self._peers:
            peer.after_fork()


_opened: weakref.WeakSet[ServerBackend] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: list(map(ServerBackend._after_fork, _opened)))


class _Reading:
    """The work of one Get; what has come is in ``results``, and stays there if the rest does not come."""

    def __init__(self, reads: Sequence[Read], results: list[Result], deadline: float) -> None:
        self.reads, self.results, self.deadline = reads, results, deadline

    def __call__(self, stream: Replies) -> None:
        self.results.clear()
        reads, deadline = self.reads, self.deadline
        capacities = [0 if each.into.readonly or not each.into.c_contiguous else each.into.nbytes for each in reads]
        keys, left = wire.pack_keys([each.key for each in reads]), SHARE * (deadline - time.monotonic())
        stream.send(data.Get(keys, capacities, wire.seconds(left)), deadline)
        for read, capacity in zip(reads, capacities, strict=True):
            status, detail, nbytes = data.unpack_head(stream.recv_bytes(data.HEAD_BYTES, deadline))
            text = stream.recv_bytes(detail, deadline).decode(errors="replace") if detail else ""
            if status is not Status.OK:
                self.results.append(Result(status, detail=text))
                continue
            if nbytes > capacity or not nbytes or nbytes % ALIGNMENT:
                raise ConnectionError(f"a container of {nbytes} bytes where {capacity} were asked for")
            verified = receive_checked(stream, _flat(read.into)[:nbytes], read.key, deadline)
            self.results.append(Result(Status.OK, nbytes, verified=verified))


class _Writing:
    """The work of one Put, likewise."""

    def __init__(self, peer: Peer, writes: Sequence[Write], results: list[Result], deadline: float) -> None:
        self.peer, self.writes, self.results, self.deadline = peer, writes, results, deadline

    def __call__(self, stream: Replies) -> None:
        self.results.clear()
        refused = [_refusal(each.data, self.peer.container_bytes) for each in self.writes]
        going = [each for each, why in zip(self.writes, refused, strict=True) if why is None]
        if going:
            put = data.Put(wire.pack_keys([each.key for each in going]), [each.data.nbytes for each in going])
            stream.send_buffers([wire.frame(put), *(_flat(each.data) for each in going)], self.deadline)
        for write, why in zip(self.writes, refused, strict=True):
            self.results.append(why or self._result(stream, write))

    def _result(self, stream: Replies, write: Write) -> Result:
        status, detail, _ = data.unpack_head(stream.recv_bytes(data.HEAD_BYTES, self.deadline))
        text = stream.recv_bytes(detail, self.deadline).decode(errors="replace") if detail else ""
        return Result(status, write.data.nbytes if status is Status.OK else 0, text)


def _refusal(view: memoryview, most: int) -> Result | None:
    if not view.nbytes or view.nbytes % ALIGNMENT or not view.c_contiguous:
        return Result(Status.ERROR, detail="not the size of a container, or scattered")
    return Result(Status.FULL, detail="larger than the server takes") if view.nbytes > most else None


def _batches(items: Sequence[A], call: Callable[[Sequence[A], list[Result]], None]) -> list[Result]:
    """``call`` for batch after batch; what a failure leaves open has failed."""
    results: list[Result] = []
    for at in range(0, len(items), BATCH):
        some: list[Result] = []
        try:
            call(items[at : at + BATCH], some)
        except Exception as error:
            return [*results, *some, *[_failed(error)] * (len(items) - len(results) - len(some))]
        results += some
    return results


def _failed(error: BaseException) -> Result:
    if isinstance(error, TimeoutError):
        return Result(Status.TIMEOUT, detail="timed out")
    return Result(Status.ERROR, detail=_why(error))


def _ask(peer: Peer, request: wire.Message, kind: type[T], deadline: float) -> T:
    """One request and its reply. OSError."""

    def work(stream: Replies) -> T:
        stream.send(request, deadline)
        reply = stream.recv(deadline)
        if not isinstance(reply, kind):
            raise ConnectionError(f"{type(reply).__name__} instead of {kind.__name__}")
        return reply

    return peer.call(work, deadline)


def _ask_each(
    peer: Peer, keys: Sequence[ChunkKey], make: Callable[[bytes], wire.Message], kind: type[T],
    answers: Callable[[T], list[R]], deadline: float,
) -> list[R]:  # fmt: skip
    """One request for as many keys as fit in a message, after the other; the answer to each key. OSError."""
    found: list[R] = []
    for at in range(0, len(keys), data.MAX_KEYS):
        batch = keys[at : at + data.MAX_KEYS]
        more = answers(_ask(peer, make(wire.pack_keys(batch)), kind, deadline))
        if len(more) != len(batch):
            raise ConnectionError("an answer of another length")
        found += more
    return found


def _probe(peer: Peer, deadline: float) -> str:
    """Store, read and delete a container of two pages. Returns what is wrong, or ''. OSError."""
    view, back = memoryview(bytearray(2 * ALIGNMENT)), memoryview(bytearray(2 * ALIGNMENT))
    key = ChunkKey(b"lmkv-health-----", bytes(8), os.urandom(32), bytes(8), 0, 0, 0)
    part = chunk.Part(0, 1, 0, ALIGNMENT, ALIGNMENT, ALIGNMENT, 0)
    chunk.seal(view, chunk.Header(key, 0, 1, 1, 1, 0, (part,), len(view), created=int(time.time())))
    results: list[Result] = []
    peer.call(_Writing(peer, [Write(key, view)], results, deadline), deadline)
    if results[0].status is Status.OK:
        peer.call(_Reading([Read(key, back)], results, deadline), deadline)
        _ask(peer, data.Delete(wire.pack_keys([key])), data.Deleted, deadline)
    if results[0].status is not Status.OK:
        return f"{results[0].status.value} {results[0].detail}".strip()
    return "" if view == back else "other bytes came back"


def _why(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or "timed out"


def _flat(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _seed(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def _seconds(name: str, value: object) -> float:
    try:
        seconds = float(parse_seconds(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(KEY, f"lmkv: {name}={value!r} is not a time: write 10s")
    return seconds
