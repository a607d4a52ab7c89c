"""The Engine end to end on known memory: right bytes, right counts, defined answers to wrong input."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from memory import CHUNK, PAGE, Memory, full, recurrent, sliding, spec

import lmkv
from lmkv import BadInput, Engine, chunk

TOKENS = np.arange(1, 10 * CHUNK + 5, dtype=np.int32)


def open_engine(memory: Memory, **config: object) -> Engine:
    config = {"cpu_budget": "4MiB", "cpu_touch": False, **config}
    return Engine(memory.spec, weights="test", layout=memory.pages.layout, **config)


@pytest.fixture
def memory() -> Memory:
    return Memory(spec(), pages=128)


def disk(path: Path, **options: object) -> str:
    query = "&".join(f"{name}={value}" for name, value in {"budget": "64MiB", **options}.items())
    return f"disk://{path}?{query}"


def test_what_was_stored_comes_back_into_other_pages_byte_for_byte(memory: Memory) -> None:
    with open_engine(memory) as engine:
        ids = memory.ids(160, seed=1)
        before = memory.read(ids)
        handle = engine.store(TOKENS, memory.pages, ids)
        assert (handle.stored, handle.skipped, handle.dropped) == (10, 0, 0)
        memory.wipe()
        other = memory.ids(160, seed=2)
        hit = engine.retrieve(TOKENS, memory.pages, other)
        assert hit == lmkv.Retrieved(160, 160, {"cpu": 160}, "end of prompt")
        for got, want in zip(memory.read(other), before, strict=True):
            np.testing.assert_array_equal(got, want)


def test_pages_that_were_not_named_are_not_touched(memory: Memory) -> None:
    with open_engine(memory) as engine:
        ids = memory.ids(160)
        engine.store(TOKENS, memory.pages, ids)
        memory.wipe()
        engine.retrieve(TOKENS, memory.pages, memory.ids(160, seed=3))
        untouched = np.setdiff1d(np.arange(128), memory.ids(160, seed=3)[0])
        assert not memory.arrays[0][:, untouched].any()


def test_a_changed_token_ends_the_hit_at_its_chunk(memory: Memory) -> None:
    with open_engine(memory) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        changed = TOKENS.copy()
        changed[3 * CHUNK + 1] += 1
        plan = engine.lookup(changed)
        assert (plan.tokens, plan.reason) == (3 * CHUNK, "not stored")
        assert plan.chunks == ("cpu",) * 3


def test_retrieve_from_the_middle_of_a_chunk_leaves_the_pages_before_alone(memory: Memory) -> None:
    with open_engine(memory) as engine:
        ids = memory.ids(160, seed=1)
        before = memory.read(ids)
        engine.store(TOKENS, memory.pages, ids)
        memory.wipe()
        start = 2 * CHUNK + PAGE
        other = [memory.ids(160, seed=2)[0][start // PAGE :]]
        hit = engine.retrieve(TOKENS, memory.pages, other, start=start)
        assert (hit.tokens, hit.loaded) == (160, 160 - start)
        np.testing.assert_array_equal(memory.read(other)[0], before[0][:, start // PAGE :])
        rest = np.setdiff1d(np.arange(128), other[0])
        assert not memory.arrays[0][:, rest].any()


def test_stop_limits_the_hit(memory: Memory) -> None:
    with open_engine(memory) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        hit = engine.retrieve(TOKENS, memory.pages, memory.ids(160), stop=3 * CHUNK - 1)
        assert (hit.tokens, hit.reason) == (2 * CHUNK, "stop")


def test_a_second_store_of_the_same_prompt_is_skipped(memory: Memory) -> None:
    with open_engine(memory) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        again = engine.store(TOKENS, memory.pages, memory.ids(160, seed=9))
        assert (again.stored, again.skipped, dict(again.reasons)) == (0, 10, {"held": 10})


def test_a_store_that_continues_an_earlier_one_needs_only_the_new_pages(memory: Memory) -> None:
    with open_engine(memory) as engine:
        ids = memory.ids(160)
        before = memory.read(ids)
        engine.store(TOKENS[: 4 * CHUNK], memory.pages, [ids[0][: 4 * CHUNK // PAGE]])
        handle = engine.store(TOKENS, memory.pages, [ids[0][4 * CHUNK // PAGE :]], start=4 * CHUNK)
        assert handle.stored == 6
        memory.wipe()
        assert engine.retrieve(TOKENS, memory.pages, ids).tokens == 160
        np.testing.assert_array_equal(memory.read(ids)[0], before[0])


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_new_process_finds_on_disk_what_the_last_one_stored(memory: Memory, tmp_path: Path, codec: str) -> None:
    ids = memory.ids(160)
    memory.arrays[0][:] //= 64  # compressible
    before = memory.read(ids)
    with open_engine(memory, tiers=disk(tmp_path, codec=codec)) as engine:
        engine.store(TOKENS, memory.pages, ids)
        report = engine.flush(10)
        assert (report.safe, report.written, report.dropped, report.failed) == (True, {"disk": 10}, {}, {})
    memory.wipe()
    with open_engine(memory, tiers=disk(tmp_path, codec=codec)) as engine:
        hit = engine.retrieve(TOKENS, memory.pages, ids)
        assert (hit.tokens, hit.tiers) == (160, {"disk": 160})
        np.testing.assert_array_equal(memory.read(ids)[0], before[0])
        memory.wipe()
        assert engine.retrieve(TOKENS, memory.pages, ids).tiers == {"cpu": 160}
        np.testing.assert_array_equal(memory.read(ids)[0], before[0])


def test_a_flipped_byte_on_disk_is_a_miss_and_the_chunk_can_be_stored_again(memory: Memory, tmp_path: Path) -> None:
    ids = memory.ids(160)
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        engine.store(TOKENS, memory.pages, ids)
        engine.flush(10)
        key = engine.keys(TOKENS).key(4, engine.scope.digest)
    (path,) = [each for each in tmp_path.rglob("*") if key.digest.hex() in each.name]
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        hit = engine.retrieve(TOKENS, memory.pages, memory.ids(160, seed=5))
        assert (hit.tokens, hit.reason) == (4 * CHUNK, "checksum")
        assert engine.stats()["miss.checksum"] == 1
        assert not path.exists()
        assert engine.lookup(TOKENS).tokens == 4 * CHUNK
        assert engine.store(TOKENS, memory.pages, ids).stored == 1
        assert engine.lookup(TOKENS).tokens == 160


def test_two_files_swapped_are_misses(memory: Memory, tmp_path: Path) -> None:
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        engine.flush(10)
        keys = [engine.keys(TOKENS).key(i, engine.scope.digest) for i in (2, 5)]
    paths = [next(each for each in tmp_path.rglob("*") if key.digest.hex() in each.name) for key in keys]
    bodies = [path.read_bytes() for path in paths]
    paths[0].write_bytes(bodies[1])
    paths[1].write_bytes(bodies[0])
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        hit = engine.retrieve(TOKENS, memory.pages, memory.ids(160))
        assert (hit.tokens, hit.reason) == (2 * CHUNK, "identity")


def test_a_container_of_the_right_name_and_another_size_is_a_miss(memory: Memory, tmp_path: Path) -> None:
    """Checksums and identity are right; scattering it would leave pages unwritten or read past its slot."""
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        engine.flush(10)
        key = engine.keys(TOKENS).key(2, engine.scope.digest)
    (path,) = [each for each in tmp_path.rglob("*") if key.digest.hex() in each.name]
    other = spec(full(layers=4))
    data = memoryview(bytearray(chunk.container_bytes(other, 0)))
    chunk.seal(data, chunk.new_header(other, key))
    path.write_bytes(data)
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        hit = engine.retrieve(TOKENS, memory.pages, memory.ids(160))
        assert (hit.tokens, hit.reason) == (2 * CHUNK, "bounds")


def test_eviction_takes_the_end_of_the_least_recent_prompt_first(memory: Memory) -> None:
    per_chunk = 4096 + 4096
    with open_engine(memory, cpu_budget=15 * per_chunk, cpu_slab=per_chunk) as engine:
        other = TOKENS + 10_000
        engine.store(TOKENS, memory.pages, memory.ids(160))
        assert engine.store(other, memory.pages, memory.ids(160)).stored == 10
        assert engine.lookup(other).tokens == 160
        assert engine.lookup(TOKENS).tokens == 5 * CHUNK
        assert engine.stats()["evicted_chunks"] == 5


def test_pinned_and_leased_chunks_are_not_evicted_and_a_full_host_drops_the_store(memory: Memory) -> None:
    per_chunk = 4096 + 4096
    with open_engine(memory, cpu_budget=12 * per_chunk, cpu_slab=per_chunk) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        assert engine.pin(TOKENS) == 160
        handle = engine.store(TOKENS + 10_000, memory.pages, memory.ids(160))
        assert (handle.stored, handle.dropped, handle.reasons["no slot"]) == (2, 8, 8)
        assert engine.lookup(TOKENS).tokens == 160
        assert engine.unpin(TOKENS) == 160
        lease = engine.acquire("a", engine.lookup(TOKENS))
        assert lease.tokens == 6 * CHUNK  # half of host memory
        assert engine.acquire("a", engine.lookup(TOKENS)) is lease
        engine.store(TOKENS + 20_000, memory.pages, memory.ids(160))
        assert engine.lookup(TOKENS).tokens >= lease.tokens
        assert engine.retrieve(lease, memory.pages, memory.ids(160)).tokens == lease.tokens
        lease.release()
        lease.release()
        assert engine.stats()["tiers"]["cpu"]["leased_bytes"] == 0


def test_an_expired_lease_promises_nothing(memory: Memory) -> None:
    with open_engine(memory) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        lease = engine.acquire("a", engine.lookup(TOKENS), timeout=1e-9)
        hit = engine.retrieve(lease, memory.pages, memory.ids(160))
        assert (hit.tokens, hit.reason, lease.tokens) == (0, "lease void", 0)


def test_salt_adapter_media_weights_and_layout_never_share(memory: Memory) -> None:
    with open_engine(memory) as engine:
        engine.store(engine.keys(TOKENS, salt="a"), memory.pages, memory.ids(160))
        for other in ({}, {"salt": "b"}, {"salt": "a", "adapter": "x"}, {"salt": "a", "media": [("img", 0, 5)]}):
            assert engine.lookup(engine.keys(TOKENS, **other)).tokens == 0
        assert engine.lookup(engine.keys(TOKENS, salt="a")).tokens == 160


def test_clear_counts_what_was_there(memory: Memory, tmp_path: Path) -> None:
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        engine.store(engine.keys(TOKENS, salt="t"), memory.pages, memory.ids(160))
        engine.flush(10)
        assert engine.clear(tier="cpu") == 20
        assert engine.lookup(TOKENS).tiers == {"disk": 160}
        assert engine.clear(tenant="t") == 10
        assert engine.clear(tenant="t") == 0
        assert engine.clear(TOKENS[: 3 * CHUNK]) == 3
        assert engine.clear(scope=True) == 7
        assert engine.clear(everything=True) == 0
        assert not [each for each in tmp_path.rglob("*-*") if each.is_file()]
        usage = engine.stats()["tiers"]
        assert (usage["cpu"]["bytes"], usage["disk"]["bytes"]) == (0, 0)


def test_a_ttl_ends_a_hit(memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160), ttl=60)
        engine.flush(10)
        assert engine.lookup(TOKENS).tokens == 160
        later = time.time() + 100
        monkeypatch.setattr(time, "time", lambda: later)
        plan = engine.lookup(TOKENS)
        assert (plan.tokens, plan.reason) == (0, "expired")
        assert engine.store(TOKENS, memory.pages, memory.ids(160)).stored == 10


def test_the_configured_ttl_holds_where_a_store_names_none(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(memory, ttl=60) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        engine.store(TOKENS + 1000, memory.pages, memory.ids(160), ttl=600)
        later = time.time() + 100
        monkeypatch.setattr(time, "time", lambda: later)
        assert engine.lookup(TOKENS).reason == "expired"
        assert engine.lookup(TOKENS + 1000).tokens == 160


def test_ready_digests_do_for_tokens(memory: Memory) -> None:
    with open_engine(memory) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        made = engine.keys(TOKENS)
        ready = lmkv.ChunkKeys.from_digests(made.upto(made.chunks), CHUNK)
        assert engine.lookup(ready).tokens == 160
        with pytest.raises(BadInput):
            engine.lookup(lmkv.ChunkKeys.from_digests(made.upto(2), 2 * CHUNK))


def test_counters_count(memory: Memory) -> None:
    with open_engine(memory) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        engine.retrieve(TOKENS, memory.pages, memory.ids(160))
        engine.acquire("a", engine.lookup(TOKENS), timeout=1e-9)
        engine.acquire("b", engine.lookup(TOKENS))
        stats = engine.stats()
        assert (stats["stored_bytes"], stats["retrieved_bytes"], stats["voided_leases"]) == (81920, 81920, 1)


def test_a_cold_prompt_of_a_hybrid_model_is_looked_up_once() -> None:
    memory = Memory(GROUPS, pages=128)
    with open_engine(memory) as engine:
        assert engine.retrieve(TOKENS, memory.pages, memory.ids(160)).tokens == 0
        assert engine.stats()["lookups"] == 1


def test_pins_do_not_depend_on_min_hit_tokens(memory: Memory) -> None:
    with open_engine(memory, min_hit_tokens=1000) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        assert engine.lookup(TOKENS).tokens == 0
        assert engine.pin(TOKENS) == engine.unpin(TOKENS) == 160


def test_a_ttl_survives_a_restart(memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160), ttl=60)
        engine.flush(10)
    later = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: later)
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        hit = engine.retrieve(TOKENS, memory.pages, memory.ids(160))
        assert (hit.tokens, hit.reason) == (0, "expired")


def test_prefetch_brings_disk_chunks_into_host_memory(memory: Memory, tmp_path: Path) -> None:
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        engine.flush(10)
        engine.clear(tier="cpu")
        assert engine.prefetch(TOKENS).result(10) == 160
        assert engine.lookup(TOKENS).tiers == {"cpu": 160}


def test_explain_says_per_tier_where_the_hit_ends(memory: Memory, tmp_path: Path) -> None:
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        engine.store(TOKENS[: 4 * CHUNK], memory.pages, memory.ids(64))
        engine.flush(10)
        engine.clear(TOKENS[: 2 * CHUNK], tier="cpu")
        told = engine.explain(TOKENS)
        assert (told.hit, told.reason) == (4 * CHUNK, "not stored")
        assert told.tiers["cpu"][:2] == (0, 2 * CHUNK)
        assert told.tiers["disk"][:2] == (4 * CHUNK, 4 * CHUNK)
        assert "64 of 164 tokens" in str(told)


GROUPS = spec(full(), sliding(window=25), recurrent())


def test_window_and_recurrent_groups_are_restored_at_the_boundary_only() -> None:
    memory = Memory(GROUPS, pages=128)
    with open_engine(memory) as engine:
        ids = memory.ids(160)
        before = memory.read(ids)
        gone = [ids[0], ids[1].copy(), ids[2].copy()]
        gone[1][: 8 * CHUNK // PAGE] = -1  # the window has slid past the first eight chunks
        gone[2][:9] = -1  # the engine kept the last state only
        handle = engine.store(TOKENS, memory.pages, gone)
        assert handle.stored == 10 + 2 + 1
        memory.wipe()
        other = memory.ids(160, seed=4)
        hit = engine.retrieve(TOKENS, memory.pages, other)
        assert hit.tokens == 160
        got = memory.read(other)
        np.testing.assert_array_equal(got[0], before[0])
        np.testing.assert_array_equal(got[1][:, -8:], before[1][:, -8:])
        assert not got[1][:, :-8].any()
        np.testing.assert_array_equal(got[2][:, -1], before[2][:, -1])
        assert engine.lookup(TOKENS[: 9 * CHUNK]).tokens == 0
        assert engine.lookup(TOKENS[: 9 * CHUNK]).reason == "window or state missing"


def test_a_group_that_lost_its_boundary_falls_back_to_an_earlier_one() -> None:
    memory = Memory(spec(full(), recurrent()), pages=128)
    with open_engine(memory) as engine:
        ids = memory.ids(160)
        sparse = [ids[0], np.where(np.isin(np.arange(10), [3, 7]), ids[1], -1)]
        engine.store(TOKENS, memory.pages, sparse)
        assert engine.lookup(TOKENS).tokens == 8 * CHUNK
        assert engine.lookup(TOKENS[: 7 * CHUNK]).tokens == 4 * CHUNK
