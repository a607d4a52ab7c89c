"""The redis backend on servers that fail, and on what only pretends to be one."""

import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import numpy as np
import pytest
from deadlines import within
from memory import CHUNK, Memory, spec
from redis_servers import FalseServer, Relay, Server, certificate, redis_binary, wait_until

from lmkv import Engine
from lmkv.backends.base import Read, Result, Status, Write
from lmkv.backends.redis import RedisBackend
from lmkv.errors import BackendError
from lmkv.testing import container, key_of
from lmkv.testing.backend_tests import buffer, fetch, put, settled

PAGE = 4096
Start = Callable[..., Server]
Open = Callable[..., RedisBackend]


def test_down_at_start_then_up(start: Start, connect: Open) -> None:
    server = start()
    server.kill()
    backend = connect(server)
    assert within(0, lambda: backend.contains([key_of(1)])) == [None]
    assert within(0, lambda: fetch(backend, key_of(1))) is Status.ERROR
    assert (backend.write([Write(key_of(1), container(1))])[0].status, backend.delete([key_of(1)])) == (
        Status.ERROR,
        [False],
    )
    health = backend.health()
    assert (health.ok, "refused" in health.detail, str(server.port) in health.detail) == (False, True, True)
    with pytest.raises(BackendError):
        list(backend.scan())
    server.start()
    assert fetch(backend, key_of(1)) is Status.MISSING
    data = put(backend, 1)
    assert (fetch(backend, key_of(1)), backend.contains([key_of(1)])) == (data, [PAGE])


def test_killed_in_the_middle_of_a_read_and_back_empty(start: Start, connect: Open) -> None:
    server = start()
    data = put(connect(server), 1, 32 << 20)
    relay = Relay(server.port, 1 << 20, server.kill)
    with closing(relay.front):
        backend, into = connect(relay.front.port), buffer(32 << 20)
        (result,) = within(0, lambda: backend.read([Read(key_of(1), into)]))
        assert (result.status, into[:4096] == data[:4096]) == (Status.ERROR, True)
        server.start()
        assert fetch(backend, key_of(1)) is Status.MISSING
        assert backend.write([Write(key_of(1), data)]) == [Result(Status.OK, data.nbytes)]
        assert fetch(backend, key_of(1), 32 << 20) == data


def test_a_restarted_server_is_found_again_by_a_connection_that_went_stale(start: Start, connect: Open) -> None:
    server = start()
    backend = connect(server)
    put(backend, 1)
    for _ in range(2):
        server.kill()
        server.start()
        assert backend.contains([key_of(1)]) == [None]
        put(backend, 1)
        server.kill()
        server.start()
        assert fetch(backend, key_of(1)) is Status.MISSING


def test_stopped_server_holds_nobody_longer_than_the_limits(start: Start, connect: Open) -> None:
    server = start()
    backend = connect(server, timeout="700ms", lookup_timeout="2s")
    data = put(backend, 1)
    server.signal(SIGSTOP)
    key = key_of(1)
    assert within(2, lambda: backend.contains([key]), at_least=1.9) == [None]
    assert within(0, lambda: backend.contains([key])) == [None]  # not even asked
    assert within(0.7, lambda: fetch(backend, key)) is Status.TIMEOUT
    assert within(0.7, lambda: backend.write([Write(key_of(2), data)]))[0].status is Status.TIMEOUT
    assert within(0.7, lambda: backend.delete([key_of(3)])) == [False]
    assert not within(1.4, backend.health).ok
    server.signal(SIGCONT)
    wait_until(lambda: backend.contains([key]) == [PAGE])
    assert fetch(backend, key) == data
    assert backend.health().ok


