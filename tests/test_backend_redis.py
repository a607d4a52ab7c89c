"""The redis backend on real servers: the contract, what goes wrong, and a parser that nothing confuses."""

import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import numpy as np
import pytest
from deadlines import within
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory import CHUNK, Memory, spec
from redis_servers import (
    FalseServer,
    Relay,
    Server,
    certificate,
    redis_binary,
    start_cluster,
    valkey_binary,
    wait_until,
)

from lmkv import Engine, backends
from lmkv.backends.base import Backend, Read, Result, Status, Write
from lmkv.backends.redis import RedisBackend
from lmkv.backends.resp import BUFFER, Body, ProtocolError, Replies, Reply, ReplyError
from lmkv.errors import BackendError, ConfigError
from lmkv.testing import BackendTests, container, key_of
from lmkv.testing.backend_tests import buffer, fetch, put, settled

PAGE = 4096
Start = Callable[..., Server]
Open = Callable[..., RedisBackend]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a Valkey with more flags."""
    with ExitStack() as stack:

        def start(*flags: str, **options: Any) -> Server:
            server = Server(valkey_binary(), tmp_path / os.urandom(4).hex(), *flags, **options)
            stack.callback(server.kill)
            return server

        yield start


@pytest.fixture
def connect() -> Iterator[Open]:
    """Opens a backend of a server, or of a port."""
    with ExitStack() as stack:

        def connect(server: Server | int, scheme: str = "valkey", **options: Any) -> RedisBackend:
            port = server if isinstance(server, int) else server.port
            backend = RedisBackend(f"{scheme}://127.0.0.1:{port}", **options)
            return stack.enter_context(closing(backend))

        yield connect


@pytest.fixture(scope="module")
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Server]]]:
    """One Valkey, one Redis if there is one, and a cluster of three."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        servers = {"valkey": [Server(valkey_binary(), folder / "valkey")]}
        servers["cluster"] = start_cluster(valkey_binary(), folder / "cluster")
        if binary := redis_binary():
            servers["redis"] = [Server(binary, folder / "redis")]
        for each in (each for group in servers.values() for each in group):
            stack.callback(each.kill)
        yield servers


@pytest.fixture
def masters(shared_servers: dict[str, list[Server]]) -> list[Server]:
    """Three empty masters of a cluster."""
    for each in shared_servers["cluster"]:
        each.ask("FLUSHALL")
    return shared_servers["cluster"]


def hosts(servers: list[Server]) -> str:
    return ",".join(f"127.0.0.1:{each.port}" for each in servers)


@pytest.fixture
def cluster(masters: list[Server]) -> Iterator[RedisBackend]:
    with closing(RedisBackend(f"redis://{hosts(masters)}", lookup_timeout=5)) as backend:
        yield backend


class RedisTests(BackendTests):
    kind = "valkey"

    @pytest.fixture
    def backend(self, shared_servers: dict[str, list[Server]]) -> Iterator[Backend]:
        if self.kind not in shared_servers:
            pytest.skip("no redis-server: apt-get install redis-server")
        servers = shared_servers[self.kind]
        for each in servers:
            each.ask("FLUSHALL")
        scheme = "redis" if self.kind == "cluster" else self.kind
        with closing(backends.open(f"{scheme}://{hosts(servers)}?lookup_timeout=20s&timeout=30s")) as backend:
            yield backend

    def reopen(self, backend: Backend) -> Backend:
        backend.close()
        return backends.open(backend.url)


class TestValkey(RedisTests):
    pass


class TestRedis(RedisTests):
    kind = "redis"


class TestCluster(RedisTests):
    kind = "cluster"


