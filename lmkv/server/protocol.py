"""What the host service and its clients say to each other, and the checks that all of it passes.

A frame is its length (u32, little-endian, at most ``MAX_FRAME``) and a msgpack body: one of the messages below, as an
array after its name. Memory is taken as bytes arrive, never by what a length says. What does not fit the types and
bounds here ends the connection. Chunk keys travel packed, 72 bytes each; times are seconds from receipt.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from lmkv import _native
from lmkv.codec import Known, Meaning
from lmkv.errors import BadInput
from lmkv.index import MAX_SHARDS
from lmkv.keys import DIGEST_BYTES, ChunkKey
from lmkv.plan import Need, Trailing

VERSION = 1
MAX_FRAME = 16 << 20
MAX_ITEMS = 1 << 16
DAY = 86400
PIECE = 1 << 18
FOREVER = math.inf

_KEY = struct.Struct("<16s8s32s8sIHH")
_HEAD = struct.Struct("<I")

Count = Annotated[int, Meta(ge=0, lt=2**31)]
Number = Annotated[int, Meta(ge=0, lt=2**53)]
Numbers = Annotated[list[Number], Meta(max_length=MAX_ITEMS)]
Bytes = Annotated[int, Meta(ge=1, lt=2**48)]
Sizes = Annotated[list[Bytes], Meta(max_length=MAX_ITEMS)]
Seconds = Annotated[float, Meta(ge=0, le=DAY)]
Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Digests = Annotated[bytes, Meta(max_length=MAX_ITEMS * DIGEST_BYTES)]
Keys = Annotated[bytes, Meta(max_length=MAX_ITEMS * _KEY.size)]
Mask = Annotated[bytes, Meta(max_length=32)]  # of pages, little-endian
Geometry = Annotated[bytes, Meta(min_length=8, max_length=8)]
Meant = Annotated[list[Meaning | None], Meta(max_length=64)]
Parts = Annotated[bytes, Meta(max_length=64 * MAX_SHARDS // 8)]  # of at most 64 groups, little-endian


class Message(Struct, array_like=True, tag=True):
    """Base of all that travels."""


# Requests. A number is the client's own name for a slot it reserves or a fetch, never used twice.


class Hello(Message):
    """First on every connection. session: the random name that the client process gives itself."""

    version: int
    session: Token
    client: Name


class Register(Message):
    """Container sizes that will be reserved and fetched, and by geometry id what the payload of each group means; the
    answer carries the arena's descriptor."""

    sizes: Annotated[list[Bytes], Meta(min_length=1, max_length=1024)]
    meanings: Annotated[list[tuple[Geometry, Meant]], Meta(max_length=64)] = []


class Tail(Struct, array_like=True):
    """`lmkv.plan.Trailing`."""

    group: Annotated[int, Meta(ge=0, lt=64)]
    bits: Parts
    pages: Annotated[list[Mask], Meta(min_length=1, max_length=4096)]


class Ask(Struct, array_like=True):
    """A lookup: 32 bytes of digest for each chunk; growing and trailing: `lmkv.plan.Need`; lease 0: none."""

    owner: Name
    scope: Token
    digests: Digests
    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    growing: Parts
    trailing: Annotated[list[Tail], Meta(max_length=64)]
    lease: Seconds
    first: Count


class Lookup(Message):
    asks: Annotated[list[Ask], Meta(max_length=4096)]


class Release(Message):
    owners: Annotated[list[Name], Meta(max_length=MAX_ITEMS)]


class Fetch(Message):
    """Answered by Runs, each to be followed by an Ack once it is not touched any more, and an End."""

    number: Number
    keys: Keys
    sizes: Sizes
    timeout: Seconds


class Ack(Message):
    more: bool


class Reserve(Message):
    """first: the number of the first slot, the others count on. timeout: to fill them in."""

    owner: Name
    first: Number
    keys: Keys
    sizes: Sizes
    timeout: Seconds


