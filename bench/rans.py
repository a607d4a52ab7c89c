"""The entropy coder and the codecs built on it, on one thread, against memcpy of the bfloat16 they stand for.

    python bench/rans.py --mib 32 --rounds 9

A symbol counts as the two bytes of the bfloat16 value that it stands for. Symbols are drawn from the tables of
quantised coefficients, 1.8 bits on average; zstd's fastest level has the same symbols. Each round times every step
once, memcpy among them, and ratios are of one round: median [lowest, highest]. Times are the thread's CPU time, which a
busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard

from lmkv import _native, codec
from lmkv.cli.output import emit, track
from lmkv.codec.shape import Shape
from lmkv.codec.tables import BITS, FREQS
from lmkv_bench import Runs

COLUMNS = 256
Step = tuple[str, Callable[[], object], float]


def seconds(call: Callable[[], object]) -> float:
    """CPU time of a call that keeps to this thread."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def rans_steps(values: int) -> list[Step]:
    """Steps with the bits of a symbol. One call codes all: rows of 256 symbols, each with one of all the tables."""
    rng = np.random.default_rng(0)
    tables = rng.integers(0, len(FREQS), values // COLUMNS).astype(np.uint16)
    share = np.cumsum(FREQS, 1)
    draws = rng.integers(0, 1 << BITS, (len(tables), COLUMNS))
    symbols = np.empty(draws.shape, np.uint8)
    for table in range(len(FREQS)):
        rows = tables == table
        symbols[rows] = np.searchsorted(share[table], draws[rows], side="right")
    out, back = bytearray(2 * values), np.empty_like(symbols)
    used = _native.rans_encode(symbols, tables, FREQS, BITS, out)
    stream, packed = memoryview(out)[:used], zstandard.ZstdCompressor(1).compress(symbols)

    def decode() -> None:
        _native.rans_decode(stream, tables, FREQS, BITS, back)

    decode()
    assert (back == symbols).all()
    return [
        ("rANS encode", lambda: _native.rans_encode(symbols, tables, FREQS, BITS, out), 8 * used / values),
        ("rANS decode", decode, 8 * used / values),
        ("zstd-1 encode", lambda: zstandard.ZstdCompressor(1).compress(symbols), 8 * len(packed) / values),
        ("zstd-1 decode", lambda: zstandard.ZstdDecompressor().decompress(packed), 8 * len(packed) / values),
    ]


def exact_steps(values: int) -> list[Step]:
    """Normal values, each channel of its own size, through ``xpl``."""
    layers = max(1, values // (2 * 4 * 256 * 64))
    shape = Shape("bfloat16", layers, 16, 16, 4, 64, 64, "kv token head dim")
    rng = np.random.default_rng(1)
    scale = np.exp2(rng.normal(size=(layers, 1, 2, 1, 4, 64))).astype(np.float32)
    normal = rng.normal(size=(layers, 16, 2, 16, 4, 64)).astype(np.float32) * scale
    raw = memoryview((normal.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    out, back, xpl = memoryview(bytearray(raw)), memoryview(bytearray(len(raw))), codec.get("xpl")
    used = xpl.encode(raw, out, shape)
    xpl.decode(out[:used], back)
    assert back == raw
    stream = bytes(out[:used])
    return [
        ("xpl encode", lambda: xpl.encode(raw, out, shape), 16 * used / len(raw)),
        ("xpl decode", lambda: xpl.decode(memoryview(stream), back), 16 * used / len(raw)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=16, help="of bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    nbytes = options.mib << 20
    steps = rans_steps(nbytes // 2) + exact_steps(nbytes // 2)
    source, target, runs = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8), Runs()
    for _ in track(range(options.rounds), "rans"):
        runs.note("memcpy", nbytes / seconds(lambda: np.copyto(target, source)) / 1e9)
        for name, call, _ in steps:
            runs.note(name, nbytes / seconds(call) / 1e9, of="memcpy")
    rows: list[dict[str, Any]] = []
    bits = {name: each for name, _, each in steps}
    for found in runs.figures():
        row = {"step": found["step"], "bits": bits.get(found["step"], 16.0), "GB/s": found["median"], "of memcpy": ""}
        if found["of"]:
            ratios = sorted(runs.ratios(found["step"]))
            row["of memcpy"] = f"{found['ratio']:.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]"
        rows.append(row)
    emit(rows)


if __name__ == "__main__":
    main()