def test_full_is_full_and_leaves_nothing_behind(start: Start, connect: Open) -> None:
    server = start("--maxmemory", "12mb")
    backend = connect(server)
    results = backend.write([Write(key_of(n), container(n, 1 << 20)) for n in range(16)])
    stored = [n for n, each in enumerate(results) if each.status is Status.OK]
    assert {each.status for each in results} == {Status.OK, Status.FULL}
    assert settled(backend) == {key_of(n): 1 << 20 for n in stored}
    assert fetch(backend, key_of(stored[0])) == container(stored[0], 1 << 20)
    backend.delete([key_of(stored[0]), key_of(stored[1])])
    backend.piece = 1 << 18
    large = Write(key_of(99), container(99, 8 << 20))
    assert backend.write([large])[0].status is Status.FULL
    assert len(settled(backend)) == server.ask("DBSIZE") == len(stored) - 2
    put(backend, 50, 1 << 20)


def test_a_server_that_evicts_takes_all_and_loses_the_oldest(start: Start, connect: Open) -> None:
    server = start("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru")
    backend = connect(server)
    for n in range(24):
        put(backend, n, 1 << 20)
    sizes = backend.contains([key_of(n) for n in range(24)])
    assert (sizes[23], sizes.count(None) > 8) == (1 << 20, True)
    assert len(settled(backend)) == 24 - sizes.count(None)