class Commit(Message):
    """masks: the pages each slot holds, empty for all. expires: unix seconds, 0 never."""

    numbers: Numbers
    masks: Annotated[list[Mask], Meta(max_length=MAX_ITEMS)]
    expires: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class LetGo(Message):
    """These are not touched any more; those unknown or committed are passed over."""

    numbers: Numbers


class Clear(Message):
    """Remove all chunks of a scope; without ``wait`` the answer comes before that is done."""

    scope: Token
    wait: bool


class Flush(Message):
    timeout: Seconds


class Events(Message):
    """What changed in a scope since ``cursor``; 0 subscribes."""

    scope: Token
    cursor: Number


class GetStats(Message):
    pass


class Bye(Message):
    """This client touches nothing any more and goes; not answered."""


# Replies.


class Welcome(Message):
    """server: 16 hex digits, others for every start."""

    version: int
    server: Name


class Refused(Message):
    """key: the setting to change, if it is one."""

    key: Name
    message: Text


class Registered(Message):
    """settings: what the service was started with, as ``key=value`` lines."""

    arena_bytes: Bytes
    tiers: list[Name]
    settings: Text


class Found(Struct, array_like=True):
    """places: for each chunk that can be restored, the number of the slowest tier it needs."""

    places: bytes
    reason: Name


class Answers(Message):
    found: list[Found]


class Run(Message):
    """Offset in the arena and tier number of each slot."""

    slots: list[tuple[Number, Count]]


class End(Message):
    """reason: why not all was delivered, if it was not."""

    reason: Name


class Granted(Message):
    """Per item the slot's offset in the arena, or why there is none."""

    slots: list[Number | Name]


class Committed(Message):
    done: list[bool]


class Done(Message):
    count: Count


class Changes(Message):
    """(stored, removed or cleared; tier number; digest; group), in order. lost: some before these are missing."""

    cursor: Number
    lost: bool
    events: list[tuple[Name, Count, bytes, Count]]


class Stats(Message):
    values: dict[str, Any]


T = TypeVar("T")
Request = (
    Hello
    | Register
    | Lookup
    | Release
    | Fetch
    | Ack
    | Reserve
    | Commit
    | LetGo
    | Clear
    | Flush
    | Events
    | GetStats
    | Bye
)
Reply = Welcome | Refused | Registered | Answers | Run | End | Granted | Committed | Done | Changes | Stats
_ENCODER = msgspec.msgpack.Encoder()


