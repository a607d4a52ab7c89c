"""The parser of RESP2: nothing confuses it."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis_servers import Server

from lmkv.backends.redis import RedisBackend
from lmkv.backends.resp import BUFFER, Body, ProtocolError, Replies, Reply, ReplyError

PAGE = 4096
Start = Callable[..., Server]
Open = Callable[..., RedisBackend]


def parse(stream: bytes, cuts: list[int], into: memoryview | None, count: int, many: int = 0) -> list[Reply]:
    """``count`` replies of a stream that arrives in pieces; ConnectionError at its end. many: see `Replies.reply`."""
    replies, parsed, at = Replies(), list[Reply](), 0
    sizes = iter(cuts)
    for _ in range(count):
        steps = replies.reply(into, many)
        try:
            want = next(steps)
            while True:
                piece = stream[at : at + min(next(sizes, len(stream)), len(want))]
                if not piece:
                    raise ConnectionError("the end")
                want[: len(piece)] = piece
                at += len(piece)
                want = steps.send(len(piece))
        except StopIteration as done:
            parsed.append(done.value)
    return parsed


def encoded(reply: Reply) -> bytes:
    if isinstance(reply, ReplyError):
        return b"-" + reply.encode() + b"\r\n"
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, list):
        return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))
    return b"$-1\r\n" if reply is None else b":%d\r\n" % int(str(reply))


LEAVES = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=200),
    st.text("abc XYZ9", max_size=50).map(ReplyError),
)
REPLIES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=5), max_leaves=8).filter(lambda r: depth(r) < 4)
CUTS = st.lists(st.integers(1, 300), max_size=200)


def depth(reply: Reply) -> int:
    return 1 + max(map(depth, reply), default=0) if isinstance(reply, list) else 0


@given(st.lists(REPLIES, max_size=8), CUTS)
@settings(max_examples=40)
def test_replies_are_the_same_however_they_arrive(replies: list[Reply], cuts: list[int]) -> None:
    stream = b"".join(map(encoded, replies))
    assert parse(stream, cuts, None, len(replies)) == replies
    assert parse(stream, [1] * len(stream), None, len(replies)) == replies
    assert not replies or parse(stream, cuts, None, 1, len(replies)) == [replies]


SIZES = st.sampled_from([0, 1, 23, 24, 25, BUFFER - 9, BUFFER // 2, BUFFER, BUFFER + 1, 3 * BUFFER])


@given(SIZES, SIZES, st.lists(st.integers(1, 2 * BUFFER), max_size=30))
@settings(max_examples=60)
def test_payload_is_the_same_however_it_arrives(nbytes: int, room: int, cuts: list[int]) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    stream = b"-ERR no\r\n$%d\r\n%b\r\n$-1\r\n" % (nbytes, data)
    into = memoryview(bytearray(room + 1))
    error, body, nothing = parse(stream, cuts, into[:room], 3)
    assert (error, nothing) == (ReplyError("ERR no"), None)
    assert body == Body(nbytes, data[-24:])
    assert into[: min(room, nbytes)] == data[:room]
    assert into[room] == 0


@given(
    st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([b"\r\n", b"*3\r\n", b"$5\r\n", b":1\r\n", b"$-1"]))),
    CUTS,
)
@example([b"*1\r\n" * 2000], [])
@example([b"$99999999999\r\n"], [])
@example([b"*%d\r\n" % (1 << 20) * 4], [])
@example([b":" + b"9" * 10000], [])
@example([b":\xb2\r\n"], [])
@settings(max_examples=120)
def test_no_bytes_confuse_the_parser(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    for into in (None, memoryview(bytearray(64))):
        for many in (0, len(stream) + 1):
            with pytest.raises(ConnectionError):
                parse(stream, cuts, into, len(stream) + 1, many)


def test_a_reply_without_end_is_given_up() -> None:
    small = b"$1000\r\n%b\r\n" % bytes(1000)
    for stream in (b"*1000000\r\n" + small * 17_000, b"+" + bytes(20000), b"$20000000\r\n"):
        with pytest.raises(ProtocolError):
            parse(stream + small, [], None, 1)
