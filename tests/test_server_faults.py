"""The host service in trouble: killed and stopped processes on both sides. No wrong bytes, no lost slots, no hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from host_clients import NBYTES, WAIT, Place, available, fill, keys, load, query, stop, store, until

from lmkv import Unavailable
from lmkv.keys import ChunkKey
from lmkv.server.client import Host
from lmkv.server.link import Reserved


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where the fork server finds what it preloads
    made = Place()
    yield made
    made.close()


def reserve(host: Host, wanted: list[ChunkKey], timeout: float = 30.0) -> list[Reserved]:
    got = host.reserve("test", [(key, NBYTES) for key in wanted], timeout)
    return [each for each in got if isinstance(each, Reserved)]


def holds(host: Host, name: str = "") -> list[int]:
    return [each["holds"] for each in host.stats()["clients"] if name in each["name"]]


# The service.


def test_a_service_killed_during_a_fetch_is_a_miss_and_its_disk_is_found_again(place: Place) -> None:
    host = place.host()
    store(host, keys(10))
    assert host.flush(WAIT)
    runs = host.fetch(keys(10), [NBYTES] * 10, 5.0)
    run = next(runs)
    assert not isinstance(run, str)
    before = [bytes(each.view()) for each in run]
    first, region = host.server_id, host.region
    place.signal(signal.SIGKILL)
    with pytest.raises(Unavailable):
        next(runs)
    assert [bytes(each.view()) for each in run] == before, "what was lent stays mapped while it is referred to"
    available(host)
    assert host.server_id != first
    assert host.region != region
    assert host.lookup(query()) == (b"\x01" * 10, "end of prompt")
    assert load(host, keys(10)) == (10, "", {1})


def test_a_service_killed_before_the_commit_leaves_nothing_and_the_next_takes_stores(place: Place) -> None:
    host = place.host()
    slots = reserve(host, keys(10))
    place.signal(signal.SIGKILL)
    for key, slot in zip(keys(10), slots, strict=True):
        fill(key, slot)
    with pytest.raises(Unavailable):
        host.commit(slots)
    available(host)
    assert host.commit(slots) == [False] * 10, "of a service that is no more"
    host.abort(slots)
    assert host.lookup(query()).chunks == 0
    assert store(host, keys(10)) == 10
    assert load(host, keys(10)) == (10, "", {0})


def test_a_service_killed_in_the_middle_of_a_reserve_ends_the_call(place: Place) -> None:
    host = place.host()
    stop(place.pid)
    ended: list[str] = []

    def call() -> None:
        try:
            reserve(host, keys(10))
        except Unavailable as error:
            ended.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    place.signal(signal.SIGKILL)
    thread.join(WAIT)
    assert ended
    available(host)
    assert store(host, keys(10)) == 10


def test_a_stopped_service_ends_every_call_in_time_and_goes_on_where_it_was(place: Place) -> None:
    host = place.host()
    store(host, keys(10))
    slots = reserve(host, keys(5, prompt=1))
    first, region = host.server_id, host.region
    stop(place.pid)
    with pytest.raises(Unavailable, match="does not answer"):
        reserve(host, keys(5, prompt=2))
    with pytest.raises(Unavailable):
        host.lookup(query(), 0.2)
    with pytest.raises(Unavailable):
        next(iter(host.fetch(keys(10), [NBYTES] * 10, 0.2)))
    with pytest.raises(Unavailable):
        host.commit(slots[:1])
    assert isinstance(host.lookup_later(query()).exception(WAIT), Unavailable)
    host.release("me")
    host.abort(slots[1:2])
    assert not host.available
    place.signal(signal.SIGCONT)
    available(host)
    assert (host.server_id, host.region) == (first, region)
    until(lambda: holds(host) == [3])
    for key, slot in zip(keys(5, prompt=1)[2:], slots[2:], strict=True):
        fill(key, slot)
    assert host.commit(slots[2:]) == [True] * 3, "reservations outlive a pause"
    assert load(host, keys(10)) == (10, "", {0})
    assert store(host, keys(5, prompt=2)) == 5, "what was reserved but not heard of came back"


def test_a_pump_whose_service_stops_answers_all_futures(place: Place) -> None:
    host = place.host()
    stop(place.pid)
    futures = [host.lookup_later(query(owner=str(n))) for n in range(600)]
    assert all(isinstance(future.exception(WAIT), Unavailable) for future in futures)
    place.signal(signal.SIGCONT)
    available(host)
    assert host.lookup_later(query()).result(WAIT).chunks == 0


# A client.


def hold_everything(host: Host, says: Connection) -> None:
    slots = reserve(host, keys(1000, prompt=7))
    says.send(len(slots))
    says.recv()


def test_a_killed_client_gives_its_slots_back(place: Place) -> None:
    host = place.host()
    child = place.child(hold_everything)
    assert child.recv() == 512
    assert host.reserve("me", [(keys(1)[0], NBYTES)], 5.0) == ["no slot"]
    child.kill()
    until(lambda: len(host.stats()["clients"]) == 1)
    assert store(host, keys(10)) == 10


def hang_up_and_stay(host: Host, says: Connection) -> None:
    slots = reserve(host, keys(1000, prompt=7))
    for channel in list(host._dialer.open):
        channel.shutdown()
    says.send(len(slots))
    says.recv()


def test_a_closed_socket_frees_no_slot_of_a_living_process(place: Place) -> None:
    host = place.host()
    child = place.child(hang_up_and_stay)
    assert child.recv() == 512
    until(lambda: [each for each in host.stats()["clients"] if each["connections"] == 0])
    assert host.reserve("me", [(keys(1)[0], NBYTES)], 5.0) == ["no slot"]
    child.kill()
    until(lambda: len(host.stats()["clients"]) == 1)
    assert store(host, keys(10)) == 10


def write_late(host: Host, says: Connection, wanted: list[ChunkKey]) -> None:
    slots = reserve(host, wanted, timeout=0.2)
    says.send(len(slots))
    says.recv()
    for slot in slots:
        slot.view()[:] = b"\xee" * NBYTES
    says.send(host.commit(slots))
    says.recv()


def test_a_client_that_wakes_after_its_deadline_spoils_nothing(place: Place) -> None:
    host = place.host()
    child = place.child(write_late, keys(10))
    assert child.recv() == 10
    stop(child.pid)
    stored = 0

    def all_stored() -> bool:
        nonlocal stored  # the deadline may fall between two of them
        stored += store(host, keys(10))
        return stored == 10

    until(all_stored)
    for prompt in range(1, 30):  # every slot that can be had is used meanwhile
        store(host, keys(20, prompt))
    child.kill(signal.SIGCONT)
    child.hears.send("go on")
    assert child.recv() == [False] * 10
    for prompt in range(30):
        count = host.lookup(query(prompt, 20)).chunks
        assert load(host, keys(count, prompt))[0] == count
    assert host.lookup(query()).chunks == 10
    assert holds(host) == [0, 0]


def read_slowly(host: Host, says: Connection, wanted: list[ChunkKey]) -> None:
    for run in host.fetch(wanted, [NBYTES] * len(wanted), 0.3):
        assert not isinstance(run, str)
        before = [bytes(each.view()) for each in run]
        says.send(len(run))
        says.recv()
        says.send([bytes(each.view()) for each in run] == before)
    says.recv()


def test_what_a_stopped_reader_was_lent_is_not_reused(place: Place) -> None:
    host = place.host()
    store(host, keys(10))
    child = place.child(read_slowly, keys(10))
    assert child.recv() == 10
    stop(child.pid)
    for prompt in range(1, 60):
        store(host, keys(20, prompt))
    child.kill(signal.SIGCONT)
    child.hears.send("look again")
    assert child.recv() is True


def leave_a_lease(host: Host, says: Connection) -> None:
    says.send(host.lookup(query(owner="gone", lease=600.0)).chunks)
    says.recv()


def test_a_killed_clients_leases_end(place: Place) -> None:
    host = place.host()
    store(host, keys(10))
    child = place.child(leave_a_lease)
    assert child.recv() == 10
    assert host.stats()["tiers"]["cpu"]["leases"] == 1
    child.kill()
    until(lambda: host.stats()["tiers"]["cpu"]["leases"] == 0)


# Fork.


def test_a_forked_childs_calls_are_unavailable_and_its_parents_go_on(place: Place) -> None:
    host = place.host()
    store(host, keys(10))
    runs = host.fetch(keys(10), [NBYTES] * 10, 5.0)
    run = next(runs)
    slots = reserve(host, keys(1, prompt=1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            calls = [
                lambda: host.lookup(query()),
                host.stats,
                lambda: reserve(host, keys(1)),
                lambda: host.commit(slots),
                lambda: list(host.fetch(keys(1), [NBYTES], 1.0)),
                lambda: host.register([NBYTES]),
                lambda: host.lookup_later(query()).result(1),
            ]
            reasons = [_reason(call) for call in calls]
            host.abort(slots)
            host.release("me")
            runs.close()
            host.close()
            code = 0 if reasons == ["forked"] * len(calls) and not host.available else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not isinstance(run, str)
    assert holds(host) == [2]
    assert list(runs) == []
    fill(keys(1, prompt=1)[0], slots[0])
    assert host.commit(slots) == [True]
    assert load(host, keys(10)) == (10, "", {0})


def _reason(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except Unavailable as error:
        return str(error)
    return "nothing was raised"


def test_a_service_that_starts_too_late_for_its_starter_serves_all_the_same(place: Place) -> None:
    ready, says = os.pipe()
    os.close(ready)  # the starter has given up
    settings = place.config().model_dump_json(exclude_unset=True)
    command = [sys.executable, "-m", "lmkv", "server", "--socket", place.socket, "--settings", settings]
    with subprocess.Popen([*command, "--ready", str(says)], pass_fds=[says]) as late:
        os.close(says)
        try:
            host = place.host(register=False, spawn=False)
            until(lambda: registered(host))
        finally:
            late.terminate()


def registered(host: Host) -> bool:
    try:
        host.register([NBYTES])
    except Unavailable:
        return False
    return True