def frame(message: Message) -> bytes:
    """A message as it travels. BadInput: it is too large."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME:
        raise BadInput(f"a message of {len(body)} bytes; at most {MAX_FRAME}")
    return _HEAD.pack(len(body)) + body


class Channel(Generic[T]):
    """One connection; a thread at a time. Deadlines are of time.monotonic.

    Whatever ends it is an OSError: TimeoutError, else ConnectionError, also for a frame that is none.
    """

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self.sock = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def send(self, message: Message, deadline: float = FOREVER, fds: Sequence[int] = ()) -> None:
        """Send one message whole. BadInput, and nothing sent: it is too large."""
        data = frame(message)
        self._limit(deadline)
        if fds:
            data = data[socket.send_fds(self.sock, [data], fds) :]
        self.sock.sendall(data)

    def recv(self, deadline: float = FOREVER) -> T:
        """The next message."""
        (size,) = _HEAD.unpack(self._read(_HEAD.size, deadline))
        return self._body(size, deadline)

    def recv_fd(self, deadline: float = FOREVER) -> tuple[T, int | None]:
        """The next message, and the descriptor that came with it."""
        self._limit(deadline)
        head, fds, _, _ = socket.recv_fds(self.sock, _HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            (size,) = _HEAD.unpack(head + self._read(_HEAD.size - len(head), deadline))
            return self._body(size, deadline), fds[0] if fds else None
        except BaseException:
            for fd in fds:
                socket.close(fd)
            raise

    def unframe(self, data: bytearray) -> T | None:
        """Take the first whole message off ``data``, None when there is none yet. ConnectionError: a bad one."""
        if len(data) < _HEAD.size:
            return None
        (size,) = _HEAD.unpack_from(data)
        self._check(size)
        if len(data) < _HEAD.size + size:
            return None
        body = bytes(data[_HEAD.size : _HEAD.size + size])
        del data[: _HEAD.size + size]
        return self._decode(body)

    def _body(self, size: int, deadline: float) -> T:
        self._check(size)
        return self._decode(self._read(size, deadline))

    def _check(self, size: int) -> None:
        if not 0 < size <= MAX_FRAME:
            raise ConnectionError(f"a frame of {size} bytes")

    def _decode(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, BadInput, ValueError, RecursionError) as error:
            raise ConnectionError(f"a bad frame: {error}") from None

    def _read(self, size: int, deadline: float) -> bytes:
        pieces = []
        while size:
            self._limit(deadline)
            piece = self.sock.recv(min(size, PIECE))
            if not piece:
                raise ConnectionError("the other side is gone")
            pieces.append(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _limit(self, deadline: float) -> None:
        if deadline == FOREVER:
            self.sock.settimeout(None)
        elif (left := deadline - time.monotonic()) > 0:
            self.sock.settimeout(left)
        else:
            raise TimeoutError("timed out")

    def close(self) -> None:
        """Close it; another thread that waits on it is told to give up first by `shutdown`."""
        self.sock.close()

    def shutdown(self) -> None:
        """Wake whoever waits on it, here and on the other side."""
        with suppress(OSError):  # already closed
            self.sock.shutdown(socket.SHUT_RDWR)


def pack_keys(keys: Sequence[ChunkKey]) -> bytes:
    """Chunk keys as bytes. BadInput: more than 65,536."""
    if len(keys) > MAX_ITEMS:
        raise BadInput(f"{len(keys)} keys in one call; at most {MAX_ITEMS}")
    return b"".join([_KEY.pack(*key) for key in keys])


def unpack_keys(packed: bytes, count: int) -> list[ChunkKey]:
    """``count`` chunk keys. ConnectionError: it is another number of bytes."""
    if len(packed) != count * _KEY.size:
        raise ConnectionError(f"{len(packed)} bytes for {count} keys")
    return [ChunkKey(*fields) for fields in _KEY.iter_unpack(packed)]


def to_bytes(mask: int) -> bytes:
    """A mask, little-endian, without zeros at the end."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def to_mask(packed: bytes) -> int:
    """The mask of `to_bytes`."""
    return int.from_bytes(packed, "little")


def pack_meanings(known: Known) -> list[tuple[bytes, list[Meaning | None]]]:
    """What payload means by geometry id, as it travels."""
    return [(geometry.to_bytes(8, "little"), list(groups)) for geometry, groups in known.items()]


def owner(name: str) -> str:
    """A lease's owner as it may travel: short plain text is itself, anything else its hash."""
    if len(name) <= 256 and name.isascii():
        return name
    return _native.blake3(name.encode("utf-8", "surrogatepass")).hex()


def seconds(value: float) -> float:
    """A timeout as it may travel: from 0 to a day."""
    return min(max(value, 0.0), DAY)


def pack_need(need: Need) -> tuple[bytes, list[Tail]]:
    """A restoration rule as the fields of an Ask. BadInput: more than 64 groups."""
    if need.growing.bit_length() > 64 * MAX_SHARDS or any(each.group > 63 for each in need.trailing):
        raise BadInput("a lookup is over at most 64 groups")
    tails = [Tail(each.group, to_bytes(each.bits), [to_bytes(page) for page in each.pages]) for each in need.trailing]
    return to_bytes(need.growing), tails


def unpack_need(growing: bytes, trailing: Sequence[Tail]) -> Need:
    """The rule of `pack_need`."""
    tails = (Trailing(each.group, to_mask(each.bits), tuple(map(to_mask, each.pages))) for each in trailing)
    return Need(to_mask(growing), tuple(tails))
