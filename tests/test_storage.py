"""Storage under trouble: failing, slow, full and hanging tiers, late commits, forks, budgets."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from memory import CHUNK, Memory, spec
from test_engine import TOKENS, disk, open_engine

from lmkv import BackendError, Engine
from lmkv.backends.base import Found, Result, Status
from lmkv.backends.disk import DiskBackend
from lmkv.leases import Reservation
from lmkv.testing import Fault, FaultyBackend, Gate
from lmkv.writer import Tally

CONTAINER = 4096 + 4096


@pytest.fixture
def memory() -> Memory:
    return Memory(spec(), pages=128)


@pytest.fixture
def engine(memory: Memory, tmp_path: Path) -> Iterator[Engine]:
    with open_engine(memory, tiers=disk(tmp_path), close_timeout=1.0) as opened:
        yield opened


def faulty(engine: Engine) -> FaultyBackend:
    tier = engine.storage.tiers[0]
    tier.backend = FaultyBackend(tier.backend)
    return tier.backend


def stored_on_disk_only(engine: Engine, memory: Memory) -> list[np.ndarray]:
    ids = memory.ids(160)
    before = memory.read(ids)
    engine.store(TOKENS, memory.pages, ids)
    assert engine.flush(10).safe
    engine.clear(tier="cpu")
    memory.wipe()
    return before


def test_corrupt_reads_are_misses_with_the_right_prefix(engine: Engine, memory: Memory) -> None:
    before = stored_on_disk_only(engine, memory)
    faulty(engine).always("read", Fault(flip=5000))
    ids = memory.ids(160)
    hit = engine.retrieve(TOKENS, memory.pages, ids)
    assert hit.reason == "checksum"
    np.testing.assert_array_equal(memory.read(ids)[0][:, : hit.tokens // 4], before[0][:, : hit.tokens // 4])


def test_a_hung_read_times_out_and_close_still_ends(memory: Memory, tmp_path: Path) -> None:
    engine = open_engine(memory, tiers=disk(tmp_path), close_timeout=0.5)
    stored_on_disk_only(engine, memory)
    backend = faulty(engine)
    backend.always("read", Fault(gate=(gate := Gate())))
    hit = engine.retrieve(TOKENS, memory.pages, memory.ids(160), timeout=0.2)
    assert (hit.tokens, hit.reason) == (0, "timeout")
    assert not memory.arrays[0].any()
    engine.close()
    gate.open()


def test_readers_of_the_same_chunk_share_one_read(engine: Engine, memory: Memory) -> None:
    stored_on_disk_only(engine, memory)
    backend = faulty(engine)
    backend.always("read", Fault(gate=(gate := Gate())))
    futures = [engine.prefetch(TOKENS) for _ in range(2)]
    while engine.stats()["shared_reads"] < 1:
        threading.Event().wait(0.001)
    gate.open()
    assert [future.result(10) for future in futures] == [160, 160]
    assert engine.stats()["promoted_chunks"] == 10


def test_failing_writes_are_counted_and_open_the_breaker(engine: Engine, memory: Memory) -> None:
    backend = faulty(engine)
    backend.always("write", Fault(result=Result(Status.ERROR)))
    handle = engine.store(TOKENS, memory.pages, memory.ids(160)).result(10)
    assert sum(handle.tiers["disk"].values()) == 10
    assert not handle.tiers["disk"].get("written")
    report = engine.flush(10)
    assert (report.safe, report.failed) == (True, {"disk": 10})
    assert engine.lookup(TOKENS).tiers == {"cpu": 160}


def test_a_store_that_finds_its_chunks_queued_waits_for_the_same_write(engine: Engine, memory: Memory) -> None:
    gate = Gate()
    backend = faulty(engine)
    backend.always("write", Fault(gate=gate))
    first = engine.store(TOKENS, memory.pages, memory.ids(160))
    engine.retrieve(TOKENS, memory.pages, memory.ids(160))
    second = engine.store(TOKENS, memory.pages, memory.ids(160))
    assert (second.skipped, first.done(), second.done()) == (10, False, False)
    gate.open()
    assert first.result(10).tiers == second.result(10).tiers == {"disk": {"written": 10}}
    report = engine.flush(10)
    assert (report.safe, report.written, report.dropped, report.failed) == (True, {"disk": 10}, {}, {})


def test_one_chunk_that_cannot_be_encoded_does_not_fail_the_others(memory: Memory, tmp_path: Path) -> None:
    with open_engine(memory, tiers=disk(tmp_path, writers=1)) as engine:
        gate, backend = Gate(), faulty(engine)
        backend.script("write", Fault(gate=gate))
        engine.store(TOKENS[:CHUNK], memory.pages, memory.ids(CHUNK))
        gate.reached.wait(10)
        handle = engine.store(TOKENS + 1000, memory.pages, memory.ids(160))
        slot = engine.storage.cpu.hold(engine.keys(TOKENS + 1000).key(3, engine.scope.digest))
        assert slot is not None
        slot.view(8)[:] = bytes(8)  # no header any more
        engine.storage.arena.release(slot)
        gate.open()
        assert handle.result(10).tiers == {"disk": {"written": 9, "failed (BadContainer)": 1}}
        assert engine.storage.tiers[0].pending == 0


def test_a_scan_that_fails_leaves_a_tier_that_works(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scan(self: object) -> Iterator[object]:
        raise RuntimeError("boom")

    monkeypatch.setattr("lmkv.backends.disk.DiskBackend.scan", scan)
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        assert engine.flush(10).written == {"disk": 10}
        assert engine.clear(everything=True) == 10
        assert engine.stats()["disk.scan.failed"] == 1


def test_a_scan_does_not_bring_back_what_was_deleted_meanwhile(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        stored_on_disk_only(engine, memory)
        digest = engine.keys(TOKENS).digest(4).hex()
    (path,) = (each for each in tmp_path.rglob("*") if digest in each.name)
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    real, listed, go_on = DiskBackend.scan, threading.Event(), threading.Event()

    def scan(self: DiskBackend) -> Iterator[list[Found]]:
        found = [each for batch in real(self) for each in batch]
        listed.set()
        assert go_on.wait(10)
        yield found

    monkeypatch.setattr(DiskBackend, "scan", scan)
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        assert listed.wait(10)
        assert engine.retrieve(TOKENS, memory.pages, memory.ids(160)).reason == "checksum"
        go_on.set()
        assert engine.storage.tiers[0].scanned.wait(10)
        assert not path.exists()
        assert engine.lookup(TOKENS).tokens == 4 * CHUNK
        assert engine.storage.index.objects[1] == 9


def test_a_backend_that_answers_too_little_is_a_miss(memory: Memory, tmp_path: Path) -> None:
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        tier = engine.storage.tiers[0]
        tier.backend.shared = True
        tier.backend.contains = lambda keys: []  # type: ignore[method-assign]
        assert engine.lookup(TOKENS).reason == "not stored"
        stored_on_disk_only(engine, memory)
        tier.backend.read = lambda reads: []  # type: ignore[method-assign]
        assert engine.retrieve(TOKENS, memory.pages, memory.ids(160)).reason == "error"


def test_a_tier_that_keeps_lookups_waiting_in_vain_is_not_asked_for_a_while(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        tier, calls = engine.storage.tiers[0], []
        assert tier.scanned.wait(10)
        tier.backend.shared = True
        tier.backend.contains = lambda keys: calls.append(len(keys)) or [None] * len(keys)  # type: ignore[method-assign]
        for _ in range(2):
            engine.lookup(TOKENS)
        assert len(calls) == 2, "quick answers are asked for again"
        monkeypatch.setattr("lmkv.tier.LATE", -1.0)
        for _ in range(3):
            engine.lookup(TOKENS)
        assert len(calls) == 3
        tier._ask_at -= 60
        engine.lookup(TOKENS)
        assert len(calls) == 4, "and later"


def test_clear_does_not_wait_for_ever_for_a_scan(memory: Memory, tmp_path: Path) -> None:
    with open_engine(memory, tiers=disk(tmp_path), operation_timeout=0.05) as engine:
        engine.storage.tiers[0].scanned.wait(10)
        engine.storage.tiers[0].scanned.clear()
        with pytest.raises(BackendError, match="still being scanned"):
            engine.clear(everything=True)
        engine.storage.tiers[0].scanned.set()


def test_a_full_medium_is_a_counted_failure(engine: Engine, memory: Memory) -> None:
    faulty(engine).always("write", Fault(result=Result(Status.FULL)))
    handle = engine.store(TOKENS, memory.pages, memory.ids(160)).result(10)
    assert handle.tiers == {"disk": {"failed (full)": 10}}
    assert engine.stats()["tiers"]["disk"]["bytes"] == 0


def test_a_chunk_cleared_while_it_is_written_does_not_come_back(engine: Engine, memory: Memory, tmp_path: Path) -> None:
    backend = faulty(engine)
    backend.always("write", Fault(gate=(gate := Gate())))
    handle = engine.store(TOKENS, memory.pages, memory.ids(160))
    assert engine.clear(TOKENS) == 10
    gate.open()
    handle.result(10)
    assert set(handle.tiers["disk"]) == {"cleared"}
    assert engine.lookup(TOKENS).tokens == 0
    assert not [each for each in tmp_path.rglob("*-*") if each.is_file()]


def test_the_disk_budget_is_never_exceeded(memory: Memory, tmp_path: Path) -> None:
    budget = 7 * CONTAINER + 100
    with open_engine(memory, tiers=disk(tmp_path, budget=budget)) as engine:
        for i in range(5):
            engine.store(TOKENS + 1000 * i, memory.pages, memory.ids(160))
            engine.flush(10)
            size = sum(each.stat().st_size for each in tmp_path.rglob("*-*") if each.is_file())
            assert size == engine.stats()["tiers"]["disk"]["bytes"] <= budget
    with open_engine(memory, tiers=disk(tmp_path, budget=3 * CONTAINER)) as engine:
        engine.storage.tiers[0].scanned.wait(10)
        size = sum(each.stat().st_size for each in tmp_path.rglob("*-*") if each.is_file())
        assert size == engine.stats()["tiers"]["disk"]["bytes"] <= 3 * CONTAINER


def test_a_late_commit_is_refused_and_its_slot_returns(engine: Engine) -> None:
    storage = engine.storage
    key = engine.keys(TOKENS).key(0, engine.scope.digest)
    used = storage.arena.used
    first = storage.reserve("test", key, CONTAINER, deadline=0.0)
    second = storage.reserve("test", key, CONTAINER, deadline=1e12)
    assert isinstance(first, Reservation)
    assert isinstance(second, Reservation)
    assert first.slot is not second.slot
    assert storage.reserve("test", key, CONTAINER, deadline=1e12) == "in flight"
    assert storage.commit([first], 0, Tally()) == [False]
    storage.abort(first)
    storage.abort(second)
    storage.abort(second)
    assert storage.arena.used == used
    assert storage.index.get(key) is None
    assert engine.stats()["late_commits"] == engine.stats()["voided_reservations"] == 1


def test_second_touch_writes_only_what_is_used_again(memory: Memory, tmp_path: Path) -> None:
    with open_engine(memory, tiers=disk(tmp_path, admission="second_touch")) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        engine.flush(10)
        assert engine.stats()["tiers"]["disk"]["objects"] == 0
        engine.retrieve(TOKENS, memory.pages, memory.ids(160))
        engine.store(TOKENS, memory.pages, memory.ids(160))
        engine.flush(10)
        assert engine.stats()["tiers"]["disk"]["objects"] == 10


def test_on_eviction_writes_only_what_leaves_host_memory(memory: Memory, tmp_path: Path) -> None:
    options = {"cpu_budget": 24 * CONTAINER, "cpu_slab": CONTAINER, "tiers": disk(tmp_path, admission="on_eviction")}
    with open_engine(memory, **options) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        engine.flush(10)
        assert engine.stats()["tiers"]["disk"]["objects"] == 0
        for i in range(1, 6):
            engine.store(TOKENS + 1000 * i, memory.pages, memory.ids(160))
            engine.flush(10)
        assert engine.stats()["tiers"]["disk"]["objects"] > 0
        assert engine.lookup(TOKENS).tokens > 0


def test_after_a_fork_every_call_in_the_child_is_a_miss(engine: Engine, memory: Memory) -> None:
    engine.store(TOKENS, memory.pages, memory.ids(160))
    pid = os.fork()
    if not pid:
        try:
            ok = engine.lookup(TOKENS).reason == "forked"
            ok = ok and engine.store(TOKENS, memory.pages, memory.ids(160)).reasons == {"forked": 10}
            engine.close()
            os._exit(0 if ok else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert engine.lookup(TOKENS).tokens == 160
    assert engine.flush(10).safe


def test_threads_that_store_retrieve_and_clear_never_see_wrong_bytes(memory: Memory, tmp_path: Path) -> None:
    options = {"cpu_budget": 40 * CONTAINER, "cpu_slab": CONTAINER, "tiers": disk(tmp_path, budget=60 * CONTAINER)}
    errors: list[BaseException] = []
    with open_engine(memory, **options) as engine:

        def work(seed: int) -> None:
            try:
                rng = np.random.default_rng(seed)
                mine = Memory(spec(), pages=128, seed=99)
                pristine = mine.arrays[0].copy()
                for _ in range(60):
                    which = int(rng.integers(0, 8))
                    tokens = TOKENS + 1000 * which
                    ids = mine.ids(160, seed=which)
                    mine.arrays[0][:] = pristine
                    action = rng.integers(0, 6)
                    if action < 2:
                        engine.store(tokens, mine.pages, ids)
                    elif action < 5:
                        mine.wipe()
                        hit = engine.retrieve(tokens, mine.pages, ids)
                        count = hit.tokens // 4
                        np.testing.assert_array_equal(mine.arrays[0][:, ids[0][:count]], pristine[:, ids[0][:count]])
                    else:
                        engine.clear(tokens)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        assert engine.flush(20).safe
        usage = engine.stats()["tiers"]
        assert usage["disk"]["bytes"] <= 60 * CONTAINER
        assert usage["cpu"]["reservations"] == usage["cpu"]["leases"] == 0
        engine.clear(everything=True)
        assert engine.storage.arena.used == 0
