"""The servers behind one Redis URL: pooled connections, and in a cluster which of them has a key.

`Nodes.ask` sends every key's calls to its server, all servers at the same time. What a client of Redis must put up
with happens here, each at most once within the deadline: a pooled connection that went stale is replaced; a cluster's
topology is asked for again when a key has moved (MOVED), is moving (ASK) or its server cannot be reached.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from lmkv.backends.redis_links import Address, Connection, exchange
from lmkv.backends.resp import Call, Reply, ReplyError
from lmkv.errors import ConfigError
from lmkv.units import parse_seconds

SLOTS = 1 << 14
ROUNDS = 4
MANY = 4096  # names in one call
SILENCE, LONGEST_SILENCE = 1.0, 4.0  # seconds that lookups leave a server alone that gave no answer; doubled each time
REFRESH = 1.0  # seconds between two looks at the topology because of servers that fail


class Ask:
    """Calls for one key, made in order on the server that has it. at: that server, if it is known."""

    __slots__ = ("at", "calls", "failed_at", "name")

    def __init__(self, name: bytes, *calls: Call, at: Address | None = None) -> None:
        self.name, self.calls, self.at = name, list(calls), at
        self.failed_at: Address | None = None

    @property
    def reply(self) -> Reply:
        """Of the last call; None also after a failure."""
        return self.calls[-1].reply

    @property
    def failure(self) -> OSError | None:
        """Why there are not all replies."""
        return next((call.failure for call in self.calls if call.failure), None)

    @property
    def redirection(self) -> list[str]:
        """``["MOVED" or "ASK", slot, "host:port"]``, or nothing."""
        for call in self.calls:
            if isinstance(call.reply, ReplyError) and call.reply.startswith(("MOVED ", "ASK ")):
                return call.reply.split()[:3]
        return []

    def fail(self, error: OSError) -> None:
        """Without asking."""
        for call in self.calls:
            call.reply, call.failure = None, error


class Nodes:
    """Thread-safe, and a forked child opens its own connections.

    seeds: where to begin; the only server when this is no cluster. login: makes the calls that a new connection begins
    with. connections: kept open for each server, at most. slot_of: the slot of a cluster's key, None: no cluster.
    """

    def __init__(
        self,
        seeds: Sequence[Address],
        tls: ssl.SSLContext | None,
        login: Callable[[], list[Call]],
        connections: int,
        slot_of: Callable[[bytes], int] | None = None,
    ) -> None:
        self._seeds, self._tls, self._login, self._slot_of = list(seeds), tls, login, slot_of
        self._connections, self._closed = connections, False
        self._slots: list[Address | None] = []
        self._stale, self._refreshed, self._trouble = True, float("-inf"), ""
        self._silent: dict[Address, tuple[float, float]] = {}  # until when, and how many seconds that was
        self._idle: dict[Address, list[Connection]] = {}
        self._let_go()
        _opened.add(self)

    def ask(self, asks: Sequence[Ask], deadline: float, *, lookup: bool = False) -> None:
        """Make all calls; afterwards each ask has its replies or a failure.

        lookup: a server that let others wait in vain just now is not asked.
        """
        left: Sequence[Ask] = asks
        for _ in range(ROUNDS):
            self._refresh(deadline, lookup)
            groups = self._group(left, lookup)
            links = {place: self._take(place) for place in groups}
            pooled = {place for place, link in links.items() if link.used}
            try:
                calls = {at: [call for each in group for call in each.calls] for at, group in groups.items()}
                exchange([(links[at], calls[at]) for at in groups], deadline)
            finally:
                for link in links.values():
                    self._give(link)
            left = [each for at, group in groups.items() for each in self._again(at, group, at in pooled, lookup)]
            if not left or time.monotonic() >= deadline:
                return

    def lengths(self, names: Sequence[bytes], deadline: float) -> list[Reply]:
        """The reply to STRLEN for each name, None where there is none."""
        self._refresh(deadline, lookup=True)
        groups, replies, left = dict[Address | None, list[int]](), list[Reply]([None] * len(names)), list[int]()
        for i, name in enumerate(names):
            groups.setdefault(self._place(name), []).append(i)
        parts = [(at, group[i : i + MANY]) for at, group in groups.items() if at for i in range(0, len(group), MANY)]
        asks = [Ask(b"", Call.each(b"STRLEN", [names[i] for i in group]), at=place) for place, group in parts]
        self.ask(asks, deadline, lookup=True)
        for (_, group), ask in zip(parts, asks, strict=True):
            if ask.failure or not isinstance(ask.reply, list):
                left += group if self._slot_of and not isinstance(ask.failure, TimeoutError) else []
                continue
            for i, reply in zip(group, ask.reply, strict=True):
                replies[i] = reply
                if isinstance(reply, ReplyError) and self._slot_of:  # it may have moved
                    left.append(i)
        again = [Ask(names[i], Call(b"STRLEN", names[i])) for i in left]
        self.ask(again, deadline, lookup=True)
        for i, ask in zip(left, again, strict=True):
            replies[i] = None if ask.failure else ask.reply
        return replies

    def masters(self, deadline: float) -> list[Address]:
        """All servers that have keys. ConnectionError when a cluster's topology is not to be had."""
        if not self._slot_of:
            return self._seeds
        self._refresh(deadline)
        if not self._slots:
            raise self._unknown()
        return sorted({each for each in self._slots if each})

    def name_at(self, place: Address, prefix: bytes) -> bytes:
        """A name with that prefix and a random end, which belongs on that server."""
        name = prefix
        for _ in range(100 * len(self._slots) or 1):
            name = prefix + secrets.token_hex(8).encode()
            if not self._slot_of or self._place(name) == place:
                break
        return name

    def attend(self) -> bool:
        """Find out, without asking, whether a server ended connections while nobody used them; they are let go."""
        with self._lock:
            ended = [place for place, idle in self._idle.items() if idle and not idle[-1].quiet]
        for place in ended:
            self._drop(place)
        return bool(ended)

    def close(self) -> None:
        """Close what is idle now, and what is in use once it is done."""
        self._closed = True
        for place in list(self._idle):
            self._drop(place)

    def _group(self, asks: Sequence[Ask], lookup: bool) -> dict[Address, list[Ask]]:
        """By server; those that have none fail."""
        groups, now = dict[Address, list[Ask]](), time.monotonic()
        for each in asks:
            place = each.at or self._place(each.name)
            if place is None:
                each.fail(self._unknown())
            elif lookup and self._silent.get(place, (0.0, 0.0))[0] > now:
                each.fail(TimeoutError("gave no answer just now"))
            elif place != each.failed_at:
                groups.setdefault(place, []).append(each)
        return groups

    def _again(self, place: Address, group: list[Ask], pooled: bool, lookup: bool) -> list[Ask]:
        """Those worth another round, after what can be learned from the replies."""
        failures = [each.failure for each in group if each.failure]
        in_time = not any(isinstance(each, TimeoutError) for each in failures)
        dumb = all(call.failure for each in group for call in each.calls)
        if in_time or not dumb:
            self._silent.pop(place, None)
        elif lookup:
            pause = min(2 * self._silent.get(place, (0.0, SILENCE / 2))[1], LONGEST_SILENCE)
            self._silent[place] = time.monotonic() + pause, pause
        if failures:
            self._stale = True
        again = []
        for each in group:
            if each.failure and in_time and dumb and pooled:  # lost between two calls: worth a new connection
                self._drop(place)
                again.append(each)
            elif each.failure and in_time and self._slot_of:  # worth a new topology
                each.failed_at = place
                again.append(each)
            elif self._slot_of and not each.failure and self._redirected(each, place):
                again.append(each)
        return again

    def _redirected(self, ask: Ask, place: Address) -> bool:
        """Follow MOVED or ASK."""
        kind, slot, target = (*ask.redirection, "", "", "")[:3]
        host, _, port = target.rpartition(":")
        if not (slot.isdecimal() and int(slot) < SLOTS and port.isdecimal() and 0 < int(port) < 1 << 16):
            return False
        to = (host.strip("[]") or place[0], int(port))
        if kind == "MOVED":
            self._stale, ask.at = True, None
            if self._slots:
                self._slots[int(slot)] = to
            return True
        if len(ask.calls) > 1:  # no transaction follows a key that is moving
            return False
        ask.at, ask.calls = to, [Call(b"ASKING"), *ask.calls]
        return True

    def _refresh(self, deadline: float, lookup: bool = False) -> None:
        """Ask a cluster's servers for its topology, if that is due; whoever answers first is believed."""
        now = time.monotonic()
        recent = now < self._refreshed + REFRESH
        if not self._slot_of or not self._stale or (recent and (self._slots or lookup)):
            return
        places = list(dict.fromkeys([*self._seeds, *filter(None, self._slots)]))
        asked = [(self._take(place), Call(b"CLUSTER", b"SLOTS")) for place in places]

        def found() -> list[Address | None]:
            return next(filter(None, (_slots(call, link.address[0]) for link, call in asked)), [])

        try:
            exchange([(link, [call]) for link, call in asked], now + (deadline - now) / 2, lambda: bool(found()))
        finally:
            for link, _ in asked:
                self._give(link)
        self._slots = found() or self._slots
        self._stale, self._refreshed = not found(), time.monotonic()
        self._trouble = "; ".join(sorted({str(call.failure or call.reply) for _, call in asked}))

    def _unknown(self) -> OSError:
        if self._slots:
            return ConnectionError("no server of the cluster has this slot")
        return ConnectionError(f"no server of the cluster tells its topology: {self._trouble}")

    def _place(self, name: bytes) -> Address | None:
        if not self._slot_of:
            return self._seeds[0]
        return self._slots[self._slot_of(name)] if self._slots else None

    def _take(self, place: Address) -> Connection:
        with self._lock:
            idle = self._idle.get(place, [])
            while idle:
                if (link := idle.pop()).quiet:
                    return link
                link.close()
        return Connection(place, self._tls, self._login())

    def _give(self, link: Connection) -> None:
        with self._lock:
            idle = self._idle.setdefault(link.address, [])
            if link.quiet and not self._closed and len(idle) < self._connections:
                idle.append(link)
            else:
                link.close()

    def _drop(self, place: Address) -> None:
        """Close what is idle there."""
        with self._lock:
            for link in self._idle.pop(place, []):
                link.close()

    def _let_go(self) -> None:
        """In a forked child, of its parent's connections and of the lock, which another thread may have held."""
        self._lock = threading.Lock()  # never held during I/O
        for place in list(self._idle):
            self._drop(place)


