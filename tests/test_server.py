"""The host service: what one process stores another reads, one service a socket, leases, limits, the end."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from host_clients import NBYTES, SCOPE, WAIT, Place, available, fill, keys, load, query, store, until

from lmkv import BadInput, ConfigError, Unavailable
from lmkv.plan import Need
from lmkv.server import election, events
from lmkv.server.client import LOST, Host
from lmkv.server.link import Reserved


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where the fork server finds what it preloads
    made = Place()
    yield made
    made.close()


def test_what_was_stored_is_found_and_comes_back_byte_for_byte(place: Place) -> None:
    host = place.host()
    assert host.tiers == ("cpu", "disk")
    assert host.lookup(query()) == (b"", "not stored")
    assert store(host, keys(10)) == 10
    assert host.lookup(query()) == (bytes(10), "end of prompt")
    assert load(host, keys(10)) == (10, "", {0})
    assert host.lookup(query(count=12)) == (bytes(10), "not stored")
    assert load(host, keys(12)) == (10, "not stored", {0})
    answers = host.reserve("again", [(key, NBYTES) for key in keys(10)], 1.0)
    assert answers == ["held"] * 10


def test_chunks_that_left_host_memory_come_from_disk(place: Place) -> None:
    host = place.host()
    for prompt in range(30):  # 30 prompts of 20 containers of 8 KiB: more than the 4 MiB of host memory
        store(host, keys(20, prompt))
        assert host.flush(WAIT)
    assert host.lookup(query(0, 20)).places == b"\x01" * 20
    assert load(host, keys(20)) == (20, "", {1})
    assert host.lookup(query(0, 20)).places == bytes(20), "what was read stays in host memory"
    assert host.stats()["tiers"]["disk"]["objects"] == 600


def serve_other(host: Host, says: Connection) -> None:
    says.send(load(host, keys(10)))
    says.send(store(host, keys(10, prompt=1)))
    says.send(host.server_id)
    says.recv()


def test_two_processes_share_one_store(place: Place) -> None:
    host = place.host()
    store(host, keys(10))
    child = place.child(serve_other)
    assert child.recv() == (10, "", {0})
    assert child.recv() == 10
    assert child.recv() == host.server_id
    assert load(host, keys(10, prompt=1)) == (10, "", {0})
    assert len(host.stats()["clients"]) == 2


def test_many_lookups_in_flight_are_answered_each(place: Place) -> None:
    host = place.host()
    for prompt in range(5):
        store(host, keys(prompt + 1, prompt))
    futures = [host.lookup_later(query(n % 5, owner=str(n))) for n in range(300)]
    for n, future in enumerate(futures):
        assert future.result(WAIT).chunks == n % 5 + 1


def test_threads_fetch_and_store_side_by_side(place: Place) -> None:
    from lmkv.workers import Workers

    host = place.host()
    workers = Workers("test", 4)
    stored = [workers.submit(store, host, keys(10, prompt)) for prompt in range(12)]
    assert [future.result(WAIT) for future in stored] == [10] * 12
    loaded = [workers.submit(load, host, keys(10, prompt)) for prompt in range(12)]
    assert [future.result(WAIT)[:2] for future in loaded] == [(10, "")] * 12
    assert all(each["holds"] == 0 for each in host.stats()["clients"])


def test_an_iterator_closed_early_gives_its_run_back(place: Place) -> None:
    host = place.host()
    store(host, keys(10))
    runs = host.fetch(keys(10), [NBYTES] * 10, 5.0)
    next(runs)
    assert host.stats()["clients"][0]["holds"] == 1
    runs.close()
    assert host.stats()["clients"][0]["holds"] == 0
    assert host.available


def test_an_abort_gives_the_slots_back(place: Place) -> None:
    host = place.host()
    got = host.reserve("one", [(key, NBYTES) for key in keys(10)], 5.0)
    assert host.reserve("two", [(key, NBYTES) for key in keys(10)], 5.0) == ["in flight"] * 10
    host.abort([each for each in got if isinstance(each, Reserved)])
    until(lambda: host.stats()["clients"][0]["holds"] == 0)
    assert store(host, keys(10)) == 10


def race(host: Host, says: Connection) -> None:
    says.send("ready")
    says.recv()
    host.register([NBYTES], WAIT)
    says.send(host.server_id)
    says.recv()


def test_eight_processes_at_once_elect_one_service(place: Place) -> None:
    children = [place.child(race, register=False) for _ in range(8)]
    for child in children:
        child.recv()
    for child in children:
        child.hears.send("go")
    assert len({child.recv() for child in children}) == 1
    assert len(place.host().stats()["clients"]) == 9


def pidfd_ends(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(WAIT * 1000))


def test_the_service_lingers_and_ends_and_the_next_one_has_the_disk(place: Place) -> None:
    host = place.host()
    store(host, keys(10))
    pidfd = os.pidfd_open(place.pid)
    host.close()
    assert pidfd_ends(pidfd)
    os.close(pidfd)
    assert not os.path.exists(place.socket)
    with pytest.raises(Unavailable, match="closed"):
        host.lookup(query())
    again = place.host()
    assert again.server_id != host.server_id
    assert load(again, keys(again.lookup(query()).chunks)) == (10, "", {1})


def test_sigterm_writes_what_is_queued_and_ends(place: Place) -> None:
    host = place.host()
    store(host, keys(10))
    pidfd = os.pidfd_open(place.pid)
    place.signal(signal.SIGTERM)
    assert pidfd_ends(pidfd)
    os.close(pidfd)
    with pytest.raises(Unavailable):
        host.stats()
    available(host)
    assert host.lookup(query()).chunks == 10
    assert load(host, keys(10)) == (10, "", {1})


def test_a_second_client_with_another_budget_is_warned(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.host()
    with caplog.at_level(logging.WARNING, "lmkv.server.client"):
        place.host(config=place.config(cpu_budget="5MiB"))
    assert "cpu.budget is 4MiB, not 5MiB" in caplog.text


def test_sizes_that_do_not_fit_are_refused_with_the_setting(place: Place) -> None:
    host = place.host(register=False)
    with pytest.raises(ConfigError, match="cannot hold one chunk") as first:
        host.register([8 << 20])
    assert first.value.key == "cpu.budget"
    host.register([NBYTES])
    with pytest.raises(ConfigError, match="3145728") as later:
        host.register([3 << 20])
    assert later.value.key == "cpu.slab"
    with pytest.raises(ConfigError) as classes:
        host.register([4096 * n for n in range(1, 30)])
    assert classes.value.key == "cpu.budget"
    assert host.reserve("o", [(keys(1)[0], 3 * NBYTES)], 1.0) == ["not registered"]
    host.register([3 * NBYTES])
    (slot,) = host.reserve("o", [(keys(1)[0], 3 * NBYTES)], 1.0)
    assert isinstance(slot, Reserved)
    assert slot.nbytes == 3 * NBYTES
    assert store(host, keys(10, prompt=1)) == 10
    host.abort([slot])


def test_a_tier_that_cannot_be_opened_stops_the_start_with_the_reason(place: Place) -> None:
    (place.folder / "disk").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match="disk"):
        place.host()


def test_leases_are_one_an_owner_keep_chunks_and_end(place: Place) -> None:
    place.settings["tiers"] = []
    host = place.host()
    store(host, keys(10))
    for _ in range(2):
        assert host.lookup(query(owner="a", lease=60.0)).chunks == 10
    assert host.stats()["tiers"]["cpu"]["leases"] == 1
    for prompt in range(1, 60):
        store(host, keys(20, prompt))
    assert load(host, keys(10)) == (10, "", {0}), "leased chunks stay"
    host.release("a", "nobody")
    until(lambda: host.stats()["tiers"]["cpu"]["leases"] == 0)
    for prompt in range(60, 120):
        store(host, keys(20, prompt))
    assert host.lookup(query()).chunks == 0
    assert host.lookup(query(119, 20, owner="b", lease=60.0)).chunks == 20
    watcher = place.host()
    assert watcher.stats()["tiers"]["cpu"]["leases"] == 1
    host.close()
    until(lambda: watcher.stats()["tiers"]["cpu"]["leases"] == 0)


def test_clear_removes_a_scope_now_or_later(place: Place) -> None:
    host = place.host()
    store(host, keys(10))
    assert host.clear(SCOPE) == 10
    assert host.lookup(query()).chunks == 0
    store(host, keys(10))
    host.clear_later(SCOPE)
    until(lambda: host.lookup(query()).chunks == 0)


def test_events_tell_what_came_and_went(place: Place) -> None:
    host = place.host()
    assert host.events(SCOPE) == []
    store(host, keys(3))
    assert host.flush(WAIT)
    digests = [key.digest for key in keys(3)]
    found = host.events(SCOPE)
    assert [event for event in found if event[1] == "cpu"] == [("stored", "cpu", digest, 0) for digest in digests]
    assert sorted(event for event in found if event[1] == "disk") == [("stored", "disk", each, 0) for each in digests]
    assert host.events(SCOPE) == []
    host.clear(SCOPE)
    assert [event[0] for event in host.events(SCOPE)] == ["cleared"]


def test_events_say_that_some_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "CHANGES", 4)
    monkeypatch.setattr(events, "SCOPES", 2)
    rings = events.Rings()
    cursor, lost, found = rings.since(SCOPE, 0)
    assert (lost, found) == (False, [])
    for _ in range(4):
        rings.cleared(SCOPE)
    cursor, lost, found = rings.since(SCOPE, cursor)
    assert (lost, len(found)) == (False, 4)
    for _ in range(6):
        rings.cleared(SCOPE)
    cursor, lost, found = rings.since(SCOPE, cursor)
    assert (lost, len(found)) == (True, 4)
    for other in (b"1" * 16, b"2" * 16):
        rings.since(other, 0)
    assert rings.since(SCOPE, cursor)[1], "a scope that was forgotten"


def test_events_of_another_service_begin_with_a_gap(place: Place) -> None:
    host = place.host()
    host.events(SCOPE)
    place.signal(signal.SIGKILL)
    with pytest.raises(Unavailable):
        host.stats()
    available(host)
    assert host.events(SCOPE) == [LOST]
    assert host.events(SCOPE) == []


def test_the_socket_must_lie_where_nobody_else_can_go(place: Place) -> None:
    place.folder.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Host(place.socket)
    place.folder.chmod(0o700)
    with pytest.raises(ConfigError, match="107 bytes"):
        Host(str(place.folder / ("x" * 200)))
    (place.folder / "link").symlink_to(place.folder)
    with pytest.raises(ConfigError, match="folder of yours"):
        Host(str(place.folder / "link" / "s"))


def test_the_default_socket_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert election.socket_path("") == f"{tmp_path}/lmkv/server.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert election.socket_path("") == f"/tmp/lmkv-{os.geteuid()}/server.sock"


def test_without_spawn_a_missing_service_is_unavailable_until_there_is_one(place: Place) -> None:
    host = place.host(register=False, spawn=False)
    with pytest.raises(Unavailable, match="not registered"):
        host.lookup(query())
    with pytest.raises(Unavailable, match="no host service listens"):
        host.register([NBYTES])
    assert isinstance(host.lookup_later(query()).exception(WAIT), Unavailable)
    place.host()
    available(host)
    assert host.lookup(query()).chunks == 0


def test_the_command_serves_and_refuses_a_second_one(place: Place) -> None:
    command = [sys.executable, "-m", "lmkv", "server", "--socket", place.socket, "--linger", "30s"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "LMKV_CPU_BUDGET": "4MiB"}) as process:
        assert process.stderr
        assert place.socket in process.stderr.readline().decode()
        host = place.host(spawn=False)
        assert host.stats()["tiers"]["cpu"]["budget"] == 4 << 20
        second = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        assert second.returncode == 1
        assert "listens at" in second.stderr
        process.terminate()
        assert process.wait(WAIT) == 0


def test_a_service_that_cannot_start_says_why(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    host = place.host(register=False, config=place.config(policy="no such policy"))
    with pytest.raises(ConfigError, match="no such policy") as refused:
        host.register([NBYTES])
    assert refused.value.key == "policy"
    with pytest.raises(Unavailable):
        host.lookup(query())


def test_owners_of_any_text_lease_and_release(place: Place) -> None:
    host = place.host()
    store(host, keys(10))
    owners = ["x" * 10_000, "\ud800", "plain", "ünïcode"]
    for n, owner in enumerate(owners):
        assert host.lookup_later(query(owner=owner, lease=60.0)).result(WAIT).chunks == 10
        assert host.stats()["tiers"]["cpu"]["leases"] == n + 1
    host.release(*owners)
    until(lambda: host.stats()["tiers"]["cpu"]["leases"] == 0)


def test_arguments_that_are_wrong_are_refused_here(place: Place) -> None:
    host = place.host()
    for bad in (
        replace(query(), scope=b"short"),
        replace(query(), digests=b"x" * 33),
        replace(query(), need=Need(1 << 5000, ())),
    ):
        with pytest.raises(BadInput):
            host.lookup(bad)
    with pytest.raises(BadInput):
        host.reserve("o", [(keys(1)[0], NBYTES)] * 70_000, 1.0)
    assert host.available


def test_prompts_of_megabytes_of_digests_are_looked_up(place: Place) -> None:
    host = place.host(patience=WAIT)
    long = replace(query(), digests=os.urandom(32 * 60_000))
    futures = [host.lookup_later(long) for _ in range(20)]
    assert [future.result(WAIT).reason for future in futures] == ["not stored"] * 20


def test_an_expired_chunk_is_not_found(place: Place) -> None:
    host = place.host()
    got = host.reserve("o", [(key, NBYTES) for key in keys(2)], 5.0)
    slots = [each for each in got if isinstance(each, Reserved)]
    for key, slot in zip(keys(2), slots, strict=True):
        fill(key, slot)
    assert host.commit(slots, expires=1) == [True, True]
    assert host.lookup(query()) == (b"", "expired")
