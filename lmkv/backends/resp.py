"""RESP2, the protocol of Redis and Valkey: requests and the parser of replies, without I/O.

Payload is neither copied into a request nor out of a reply. Nothing a peer says makes the parser allocate without
bound.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, Union

BUFFER = 1 << 16  # what is not payload is received through so many bytes
LINE, SMALL, ITEMS, DEPTH = 1 << 13, 1 << 24, 1 << 20, 4  # most that a line, a reply outside payload and an array hold
PAYLOAD = 1 << 40  # a longer bulk is no reply at all
TAIL = 24  # last bytes of a payload that its `Body` has

Word: TypeAlias = Union[bytes, "tuple[memoryview | bytes, ...]"]  # a tuple: one word in several pieces
Reply: TypeAlias = Union[bytes, int, "ReplyError", "Body", list[Any], None]


class ProtocolError(ConnectionError):
    """The peer sent what is no RESP2 reply."""


class ReplyError(str):
    """A reply that starts with '-': ``OOM command not allowed ...``."""

    __slots__ = ()


class Body(NamedTuple):
    """A bulk that was received into `Call.into`: its size, which may be more than fits there, and its last bytes."""

    nbytes: int
    tail: bytes


class Call:
    """One request. into: where a bulk reply goes, which is then a `Body`. failure: why there is no reply.

    count: of replies, if it is a request for each of several names.
    """

    __slots__ = ("count", "failure", "into", "parts", "reply", "weight")

    def __init__(self, *words: Word, into: memoryview | None = None) -> None:
        self.parts, self.into, self.count = encode(words), into, 0
        self.weight = sum(map(len, self.parts)) + (into.nbytes if into else 0)
        self.reply: Reply = None
        self.failure: OSError | None = ConnectionError("not asked")

    @classmethod
    def each(cls, command: bytes, names: Sequence[bytes]) -> Call:
        """The same command for each name, at less cost than so many calls. The reply is a list of theirs."""
        call, head = cls(), b"*2\r\n$%d\r\n%b\r\n" % (len(command), command)
        call.parts = [b"".join([b"%b$%d\r\n%b\r\n" % (head, len(name), name) for name in names])]
        call.weight, call.count = len(call.parts[0]), len(names)
        return call


def encode(words: Sequence[Word]) -> list[memoryview | bytes]:
    """A request, in as few pieces as there can be without copying payload."""
    parts, small = list[memoryview | bytes](), [b"*%d\r\n" % len(words)]
    for word in words:
        if isinstance(word, bytes):
            small.append(b"$%d\r\n%b\r\n" % (len(word), word))
        else:
            small.append(b"$%d\r\n" % sum(map(len, word)))
            parts += [b"".join(small), *word]
            small = [b"\r\n"]
    parts.append(b"".join(small))
    return parts


class Replies:
    """The parser of one connection. It does no I/O: `reply` yields the memory that it wants received bytes in."""

    def __init__(self) -> None:
        self._memory = bytearray(BUFFER)
        self._view = memoryview(self._memory)
        self._start = self._end = 0
        self._allowance = 0

    @property
    def empty(self) -> bool:
        """Nothing was received after the last reply."""
        return self._start == self._end

    def reply(self, into: memoryview | None = None, count: int = 0) -> Generator[memoryview, int, Reply]:
        """The next reply, or a list of the next ``count``. ProtocolError.

        Send it how many bytes were put into what it yielded, at least 1.
        """
        self._allowance = SMALL
        if count:
            items = list[Any]()
            while len(items) < count:
                number = self._number()
                items.append((yield from self._reply(None, 0)) if number is None else number)
            return items
        reply = yield from self._reply(into, 0)
        if into is not None and not isinstance(reply, Body | ReplyError | None):
            raise ProtocolError("not the reply to this request")
        return reply

    def _number(self) -> int | None:
        """The next reply at once, if it is an integer that is all there."""
        if self._start == self._end or self._memory[self._start] != ord(":"):
            return None
        if (stop := self._memory.find(b"\r\n", self._start, min(self._end, self._start + 32))) < 0:
            return None
        text, self._start = self._memory[self._start + 1 : stop], stop + 2
        return _number(text)

    def _reply(self, into: memoryview | None, depth: int) -> Generator[memoryview, int, Reply]:
        while (stop := self._memory.find(b"\r\n", self._start, min(self._end, self._start + LINE))) < 0:
            if self._end - self._start >= LINE:
                raise ProtocolError(f"a reply's line has more than {LINE} bytes")
            yield from self._fill()
        kind, text = self._memory[self._start : self._start + 1], bytes(self._view[self._start + 1 : stop])
        self._start = stop + 2
        if kind == b"+":
            return text
        if kind == b"-":
            return ReplyError(text.decode("utf-8", "replace"))
        number = _number(text)
        if kind == b":":
            return number
        if kind == b"$" and -1 <= number <= PAYLOAD:
            if number < 0:
                return None
            return (yield from self._small(number) if into is None else self._payload(number, into))
        if kind == b"*" and -1 <= number <= ITEMS and depth < DEPTH:
            items = list[Any]()
            for _ in range(number):
                self._spend(64)
                items.append((yield from self._reply(None, depth + 1)))
            return items if number >= 0 else None
        raise ProtocolError(f"no reply starts with {bytes(kind + text[:20])!r}")

    def _fill(self) -> Generator[memoryview, int, None]:
        """Receive more behind what is not consumed yet, which is never a whole buffer."""
        if self._start:
            rest = self._end - self._start
            self._memory[:rest] = self._memory[self._start : self._end]
            self._start, self._end = 0, rest
        self._end += yield self._view[self._end :]

    def _take(self, most: int) -> Generator[memoryview, int, memoryview]:
        """At least one of the next ``most`` bytes; valid until more is received."""
        if self._start == self._end:
            yield from self._fill()
        first, self._start = self._start, min(self._end, self._start + most)
        return self._view[first : self._start]

    def _small(self, nbytes: int) -> Generator[memoryview, int, bytes]:
        self._spend(nbytes)
        data = bytearray()
        while len(data) < nbytes:
            data += yield from self._take(nbytes - len(data))
        yield from self._line_end()
        return bytes(data)

    def _payload(self, nbytes: int, into: memoryview) -> Generator[memoryview, int, Body]:
        got, room, rest = 0, min(nbytes, into.nbytes), b""
        while got < room:
            if self._start == self._end and room - got > BUFFER // 2:
                got += yield into[got:room]
            else:  # one more receive brings what follows, too
                piece = yield from self._take(room - got)
                into[got : got + len(piece)] = piece
                got += len(piece)
        while got < nbytes:
            piece = yield from self._take(nbytes - got)
            got += len(piece)
            rest = (rest + piece[-TAIL:])[-TAIL:]
        yield from self._line_end()
        return Body(nbytes, (bytes(into[max(0, room - TAIL) : room]) + rest)[-TAIL:])

    def _line_end(self) -> Generator[memoryview, int, None]:
        for byte in b"\r\n":
            if (yield from self._take(1))[0] != byte:
                raise ProtocolError("a bulk is longer than it said")

    def _spend(self, nbytes: int) -> None:
        self._allowance -= nbytes
        if self._allowance < 0:
            raise ProtocolError(f"a reply has more than {SMALL} bytes")


def _number(text: bytes | bytearray) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 20:
        raise ProtocolError(f"{bytes(text[:20])!r} is no number")
    return int(text)
