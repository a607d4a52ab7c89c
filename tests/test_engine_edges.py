"""The Engine at its edges: short prompts, wrong input and settings, small budgets, closing, and ending without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from memory import CHUNK, PAGE, Memory, full, recurrent, spec
from test_engine import TOKENS, disk, open_engine

import lmkv
from lmkv import BadInput, ConfigError, Engine


@pytest.fixture
def memory() -> Memory:
    return Memory(spec(), pages=128)


@pytest.mark.parametrize(
    ("tokens", "chunks", "reason"),
    [
        ([], 0, "shorter than a chunk"),
        (TOKENS[: CHUNK - 1], 0, "shorter than a chunk"),
        (TOKENS[: 2 * CHUNK], 2, "end of prompt"),
    ],
)
def test_short_and_exact_prompts(memory: Memory, tokens: object, chunks: int, reason: str) -> None:
    with open_engine(memory) as engine:
        handle = engine.store(tokens, memory.pages, memory.ids(chunks * CHUNK))
        plan = engine.lookup(tokens)
        assert (handle.stored, plan.tokens, plan.reason) == (chunks, chunks * CHUNK, reason)
        assert engine.retrieve(tokens, memory.pages, memory.ids(chunks * CHUNK)).tokens == chunks * CHUNK


def test_wrong_arguments_are_refused_and_change_nothing(memory: Memory) -> None:
    with open_engine(memory) as engine:
        ids = memory.ids(160)
        for tokens in ([1.5] * 20, [-1] * 20, [2**32] * 20, np.zeros((4, 4), np.int32), np.ones(20), [True] * 20):
            with pytest.raises(BadInput):
                engine.store(tokens, memory.pages, ids)
        wrong = [[ids[0][:3]], [], [ids[0], ids[0]], [ids[0] + 10_000], [ids[0].astype(float)], [-ids[0] - 2]]
        for page_ids in wrong:
            with pytest.raises(BadInput):
                engine.store(TOKENS, memory.pages, page_ids)
        for start in (1, PAGE, -CHUNK, 11 * CHUNK):
            with pytest.raises(BadInput):
                engine.store(TOKENS, memory.pages, ids, start=start)
        with pytest.raises(BadInput):
            engine.store(TOKENS, Memory(spec(full(heads=4, dim=4))).pages, ids)
        assert engine.stats()["tiers"]["cpu"]["objects"] == 0
        engine.store(TOKENS, memory.pages, ids)
        with pytest.raises(BadInput):
            engine.retrieve(TOKENS, memory.pages, ids, start=1)
        with pytest.raises(BadInput):
            engine.retrieve(TOKENS, memory.pages, [ids[0][:4]])
        with pytest.raises(BadInput):
            engine.clear()
        with pytest.raises(BadInput):
            engine.clear(TOKENS, scope=True)
        with pytest.raises(BadInput):
            engine.clear(tier="moon")
        assert engine.stats()["tiers"]["cpu"]["reservations"] == 0


def test_wrong_settings_stop_the_start(memory: Memory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cpu.budget.*at least 8192"):
        open_engine(memory, cpu_budget=4096)
    with pytest.raises(ConfigError, match=r"tiers.0.budget.*at least 8192"):
        open_engine(memory, tiers=disk(tmp_path, budget=4096))
    with pytest.raises(ConfigError, match="weights"):
        Engine(memory.spec, weights="")
    with pytest.raises(ConfigError, match="policy"):
        open_engine(memory, policy="lruu")


def test_after_close_every_call_is_a_miss(memory: Memory) -> None:
    engine = open_engine(memory)
    engine.store(TOKENS, memory.pages, memory.ids(160))
    engine.close()
    engine.close()
    assert engine.lookup(TOKENS).reason == "closed"
    assert engine.retrieve(TOKENS, memory.pages, memory.ids(160)).reason == "closed"
    assert engine.store(TOKENS, memory.pages, memory.ids(160)).reasons == {"closed": 10}
    with pytest.raises(lmkv.Closed):
        engine.clear(everything=True)
    assert not engine.health()["ok"]


def test_a_small_budget_still_serves_groups_of_different_sizes() -> None:
    mixed = spec(full(layers=40), recurrent())
    memory = Memory(mixed, pages=128)
    with open_engine(memory, cpu_budget="1MiB", cpu_slab="64MiB") as engine:
        ids = memory.ids(160)
        handle = engine.store(TOKENS[: 5 * CHUNK], memory.pages, [ids[0][:20], ids[1][:5]])
        assert (handle.stored, handle.dropped) == (10, 0)
        assert engine.lookup(TOKENS).tokens == 5 * CHUNK


def test_a_process_may_end_without_closing_its_engine(tmp_path: Path) -> None:
    code = """
import sys
sys.path.insert(0, {tests!r})
from test_engine_edges import *
memory = Memory(spec(), pages=128)
engine = open_engine(memory, tiers=disk(Path({root!r})), cpu_budget="2GiB", cpu_touch=True)
engine.store(TOKENS, memory.pages, memory.ids(160))
try:
    open_engine(memory, cpu_budget="1GiB", cpu_touch=True, tiers=disk(Path({root!r}), budget=4096))
except ConfigError:
    print("refused")
"""
    code = code.format(tests=str(Path(__file__).parent), root=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")
    memory = Memory(spec(), pages=128)
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        assert engine.retrieve(TOKENS, memory.pages, memory.ids(160)).tokens == 160
