"""What the service does with bytes that no client of ours sends: it drops the connection, and nobody else notices."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
from host_clients import CHUNK, NBYTES, NEED, SCOPE, WAIT, Place, keys, load, store
from hypothesis import given
from hypothesis import strategies as st

from lmkv.plan import Need, Trailing
from lmkv.server import protocol as wire
from lmkv.server.client import Host

HELLO = wire.Hello(wire.VERSION, b"0123456789abcdef", "raw")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    made = Place()
    made.host()
    yield made
    made.close()


@pytest.fixture
def host(place: Place) -> Iterator[Host]:
    """Another client, to whom nothing may happen."""
    other = place.hosts[0]
    store(other, keys(3))
    yield other
    assert load(other, keys(3)) == (3, "", {0})
    assert [each["holds"] for each in other.stats()["clients"]] == [0]


class Raw:
    """A connection on which anything can be said."""

    def __init__(self, place: Place, *said: wire.Message) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(WAIT)
        self.sock.connect(place.socket)
        self.channel: wire.Channel[wire.Reply] = wire.Channel(self.sock, wire.Reply)
        for message in said:
            self.channel.send(message)
            self.channel.recv()

    def say(self, data: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # dropped already
            self.sock.sendall(data)

    def dropped(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True
        finally:
            self.sock.close()


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def encoded(*fields: object) -> bytes:
    return frame(msgspec.msgpack.encode(fields))


KEY = wire.pack_keys(keys(1))
BAD = {
    "garbage": b"\xff" * 100,
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "length 0": frame(b""),
    "oversize": struct.pack("<I", wire.MAX_FRAME + 1) + b"x",
    "4 GiB": struct.pack("<I", 2**32 - 1),
    "not msgpack": frame(b"\xc1"),
    "deep": frame(b"\x91" * 100_000),
    "an array of 4 billion": frame(b"\xdd\xff\xff\xff\xff"),
    "unknown message": encoded("Nonsense", 1),
    "too few fields": encoded("Flush"),
    "wrong type": encoded("Flush", "soon"),
    "nan": encoded("Flush", float("nan")),
    "negative": encoded("Flush", -1.0),
    "a digest short": encoded("Lookup", [["o", SCOPE, b"x" * 31, CHUNK, b"\1", [], 0.0, 0]]),
    "a scope short": encoded("Lookup", [["o", b"x", b"", CHUNK, b"\1", [], 0.0, 0]]),
    "no tokens": encoded("Lookup", [["o", SCOPE, b"x" * 32, 0, b"\1", [], 0.0, 0]]),
    "keys short": encoded("Fetch", 1, KEY[:-1], [NBYTES], 1.0),
    "more sizes than keys": encoded("Reserve", "o", 1, KEY, [NBYTES, NBYTES], 1.0),
    "size 0": encoded("Reserve", "o", 1, KEY, [0], 1.0),
    "masks missing": encoded("Commit", [1], [], 0),
    "hello again": encoded("Hello", wire.VERSION, b"0123456789abcdef", "raw"),
    "an ack of nothing": encoded("Ack", True),
    "a reply": encoded("Done", 1),
}


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_bad_bytes_end_the_connection_and_touch_nobody(place: Place, host: Host, what: str, greeted: bool) -> None:
    raw = Raw(place, *([HELLO] if greeted else []))
    raw.say(BAD[what])
    if what == "hello again" and not greeted:
        assert isinstance(raw.channel.recv(), wire.Welcome)
        raw.say(BAD[what])
    assert raw.dropped()


def test_a_frame_that_breaks_off_ends_the_connection(place: Place, host: Host) -> None:
    raw = Raw(place, HELLO)
    raw.say(struct.pack("<I", 1000) + b"x" * 10)
    raw.sock.shutdown(socket.SHUT_WR)
    assert raw.dropped()


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_length_that_breaks_off_ends_the_connection(place: Place, host: Host, length: int) -> None:
    raw = Raw(place)
    raw.say(bytes(length))
    raw.sock.shutdown(socket.SHUT_WR)
    assert raw.dropped()


def test_another_version_is_told_so(place: Place, host: Host) -> None:
    raw = Raw(place)
    raw.channel.send(wire.Hello(wire.VERSION + 1, b"0123456789abcdef", "new"))
    reply = raw.channel.recv()
    assert isinstance(reply, wire.Refused)
    assert (reply.key, f"version {wire.VERSION}" in reply.message) == ("server", True)
    assert raw.dropped()


def test_a_number_used_twice_ends_the_connection_and_leaks_nothing(place: Place, host: Host) -> None:
    raw = Raw(place, HELLO)
    packed = wire.pack_keys(keys(2, prompt=9))
    raw.channel.send(wire.Reserve("o", 5, packed[: len(packed) // 2], [NBYTES], 5.0))
    assert isinstance(raw.channel.recv(), wire.Granted)
    raw.channel.send(wire.Reserve("o", 5, packed[len(packed) // 2 :], [NBYTES], 5.0))
    assert raw.dropped()
    again = Raw(place, HELLO)
    again.channel.send(wire.LetGo([5, 6]))
    assert again.channel.recv() == wire.Done(1)
    again.channel.send(wire.Bye())
    assert again.dropped()


def test_a_client_that_answers_a_run_with_another_request_is_dropped_and_can_let_go(place: Place, host: Host) -> None:
    raw = Raw(place, HELLO)
    raw.channel.send(wire.Fetch(8, KEY, [NBYTES], 5.0))
    assert isinstance(raw.channel.recv(), wire.Run)
    raw.channel.send(wire.GetStats())
    assert raw.dropped()
    again = Raw(place, HELLO)
    again.channel.send(wire.LetGo([8]))
    assert again.channel.recv() == wire.Done(1)
    again.sock.close()


@given(st.binary(max_size=200))
def test_any_frame_is_a_message_or_refused(body: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(body) if body else bytes(4))
        ours.shutdown(socket.SHUT_WR)
        channel: wire.Channel[wire.Request] = wire.Channel(theirs, wire.Request)
        with suppress(ConnectionError):
            assert isinstance(channel.recv(), wire.Message)


masks = st.integers(0, 2**256 - 1)
parts = st.integers(0, 2**4096 - 1)
tails = st.builds(Trailing, st.integers(0, 63), parts, st.lists(masks, min_size=1, max_size=9).map(tuple))


@given(st.builds(Need, parts, st.lists(tails, max_size=3).map(tuple)))
def test_needs_travel_whole(need: Need) -> None:
    growing, trailing = wire.pack_need(need)
    ask = wire.Ask("o", SCOPE, b"", 1, growing, trailing, 0.0, 0)
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(ask), type=wire.Ask)
    assert wire.unpack_need(back.growing, back.trailing) == need
    assert wire.unpack_need(*wire.pack_need(NEED)) == NEED


def test_keys_travel_whole() -> None:
    some = [key._replace(group=2**16 - 1, depth=2**32 - 1) for key in keys(5, shard=63)]
    assert wire.unpack_keys(wire.pack_keys(some), 5) == some