def test_password_from_a_file_or_the_environment(
    start: Start, connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    server.ask("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@read", "+ping")
    server.ask("CONFIG", "SET", "requirepass", "right")
    file = tmp_path / "password"
    file.write_text("wrong\n")
    backend = connect(server, password_file=str(file))
    (result,) = backend.read([Read(key_of(1), buffer(PAGE))])
    assert (result.status, "WRONGPASS" in result.detail) == (Status.ERROR, True)
    assert (backend.health().ok, "WRONGPASS" in backend.health().detail) == (False, True)
    assert connect(server).write([Write(key_of(1), container(1))])[0].detail.startswith("NOAUTH")
    assert connect(server).health().detail.startswith("NOAUTH")
    file.write_text("right\n")  # read again for each connection
    data = put(backend, 1)
    assert (backend.health().ok, "right" in backend.url) == (True, False)
    monkeypatch.setenv("KV_PASSWORD", "secret")
    reader = connect(server, username="reader", password_env="KV_PASSWORD")
    assert fetch(reader, key_of(1)) == data
    assert reader.write([Write(key_of(2), data)])[0].status is Status.READ_ONLY


def test_a_replica_takes_no_writes(start: Start, connect: Open) -> None:
    server, replica = start("--repl-diskless-sync-delay", "0"), start()
    data = put(connect(server), 1)
    replica.ask("REPLICAOF", "127.0.0.1", str(server.port))
    backend = connect(replica)
    wait_until(lambda: fetch(backend, key_of(1)) == data)
    assert backend.write([Write(key_of(2), data)])[0].status is Status.READ_ONLY
    assert backend.delete([key_of(1)]) == [False]


def test_a_database_that_is_none_gets_nothing_into_another(start: Start) -> None:
    server = start()
    with closing(RedisBackend(f"redis://127.0.0.1:{server.port}/99")) as backend:
        (result,) = backend.write([Write(key_of(1), container(1))])
        assert (result.status, "DB index" in result.detail) == (Status.ERROR, True)
    assert server.ask("DBSIZE") == 0


def test_one_flipped_byte_is_a_miss_and_the_object_goes(start: Start) -> None:
    server, memory = start(), Memory(spec(), pages=128)
    tokens, ids = np.arange(4 * CHUNK, dtype=np.int32), memory.ids(4 * CHUNK)
    options = {"weights": "test", "layout": memory.pages.layout, "cpu_budget": "4MiB", "cpu_touch": False}
    options["tiers"] = [f"valkey://127.0.0.1:{server.port}"]
    before = memory.read(ids)
    with Engine(memory.spec, **options) as engine:
        engine.store(tokens, memory.pages, ids)
        assert engine.flush(60)
    names = server.ask("KEYS", "*")
    assert isinstance(names, list)
    (third,) = [each for each in names if each.split(b"-")[-3:] == [b"2", b"0", b"0"]]
    byte = server.ask("GETRANGE", third, "4200", "4200")
    assert isinstance(byte, bytes)
    server.ask("SETRANGE", third, "4200", bytes([byte[0] ^ 1]))
    memory.wipe()
    with Engine(memory.spec, **options) as engine:
        hit = engine.retrieve(tokens, memory.pages, ids)
        assert (hit.tokens, hit.reason) == (2 * CHUNK, "checksum")
        pages = 2 * CHUNK // (4 * CHUNK // len(ids[0]))
        np.testing.assert_array_equal(memory.read(ids)[0][:, :pages], before[0][:, :pages])
        wait_until(lambda: server.ask("EXISTS", third) == 0, "deleted")


def say(*pieces: bytes, wait: bool = True) -> Callable[[socket.socket], None]:
    """Answer each request after the login with ``pieces``, then wait for the client to leave; or leave first."""

    def script(link: socket.socket) -> None:
        while b"SETNAME" not in link.recv(1 << 16):
            pass
        link.sendall(b"+OK\r\n")
        while asked := link.recv(1 << 16):
            for piece in pieces * len(re.findall(rb"\*\d+\r\n\$", asked)):
                link.sendall(piece)
            if not wait:
                return

    return script


def drip(link: socket.socket) -> None:
    while link.recv(1 << 16):
        link.sendall(b"+OK\r\n+")
        while True:
            link.sendall(b"x" * 1000)


def stream(link: socket.socket) -> None:
    link.recv(1 << 16)
    link.sendall(b"+OK\r\n$%d\r\n" % (1 << 40))
    while True:
        link.sendall(bytes(1 << 22))


LIES = {
    "garbage": (say(b"\x00\xff garbage\r\n" * 9), {Status.ERROR}),
    "an answer of another kind": (say(b":7\r\n"), {Status.ERROR}),
    "a huge length": (say(b"$9223372036854775807\r\nabc"), {Status.ERROR}),
    "a huge array": (say(b"*1000000000\r\n"), {Status.ERROR}),
    "deep arrays": (say(b"*1\r\n" * 1000), {Status.ERROR}),
    "a short body and the end": (say(b"$%d\r\n" % (PAGE + 8), bytes(100), wait=False), {Status.ERROR}),
    "a short body and silence": (say(b"$%d\r\n" % (PAGE + 8), bytes(100)), {Status.TIMEOUT}),
    "a body that is longer": (say(b"$%d\r\n" % (PAGE + 8), bytes(PAGE + 99)), {Status.ERROR}),
    "a body of no container's size": (say(b"$100\r\n", bytes(100), b"\r\n"), {Status.CORRUPT}),
    "that it is not ready": (say(b"-LOADING Redis is loading the dataset in memory\r\n"), {Status.ERROR}),
    "nothing": (say(), {Status.TIMEOUT}),
    "nothing at all": (lambda link: link.recv(1 << 20) and time.sleep(3), {Status.TIMEOUT}),
    "the end": (say(wait=False), {Status.ERROR}),
    "a line without end": (drip, {Status.ERROR}),
    "a body without end": (stream, {Status.TIMEOUT}),
}


@pytest.mark.parametrize("lie", LIES)
def test_whatever_a_server_says_is_bounded_and_its_connection_not_used_again(lie: str, connect: Open) -> None:
    script, statuses = LIES[lie]
    with closing(FalseServer(script)) as server:
        limits = (0.2, 0.15) if Status.TIMEOUT in statuses else (20, 20)
        backend = connect(server.port, timeout=limits[0], lookup_timeout=limits[1])
        into = buffer(PAGE)
        for _ in range(2):
            (result,) = within(0.2, lambda: backend.read([Read(key_of(1), into)]))
            assert result.status in statuses
        whole = result.status is Status.CORRUPT or result.detail.startswith("LOADING")
        assert server.served == (1 if whole else 2)
        assert within(0.2, lambda: backend.contains([key_of(1)]))[0] in (None, 92)
        assert within(0.2, lambda: backend.write([Write(key_of(1), container(1))]))[0].status is not Status.OK
        assert within(0.2, lambda: backend.delete([key_of(1)])) == [False]
        assert not within(0.4, backend.health).ok
        with pytest.raises(BackendError):
            within(0.4, lambda: list(backend.scan()))


def test_a_place_that_takes_no_connections_holds_nobody(connect: Open) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # what the kernel takes in its own name
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        backend = connect(listener.getsockname()[1], timeout="400ms", lookup_timeout="200ms")
        assert within(0.2, lambda: backend.contains([key_of(1)])) == [None]
        assert within(0.4, lambda: fetch(backend, key_of(1))) is Status.TIMEOUT


def test_an_answer_too_many_is_not_taken_for_the_next(connect: Open) -> None:
    with closing(FalseServer(say(b"$-1\r\n$-1\r\n"))) as server:
        backend = connect(server.port)
        assert [fetch(backend, key_of(n)) for n in range(3)] == [Status.MISSING] * 3
        assert server.served == 3


def answer(link: socket.socket, times: int) -> None:
    """Log in, then say "no such key" to so many requests; hang up at the next."""
    for reply in (b"+OK\r\n", *[b"$-1\r\n"] * times):
        link.recv(1 << 16)
        link.sendall(reply)
    link.recv(1 << 16)


def test_a_connection_that_is_lost_between_two_calls_is_replaced_within_the_second(connect: Open) -> None:
    with closing(FalseServer(partial(answer, times=1))) as server:
        backend = connect(server.port)
        assert [fetch(backend, key_of(n)) for n in range(3)] == [Status.MISSING] * 3
        assert server.served == 3
    with closing(FalseServer(partial(answer, times=0))) as server:
        assert fetch(connect(server.port), key_of(1)) is Status.ERROR
        assert server.served == 1  # a fresh one is not tried again


def test_requests_wait_while_too_much_is_under_way(connect: Open) -> None:
    seen: list[int] = []

    def script(link: socket.socket) -> None:
        link.recv(1 << 16)
        link.sendall(b"+OK\r\n")
        link.settimeout(0.2)
        asked = b""
        while len(seen) < 3:
            try:
                asked += link.recv(1 << 16)
            except TimeoutError:  # noqa: PERF203
                seen.append(asked.count(b"GET"))
                link.sendall(b"$-1\r\n")

    with closing(FalseServer(script)) as server:
        reads = [Read(key_of(n), buffer(25 << 20)) for n in range(3)]
        assert connect(server.port).read(reads) == [Result(Status.MISSING)] * 3
    assert seen == [2, 3, 3]


def test_a_lookup_is_one_round_trip(connect: Open) -> None:
    def script(link: socket.socket) -> None:
        asked = b""
        while asked.count(b"STRLEN") < 1024 or not asked.endswith(b"\r\n"):
            asked += link.recv(1 << 16)
            if asked.count(b"SETNAME") and b"STRLEN" not in asked:
                link.sendall(b"+OK\r\n")
        link.sendall(b":%d\r\n" % (PAGE + 8) * 1024)

    with closing(FalseServer(script)) as server:
        assert connect(server.port, lookup_timeout=60).contains([key_of(n) for n in range(1024)]) == [PAGE] * 1024


def test_tls_with_its_own_authority(tmp_path: Path, connect: Open) -> None:
    if not (binary := redis_binary()):
        pytest.skip("no redis-server: apt-get install redis-server")
    key, cert = certificate(tmp_path)
    flags = "--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-auth-clients", "no"
    server = Server(binary, tmp_path / "tls", *flags, plain=False)
    try:
        backend = connect(server, "rediss", ca=str(cert), timeout=30, lookup_timeout=30)
        data = put(backend, 1, 8 << 20)
        assert fetch(backend, key_of(1), 8 << 20) == data
        assert len(backend.contains([key_of(n) for n in range(2000)])) == 2000
        assert settled(backend) == {key_of(1): 8 << 20}
        (result,) = connect(server, "rediss").read([Read(key_of(1), buffer(PAGE))])
        assert (result.status, "certificate" in result.detail) == (Status.ERROR, True)
        assert fetch(connect(server, "redis"), key_of(1)) is Status.ERROR
    finally:
        server.kill()
