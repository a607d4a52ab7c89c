"""The `lmkv://` backend against real server processes: the contract, several servers, and servers in trouble."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_servers import PAGE, WAIT, Proxy, Server, free_port, load, run, store, whole
from deadlines import within
from host_clients import stop, until
from memory import CHUNK, Memory, spec

from lmkv import ConfigError, Engine, backends, chunk
from lmkv.backends.base import Backend, Read, Result, Status, Write
from lmkv.backends.server import ServerBackend
from lmkv.errors import BackendError, BadContainer
from lmkv.server import data
from lmkv.server import protocol as wire
from lmkv.server.stream import Stream
from lmkv.testing.backend_tests import BackendTests, buffer, key_of, listed, settled

TOKENS = np.arange(1, 10 * CHUNK + 5, dtype=np.int32)
Start = Callable[..., Server]


@pytest.fixture(scope="module")
def opaque(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server that stores anything, for the contract's tests."""
    server = Server(tmp_path_factory.mktemp("opaque"), cpu_budget="256MiB", server_verify="0")
    yield server
    server.close()


class TestContract(BackendTests):
    @pytest.fixture
    def backend(self, opaque: Server) -> Iterator[Backend]:
        made = opaque.client()
        yield made
        made.close()
        with closing(opaque.client()) as again:
            again.delete(list(listed(again)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two healthy servers that store whole containers."""
    folder = tmp_path_factory.mktemp("pair")
    servers = Server(folder), Server(folder)
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers of this test alone."""
    servers: list[Server] = []

    def begin(*options: str, **settings: object) -> Server:
        servers.append(Server(tmp_path, *options, **settings))  # type: ignore[arg-type]
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def both(*servers: Server, **options: object) -> ServerBackend:
    return ServerBackend("lmkv://" + ",".join(server.address for server in servers), **options)  # type: ignore[arg-type]


def owner(client: ServerBackend, number: int) -> int:
    return client._places([key_of(number)])[0]


# Several servers.


def test_keys_are_spread_over_the_servers_and_each_is_on_one(pair: tuple[Server, Server]) -> None:
    with closing(both(*pair)) as client, closing(pair[0].client()) as one, closing(pair[1].client()) as two:
        data = {number: store(client, number) for number in range(60)}
        keys = list(map(key_of, data))
        assert client.contains(keys) == [3 * PAGE] * 60
        held = [one.contains(keys), two.contains(keys)]
        assert all((a is None) != (b is None) for a, b in zip(*held, strict=True))
        assert min(sum(size is not None for size in sizes) for sizes in held) > 15
        into = [buffer(4 * PAGE) for _ in keys]
        results = client.read([Read(key, each) for key, each in zip(keys, into, strict=True)])
        assert results == [Result(Status.OK, 3 * PAGE)] * 60
        assert [each[: 3 * PAGE] for each in into] == list(data.values())
        assert settled(client) == dict.fromkeys(keys, 3 * PAGE)
        assert client.delete([*keys, key_of(99)]) == [True] * 60 + [False]


def test_all_parts_of_a_chunk_are_on_one_server_and_a_new_server_only_takes() -> None:
    names = [f"10.0.0.{n}:7000" for n in range(4)]
    three, four = (ServerBackend("lmkv://" + ",".join(some)) for some in (names[:3], names[::-1]))
    with closing(three), closing(four):
        keys = [key_of(number) for number in range(3000)]
        parts = [key._replace(group=2, shard=7, depth=9) for key in keys]
        assert three._places(keys) == three._places(parts)
        before = [names[place] for place in three._places(keys)]
        after = [names[3 - place] for place in four._places(keys)]
        moved = {now for was, now in zip(before, after, strict=True) if was != now}
        assert moved == {names[3]}
        shares = Counter(after)
        assert max(shares.values()) < 1.25 * min(shares.values())


def test_one_server_down_leaves_the_others_keys(start: Start) -> None:
    one, two = start(), start()
    with closing(both(one, two)) as client:
        data = {number: store(client, number) for number in range(20)}
        two.kill()
        for number in range(20):
            if owner(client, number) == 0:
                assert client.contains([key_of(number)]) == [3 * PAGE]
                assert load(client, key_of(number)) == data[number]
            else:
                assert client.contains([key_of(number)]) == [None]
                assert load(client, key_of(number)).status is Status.ERROR  # type: ignore[union-attr]
        keys = [key_of(number) for number in range(20)]
        assert set(client.contains(keys)) == {3 * PAGE, None}
        assert {each.status for each in client.read([Read(key, buffer(3 * PAGE)) for key in keys])} == {
            Status.OK, Status.ERROR,
        }  # fmt: skip
        health = client.health()
        assert not health.ok
        assert two.address in health.detail
        assert one.address not in health.detail
        with pytest.raises(BackendError, match="cannot list"):
            listed(client)


# Servers in trouble.


def test_a_server_that_is_down_at_start_is_used_once_it_is_up(start: Start) -> None:
    port = free_port()
    with closing(ServerBackend(f"lmkv://127.0.0.1:{port}")) as client:
        assert client.contains([key_of(1)]) == [None]
        assert client.write([Write(key_of(1), whole(1))])[0].status is Status.ERROR
        assert client.usage() == (0, 0, None)
        assert not client.health().ok
        start(port=port)
        data = store(client, 1)
        assert load(client, key_of(1)) == data
        assert client.health() == (True, "ok")


def test_killed_in_the_middle_of_a_read_and_back_empty(start: Start) -> None:
    server = start()
    proxy = Proxy(server, hold=5 << 20)
    nbytes = 12 << 20
    with closing(proxy), closing(ServerBackend(f"lmkv://{proxy.address}")) as client:
        store(client, 1, nbytes)
        ended: list[Result] = []
        into = buffer(nbytes)
        thread = threading.Thread(target=lambda: ended.extend(client.read([Read(key_of(1), into)])))
        thread.start()
        assert proxy.held.wait(WAIT)
        server.kill()
        proxy.release()
        thread.join(WAIT)
        assert [each.status for each in ended] == [Status.ERROR]
        generation = client._peers[0].generation
        assert client.contains([key_of(1)]) == [None]
        server.start()
        assert load(client, key_of(1)) == Result(Status.MISSING), "known at once, and nothing stale is given"
        assert client._peers[0].generation != generation
        assert settled(client) == {}
        store(client, 1)


def test_a_restart_while_connections_are_kept_loses_no_call(start: Start) -> None:
    server = start()
    with closing(server.client()) as client:
        data = store(client, 1)
        gate = threading.Barrier(4)

        def at_once() -> None:
            gate.wait(WAIT)
            assert load(client, key_of(1)) == data

        run([at_once] * 4)
        server.kill()
        server.start()
        assert client.write([Write(key_of(1), data)]) == [Result(Status.OK, len(data))], "over a fresh connection"
        assert load(client, key_of(1)) == data


def test_a_stopped_server_holds_no_call_longer_than_its_time(pair: tuple[Server, Server], start: Start) -> None:
    stopped = start()
    with closing(both(stopped, pair[0], timeout="1.5s", lookup_timeout="0.5s")) as client:
        data = {number: store(client, number) for number in range(20)}
        mine = [number for number in data if owner(client, number) == 0]
        other = [number for number in data if number not in mine]
        stop(stopped.process.pid)
        reads = [Read(key_of(n), buffer(3 * PAGE)) for n in data]
        results = within(1.5, lambda: client.read(reads), at_least=1.2)
        statuses = [Status.TIMEOUT if n in mine else Status.OK for n in data]
        assert [each.status for each in results] == statuses
        sizes = within(0, lambda: client.contains([key_of(n) for n in data]))
        assert sizes == [None if n in mine else 3 * PAGE for n in data]
        alone = client.read([Read(key_of(mine[0]), buffer(3 * PAGE))])
        assert (alone[0].status, "does not answer" in alone[0].detail) == (Status.ERROR, True), (
            "not asked until it does"
        )
        stopped.signal(signal.SIGCONT)
        until(lambda: load(client, key_of(mine[0])) == data[mine[0]])
        assert load(client, key_of(other[0])) == data[other[0]]
        assert client.delete([key_of(n) for n in data]) == [True] * 20


def test_a_lookup_of_a_stopped_server_ends_in_time(start: Start) -> None:
    server = start()
    with closing(server.client(lookup_timeout=0.4)) as client:
        store(client, 1)
        stop(server.process.pid)
        assert within(0.4, lambda: client.contains([key_of(1)]), at_least=0.3) == [None]


def test_what_a_disk_tier_has_is_there_after_a_restart(start: Start, tmp_path: Path) -> None:
    server = start(tiers=f"disk://{tmp_path}/store?budget=64MiB")
    with closing(server.client()) as client:
        data = {number: store(client, number, (2 + number % 3) * PAGE) for number in range(40)}
        assert client.usage()[:2] == (sum(map(len, data.values())), 40)
        assert server.end() == 0
        server.start()
        keys = list(map(key_of, data))
        assert client.contains(keys) == list(map(len, data.values()))
        into = [buffer(4 * PAGE) for _ in data]
        results = client.read([Read(key, each) for key, each in zip(keys, into, strict=True)])
        assert [each.status for each in results] == [Status.OK] * 40
        assert [each[: len(want)] for each, want in zip(into, data.values(), strict=True)] == list(data.values())
        assert settled(client) == {key: len(each) for key, each in zip(keys, data.values(), strict=True)}
        assert client.delete(keys[:5]) == [True] * 5
        assert settled(client).keys() == set(keys[5:])
        assert len(list(tmp_path.glob("store/*/*/*/*"))) == 35, "also on the disk"


def test_a_damaged_file_of_the_server_is_a_miss(start: Start, tmp_path: Path) -> None:
    server = start(tiers=f"disk://{tmp_path}/store?budget=64MiB")
    with closing(server.client()) as client:
        store(client, 1)
        data = store(client, 2)
        server.end()
        (file,) = (each for each in tmp_path.glob("store/*/*/*/*") if key_of(1).digest.hex() in each.name)
        with open(file, "r+b") as damaged:
            damaged.seek(2 * PAGE)
            damaged.write(b"x")
        server.start()
        results = client.read([Read(key_of(number), buffer(3 * PAGE)) for number in (1, 2, 1)])
        assert [each.status for each in results] == [Status.MISSING, Status.OK, Status.MISSING]
        assert load(client, key_of(2)) == data
        assert client.contains([key_of(1)]) == [None]


# Wrong bytes, and too many.


def test_a_byte_flipped_on_the_way_to_the_server_is_not_stored(start: Start) -> None:
    server = start()
    proxy = Proxy(server, "server", flip=300_000)
    with closing(proxy), closing(ServerBackend(f"lmkv://{proxy.address}")) as client:
        (result,) = client.write([Write(key_of(1), whole(1, 1 << 20))])
        assert (result.status, result.nbytes) == (Status.ERROR, 0)
        assert result.detail.startswith("checksum")
        assert client.contains([key_of(1)]) == [None]
        assert client.write([Write(key_of(1), whole(1, 1 << 20))])[0].status is Status.OK, "on the same connection"


def test_a_byte_flipped_on_the_way_back_fails_the_readers_check(start: Start) -> None:
    server = start()
    proxy = Proxy(server, flip=300_000)
    with closing(proxy), closing(ServerBackend(f"lmkv://{proxy.address}")) as client, closing(server.client()) as good:
        store(good, 1, 1 << 20)
        found = load(client, key_of(1))
        assert isinstance(found, memoryview)
        with pytest.raises(BadContainer, match="checksum"):
            chunk.verify(found, chunk.parse(found, key_of(1)))
        found = load(client, key_of(1))
        assert isinstance(found, memoryview)
        chunk.verify(found, chunk.parse(found, key_of(1)))


def test_what_cannot_be_kept_is_full_and_leaves_nothing(start: Start) -> None:
    server = start(cpu_budget="32MiB", cpu_slab="4MiB", server_tenant_budget="3MiB")
    with closing(server.client()) as client:
        assert client.write([Write(key_of(1), whole(1, 5 << 20))]) == [
            Result(Status.FULL, detail="larger than the server takes")
        ]
        small = whole(3)
        assert client.write([Write(key_of(2), whole(2, 7 << 19)), Write(key_of(3), small)]) == [
            Result(Status.FULL, detail="tenant budget"), Result(Status.OK, len(small)),
        ]  # fmt: skip
        assert settled(client) == {key_of(3): len(small)}


def test_a_tenant_over_its_budget_loses_its_own_chunks_only(start: Start) -> None:
    server = start(cpu_budget="32MiB", cpu_slab="4MiB", server_tenant_budget="1MiB")
    with closing(server.client()) as client:
        mine = {key_of(n)._replace(tenant=b"tenant-1"): whole(n, tenant=b"tenant-1") for n in range(3)}
        for key, data in mine.items():
            assert client.write([Write(key, data)]) == [Result(Status.OK, len(data))]
        for number in range(200):  # 2.3 MiB
            store(client, number)
        kept = settled(client)
        assert mine.keys() <= kept.keys()
        theirs = [key for key in kept if key.tenant == bytes(8)]
        assert 900 << 10 < len(theirs) * 3 * PAGE <= 1 << 20
        assert theirs[-1:] == [key_of(199)]
        assert all(load(client, key) == data for key, data in mine.items())


def test_a_full_server_lets_the_oldest_go(start: Start) -> None:
    server = start(cpu_budget="16MiB", cpu_slab="2MiB")
    with closing(server.client()) as client:
        for number in range(40):  # 20 MiB
            store(client, number, 1 << 19)
        sizes = client.contains([key_of(number) for number in range(40)])
        assert sizes[-1] == 1 << 19
        assert sizes[0] is None
        assert 10 < sum(size is not None for size in sizes) <= 32


def head(status: int = 0, detail: bytes = b"", nbytes: int = 0, stated: int | None = None) -> bytes:
    return struct.pack("<BB6xQ", status, len(detail) if stated is None else stated, nbytes) + detail


PLACED = head(nbytes=3 * PAGE) + bytes(3 * PAGE)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (head(nbytes=5 * PAGE) + bytes(5 * PAGE), Status.ERROR),
        (head(nbytes=1 << 60), Status.ERROR),
        (head(nbytes=0), Status.ERROR),
        (head(nbytes=PAGE + 1) + bytes(PAGE + 1), Status.ERROR),
        (head(status=200), Status.ERROR),
        (PLACED[:5000], Status.ERROR),
        (head(6, b"\xff\xfe not text"), Status.ERROR),
        (head(1, stated=200), Status.ERROR),
        (head(1), Status.MISSING),
        (wire.frame(data.Pong()), Status.ERROR),
        (b"", Status.ERROR),
    ],
)
def test_a_server_that_answers_wrong_is_an_error_and_writes_nowhere_else(answer: bytes, status: Status) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            for _ in range(2):
                sock, _ = listener.accept()
                with sock:
                    stream = Stream[data.Request](sock, data.Request)
                    stream.recv(time.monotonic() + WAIT)
                    stream.send(data.Welcome(1, "x", "generation", 1 << 40), time.monotonic() + WAIT)
                    if isinstance(stream.recv(time.monotonic() + WAIT), data.Get):
                        stream.send_buffers([answer], time.monotonic() + WAIT)
                    else:
                        stream.send(data.Contained([3 * PAGE, 5]), time.monotonic() + WAIT)

        thread = threading.Thread(target=serve)
        thread.start()
        into = buffer(8 * PAGE)
        with closing(ServerBackend(f"lmkv://127.0.0.1:{port}", timeout=5)) as client:
            (result,) = client.read([Read(key_of(1), into[2 * PAGE : 6 * PAGE])])
            assert (result.status, result.nbytes) == (status, 0)
            assert not any(into[: 2 * PAGE])
            assert not any(into[6 * PAGE :])
            client._peers[0]._drop_idle()
            assert client.contains([key_of(1)]) == [None], "two answers for one key"
        thread.join(WAIT)


