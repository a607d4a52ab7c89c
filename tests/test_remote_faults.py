"""Faults of each remote store, by way of an engine: every request ends in time, gives right bytes, and hits return.

`test_remote_tiers` has those that need no proxy and no other settings; `bench/remote_faults.py` measures all of them.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
import remote_stores
import store_faults
from deadlines import within
from memory import CHUNK
from remote_engines import ALL, CHUNKS, TOKENS, hit, open_engine, until_full
from s3_servers import keys_in_environment
from store_faults import Case

from lmkv import Engine, tier

TIMEOUT = 2.0
OPTIONS = {"timeout": "2s", "lookup_timeout": "1s"}
OTHER = TOKENS + 10_000


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    keys_in_environment(monkeypatch)
    monkeypatch.setattr(tier, "COOL_DOWN", 0.5)


def opened(case: Case) -> Engine:
    """A client that has looked."""
    engine = open_engine(case.memory, case.url, TIMEOUT)
    deadline = time.monotonic() + 20
    while engine.lookup(TOKENS).tokens < ALL:  # a busy machine may be slow with the first answer
        assert time.monotonic() < deadline
    return engine


def retrieve(case: Case, engine: Engine) -> tuple[int, str]:
    """From the store alone, in time and with right bytes; tokens and the reason why there are no more."""
    engine.clear(tier="cpu")
    found = within(TIMEOUT, lambda: hit(case.memory, engine, case.right))
    return found.tokens, found.reason


def store_other(case: Case, engine: Engine) -> Counter[str]:
    """How the writes of another prompt end."""
    engine.clear(tier="cpu")
    handle = engine.store(OTHER, case.memory.pages, case.memory.ids(ALL))
    engine.flush(30)
    return Counter({each: n for outcomes in handle.tiers.values() for each, n in outcomes.items()})


def options(name: str) -> dict[str, str]:
    return OPTIONS | ({"negative": "100ms"} if name == "s3" else {})


# The reasons that the first request may end with; "end of prompt" is a hit.
ENDS = {
    "killed in a read": {"error"},
    "slow by 10 s": {"timeout"},
    "restarted empty": {"not stored"},
    "wrong credentials": {"not stored"},
    "short body": {"error"},
}
ENDS_OF_S3 = ENDS | {  # moto takes its time where much else runs
    "restarted empty": {"missing", "not stored", "timeout"},
    "short body": {"end of prompt", "timeout"},  # the rest of a body is asked for
}


@pytest.mark.parametrize("name", remote_stores.NAMES)
@pytest.mark.parametrize("fault", ENDS)
def test_a_fault_is_a_miss_in_time_and_hits_return(fault: str, name: str, tmp_path: Path) -> None:
    with store_faults.opened(fault, name, tmp_path, **options(name)) as (case, strike):
        engine = opened(case) if case.known else None
        with strike(case):
            engine = engine or open_engine(case.memory, case.url, TIMEOUT)
            tokens, reason = retrieve(case, engine)
            assert reason in (ENDS_OF_S3 if name == "s3" else ENDS)[fault]
            assert (tokens == ALL) == (reason == "end of prompt")
            if reason not in ("not stored", "end of prompt"):
                assert engine.stats()[f"miss.{reason}"]
            for _ in range(2):
                retrieve(case, engine)
            within(1, lambda: engine.lookup(TOKENS))
        with engine:
            if case.lost:
                case.refill()
            engine.clear(tier="cpu")
            assert until_full(case.memory, engine, case.right).tiers == {case.url.partition(":")[0]: ALL}


@pytest.mark.parametrize("name", remote_stores.NAMES)
def test_a_full_store_keeps_what_it_has_or_the_newest(name: str, tmp_path: Path) -> None:
    with store_faults.opened("full", name, tmp_path, **options(name)) as (case, strike), opened(case) as engine:
        with strike(case):
            written = store_other(case, engine)
            if name == "lmkv":
                assert written == {"written": CHUNKS}
                assert retrieve(case, engine)[0] < ALL
            else:
                assert written == {"failed (full)": CHUNKS}
                assert retrieve(case, engine) == (ALL, "end of prompt")
        store_other(case, engine)
        engine.clear(tier="cpu")
        assert engine.lookup(OTHER).tokens == ALL, "there is room again"


@pytest.mark.parametrize("name", ["lmkv", "valkey"])
def test_a_restart_is_noticed_at_once_and_all_is_forgotten(name: str, tmp_path: Path) -> None:
    with store_faults.opened("restarted empty", name, tmp_path, **OPTIONS) as (case, strike), opened(case) as engine:
        backend = engine.storage.tiers[0].backend
        asked: list[int] = []
        ask = backend.contains
        backend.contains = lambda keys: (asked.append(len(keys)), ask(keys))[1]  # type: ignore[method-assign]
        with strike(case):
            assert engine.lookup(TOKENS).tokens == 0
        assert asked == [CHUNKS], "one round trip"
        counts = engine.stats()
        assert not [each for each in counts if each.startswith("miss.")], "nothing was read in vain"
        assert counts[f"{name}.resets"] == 1
        assert engine.storage.index.objects[1] == 0
        case.refill()
        assert engine.lookup(TOKENS[: 5 * CHUNK]).tokens == 5 * CHUNK
