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

from lmkv.errors import BadInput
from lmkv.index import MAX_SHARDS
from lmkv.keys import ChunkKey
from lmkv.plan import Need, Trailing

VERSION = 1
MAX_FRAME = 16 << 20
MAX_ITEMS = 1 << 16
PIECE = 1 << 18
FOREVER = math.inf

_KEY = struct.Struct("<16s8s32s8sIHH")
_HEAD = struct.Struct("<I")

Count = Annotated[int, Meta(ge=0, lt=2**31)]
Id = Annotated[int, Meta(ge=0, lt=2**53)]
Bytes = Annotated[int, Meta(ge=1, lt=2**48)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Name = Annotated[str, Meta(max_length=512)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Digests = Annotated[bytes, Meta(max_length=MAX_ITEMS * 32)]
Keys = Annotated[bytes, Meta(max_length=MAX_ITEMS * _KEY.size)]
Mask = Annotated[bytes, Meta(max_length=32)]  # of pages, little-endian
Parts = Annotated[bytes, Meta(max_length=64 * MAX_SHARDS // 8)]  # of at most 64 groups, little-endian
Ids = Annotated[list[Id], Meta(max_length=MAX_ITEMS)]
Sizes = Annotated[list[Bytes], Meta(max_length=MAX_ITEMS)]
Owners = Annotated[list[Name], Meta(max_length=MAX_ITEMS)]


class Message(Struct, array_like=True, tag=True):
    """Base of all that travels."""


# Requests.


class Hello(Message):
    """First on every connection. session: the client process's own random name for itself."""

    version: int
    session: Token
    client: Name


class Register(Message):
    """Container sizes that will be reserved and fetched; the answer carries the arena's descriptor."""

    sizes: Annotated[list[Bytes], Meta(min_length=1, max_length=1024)]


class Tail(Struct, array_like=True):
    """`lmkv.plan.Trailing`."""

    group: Annotated[int, Meta(ge=0, lt=64)]
    bits: Parts
    pages: Annotated[list[Mask], Meta(min_length=1, max_length=4096)]


class Ask(Struct, array_like=True):
    """One lookup: digests of a prompt's chunks, 32 bytes each; a lease for ``owner`` unless ``lease`` is 0."""

    owner: Name
    scope: Token
    digests: Digests
    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    growing: Parts
    trailing: Annotated[list[Tail], Meta(max_length=64)]
    lease: Seconds
    first: Count


class Lookup(Message):
    """Many lookups at once."""

    asks: Annotated[list[Ask], Meta(max_length=4096)]


class Release(Message):
    """End leases."""

    owners: Owners


class Fetch(Message):
    """Answered by a Run for each run, each followed by an Ack from here, and an End. number: the client's own."""

    number: Id
    keys: Keys
    sizes: Sizes
    timeout: Seconds


class Ack(Message):
    """The run is not touched any more. more: go on."""

    more: bool


class Reserve(Message):
    """Slots to fill within ``timeout``. first: the client's number of the first; the others follow."""

    owner: Name
    first: Id
    keys: Keys
    sizes: Sizes
    timeout: Seconds


class Commit(Message):
    """Publish filled slots. masks: the pages each holds, empty for all. expires: unix seconds, 0 never."""

    numbers: Ids
    masks: Annotated[list[Mask], Meta(max_length=MAX_ITEMS)]
    expires: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class LetGo(Message):
    """Reserved or fetched slots are not touched any more; those unknown or committed are passed over."""

    numbers: Ids


class Clear(Message):
    """Remove all chunks of a scope."""

    scope: Token


class Flush(Message):
    """Wait until what is queued for lower tiers is written or given up."""

    timeout: Seconds


class Events(Message):
    """What changed in a scope since ``cursor``; the first call subscribes."""

    scope: Token
    cursor: Id


class GetStats(Message):
    """Counters and usage."""


class Bye(Message):
    """This process touches nothing any more and goes."""


# Replies.


class Welcome(Message):
    """server: 16 hex digits, another for every start."""

    version: int
    server: Name
    pid: int


class Refused(Message):
    """Not done. key: the setting to change, if it is one."""

    key: Text
    message: Text


class Registered(Message):
    """Carries the arena's descriptor. settings: ``key=value`` lines of what the service was started with."""

    arena_bytes: Bytes
    tiers: list[Name]
    settings: Text


class Found(Struct, array_like=True):
    """chunks: restorable; tiers: how many of those past ``first`` come from which tier at the slowest."""

    chunks: Count
    tiers: list[tuple[Name, Count]]
    reason: Name


class Answers(Message):
    """One a lookup."""

    found: list[Found]


class Run(Message):
    """Fetched slots as (offset in the arena, tier number)."""

    slots: list[tuple[Id, Count]]


class End(Message):
    """No more runs; why, if not all were delivered."""

    reason: Name


class Granted(Message):
    """Per item the slot's offset in the arena, or why there is none."""

    slots: list[Id | Name]


class Committed(Message):
    """False: came too late."""

    done: list[bool]


class Done(Message):
    """count: what was done, where that is a number."""

    count: Count


class Changes(Message):
    """(kind, tier number, digest, group) in order. lost: some before these are missing."""

    cursor: Id
    lost: bool
    events: list[tuple[Name, Count, bytes, Count]]


class Stats(Message):
    """A tree of numbers and words."""

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


class Channel(Generic[T]):
    """One connection; a thread at a time. Deadlines are of time.monotonic.

    Whatever ends it is an OSError: TimeoutError, else ConnectionError, also for a frame that is none.
    """

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self.sock = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def send(self, message: Message, deadline: float = FOREVER, fds: Sequence[int] = ()) -> None:
        """Send one message whole. BadInput, and nothing sent: it is too large."""
        body = _ENCODER.encode(message)
        if len(body) > MAX_FRAME:
            raise BadInput(f"a message of {len(body)} bytes; at most {MAX_FRAME}")
        frame = _HEAD.pack(len(body)) + body
        self._limit(deadline)
        if fds:
            frame = frame[socket.send_fds(self.sock, [frame], fds) :]
        self.sock.sendall(frame)

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

    def _body(self, size: int, deadline: float) -> T:
        if not 0 < size <= MAX_FRAME:
            raise ConnectionError(f"a frame of {size} bytes")
        try:
            return self._decoder.decode(self._read(size, deadline))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
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
    """Chunk keys as bytes."""
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


def pack_need(need: Need) -> tuple[bytes, list[Tail]]:
    """A restoration rule as the fields of an Ask."""
    tails = [Tail(each.group, to_bytes(each.bits), [to_bytes(page) for page in each.pages]) for each in need.trailing]
    return to_bytes(need.growing), tails


def unpack_need(growing: bytes, trailing: Sequence[Tail]) -> Need:
    """The rule of `pack_need`."""
    tails = (Trailing(each.group, to_mask(each.bits), tuple(map(to_mask, each.pages))) for each in trailing)
    return Need(to_mask(growing), tuple(tails))