@pytest.mark.parametrize("way", ["read", "write"])
def test_bytes_that_trickle_hold_no_call_longer_than_its_time(way: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        port, over = listener.getsockname()[1], threading.Event()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, suppress(OSError):
                stream = Stream[data.Request](sock, data.Request)
                stream.recv(time.monotonic() + WAIT)
                stream.send(data.Welcome(1, "x", "generation", 1 << 40), time.monotonic() + WAIT)
                stream.recv(time.monotonic() + WAIT)
                if way == "read":
                    sock.sendall(head(nbytes=32 << 20))
                while not over.wait(0.02):
                    if way == "read":
                        sock.sendall(bytes(100))
                    else:
                        sock.recv(20_000)

        thread = threading.Thread(target=serve)
        thread.start()
        view = buffer(32 << 20)
        with closing(ServerBackend(f"lmkv://127.0.0.1:{port}", timeout=0.7)) as client:
            call = client.read if way == "read" else client.write
            item: Any = (Read if way == "read" else Write)(key_of(1), view)
            results = within(0.7, lambda: call([item]), at_least=0.6)
            assert results == [Result(Status.TIMEOUT, detail="timed out")]
            over.set()
        thread.join(WAIT)


# Options.


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("lmkv://", "write HOST:PORT"),
        ("lmkv://host", "write HOST:PORT"),
        ("lmkv://host:70000", "write HOST:PORT"),
        ("lmkv://::1:70", "brackets"),
        ("lmkv://a:1,a:1", "no server twice"),
        ("lmkv://secret@a:1", "token_file= or token_env="),
        ("lmkv://a:1?token=x", "no option 'token'; did you mean"),
        ("lmkv://a:1?timeout=soon", "timeout='soon' is not a time"),
        ("lmkv://a:1?timeout=0", "is not a time"),
        ("lmkv://a:1?lookup_timeout=inf", "is not a time"),
        ("lmkv://a:1?tls=maybe", "must be 0 or 1"),
        ("lmkv://a:1?ca=/x", "need tls=1"),
        ("lmkv://a:1?tls=1&ca=/nowhere", "cannot use ca='/nowhere'"),
        ("lmkv://a:1?token_file=/nowhere", "cannot read the token"),
        ("lmkv://a:1?token_env=LMKV_TEST_NO_SUCH", "is not set in the environment"),
        ("lmkv://a:1?token_env=A&token_file=B", "not both"),
    ],
)
def test_wrong_options_are_refused_at_once(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        backends.open(url)
    assert message in str(caught.value)
    assert caught.value.key == "tiers.url"


def test_the_url_opens_the_same_backend_and_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_TOKEN", "very secret")
    url = "lmkv://a:1,[::1]:2?timeout=2s&lookup_timeout=0.3s&token_env=CACHE_TOKEN&tls=1"
    with closing(backends.open(url)) as made:
        assert made.url == url
        assert (made.shared, made.remote) == (True, True)
    with closing(backends.open("lmkv://a:1?timeout=10000ms&tls=0")) as made:
        assert made.url == "lmkv://a:1"


def test_a_forked_child_shares_no_connection_with_its_parent(pair: tuple[Server, Server]) -> None:
    with closing(both(*pair)) as client:
        data = {number: store(client, number) for number in range(8)}
        pid = os.fork()
        if pid == 0:
            good = all(load(client, key_of(number)) == data[number] for number in data for _ in range(20))
            os._exit(0 if good else 1)
        for _ in range(20):
            for number, want in data.items():
                assert load(client, key_of(number)) == want
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.delete(list(map(key_of, data))) == [True] * 8


# Engines.


def engine(memory: Memory, *servers: Server, **options: Any) -> Engine:
    place = "lmkv://" + ",".join(server.address for server in servers)
    tier = place + "?" + "&".join(f"{name}={value}" for name, value in options.items())
    return Engine(
        memory.spec, weights="test", layout=memory.pages.layout, cpu_budget="4MiB", cpu_touch=False, tiers=[tier]
    )  # fmt: skip


def test_another_engine_retrieves_exactly_what_one_stored(pair: tuple[Server, Server]) -> None:
    ours, theirs = Memory(spec(), pages=128), Memory(spec(), pages=128, seed=9)
    ids, others = ours.ids(160, seed=1), theirs.ids(160, seed=2)
    with engine(ours, *pair) as a:
        assert a.store(TOKENS, ours.pages, ids).stored == 10
        assert a.flush(WAIT).safe
    with engine(theirs, *pair) as b:
        assert b.lookup(TOKENS).tokens == 160
        found = b.retrieve(TOKENS, theirs.pages, others)
        assert (found.tokens, found.tiers) == (160, {"lmkv": 160})
        for got, want in zip(theirs.read(others), ours.read(ids), strict=True):
            np.testing.assert_array_equal(got, want)


def test_a_chunk_damaged_on_the_way_is_a_miss_of_the_engine(start: Start) -> None:
    server = start()
    memory = Memory(spec(), pages=128)
    proxy = Proxy(server, flip=PAGE + 2000)
    with closing(proxy):
        with engine(memory, server) as a:
            a.store(TOKENS[: 2 * CHUNK], memory.pages, memory.ids(2 * CHUNK))
            assert a.flush(WAIT).safe
        url = f"lmkv://{proxy.address}?readers=1"
        with Engine(memory.spec, weights="test", layout=memory.pages.layout, cpu_budget="4MiB", tiers=[url]) as b:
            assert b.lookup(TOKENS[: 2 * CHUNK]).tokens == 2 * CHUNK
            found = b.retrieve(TOKENS[: 2 * CHUNK], memory.pages, memory.ids(2 * CHUNK, seed=5))
            assert found.tokens < 2 * CHUNK
            assert b.stats()["miss.checksum"] == 1


def test_an_engine_without_its_server_only_misses(start: Start) -> None:
    server = start()
    memory = Memory(spec(), pages=128)
    with engine(memory, server, timeout="1s", lookup_timeout="0.5s") as a:
        assert a.store(TOKENS, memory.pages, memory.ids(160)).stored == 10
        assert a.flush(WAIT).safe
        a.clear(TOKENS, tier="cpu")
        server.kill()
        found = within(1, lambda: a.retrieve(TOKENS, memory.pages, memory.ids(160)))
        assert found.tokens == 0
        server.start()

        def again() -> bool:
            a.store(TOKENS, memory.pages, memory.ids(160))
            return a.retrieve(TOKENS, memory.pages, memory.ids(160)).tokens == 160 and a.flush(WAIT).safe

        until(again)  # once its breaker tries, and finds that the server is another
        with closing(server.client()) as client:
            until(lambda: len(listed(client)) == 10)
