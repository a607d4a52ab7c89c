"""Resident memory over many store and retrieve rounds: it must not grow.

    python bench/rss.py --rounds 10000 [--tier disk:///path]

Every round stores a new prompt, so that old ones are evicted all the time, and retrieves it and an
older one. The budget is full, and touched, before the first figure is taken.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

import numpy as np

from lmkv.cli.output import emit, human, track
from lmkv.config import Config
from lmkv.engine import Engine
from lmkv.spec import Kind, KVSpec, LayerGroup
from lmkv_bench import Memory, scratch

CHUNK, CHUNKS = 64, 8
SPEC = KVSpec((LayerGroup(Kind.FULL, (0, 1, 2, 3), 16, kv_heads=2, head_dim=64),), CHUNK)


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompt(number: int) -> np.ndarray:
    """Token ids of one round."""
    return np.random.default_rng(number).integers(0, 150_000, CHUNK * CHUNKS).astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--tier", default="", help="URL of a tier below host memory")
    options = parser.parse_args()
    memory = Memory(SPEC, "LBNHC", CHUNK * CHUNKS, 1)
    config = Config.load(
        env={}, chunk_tokens=CHUNK, cpu_budget="64MiB", cpu_slab="8MiB",
        tiers=[{"url": options.tier, "budget": "128MiB"}] if options.tier else [],
    )  # fmt: skip
    warm, rows = max(100, options.rounds // 20), []
    every = max(1, options.rounds // options.samples)
    engine = Engine(SPEC, weights=f"rss {os.getpid()}", layout=memory.pages.layout, config=config)
    with scratch(engine):
        for number in track(range(warm + options.rounds + 1), "rounds"):
            if number >= warm and (number - warm) % every == 0:
                engine.flush()
                rows.append((number - warm, resident()))
            engine.store(prompt(number), memory.pages, memory.ids)
            for each in (number, max(0, number - 20)):
                engine.retrieve(prompt(each), memory.pages, memory.ids)
        stats = engine.stats()
    first = rows[0][1]
    emit(
        [
            {"round": number, "resident": human(size), "more than at first, KiB": f"{(size - first) / 1024:+.0f}"}
            for number, size in rows
        ]
    )
    kept = ("stored_chunks", "retrieved_tokens", "evicted_chunks", "retrieve_failures")
    print(", ".join(f"{name} {stats[name]}" for name in kept))


if __name__ == "__main__":
    main()
