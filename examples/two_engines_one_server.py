"""Two engines and a cache server, each a process of its own: what one engine stores, the other one finds.

python examples/two_engines_one_server.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import lmkv

SPEC = lmkv.KVSpec((lmkv.LayerGroup(lmkv.Kind.FULL, tuple(range(4)), 16, kv_heads=8, head_dim=64),), chunk_tokens=256)
TOKENS = np.arange(2048, dtype=np.int32)
PAGES = np.arange(len(TOKENS) // 16)


def engine(memory: np.ndarray, server: str) -> tuple[lmkv.Engine, lmkv.PagedKV]:
    """An engine over ``memory``, [layer, page, bytes of a page], whose only other tier is the server."""
    views = [lmkv.GroupView(tuple((lmkv.Plane.of(layer),) for layer in memory))]
    pages = lmkv.PagedKV(SPEC, views, keep=[memory])
    options = {"cpu_budget": "256MiB", "tiers": [f"lmkv://{server}"]}
    return lmkv.Engine(SPEC, weights="an example", layout=pages.layout, **options), pages


def attend() -> np.ndarray:
    """What a model would compute."""
    shape = (4, len(PAGES), SPEC.groups[0].layer_page_bytes)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def store(server: str) -> None:
    """One engine: compute, and store."""
    kv, pages = engine(attend(), server)
    with kv:
        print("first engine: ", kv.store(TOKENS, pages, [PAGES]).stored, "chunks stored")
        print("first engine: ", kv.flush(timeout=30))


def retrieve(server: str) -> None:
    """Another: find and copy, and see that it is the same."""
    memory = np.zeros_like(attend())
    kv, pages = engine(memory, server)
    with kv:
        print("second engine:", kv.retrieve(TOKENS, pages, [PAGES]))
    assert (memory == attend()).all(), "other bytes than were stored"
    print("second engine: every byte is the same")


def main() -> None:
    """Start the server, then one engine after the other."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [sys.executable, "-m", "lmkv", "server", "--listen", "127.0.0.1:0"]
        with open(log, "w") as errors:
            server = subprocess.Popen(command, stderr=errors)
        try:
            while " serves " not in log.read_text():
                if server.poll() is not None:
                    sys.exit(log.read_text())
            address = log.read_text().partition(" serves ")[2].split()[0]
            for what in ("store", "retrieve"):
                subprocess.run([sys.executable, __file__, what, address], check=True)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    {"store": store, "retrieve": retrieve}[sys.argv[1]](sys.argv[2]) if sys.argv[1:] else main()
