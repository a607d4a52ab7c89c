"""kill -9 in the middle of stores: what is found afterwards is right, and the budget holds after each restart."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from memory import Memory, spec
from test_engine import TOKENS, disk, open_engine

ROUNDS = 50
CONTAINER = 8192


def store_until_killed(root: str, budget: int, first: int, says: Connection) -> None:
    """The child: stores one prompt after another and says which is safe."""
    memory = Memory(spec(), pages=128, seed=7)
    ids = memory.ids(160)
    engine = open_engine(memory, tiers=disk(Path(root), budget=budget))
    for i in itertools.count(first):
        engine.store(TOKENS + 1000 * i, memory.pages, ids)
        engine.flush(10)
        says.send(i)


def test_fifty_kills_leave_right_bytes_and_the_budget_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where the fork server finds what it preloads
    memory = Memory(spec(), pages=128, seed=7)
    ids = memory.ids(160)
    right = memory.read(ids)[0].copy()
    random.seed(3)
    first = 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_crash"])
    for round_ in range(ROUNDS):
        budget = 100 * CONTAINER if round_ % 2 else 50 * CONTAINER
        hears, says = context.Pipe(duplex=False)
        child = context.Process(target=store_until_killed, args=(str(tmp_path), budget, first, says), daemon=True)
        child.start()
        says.close()
        for _ in range(random.randrange(1, 6)):
            first = hears.recv() + 1
        for _ in range(random.randrange(0, 20_000)):
            pass  # land anywhere inside the next store
        child.kill()
        child.join()
        hears.close()
        if round_ % 5 == 4:
            check(tmp_path, memory, ids, right, first)


def check(root: Path, memory: Memory, ids: list[np.ndarray], right: np.ndarray, stored: int) -> None:
    """Every chunk that is offered has the right bytes, and the last flushed prompt is there whole."""
    half = 25 * CONTAINER
    with open_engine(memory, tiers=disk(root, budget=half)) as engine:
        engine.storage.tiers[0].scanned.wait(10)
        files = [each for each in root.rglob("*-*") if each.is_file()]
        assert sum(each.stat().st_size for each in files) == engine.stats()["tiers"]["disk"]["bytes"] <= half
        assert not list((root / "tmp").iterdir())
        hits = 0
        for i in range(stored + 2):
            memory.wipe()
            hit = engine.retrieve(TOKENS + 1000 * i, memory.pages, ids)
            count = hit.tokens // 4
            np.testing.assert_array_equal(memory.read(ids)[0][:, :count], right[:, :count])
            hits += hit.tokens
        assert hits >= 10 * 16, "half the budget still holds the most recent prompt"
        assert not [name for name in engine.stats() if name.startswith("miss.")]
    memory.arrays[0][:, ids[0]] = right
