"""Engines over a remote tier, a prompt of known bytes, and what a request for it must give."""

from __future__ import annotations

import time

import numpy as np
from memory import CHUNK, Memory, full, spec

from lmkv import Engine, Retrieved

CHUNKS = 12
TOKENS = np.arange(1, CHUNKS * CHUNK + 5, dtype=np.int32)
ALL = CHUNKS * CHUNK
LATE = 20.0  # seconds after which a call that should take two has hung


def new_memory() -> Memory:
    return Memory(spec(full(heads=8, dim=64)), pages=128)


def open_engine(memory: Memory, url: str, timeout: float = 3.0) -> Engine:
    return Engine(
        memory.spec, weights="test", layout=memory.pages.layout, cpu_budget="32MiB", cpu_touch=False, tiers=url,
        operation_timeout=timeout,
    )  # fmt: skip


def fill(memory: Memory, url: str) -> np.ndarray:
    """Store the prompt by an engine of its own; returns the bytes of its pages."""
    ids = memory.ids(ALL)
    with open_engine(memory, url) as engine:
        assert engine.store(TOKENS, memory.pages, ids).dropped == 0
        report = engine.flush(30)
        assert report.written == {url.partition(":")[0]: CHUNKS}, report
    return memory.read(ids)[0].copy()


def refill(memory: Memory, url: str, right: np.ndarray) -> None:
    """Compute and store the same again."""
    memory.arrays[0][:, memory.ids(ALL)[0]] = right
    fill(memory, url)


def hit(memory: Memory, engine: Engine, right: np.ndarray) -> Retrieved:
    """A retrieve into wiped pages, in time, whose tokens are right."""
    memory.wipe()
    ids = memory.ids(ALL, seed=7)
    began = time.monotonic()
    found = engine.retrieve(TOKENS, memory.pages, ids)
    assert time.monotonic() - began < LATE
    pages = found.tokens // memory.spec.groups[0].page_tokens
    np.testing.assert_array_equal(memory.read(ids)[0][:, :pages], right[:, :pages])
    return found


def until_full(memory: Memory, engine: Engine, right: np.ndarray) -> Retrieved:
    """Hits come back, once the breaker has tried again, without another engine."""
    deadline = time.monotonic() + 30
    while (found := hit(memory, engine, right)).tokens < ALL:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found
