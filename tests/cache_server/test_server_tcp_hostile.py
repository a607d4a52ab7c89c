"""`lmkv server --listen` and clients that mean no good: others never notice."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import closing, suppress

import numpy as np
import pytest
from cache_servers import PAGE, Server, ended, greeted, load, put, soon, stats, store, whole
from host_clients import until

from lmkv.backends.base import Result, Status
from lmkv.backends.server import ServerBackend
from lmkv.server import data
from lmkv.server import protocol as wire
from lmkv.server.tcp import NEWCOMERS
from lmkv.testing.backend_tests import key_of, settled

Start = Callable[..., Server]


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


BAD = {
    "random bytes": os.urandom(4000),
    "http": b"GET / HTTP/1.1\r\nHost: cache\r\n\r\n",
    "a frame of 4 GiB": struct.pack("<I", 2**32 - 1) + bytes(1000),
    "an empty frame": bytes(4),
    "a frame that is no message": frame(b"\xc1" * 100),
    "something before Hello": wire.frame(data.Ping()),
    "the other protocol": wire.frame(wire.Hello(1, bytes(16), "me")),
    "a long name": frame(b"\x94\xa5Hello\x01\xdb\x00\x10\x00\x00" + bytes(4000)),
    "a greeting larger than any": struct.pack("<I", 1 << 20) + bytes(1 << 20),
}


@pytest.mark.parametrize("what", BAD)
def test_garbage_ends_its_own_connection_only(shared: Server, client: ServerBackend, what: str) -> None:
    before = store(client, 1)
    with socket.create_connection(("127.0.0.1", shared.port)) as sock:
        with suppress(ConnectionError):
            sock.sendall(BAD[what])
        assert ended(sock)
    assert load(client, key_of(1)) == before


@pytest.mark.parametrize(
    "message",
    [
        data.Get(bytes(71), [1], 1.0),
        data.Get(bytes(72), [1, 2], 1.0),
        data.Put(bytes(72), []),
        data.Put(bytes(72), [4097]),
        data.Put(bytes(72), [0]),
        data.Put(bytes(72), [1 << 50]),
        data.Put(bytes(72), [(1 << 40)]),
        data.Contains(bytes(100)),
        data.Hello(1, "again", ""),
    ],
    ids=lambda message: str(message)[:60],
)
def test_a_message_that_does_not_fit_ends_its_connection(
    shared: Server, client: ServerBackend, message: wire.Message
) -> None:
    stream, _ = greeted(shared)
    with closing(stream):
        stream.send(message, soon())
        assert ended(stream.sock)
    store(client, 1)


def test_damaged_requests_harm_nobody_else(shared: Server, client: ServerBackend) -> None:
    kept = store(client, 1)
    packed = wire.pack_keys([key_of(1), key_of(7)])
    messages = [data.Hello(1, "test", ""), data.Contains(packed), data.Get(packed, [1 << 20] * 2, 1.0), data.Ping()]
    messages += [data.List(0), data.GetUsage(), data.Delete(wire.pack_keys([key_of(7)]))]
    put = wire.frame(data.Put(wire.pack_keys([key_of(7)]), [3 * PAGE])) + bytes(whole(7))
    good = b"".join(map(wire.frame, messages)) + put
    rng = np.random.default_rng(7)
    for _ in range(120):
        bad = bytearray(good)
        for at in rng.integers(0, len(good) - 3 * PAGE, rng.integers(1, 4)):
            bad[at] = rng.integers(256)
        with socket.create_connection(("127.0.0.1", shared.port)) as sock:
            with suppress(OSError):
                sock.sendall(bad[: rng.integers(len(bad))])
                sock.shutdown(socket.SHUT_WR)
            assert ended(sock)
    assert load(client, key_of(1)) in (kept, Result(Status.MISSING)), "one may have asked to delete it"
    fresh = store(client, 1)
    assert load(client, key_of(1)) in (kept, fresh)


def test_half_a_message_and_half_a_container_are_let_go_and_cost_nothing(shared: Server, client: ServerBackend) -> None:
    kept = store(client, 1)
    used = stats(shared)["tiers"]["cpu"]["bytes"]
    streams = [greeted(shared)[0] for _ in range(8)]
    for number, stream in enumerate(streams):
        if number % 2:
            put(stream, 100 + number, whole(100 + number, 1 << 20)[: 1 << 19], 1 << 20)
        else:
            stream.send_buffers([wire.frame(data.Contains(bytes(7200)))[:1000]], soon())
    for _ in range(20):
        assert load(client, key_of(1)) == kept
    began = time.monotonic()
    assert all(ended(stream.sock) for stream in streams)
    assert time.monotonic() - began < 10
    for stream in streams:
        stream.close()
    assert settled(client) == {key_of(1): len(kept)}
    assert stats(shared)["tiers"]["cpu"]["bytes"] == used
    assert stats(shared)["filling_bytes"] == 0
    assert len(stats(shared)["clients"]) == 2


def test_one_that_does_not_read_its_answers_is_let_go(shared: Server, client: ServerBackend) -> None:
    nbytes = 2 << 20
    kept = [store(client, number, nbytes) for number in range(2)]
    stream, _ = greeted(shared)
    with closing(stream):
        stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        many = [key_of(number % 2) for number in range(64)]
        stream.send(data.Get(wire.pack_keys(many), [nbytes] * 64, 60.0), soon())
        until(lambda: len(stats(shared)["clients"]) == 2)  # this question's and the client's connection
    assert load(client, key_of(1), nbytes) == kept[1]


def test_a_flood_of_connections_keeps_nobody_out_and_takes_no_memory(shared: Server, client: ServerBackend) -> None:
    kept = store(client, 1)
    before = shared.rss()
    flood: list[socket.socket] = []
    try:
        for _ in range(4 * NEWCOMERS):
            flood.append(socket.create_connection(("127.0.0.1", shared.port)))
            flood[-1].sendall(struct.pack("<I", 8000) + bytes(4000))
        assert load(client, key_of(1)) == kept
        with closing(shared.client()) as newcomer:
            assert load(newcomer, key_of(1)) == kept
        assert shared.rss() - before < 32 << 20
    finally:
        for sock in flood:
            sock.close()


def test_no_more_than_so_many_clients(start: Start) -> None:
    server = start(server_max_connections=2)
    first, second = greeted(server)[0], greeted(server)[0]
    third, reply = greeted(server)
    assert reply == data.Refused("busy", "too many connections")
    first.close()

    def comes_in() -> bool:
        stream, reply = greeted(server)
        stream.close()
        return isinstance(reply, data.Welcome)

    until(comes_in)
    for stream in (second, third):
        stream.close()


def test_an_idle_connection_ends_and_the_client_makes_another(start: Start) -> None:
    server = start(server_idle_timeout="0.2s")
    with closing(server.client()) as client:
        data = store(client, 1)
        (kept,) = client._peers[0]._idle
        until(lambda: not kept.usable())
        assert load(client, key_of(1)) == data