class TestPieces(RedisTests):
    """Where every container above four pages is in pieces."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RedisBackend, "piece", 4 * PAGE)


# What a server holds.


def test_a_value_is_the_container_and_its_time_under_prefix_and_key(start: Start, connect: Open) -> None:
    server = start()
    data = put(connect(server, prefix="a*b:"), 1)
    value = server.ask("GET", f"a*b:{key_of(1)}")
    assert isinstance(value, bytes)
    assert value[:-8] == data
    assert abs(int.from_bytes(value[-8:], "little") / 1000 - time.time()) < 60


def test_prefixes_and_databases_keep_backends_apart_and_what_is_foreign_is_skipped(start: Start, connect: Open) -> None:
    server = start()
    server.ask("SET", f"a?x{key_of(3)}", b"x")
    server.ask("SET", "a?:not a key", bytes(PAGE + 8))
    server.ask("SET", f"a?:{key_of(4)}", bytes(PAGE))
    server.ask("LPUSH", f"a?:{key_of(5)}", b"x")
    one, other, third = (
        connect(server, prefix="a?:"),
        connect(server, prefix="ax:"),
        RedisBackend(f"redis://127.0.0.1:{server.port}/3", prefix="a?:"),
    )
    with closing(third):
        for backend, number in ((one, 1), (other, 2), (third, 6)):
            put(backend, number)
            assert settled(backend) == {key_of(number): PAGE}
        assert one.contains([key_of(n) for n in range(1, 7)]) == [PAGE, None, None, None, None, None]
        assert [fetch(one, key_of(n)) for n in (4, 5)] == [Status.CORRUPT] * 2
        assert one.delete([key_of(4), key_of(5)]) == [True, True]
        assert one.usage()[:2] == (PAGE, 1)


def test_objects_go_after_their_ttl_and_stay_without(start: Start, connect: Open, monkeypatch: Any) -> None:
    monkeypatch.setattr(RedisBackend, "piece", PAGE)
    server = start()
    put(connect(server, ttl="1h", prefix="gone:"), 1, 3 * PAGE)
    put(connect(server, prefix="kept:"), 1, 3 * PAGE)
    names = server.ask("KEYS", "*")
    assert isinstance(names, list)
    ttls = {name: server.ask("TTL", name) for name in names}
    assert sorted(3500 < each <= 3660 for name, each in ttls.items() if name.startswith(b"gone:")) == [True] * 3
    assert [each for name, each in ttls.items() if name.startswith(b"kept:")] == [-1] * 3


def test_pieces_are_published_with_the_first_and_go_with_it(start: Start, connect: Open) -> None:
    server = start()
    backend, data = connect(server), container(1, 10 * PAGE)
    backend.piece = 4 * PAGE
    assert backend.write([Write(key_of(1), data)]) == [Result(Status.OK, data.nbytes)]
    assert (backend.contains([key_of(1)]), server.ask("DBSIZE")) == ([data.nbytes], 3)
    into = buffer(8 * PAGE)
    assert backend.read([Read(key_of(1), into)]) == [Result(Status.ERROR, detail="short buffer")]
    (name,) = [name for name in server.ask("KEYS", "*part*") if name.endswith(b"/2")]  # type: ignore[union-attr]
    value = server.ask("GET", name)
    assert isinstance(value, bytes)
    for broken in (value[:-1], value + b"x", None):
        server.ask("DEL", name) if broken is None else server.ask("SET", name, broken)
        assert (backend.contains([key_of(1)]), fetch(backend, key_of(1))) == ([None], Status.CORRUPT)
    assert backend.delete([key_of(1)]) == [True]
    assert (server.ask("DBSIZE"), backend.usage()[:2]) == (0, (0, 0))


def test_writers_of_one_key_in_pieces_never_mix(start: Start, connect: Open) -> None:
    server = start()
    versions = [container(n, (9 + n) * PAGE) for n in range(4)]
    clients = [connect(server) for _ in versions]
    for each in clients:
        each.piece = 4 * PAGE
    failed: list[object] = []

    def work(number: int) -> None:
        for _ in range(60):
            result = clients[number].write([Write(key_of(1), versions[number])])[0]
            found = fetch(clients[number], key_of(1))
            good = found is Status.MISSING or found in versions
            failed.extend([result, found] if result.status is not Status.OK or not good else [])
            clients[number].delete([key_of(1)])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (failed, server.ask("DBSIZE")) == ([], 0)


def test_a_big_batch_flows_both_ways_without_jamming(start: Start, connect: Open) -> None:
    backend = connect(start(), timeout=60)
    data = [container(n, 1 << 20) for n in range(4)]
    writes = [Write(key_of(n), data[n % 4]) for n in range(100)]  # far more than sockets' buffers hold
    assert {each.status for each in backend.write(writes)} == {Status.OK}
    into = [buffer(1 << 20) for _ in writes]
    results = backend.read([Read(each.key, view) for each, view in zip(writes, into, strict=True)])
    assert results == [Result(Status.OK, 1 << 20)] * 100
    assert all(view == each.data for each, view in zip(writes, into, strict=True))
    assert backend.contains([each.key for each in writes] * 40) == [1 << 20] * 4000


def test_usage_counts_a_key_once_however_often_it_is_written(start: Start, connect: Open) -> None:
    server = start()
    backend, other = connect(server), connect(server)
    backend.piece = 4 * PAGE
    for nbytes in (2 * PAGE, 8 * PAGE):
        for _ in range(2):
            put(backend, 1, nbytes)
            assert backend.usage()[:2] == (nbytes, 1)
        assert other.write([Write(key_of(1), container(1, nbytes))]) == [Result(Status.OK, nbytes)]
        assert other.usage()[:2] == (0, 0)
        assert backend.delete([key_of(1)] * 2) == [True, False]
        assert backend.usage()[:2] == (0, 0)
    assert server.ask("DBSIZE") == 0


def test_usage_counts_what_was_there_from_the_end_of_a_scan_and_writes_during_it(start: Start, connect: Open) -> None:
    server = start()
    for n in range(3000):
        server.ask("SET", f"lmkv:{key_of(n)}", bytes(PAGE + 8)) if n % 10 == 0 else None
    backend = connect(server)
    scan = backend.scan()
    first = next(scan)
    put(backend, 100001)
    put(backend, 100002)
    assert backend.delete([first[0].key, key_of(100002)]) == [True, True]
    assert backend.usage()[:2] == (0, 0)
    list(scan)
    assert backend.usage()[:2] == (300 * PAGE, 300)
    assert len(settled(backend)) == 300


# What goes wrong.


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


# Servers that are none.


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


# A cluster.


def test_a_cluster_is_laid_out_as_redis_py_sees_it(cluster: RedisBackend, masters: list[Server]) -> None:
    from redis.cluster import RedisCluster

    for n in range(60):
        put(cluster, n)
    assert len(settled(cluster)) == 60
    assert all(int(str(each.ask("DBSIZE"))) > 5 for each in masters)
    with closing(RedisCluster(host="127.0.0.1", port=masters[1].port)) as official:
        assert {official.get(f"lmkv:{key_of(n)}")[:-8] == container(n) for n in range(60)} == {True}
        slots = {slot: nodes[0].port for slot, nodes in official.nodes_manager.slots_cache.items()}
    assert {slot: place[1] for slot, place in enumerate(cluster._nodes._slots) if place} == slots
    assert "3 servers" in cluster.health().detail


def test_pieces_of_one_container_share_a_server(cluster: RedisBackend, masters: list[Server]) -> None:
    cluster.piece = PAGE
    for n in range(3):
        data = put(cluster, n, 8 * PAGE)
        assert fetch(cluster, key_of(n)) == data
        assert sorted(int(str(each.ask("DBSIZE"))) for each in masters) == [0, 0, 8]
        assert cluster.delete([key_of(n)]) == [True]
        assert [each.ask("DBSIZE") for each in masters] == [0, 0, 0]


def slot_of(name: str) -> int:
    from redis.crc import key_slot

    return key_slot(name.encode())


def identity(server: Server) -> bytes:
    answer = server.ask("CLUSTER", "MYID")
    assert isinstance(answer, bytes)
    return answer


def test_a_key_that_moves_is_followed(cluster: RedisBackend, masters: list[Server]) -> None:
    put(cluster, 1)
    slot = str(slot_of(f"lmkv:{key_of(2)}"))
    source = next(i for i, each in enumerate(masters) if each.port == cluster._nodes._slots[int(slot)][1])  # type: ignore[index]
    old, new = masters[source], masters[source - 1]
    old_id, new_id = identity(old), identity(new)
    new.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
    old.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
    data = put(cluster, 2)  # ASK
    assert (fetch(cluster, key_of(2)), cluster.contains([key_of(2)])) == (data, [PAGE])
    assert (old.ask("CLUSTER", "COUNTKEYSINSLOT", slot), new.ask("CLUSTER", "COUNTKEYSINSLOT", slot)) == (0, 1)
    for each in (new, old):
        each.ask("CLUSTER", "SETSLOT", slot, "NODE", new_id)
    assert (fetch(cluster, key_of(2)), cluster.contains([key_of(2)])) == (data, [PAGE])  # MOVED
    assert cluster.delete([key_of(2)]) == [True]
    new.ask("CLUSTER", "SETSLOT", slot, "NODE", old_id)
    old.ask("CLUSTER", "SETSLOT", slot, "NODE", old_id)
    assert cluster.write([Write(key_of(2), data), Write(key_of(3), data)]) == [Result(Status.OK, PAGE)] * 2
    assert set(settled(cluster)) == {key_of(n) for n in (1, 2, 3)}


def test_a_dead_master_takes_only_its_own_keys_along(tmp_path: Path) -> None:
    servers = start_cluster(valkey_binary(), tmp_path)
    try:
        with closing(RedisBackend(f"redis://{hosts(servers)}", timeout="3s", lookup_timeout="1s")) as backend:
            data = {n: put(backend, n) for n in range(30)}
            keys = [key_of(n) for n in data]
            slots = backend._nodes._slots
            servers[0].signal(SIGSTOP)
            lost = [slots[slot_of(f"lmkv:{key}")] == ("127.0.0.1", servers[0].port) for key in keys]
            expected = [None if each else PAGE for each in lost]
            assert 0 < sum(lost) < 30
            assert within(1, lambda: backend.contains(keys)) == expected
            assert within(0, lambda: backend.contains(keys)) == expected
            servers[0].kill()
            for _ in range(2):
                assert within(1, lambda: backend.contains(keys)) == expected
                into = [buffer(PAGE) for _ in keys]
                reads = [Read(key, view) for key, view in zip(keys, into, strict=True)]
                results = within(1, partial(backend.read, reads))
                assert [each.status for each in results] == [Status.ERROR if each else Status.OK for each in lost]
                assert all(each or view == data[n] for n, (view, each) in enumerate(zip(into, lost, strict=True)))
            health = backend.health()
            assert (health.ok, health.detail.startswith(f"1 of 3 servers: 127.0.0.1:{servers[0].port}")) == (
                False,
                True,
            )
            with pytest.raises(BackendError):
                list(backend.scan())
            servers[0].start()
            wait_until(lambda: backend.contains(keys) == expected and backend.health().ok, "the master is back, empty")
            assert backend.write([Write(key, container(0)) for key in keys]) == [Result(Status.OK, PAGE)] * 30
    finally:
        for each in servers:
            each.kill()


def test_a_replica_that_takes_over_is_found(tmp_path: Path) -> None:
    flags = "--cluster-node-timeout", "600", "--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"
    servers = start_cluster(valkey_binary(), tmp_path, flags=flags, replicas=1)
    try:
        with closing(RedisBackend(f"redis://{hosts(servers[1:3])}")) as backend:
            data = {n: put(backend, n) for n in range(30)}
            copied, here = servers[3], servers[0].ask("DBSIZE")
            wait_until(lambda: copied.ask("DBSIZE") == here, "copied")
            servers[0].kill()
            with closing(RedisBackend(backend.url)) as other:
                wait_until(lambda: other.contains(list(map(key_of, data))) == [PAGE] * 30, "taken over")
            assert {n: fetch(backend, key_of(n)) for n in data} == data  # the first call finds it
            assert backend.contains(list(map(key_of, data))) == [PAGE] * 30
            assert len(settled(backend)) == 30
    finally:
        for each in servers:
            each.kill()


def test_a_cluster_that_is_down_at_start_and_one_that_is_none(start: Start, connect: Open) -> None:
    server = start()
    backend = connect(server, cluster="1")
    assert (fetch(backend, key_of(1)), backend.contains([key_of(1)])) == (Status.ERROR, [None])
    assert "cluster support disabled" in backend.health().detail
    server.kill()
    assert within(0, lambda: fetch(backend, key_of(1))) is Status.ERROR
    assert "refused" in backend.health().detail


def test_a_cluster_asked_as_one_server_says_what_to_do(
    cluster: RedisBackend, masters: list[Server], connect: Open
) -> None:
    results = connect(masters[0]).write([Write(key_of(n), container(n)) for n in range(20)])
    wrong = {each.detail.partition(";")[2] for each in results if each.status is Status.ERROR}
    assert wrong == {" this is a cluster: add cluster=1 to the URL"}


# Forks.


def test_a_forked_child_uses_connections_of_its_own(start: Start, connect: Open) -> None:
    server = start()
    backend = connect(server)
    data = put(backend, 1, 1 << 20)

    def work() -> None:
        for _ in range(20):
            assert fetch(backend, key_of(1)) == data

    children = [multiprocessing.get_context("fork").Process(target=work) for _ in range(3)]
    for each in children:
        each.start()
    work()
    for each in children:
        each.join(60)
    assert [each.exitcode for each in children] == [0, 0, 0]


# URLs.


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379",
        "valkey://cache.example/3?prefix=a:b&ttl=7d&connections=2",
        "redis://[::1]:7000,node-2:7000?username=me&password_env=PATH&timeout=3s&lookup_timeout=200ms",
        "rediss://cache:6380?cluster=1",
    ],
)
def test_a_url_opens_the_same_backend_again(url: str) -> None:
    with closing(backends.open(url)) as backend, closing(backends.open(backend.url)) as again:
        assert backend.url == again.url == url
        assert (backend.shared, backend.remote) == (True, True)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://:hunter2@host", "password_file"),
        ("redis://me:hunter2@host:1/0", "password_env"),
        ("redis://host?password=hunter2", "password_file"),
        ("redis://", "host:port"),
        ("redis://host:99999", "host:port"),
        ("redis://host/zero", "redis://host:port"),
        ("redis://a,a", "redis://host:port"),
        ("redis://a,b?cluster=0", "cluster"),
        ("redis://a,b/1", "database"),
        ("redis://a?cluster=maybe", "cluster"),
        ("redis://a?prefix={x}", "braces"),
        ("redis://a?ca=/etc/hosts", "rediss"),
        ("rediss://a?ca=/nowhere", "/nowhere"),
        ("redis://a?username=me", "password_file"),
        ("redis://a?password_file=/nowhere", "/nowhere"),
        ("redis://a?password_env=LMKV_NOT_SET", "LMKV_NOT_SET"),
        ("redis://a?timeout=0s", "timeout"),
        ("redis://a?lookup_timeout=soon", "lookup_timeout"),
        ("redis://a?ttl=-1s", "ttl"),
        ("redis://a?connections=0", "connections"),
        ("redis://a?conections=1", "connections"),
    ],
)
def test_a_setting_that_is_wrong_is_refused_at_start(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        backends.open(url)
    assert says in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_cluster_without_redis_py_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.crc", None)
    with pytest.raises(ConfigError, match=r"pip install lmkv\[redis\]"):
        backends.open("redis://a,b")
    backends.open("redis://a").close()


# The parser.


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
