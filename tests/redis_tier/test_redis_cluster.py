"""The redis backend on clusters: topology, moves, dead masters."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from signal import SIGSTOP

import pytest
from deadlines import within
from redis_servers import Server, hosts, start_cluster, valkey_binary, wait_until

from lmkv.backends.base import Read, Result, Status, Write
from lmkv.backends.redis import RedisBackend
from lmkv.errors import BackendError
from lmkv.testing import container, key_of
from lmkv.testing.backend_tests import buffer, fetch, put, settled

PAGE = 4096
Start = Callable[..., Server]
Open = Callable[..., RedisBackend]


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
