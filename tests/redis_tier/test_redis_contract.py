"""The redis backend on real servers: the contract, what a server holds, forks and URLs."""

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from redis_servers import Server, hosts

from lmkv import backends
from lmkv.backends.base import Backend, Read, Result, Status, Write
from lmkv.backends.redis import RedisBackend
from lmkv.errors import ConfigError
from lmkv.testing import BackendTests, container, key_of
from lmkv.testing.backend_tests import buffer, fetch, put, settled

PAGE = 4096
Start = Callable[..., Server]
Open = Callable[..., RedisBackend]


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
