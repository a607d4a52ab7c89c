"""Engines over every remote tier: exact hits from a store that another engine filled, and every fault a miss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import remote_stores
from memory import CHUNK, Memory
from remote_engines import ALL, CHUNKS, TOKENS, fill, hit, new_memory, open_engine, refill, until_full
from remote_stores import Store
from s3_servers import keys_in_environment

from lmkv.cli.doctor import check
from lmkv.config import TierConfig


@pytest.fixture(params=remote_stores.NAMES)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    keys_in_environment(monkeypatch)
    with remote_stores.running(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def memory() -> Memory:
    return new_memory()


def test_what_one_engine_stored_another_one_hits(store: Store, memory: Memory) -> None:
    url = remote_stores.tier(store)
    right = fill(memory, url)
    with open_engine(memory, url) as engine:
        found = hit(memory, engine, right)
        (name,) = found.tiers
        assert (found.tokens, found.tiers) == (ALL, {name: ALL})
        assert name == store.url.partition(":")[0]
        assert hit(memory, engine, right).tiers == {"cpu": ALL}
        changed = TOKENS.copy()
        changed[5 * CHUNK] += 1
        assert engine.lookup(changed).tokens == 5 * CHUNK


def test_down_at_start_and_up_later(store: Store, memory: Memory) -> None:
    url = remote_stores.tier(store)
    right = fill(memory, url)
    store.down()
    with open_engine(memory, url) as engine:
        assert hit(memory, engine, right).tokens == 0
        store.up()
        if not store.keeps:
            refill(memory, url, right)
        assert until_full(memory, engine, right).tokens == ALL


def test_killed_and_started_again(store: Store, memory: Memory) -> None:
    url = remote_stores.tier(store)
    right = fill(memory, url)
    with open_engine(memory, url) as engine:
        assert engine.lookup(TOKENS).tokens == ALL
        store.down()
        assert hit(memory, engine, right).tokens == 0
        store.up()
        if store.keeps:
            assert until_full(memory, engine, right).tokens == ALL
            return
        for _ in range(2):  # the index still believes in what is gone; a read puts it right
            assert hit(memory, engine, right).tokens == 0
        refill(memory, url, right)
        assert until_full(memory, engine, right).tokens == ALL


def test_stopped_and_continued(store: Store, memory: Memory) -> None:
    url = remote_stores.tier(store)
    right = fill(memory, url)
    with open_engine(memory, url) as engine:
        assert engine.lookup(TOKENS[: 2 * CHUNK + 1]).tokens == 2 * CHUNK
        store.signal(signal.SIGSTOP)
        assert hit(memory, engine, right).tokens == 0
        store.signal(signal.SIGCONT)
        assert until_full(memory, engine, right).tokens == ALL


def test_a_flipped_bit_is_a_miss_that_heals(store: Store, memory: Memory) -> None:
    url = remote_stores.tier(store)
    right = fill(memory, url)
    assert store.flip() == CHUNKS
    with open_engine(memory, url) as engine:
        assert engine.lookup(TOKENS).tokens == ALL
        assert hit(memory, engine, right).tokens == 0
        deadline = time.monotonic() + 60
        while hit(memory, engine, right).tokens < ALL:
            assert time.monotonic() < deadline, engine.explain(TOKENS)
            # What is damaged is deleted when it is read, and stored anew by whoever computes it.
            refill(memory, url, right)


def test_one_round_trip_asks_for_a_whole_prompt(store: Store, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    url = remote_stores.tier(store)
    fill(memory, url)
    with open_engine(memory, url) as engine:
        backend = engine.storage.tiers[0].backend
        calls: list[int] = []
        ask = backend.contains
        monkeypatch.setattr(backend, "contains", lambda keys: (calls.append(len(keys)), ask(keys))[1])
        assert engine.lookup(TOKENS).tokens == ALL
        assert calls == [CHUNKS]
        assert engine.lookup(TOKENS).tokens == ALL
        assert calls == [CHUNKS], "what was found is known"


def test_a_forked_child_shares_no_connection(store: Store, memory: Memory) -> None:
    url = remote_stores.tier(store)
    right = fill(memory, url)
    with open_engine(memory, url) as engine:
        assert engine.lookup(TOKENS).tokens == ALL
        child = os.fork()
        if not child:
            os._exit(engine.lookup(TOKENS).tokens)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert hit(memory, engine, right).tokens == ALL


def test_doctor_finds_it_well(store: Store) -> None:
    verdict, what, finding, _ = check(TierConfig(url=remote_stores.tier(store)), 30)
    assert (verdict, what) == ("OK", remote_stores.tier(store)), finding
    store.down()
    assert check(TierConfig(url=remote_stores.tier(store)), 30)[0] == "FAIL"
