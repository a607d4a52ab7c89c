"""What reads bytes that a peer or a disk made up: each target takes any bytes, and either understands or refuses them.

An exception that a target lets out, a hang, or memory that grows is a finding. ``make fuzz`` runs them guided by
coverage; `tests/test_fuzz.py` replays the corpus.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from lmkv import chunk, codec
from lmkv.backends.resp import Replies
from lmkv.codec import profile
from lmkv.config import Config
from lmkv.errors import BadContainer, BadInput
from lmkv.keys import ChunkKey
from lmkv.server import data as remote
from lmkv.server import protocol as host
from lmkv.server.remote import Remote
from lmkv.server.service import Service
from lmkv.server.tcp import Guest

ROOM = 1 << 20


def header(data: bytes) -> None:
    """A container's header page, then all of it, then its decoding."""
    page = data[: chunk.HEADER_BYTES].ljust(chunk.HEADER_BYTES, b"\0")
    body = memoryview(page + data[chunk.HEADER_BYTES :].ljust(chunk.HEADER_BYTES, b"\0"))
    with suppress(BadContainer):
        found = chunk.parse(body)
        chunk.verify(body, found)
        if found.raw_bytes <= ROOM:
            codec.decode_container(body, found, memoryview(bytearray(found.raw_bytes)))


def sealed(data: bytes) -> None:
    """The same behind the header's own checksum, which random changes would never get right."""
    page = bytearray(data[: chunk.HEADER_BYTES].ljust(chunk.HEADER_BYTES, b"\0"))
    page[: len(chunk.MAGIC)] = chunk.MAGIC
    page[-8:] = chunk._native.xxh3_64(bytes(page[:-8])).to_bytes(8, "little")
    header(bytes(page) + data[chunk.HEADER_BYTES :])


def streams(data: bytes) -> None:
    """A stream of the codec that the first byte names, decoded to as many bytes as the next two say."""
    if str(PROFILES) not in profile._folders:
        profile._folders.append(str(PROFILES))
    if len(data) > 3:
        nbytes = int.from_bytes(data[1:3], "little")
        room = bytearray(nbytes + 64)
        with suppress(BadContainer):
            _codec(CODECS[data[0] % len(CODECS)]).decode(memoryview(data)[3:], memoryview(room)[32 : 32 + nbytes])
        assert not any(room[:32] + room[32 + nbytes :]), "written beyond the part"


CODECS = ("zstd", "xpl", "fp8", "q8", "cachegen", "kch", "klt")
PROFILES = Path(__file__).parent / "profiles"


@functools.cache
def _codec(name: str) -> codec.Codec:
    return codec.get(name, None, next(PROFILES.iterdir()).stem) if name == "klt" else codec.get(name)


def key(data: bytes) -> None:
    """A key's text, as a file or an object may be named; what parses prints the same again."""
    text = data.decode("utf-8", "surrogateescape")
    with suppress(BadInput, ValueError):
        assert str(ChunkKey.parse(text)) == text


def frames(data: bytes) -> None:
    """Messages of both protocols, requests and replies."""
    for kind in (host.Request, host.Reply):
        channel: host.Channel[Any] = host.Channel(None, kind)  # type: ignore[arg-type]
        left = bytearray(data)
        with suppress(ConnectionError):
            while channel.unframe(left) is not None:
                pass
    for kind in (remote.Request, remote.Reply):
        with suppress(msgspec.MsgspecError, ValueError, RecursionError):
            msgspec.msgpack.decode(data, type=kind)
    with suppress(ConnectionError):
        remote.unpack_head(data[: remote.HEAD_BYTES].ljust(remote.HEAD_BYTES, b"\0"))


def resp(data: bytes) -> None:
    """Replies of Redis, in pieces whose sizes the first byte decides, with and without a place for a bulk."""
    step, rest = (data[0] % 7 + 1, data[1:]) if data else (1, b"")
    for into in (None, memoryview(bytearray(64))):
        replies, at = Replies(), 0
        with suppress(ConnectionError):
            while at < len(rest):
                wants = replies.reply(into)
                try:
                    room = next(wants)
                    while at < len(rest):
                        piece = rest[at : at + min(step, len(room))]
                        room[: len(piece)] = piece
                        at += len(piece)
                        room = wants.send(len(piece))
                except StopIteration:
                    continue


@functools.cache
def _service() -> Service:
    listen = {"listen": "127.0.0.1:0", "message_timeout": 5, "idle_timeout": 5}
    return Service(None, Config.load(env={}, cpu={"budget": "64MiB", "slab": "8MiB", "touch": False}, server=listen))


def server(data: bytes) -> None:
    """A whole connection to a cache server: a greeting, then the bytes, then the end."""
    service = _service()
    assert service.door is not None
    assert service.catalog is not None
    ours, theirs = socket.socketpair()
    hello = host.frame(remote.Hello(remote.VERSION, "fuzz", ""))

    def talk() -> None:
        with suppress(OSError):
            ours.sendall(hello + data)
            ours.shutdown(socket.SHUT_WR)
            while ours.recv(1 << 16):
                pass

    talker = threading.Thread(target=talk, daemon=True)
    guest = Guest(theirs, "fuzz")
    guest.secure = lambda access, deadline: None  # type: ignore[method-assign]  # no TCP options on a pair
    talker.start()
    try:
        with suppress(OSError):
            Remote(service, service.door, service.catalog, guest).serve()
    finally:
        theirs.close()
        talker.join(10)
        ours.close()
        with service.door._left:
            service.door._guests.discard(guest)
    assert not talker.is_alive(), "a client was left waiting"
    assert not service.catalog.storage._reservations, "a slot was kept"


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (header, sealed, streams, key, frames, resp, server)
}
