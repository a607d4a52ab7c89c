"""Hashing and lookup: prompts of 32k, 131k and 1M tokens, from an int32 array and from a list.

    python bench/lookup.py --tokens 32768 131072 1048576 --runs 99

All chunks are in the index, so a hit walks all of them, and every lookup makes its keys anew from
the token ids; "keys made before" is the index alone, "miss at once" a prompt whose first chunk is
unknown. The steps take turns, so none finds the caches as it left them; a tenth of the rounds warms
up. SHA-256 of the token ids stands beside.
"""

from __future__ import annotations

import argparse
import hashlib

import numpy as np

from lmkv.cli.output import emit, track
from lmkv.config import Config
from lmkv.engine import Engine
from lmkv.spec import Kind, KVSpec, LayerGroup
from lmkv_bench import Memory, Runs

CHUNK = 256
# as little KV as there can be: what is measured is keys and index
SPEC = KVSpec((LayerGroup(Kind.FULL, (0,), CHUNK, kv_heads=1, head_dim=1),), CHUNK)


def measure(tokens: int, runs: int) -> list[dict[str, str]]:
    """Rows of one prompt length."""
    ids = np.random.default_rng(0).integers(0, 150_000, tokens).astype(np.int32)
    listed, other, text = ids.tolist(), (ids + 1).tolist(), ids.tobytes()
    memory = Memory(SPEC, "LBNHC", tokens, 1)
    config = Config.load(env={}, cpu_budget=(1 << 28) + tokens * 64)
    figures = Runs()
    with Engine(SPEC, weights="bench", layout=memory.pages.layout, config=config) as engine:
        engine.store(ids, memory.pages, memory.ids)
        ready = engine.keys(ids)
        ready.upto(ready.chunks)
        assert engine.lookup(listed).tokens == tokens
        for number in range(-max(1, runs // 10), runs):
            if number == 0:
                figures = Runs()
            figures.time("SHA-256", lambda: hashlib.sha256(text).digest())
            figures.time("hash, array", lambda: engine.keys(ids).upto(tokens), "SHA-256")
            figures.time("hash, list", lambda: engine.keys(listed).upto(tokens), "SHA-256")
            figures.time("lookup, keys made before", lambda: engine.lookup(ready))
            figures.time("lookup, array", lambda: engine.lookup(ids))
            figures.time("lookup, list", lambda: engine.lookup(listed))
            figures.time("lookup, list, miss at once", lambda: engine.lookup(other))
    return [
        {"tokens": f"{tokens:,}", "step": each["step"]}
        | {f"{name} us": f"{each[name]:.0f}" for name in ("min", "median", "max")}
        for each in figures.figures()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 15, 1 << 17, 1 << 20])
    parser.add_argument("--runs", type=int, default=99)
    options = parser.parse_args()
    emit([row for tokens in track(options.tokens, "lookup") for row in measure(tokens, options.runs)])


if __name__ == "__main__":
    main()
