"""The `lmkv://` backend and servers in trouble, full ones, and ones that answer wrong."""

from __future__ import annotations

import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from cache_servers import PAGE, WAIT, Proxy, Server, both, free_port, load, owner, run, store, whole
from deadlines import within
from host_clients import stop, until

from lmkv import chunk
from lmkv.backends.base import Read, Result, Status, Write
from lmkv.backends.server import ServerBackend
from lmkv.errors import BadContainer
from lmkv.server import data
from lmkv.server import protocol as wire
from lmkv.server.stream import Stream
from lmkv.testing.backend_tests import buffer, key_of, settled

Start = Callable[..., Server]


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
    server = start(cpu_budget="128MiB", cpu_slab="32MiB")
    proxy = Proxy(server, hold=5 << 20)
    nbytes = 24 << 20  # more than held, and what two sockets' buffers take
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


def test_a_restart_voids_what_was_known_of_that_server_alone(pair: tuple[Server, Server], start: Start) -> None:
    server = start()
    keys = [key_of(number) for number in range(20)]
    with closing(both(server, pair[0])) as client:
        client.contains(keys)
        mine, lost = [owner(client, number) == 0 for number in range(20)], list[object]()
        client.on_reset = lambda which: lost.append(which(keys))
        client.attend()
        assert not lost
        server.kill()
        client.attend()
        assert lost == [mine]
        client.contains(keys)
        client.attend()
        server.start()
        client.contains(keys)
        assert lost == [mine], "once for each life that was heard from"
        server.kill()
        server.start()
        client.contains(keys)
        assert lost == [mine, mine], "the greeting tells it too"


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