_opened: weakref.WeakSet[Nodes] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: list(map(Nodes._let_go, _opened)))


def _slots(call: Call, host: str) -> list[Address | None]:
    """The server of each slot as CLUSTER SLOTS tells, which names itself ``host`` by saying nothing."""
    slots: list[Address | None] = [None] * SLOTS
    for each in call.reply if isinstance(call.reply, list) and not call.failure else ():
        match each:
            case [int(first), int(last), [bytes() | None as name, int(port), *_], *_] if (
                0 <= first <= last < SLOTS and 0 < port < 1 << 16 and name != b"?"
            ):
                place = ((name or b"").decode("utf-8", "replace") or host, port)
                slots[first : last + 1] = [place] * (last + 1 - first)
    return slots if any(slots) else []


class Login:
    """What a connection begins with. The password is read again for each, as it may change while we run."""

    def __init__(self, db: int, username: str, file: str, variable: str) -> None:
        self._db, self._username, self._file, self._variable = db, username, file, variable
        try:
            self._password = self._read()
        except (OSError, UnicodeDecodeError, KeyError) as error:
            source = f"password_file={file}" if file else f"password_env={variable}"
            raise wrong(f"redis: no password from {source}: {error}") from error
        if (file or variable) and not self._password:
            raise wrong("redis: the password is empty")

    def __call__(self) -> list[Call]:
        with suppress(OSError, UnicodeDecodeError, KeyError):
            self._password = self._read() or self._password
        user = [self._username.encode()] if self._username else []
        calls = [Call(b"AUTH", *user, self._password.encode())] if self._password else []
        return calls + ([Call(b"SELECT", b"%d" % self._db)] if self._db else [])

    def _read(self) -> str:
        if self._file:
            return Path(self._file).read_text("utf-8").strip("\r\n")
        return os.environ[self._variable] if self._variable else ""


def wrong(message: str) -> ConfigError:
    return ConfigError("tiers.url", message)


def address_of(text: str) -> Address:
    match = re.fullmatch(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?", text)
    if not match or not 0 < int(match[2] or 6379) < 1 << 16:
        raise wrong(f"redis: {text!r} is no host:port")
    return match[1].strip("[]"), int(match[2] or 6379)


def seconds_of(name: str, value: object) -> float:
    try:
        seconds = float(str(parse_seconds(value)))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 10 * 366 * 86400:
        raise wrong(f"redis: {name}={value!r} must be a time, such as 500ms, 10s or 7d")
    return seconds


def tls_of(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise wrong(f"redis: ca={ca}: {error}") from error


def cluster_slots() -> Callable[[bytes], int]:
    try:
        from redis.crc import key_slot
    except ImportError as error:
        raise wrong("redis: a cluster needs redis-py: pip install lmkv[redis]") from error
    return key_slot
