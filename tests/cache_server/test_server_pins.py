"""Pins of clients on other machines: what is pinned stays, for as long as was asked, and never too much of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from cache_servers import Server, both, ended, greeted, owner, soon, stats, store, whole
from host_clients import until

from lmkv.backends.base import Status, Write
from lmkv.backends.server import ServerBackend
from lmkv.keys import ChunkKey
from lmkv.server import data
from lmkv.server import protocol as wire
from lmkv.testing.backend_tests import key_of

Start = Callable[..., Server]
MIB = 1 << 20
SMALL = {"cpu_budget": "16MiB", "cpu_slab": "4MiB"}


def there(client: ServerBackend, numbers: Sequence[int]) -> list[bool]:
    return [size is not None for size in client.contains([key_of(n) for n in numbers])]


def press(client: ServerBackend, count: int = 40, first: int = 1000, nbytes: int = MIB) -> None:
    """Put more than there is room for."""
    for number in range(first, first + count):
        store(client, number, nbytes)


def chain(length: int, first: int) -> list[ChunkKey]:
    """Keys of chunks that continue each other."""
    keys = [key_of(first)._replace(parent=bytes(8), depth=0)]
    for n in range(1, length):
        keys.append(key_of(first + n)._replace(parent=keys[-1].digest[:8], depth=n))
    return keys


def put(client: ServerBackend, keys: Sequence[ChunkKey], first: int, nbytes: int) -> None:
    bodies = [whole(first + n, nbytes, parent=key.parent, depth=key.depth) for n, key in enumerate(keys)]
    results = client.write([Write(key, body) for key, body in zip(keys, bodies, strict=True)])
    assert {each.status for each in results} == {Status.OK}


def test_what_is_pinned_survives_and_what_is_not_goes(start: Start) -> None:
    server = start(**SMALL)
    with closing(server.client()) as client:
        for number in range(8):
            store(client, number, MIB)
        wanted = [key_of(n) for n in (0, 1, 2, 99)]
        assert client.pin("me", wanted, 60) == [Status.OK] * 3 + [Status.MISSING]
        assert stats(server)["pins"] == {"chunks": 3, "held_bytes": 3 * MIB, "limit_bytes": 8 * MIB}
        press(client)
        assert there(client, range(8)) == [True] * 3 + [False] * 5
        assert client.unpin("you", wanted[:3]) == [False] * 3, "not yours"
        assert client.unpin("me", wanted) == [True] * 3 + [False]
        assert client.unpin("me", wanted) == [False] * 4
        press(client, first=2000)
        assert not any(there(client, range(8)))
        counts = stats(server)
        assert (counts["remote.pin.ok"], counts["remote.pin.missing"], counts["pins"]["chunks"]) == (3, 1, 0)


def test_a_chunk_is_kept_until_its_last_pin_ends(start: Start) -> None:
    server = start(**SMALL)
    with closing(server.client()) as client:
        store(client, 0, MIB)
        for name, seconds in (("a", 60), ("a", 60), ("b", 60), ("c", 0.3)):
            assert client.pin(name, [key_of(0)], seconds) == [Status.OK]
        assert client.unpin("a", [key_of(0)]) == [True]
        press(client)
        assert there(client, [0]) == [True]
        until(lambda: stats(server).get("remote.pins_expired") == 1)
        assert client.unpin("c", [key_of(0)]) == [False]
        assert client.unpin("b", [key_of(0)]) == [True]
        press(client, first=2000)
        assert there(client, [0]) == [False]


def test_a_pin_ends_by_itself_and_can_be_renewed(start: Start) -> None:
    server = start(**SMALL)
    with closing(server.client()) as client:
        for number in range(2):
            store(client, number, MIB)
        began = time.monotonic()
        assert client.pin("me", [key_of(0), key_of(1)], 5) == [Status.OK] * 2
        assert client.pin("me", [key_of(1)], 60) == [Status.OK]
        press(client)
        assert there(client, range(2)) == [True, True]
        time.sleep(max(0.0, began + 5.5 - time.monotonic()))
        press(client, first=2000)  # nobody asked for the pins meanwhile
        assert there(client, range(2)) == [False, True]
        assert stats(server)["remote.pins_expired"] == 1


def test_nobody_can_pin_everything(start: Start) -> None:
    server = start(**SMALL)
    with closing(server.client()) as client, closing(server.client()) as other:
        for number in range(12):
            store(client, number, MIB)
        ends = [client.pin(f"me {n}", [key_of(n)], 60)[0] for n in range(12)]
        assert ends == [Status.OK] * 8 + [Status.FULL] * 4
        press(other)
        assert there(client, range(8)) == [True] * 8
        assert there(other, [1039]) == [True]
        store(other, 5000, 3 * MIB)  # of another size: some slabs have to change
        assert stats(server)["remote.pin.full"] == 4


def test_a_chain_counts_with_all_that_it_keeps(start: Start) -> None:
    server = start(**SMALL)
    with closing(server.client()) as client:
        long, short = chain(12, 0), chain(4, 100)
        put(client, long, 0, MIB)
        assert client.pin("me", [long[-1]], 60) == [Status.FULL], "with its 11 ancestors it is more than half"
        assert client.pin("me", [long[5]], 60) == [Status.OK]
        assert stats(server)["pins"]["held_bytes"] == 6 * MIB
        press(client)
        sizes = client.contains(long)
        assert sizes[:6] == [MIB] * 6
        assert not any(sizes[7:])
        assert client.unpin("me", [long[5]]) == [True]
        # The last one first, and its ancestors later: they count as soon as room is wanted.
        put(client, short[-1:], 103, MIB)
        assert client.pin("me", short[-1:], 60) == [Status.OK]
        put(client, short[:-1], 100, 3 * MIB)
        until(lambda: "remote.pins_dropped" in stats(server) and stats(server)["pins"]["chunks"] == 0)
        press(client, first=3000)
        assert not any(client.contains(short))


def test_small_pins_in_every_slab_do_not_keep_others_out(start: Start) -> None:
    server = start(cpu_budget="16MiB", cpu_slab="1MiB")
    with closing(server.client()) as client:
        for number in range(1360):  # 16 MiB in slabs of 85 each
            store(client, number)
        ends = client.pin("me", [key_of(number) for number in range(0, 1360, 80)], 60)
        assert ends.count(Status.OK) >= 16
        assert stats(server)["pins"]["held_bytes"] < MIB
        store(client, 9000, MIB)  # needs a whole slab
        assert stats(server)["remote.pins_dropped"] > 0
        assert stats(server)["pins"]["chunks"] >= 7


def test_a_tenants_pins_leave_half_of_its_budget(start: Start) -> None:
    server = start(**SMALL, server_tenant_budget="4MiB")
    with closing(server.client()) as client:
        for number in range(4):
            store(client, number, MIB)
        ends = client.pin("me", [key_of(n) for n in range(4)], 60)
        assert ends == [Status.OK] * 2 + [Status.FULL] * 2
        press(client, 8)
        assert there(client, range(4)) == [True, True, False, False]
        assert client.pin("me", [key_of(0)], 0.2) == [Status.OK]
        time.sleep(0.3)
        press(client, 8, first=2000)
        assert there(client, range(4)) == [False, True, False, False]


def test_pins_hold_on_disk_too_and_end_with_the_server(start: Start, tmp_path: Path) -> None:
    server = start(**SMALL, tiers=f"disk://{tmp_path}/store?budget=8MiB")
    with closing(server.client()) as client:
        for number in range(3):
            store(client, number, MIB)
        assert client.pin("me", [key_of(0)], 60) == [Status.OK]
        assert stats(server)["pins"]["limit_bytes"] == 4 * MIB
        press(client, 24)
        assert there(client, range(3))[0]
        until(lambda: stats(server)["disk.evicted_chunks"] > 8)
        server.end()
        server.start()
        assert there(client, [0]) == [True], "the disk kept it"
        assert stats(server)["pins"]["chunks"] == 0


def test_pins_may_be_turned_off(start: Start) -> None:
    server = start(**SMALL, server_pin_share=0)
    with closing(server.client()) as client:
        store(client, 0)
        assert client.pin("me", [key_of(0), key_of(1)], 60) == [Status.FULL, Status.MISSING]


def test_each_server_keeps_its_own_and_one_that_is_down_says_so(pair: tuple[Server, Server], start: Start) -> None:
    down = start()
    with closing(both(pair[0], down, timeout="2s")) as client:
        for number in range(10):
            store(client, number)
        keys = [key_of(number) for number in range(10)]
        assert client.pin("me", keys, 60) == [Status.OK] * 10
        down.kill()
        ends = [Status.ERROR if owner(client, number) else Status.OK for number in range(10)]
        assert client.pin("me", keys, 60) == ends
        assert client.unpin("me", keys) == [end is Status.OK for end in ends]
        client.delete(keys)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 86401.0, float("nan"), float("inf")])
def test_a_pin_without_an_end_is_refused(shared: Server, seconds: float) -> None:
    stream, _ = greeted(shared)
    with closing(stream):
        stream.send(data.Pin("me", wire.pack_keys([key_of(1)]), seconds), soon())
        assert ended(stream.sock)


def test_a_chunk_that_is_deleted_is_pinned_no_more(start: Start) -> None:
    server = start(**SMALL)
    with closing(server.client()) as client:
        store(client, 0, MIB)
        assert client.pin("me", [key_of(0)], 60) == [Status.OK]
        assert client.delete([key_of(0)]) == [True]
        assert stats(server)["pins"]["chunks"] == 0
        store(client, 0, MIB)
        press(client)
        assert there(client, [0]) == [False]
