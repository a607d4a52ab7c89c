"""A restart over a full disk tier: seconds to the first hit, and to the whole index.

    sudo python bench/restart.py /path/on/the/disk --entries 100000

Fills a folder with small sealed containers (prompts of 100 chunks), drops the page and dentry
caches where that is allowed, and opens an engine on it in this process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import numpy as np

from lmkv import backends, chunk
from lmkv.backends import Status, Write
from lmkv.cli.output import emit, track
from lmkv.config import Config
from lmkv.engine import Engine
from lmkv.keys import ChunkKeys
from lmkv.spec import Kind, KVSpec, LayerGroup
from lmkv_bench import Memory

CHUNK, DEPTH = 16, 100
SPEC = KVSpec((LayerGroup(Kind.FULL, (0,), CHUNK, kv_heads=1, head_dim=16),), CHUNK)


def prompt(number: int) -> np.ndarray:
    """Token ids of one prompt."""
    return np.random.default_rng(number).integers(0, 150_000, CHUNK * DEPTH).astype(np.int32)


def fill(url: str, scope: bytes, prompts: int) -> None:
    """Write every chunk of the prompts, as an engine would have."""
    backend = backends.open(url)
    buffer = memoryview(bytearray(chunk.container_bytes(SPEC, 0)))
    for number in track(range(prompts), "fill"):
        keys = ChunkKeys.from_tokens(prompt(number), CHUNK)
        for i in range(DEPTH):
            key = keys.key(i, scope)
            chunk.seal(buffer, chunk.new_header(SPEC, key))
            (result,) = backend.write([Write(key, buffer)])
            if result.status is not Status.OK:
                raise SystemExit(f"{key}: {result.detail}")
    backend.close()


def drop_caches() -> str:
    """Forget what the kernel knows of the disk; says whether it did."""
    os.sync()
    try:
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3\n")
    except OSError as error:
        return f"warm ({error.strerror})"
    return "cold"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a folder on the disk")
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    prompts, rows = options.entries // DEPTH, []
    memory = Memory(SPEC, "LBNHC", CHUNK * DEPTH, 1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        config = Config.load(env={}, chunk_tokens=CHUNK, cpu_budget="256MiB", tiers=f"disk://{folder}?budget=1TiB")
        for run in range(options.runs):
            if run == 0:
                with Engine(SPEC, weights="b", layout=memory.pages.layout, config=config) as engine:
                    scope = engine.scope.digest
                fill(f"disk://{folder}?direct=off", scope, prompts)
            state, start, busy = drop_caches(), time.perf_counter(), time.process_time()
            with Engine(SPEC, weights="b", layout=memory.pages.layout, config=config) as engine:
                opened = time.perf_counter()
                found = engine.retrieve(prompt(prompts - 1), memory.pages, memory.ids)
                hit = time.perf_counter()
                engine.storage.tiers[0].scanned.wait()
                done, busy = time.perf_counter(), time.process_time() - busy
                objects = engine.stats()["tiers"]["disk"]["objects"]
            assert (found.tokens, objects) == (CHUNK * DEPTH, prompts * DEPTH), (found, objects)
            times = {"opened s": opened, f"first hit of {CHUNK * DEPTH} tokens s": hit, "index s": done}
            seconds = {name: f"{moment - start:.3f}" for name, moment in times.items()}
            rows.append({"objects": objects, "caches": state} | seconds | {"CPU s": f"{busy:.3f}"})
    emit(rows)


if __name__ == "__main__":
    main()
