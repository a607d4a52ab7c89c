"""Redis and Valkey, one server or a cluster: the tier that outgrows one machine.

What a key has already is kept (SET NX), as it holds the same chunk; see `redis_values` for how. Which
server has a key is for `redis_nodes`, how bytes travel for `redis_links` and `resp`.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from urllib.parse import urlencode

from lmkv.backends import redis_values as values
from lmkv.backends.base import ALIGNMENT, Backend, Found, Health, Read, Result, Status, Usage, Write
from lmkv.backends.redis_links import Address
from lmkv.backends.redis_nodes import Ask, Login, Nodes, address_of, cluster_slots, seconds_of, tls_of, wrong
from lmkv.backends.resp import Body, Call, Reply, ReplyError
from lmkv.errors import BackendError, BadInput
from lmkv.keys import ChunkKey

STAGING = 600  # seconds after which pieces go whose container was never published
_CLOSED = Result(Status.ERROR, detail="closed")
_FALSE_TRUE = {"0": False, "off": False, "false": False, "1": True, "on": True, "true": True}
_REFUSED = {"OOM": Status.FULL} | dict.fromkeys(("READONLY", "MISCONF", "NOPERM"), Status.READ_ONLY)


class RedisBackend(Backend):
    """``redis://host:port[/db]``, ``rediss://`` for TLS, ``valkey://``; several hosts, or cluster=1: a cluster.

    prefix: of all names. username, and the password in a file or an environment variable. ca: a file of certificates
    to trust instead of the system's. ttl: objects go so long after they were written. connections: kept open for each
    server. timeout, lookup_timeout: of a whole call, and of a whole `contains`.
    """

    shared = True
    remote = True
    piece = values.PIECE

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "lmkv:",
        cluster: bool | str = "",
        username: str = "",
        password: object = None,
        password_file: str = "",
        password_env: str = "",
        ca: str = "",
        ttl: object = None,
        connections: int | str = 8,
        timeout: object = "10s",
        lookup_timeout: object = "1s",
    ) -> None:
        scheme, _, place = url.partition("://")
        if "@" in place or password is not None:
            raise wrong(
                "redis: a URL holds no password: name it by password_file= or password_env=, its user by username="
            )
        hosts, _, db = place.partition("/")
        seeds = [address_of(each) for each in hosts.split(",")]
        if (
            scheme not in ("redis", "rediss", "valkey")
            or len(set(seeds)) < len(seeds)
            or not re.fullmatch("[0-9]{0,4}", db)
        ):
            raise wrong(f"{url!r}: write redis://host:port/db, or redis://host:port,host:port for a cluster")
        clustered = len(seeds) > 1 if cluster == "" else _FALSE_TRUE.get(str(cluster).lower())
        if clustered is None or (len(seeds) > 1 and not clustered):
            raise wrong(f"redis: cluster={cluster!r} must be 0 or 1, and 1 with several hosts")
        if clustered and int(db or 0):
            raise wrong(f"redis: a cluster has no database {db}")
        if set(prefix) & set("{}\r\n") or len(prefix) > 128:
            raise wrong(f"redis: prefix={prefix!r} must be short and without braces")
        if ca and scheme != "rediss":
            raise wrong("redis: ca= is for TLS: write rediss://")
        if (password_file and password_env) or (username and not (password_file or password_env)):
            raise wrong("redis: give one of password_file and password_env, also with a username")
        self._timeout = seconds_of("timeout", timeout)
        self._lookup_timeout = seconds_of("lookup_timeout", lookup_timeout)
        self._ttl = math.ceil(seconds_of("ttl", ttl)) if ttl is not None else 0
        if not str(connections).isdecimal() or not 1 <= int(connections) <= 1024:
            raise wrong(f"redis: connections={connections!r} must be 1 to 1024")
        given = {"prefix": prefix, "cluster": str(cluster), "username": username, "password_file": password_file}
        given |= {"password_env": password_env, "ca": ca, "ttl": "" if ttl is None else str(ttl)}
        given |= {"connections": str(connections), "timeout": str(timeout), "lookup_timeout": str(lookup_timeout)}
        usual = {"prefix": "lmkv:", "connections": "8", "timeout": "10s", "lookup_timeout": "1s"}
        query = urlencode({name: value for name, value in given.items() if value != usual.get(name, "")}, safe="/:,")
        self.url = f"{scheme}://{place}{'?' * bool(query)}{query}"
        self._prefix, self._closed = prefix.encode(), False
        self._used = self._objects = 0
        self._changes: list[dict[bytes, int]] = []  # own writes and deletes since each scan under way began
        self._let_go()
        tls = tls_of(ca) if scheme == "rediss" else None
        login = Login(int(db or 0), username, password_file, password_env)
        self._nodes = Nodes(seeds, tls, login, int(connections), cluster_slots() if clustered else None)
        _opened.add(self)

    def attend(self) -> None:
        if not self._closed and self._nodes.attend() and self.on_reset:
            self.on_reset(lambda keys: [True] * len(keys))

    def contains(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        """One round trip; up to two more where there are containers in pieces."""
        if self._closed:
            return [None] * len(keys)
        deadline = time.monotonic() + self._lookup_timeout
        names = [self._name(key) for key in keys]
        lengths = self._nodes.lengths(names, deadline)
        sizes = list(map(values.whole, lengths))
        split = [i for i, length in enumerate(lengths) if values.may_be_split(length)]
        if split:
            tails = self._each([Ask(names[i], _tail_of(names[i])) for i in split], deadline, lookup=True)
            found = [
                values.parse(self._prefix, names[i], lengths[i], tail) for i, tail in zip(split, tails, strict=True)
            ]
            pieces = [(i, *piece) for i, parts in zip(split, found, strict=True) if parts for piece in parts.pieces()]
            there = self._nodes.lengths([name for _, name, _, _ in pieces], deadline)
            for i, parts in zip(split, found, strict=True):
                sizes[i] = parts.nbytes if parts else 0
            for (i, _, start, stop), length in zip(pieces, there, strict=True):
                if length != stop - start:
                    sizes[i] = 0
        return [size or None for size in sizes]

    def read(self, reads: Sequence[Read]) -> list[Result]:
        deadline = time.monotonic() + self._timeout
        results = list[Result | None]([None] * len(reads))
        while again := [i for i, result in enumerate(results) if result is None]:
            for i, result in zip(again, self._read([reads[i] for i in again], deadline), strict=True):
                results[i] = result
        return [result for result in results if result]

    def write(self, writes: Sequence[Write]) -> list[Result]:
        deadline = time.monotonic() + self._timeout
        results = [Result(Status.ERROR, detail="not the size of a container")] * len(writes)
        views = [_octets(each.data) for each in writes]
        asks: dict[int, Ask] = {}
        for i, (each, view) in enumerate(zip(writes, views, strict=True)):
            if view.nbytes and view.nbytes % ALIGNMENT == 0:
                if view.nbytes > self.piece:
                    results[i] = _CLOSED if self._closed else self._write_split(self._name(each.key), view, deadline)
                else:
                    name = self._name(each.key)
                    asks[i] = Ask(name, self._set(name, view, values.stamp()))
        self._each(list(asks.values()), deadline)
        for i, ask in asks.items():
            results[i] = self._written(ask, views[i].nbytes)
        return results

    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        deadline = time.monotonic() + self._timeout
        asks = []
        for name in map(self._name, keys):
            steps = _tail_of(name), Call(b"STRLEN", name), Call(b"UNLINK", name)
            asks.append(Ask(name, Call(b"MULTI"), *steps, Call(b"EXEC")))
        removed, pieces = list[bool](), list[bytes]()
        for ask, reply in zip(asks, self._each(asks, deadline), strict=True):
            tail, length, count = reply if isinstance(reply, list) and len(reply) == 3 else (None, 0, 0)
            removed.append(count == 1)
            if count == 1:
                parts = values.parse(self._prefix, ask.name, length, tail)
                pieces += [name for name, _, _ in parts.pieces()] if parts else []
                self._account(ask.name, -(parts.nbytes if parts else values.whole(length)))
        self._each([Ask(name, Call(b"UNLINK", name)) for name in pieces], deadline)
        return removed

    def scan(self) -> Iterator[list[Found]]:
        """Also recounts `usage`. Of a cluster, all servers that have keys must answer."""
        if self._closed:
            return
        seen, changes = dict[int, int](), dict[bytes, int]()
        with self._lock:
            self._changes.append(changes)
        try:
            for place in self._nodes.masters(time.monotonic() + self._timeout):
                for names in self._names(place):
                    if found := self._found(place, [name for name in names if hash(name) not in seen], seen):
                        yield found
            with self._lock:
                for name, nbytes in changes.items():  # what the listing did not see of it
                    if (hash(name) in seen) == (nbytes < 0):
                        seen[hash(name)] = max(nbytes, 0)
                sizes = [nbytes for nbytes in seen.values() if nbytes]
                self._used, self._objects = sum(sizes), len(sizes)
        except OSError as error:
            raise BackendError(f"redis: cannot list {self.url}: {error}") from error
        finally:
            with self._lock:
                self._changes = [each for each in self._changes if each is not changes]

    def usage(self) -> Usage:
        return Usage(max(self._used, 0), max(self._objects, 0), None)

    def health(self) -> Health:
        """A value set, read and deleted on each server."""
        if self._closed:
            return Health(False, "closed")
        deadline, value = time.monotonic() + self._timeout, secrets.token_bytes(64)
        try:
            places = self._nodes.masters(deadline)
        except OSError as error:
            return Health(False, str(error))
        pings = [Ask(b"", Call(b"PING"), at=place) for place in places]
        self._each(pings, deadline)  # so that what follows needs no connecting
        asks, began = list[Ask](), time.monotonic()
        for place in places:
            name = self._nodes.name_at(place, self._prefix + b"health/")
            steps = Call(b"SET", name, value, b"PX", b"60000"), Call(b"GET", name), Call(b"UNLINK", name)
            asks.append(Ask(name, *steps, at=place))
        self._each(asks, deadline)
        trip, failed = time.monotonic() - began, list[str]()
        for ask in asks:
            refused = (each.reply for each in ask.calls if isinstance(each.reply, ReplyError))
            if ask.failure or [each.reply for each in ask.calls] != [b"OK", value, 1]:
                failed.append(str(ask.failure or next(refused, "reads something else")))
        of = f"{len(failed)} of {len(places)} servers: " if failed and len(places) > 1 else ""
        good = f"set, get and delete in {trip * 1000:.1f} ms" + f", {len(places)} servers" * (len(places) > 1)
        return Health(not failed, of + "; ".join(failed) or good)

    def close(self) -> None:
        self._closed = True
        self._nodes.close()

    def _name(self, key: ChunkKey) -> bytes:
        return self._prefix + str(key).encode()

    def _each(self, asks: Sequence[Ask], deadline: float, lookup: bool = False) -> list[Reply]:
        """The last reply of each; None for a failure."""
        if self._closed:
            for ask in asks:
                ask.fail(ConnectionError("closed"))
        else:
            self._nodes.ask(asks, deadline, lookup=lookup)
        return [None if ask.failure else ask.reply for ask in asks]

    def _read(self, reads: Sequence[Read], deadline: float) -> list[Result | None]:
        """None: the object was replaced or removed while its pieces were read."""
        views = [_octets(each.into) for each in reads]
        names = [self._name(each.key) for each in reads]
        asks = [Ask(name, Call(b"GET", name, into=view)) for name, view in zip(names, views, strict=True)]
        results, tails, pieces = list[Result | None](), dict[int, Reply](), list[tuple[int, Ask, int]]()
        for i, reply in enumerate(self._each(asks, deadline)):
            results.append(self._whole(asks[i], reply, views[i]))
            if isinstance(reply, Body) and (parts := values.parse(self._prefix, names[i], reply.nbytes, reply.tail)):
                results[i] = Result(Status.ERROR, detail="short buffer")
                if parts.nbytes <= views[i].nbytes:
                    results[i], tails[i] = Result(Status.OK, parts.nbytes), reply.tail
                    for name, start, stop in parts.pieces():
                        ask = Ask(name, Call(b"GET", name, into=views[i][start:stop]))
                        pieces.append((i, ask, stop - start))
        self._each([ask for _, ask, _ in pieces], deadline)
        torn = set[int]()
        for i, ask, nbytes in pieces:
            if ask.failure or isinstance(ask.reply, ReplyError):
                results[i] = _failed(ask)
            elif not isinstance(ask.reply, Body) or ask.reply.nbytes != nbytes:
                torn.add(i)
        now = [Ask(names[i], _tail_of(names[i])) for i in torn]
        for i, ask, tail in zip(torn, now, self._each(now, deadline), strict=True):
            same = Result(Status.CORRUPT, detail="a piece is missing")
            results[i] = _failed(ask) if ask.failure else same if tail == tails[i] else None
        return results

    def _whole(self, ask: Ask, reply: Reply, view: memoryview) -> Result:
        """How a GET of one value ended."""
        if ask.failure or isinstance(reply, ReplyError):
            return _failed(ask)
        if not isinstance(reply, Body):
            return Result(Status.MISSING)
        if not (nbytes := values.whole(reply.nbytes)):
            return Result(Status.CORRUPT, detail=f"{reply.nbytes} bytes")
        return Result(Status.OK, nbytes) if nbytes <= view.nbytes else Result(Status.ERROR, detail="short buffer")

    def _set(self, name: bytes, *pieces: memoryview | bytes, ttl: int = 0, new: bool = True) -> Call:
        options = [b"NX"] * new + ([b"EX", b"%d" % (ttl or self._ttl)] if ttl or self._ttl else [])
        return Call(b"SET", name, pieces, *options)

    def _written(self, ask: Ask, nbytes: int) -> Result:
        """How a SET NX ended, whose container has ``nbytes``."""
        if ask.failure or ask.reply not in (b"OK", None):
            return _failed(ask, True)
        if ask.reply == b"OK":
            self._account(ask.name, nbytes)
        return Result(Status.OK, nbytes)

    def _write_split(self, name: bytes, view: memoryview, deadline: float) -> Result:
        parts, tail = values.split(self._prefix, name, view.nbytes, self.piece)
        pieces = parts.pieces()
        if len(pieces) >= values.PIECES:
            return Result(Status.ERROR, detail="too large")
        ttl = self._ttl + 60 if self._ttl else STAGING
        asks = [Ask(each, self._set(each, view[a:b], ttl=ttl, new=False)) for each, a, b in pieces]
        self._each(asks, deadline)
        result = next((_failed(ask, True) for ask in asks if ask.failure or ask.reply != b"OK"), None)
        first = Ask(name, self._set(name, view[: self.piece], tail))
        if result is None:
            self._each([first], deadline)
            result = self._written(first, view.nbytes)
        published = first.reply == b"OK" and not first.failure
        if not published:
            self._each([Ask(each, Call(b"UNLINK", each)) for each, _, _ in pieces], deadline)
        elif not self._ttl:
            self._each([Ask(each, Call(b"PERSIST", each)) for each, _, _ in pieces], deadline)
        return result

    def _account(self, name: bytes, nbytes: int) -> None:
        """Of an object written, or removed: then less than 0; 0 for what was none."""
        with self._lock:
            self._used += nbytes
            self._objects += (nbytes > 0) - (nbytes < 0)
            for changes in self._changes:
                changes[name] = changes.get(name, 0) + nbytes

    def _names(self, place: Address) -> Iterator[list[bytes]]:
        """All names with our prefix on one server, some of them more than once."""
        cursor, pattern = b"0", re.sub(rb"[*?\[\]\\^]", rb"\\\g<0>", self._prefix) + b"*"
        while not self._closed:
            ask = Ask(b"", Call(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000"), at=place)
            self._each([ask], time.monotonic() + self._timeout)
            if not isinstance(ask.reply, list) or list(map(type, ask.reply)) != [bytes, list]:
                raise ConnectionError(_failed(ask).detail)
            cursor, names = ask.reply
            yield [name for name in names if isinstance(name, bytes)]
            if cursor == b"0":
                return

    def _found(self, place: Address, names: Sequence[bytes], seen: dict[int, int]) -> list[Found]:
        """The objects among ``names``, whose sizes go into ``seen``."""
        keys = dict[bytes, ChunkKey]()
        for name in names:
            with suppress(BadInput, UnicodeDecodeError):  # of other origin, or a piece
                keys[name] = ChunkKey.parse(name[len(self._prefix) :].decode("ascii"))
        asks = [Ask(name, Call(b"STRLEN", name), _tail_of(name), at=place) for name in keys]
        tails, found = self._each(asks, time.monotonic() + self._timeout), list[Found]()
        if error := next((ask.failure for ask in asks if ask.failure), None):
            raise error
        for ask, key, tail in zip(asks, keys.values(), tails, strict=True):
            length = ask.calls[-2].reply
            parts = values.parse(self._prefix, ask.name, length, tail)
            nbytes = parts.nbytes if parts else values.whole(length)
            if nbytes and isinstance(tail, bytes) and len(tail) >= values.STAMP:
                seen[hash(ask.name)] = nbytes
                found.append(Found(key, nbytes, values.written_at(tail)))
        return found

    def _let_go(self) -> None:
        """Of the lock, which another thread may have held when this process was forked."""
        self._lock = threading.Lock()  # never held during I/O


_opened: weakref.WeakSet[RedisBackend] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: list(map(RedisBackend._let_go, _opened)))


def _octets(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _tail_of(name: bytes) -> Call:
    return Call(b"GETRANGE", name, b"-%d" % values.TAIL, b"-1")


def _failed(ask: Ask, write: bool = False) -> Result:
    if ask.failure:
        return Result(
            Status.TIMEOUT if isinstance(ask.failure, TimeoutError) else Status.ERROR, detail=str(ask.failure)
        )
    text = str(ask.reply) if isinstance(ask.reply, ReplyError) else "not the reply to this request"
    word = text.partition(" ")[0]
    if word == "WRONGTYPE":
        return Result(Status.CORRUPT, detail=text)
    hint = "; this is a cluster: add cluster=1 to the URL" if word == "MOVED" else ""
    return Result(_REFUSED.get(word, Status.ERROR) if write else Status.ERROR, detail=text + hint)
