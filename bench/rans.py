"""The entropy coder and the codecs built on it, on one thread, against memcpy of the bfloat16 they stand for.

    python bench/rans.py --mib 32 --rounds 9

A symbol counts as the two bytes of the bfloat16 value that it stands for. Symbols are drawn from the tables of
quantised coefficients, 1.8 bits on average; zstd's fastest level has the same symbols. Each round times every step
once, memcpy among them, and ratios are of one round: median [lowest, highest]. Times are the thread's CPU time, which a
busy machine disturbs less.
"""

from __future__ import annotations

import argparse

import numpy as np
import zstandard

from lmkv import _native, codec
from lmkv.cli.output import emit, track
from lmkv.codec.shape import Shape
from lmkv.codec.tables import BITS, FREQS
from lmkv_bench import Step, beside_memcpy

COLUMNS = 256


def rans_steps(values: int) -> list[Step]:
    """One call codes all: rows of 256 symbols, each with one of all the tables."""
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
    nbytes, mine, theirs = 2 * values, 8 * used / values, 8 * len(packed) / values
    return [
        Step("rANS encode", lambda: _native.rans_encode(symbols, tables, FREQS, BITS, out), nbytes, mine),
        Step("rANS decode", decode, nbytes, mine),
        Step("zstd-1 encode", lambda: zstandard.ZstdCompressor(1).compress(symbols), nbytes, theirs),
        Step("zstd-1 decode", lambda: zstandard.ZstdDecompressor().decompress(packed), nbytes, theirs),
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
        Step("xpl encode", lambda: xpl.encode(raw, out, shape), len(raw), 16 * used / len(raw)),
        Step("xpl decode", lambda: xpl.decode(memoryview(stream), back), len(raw), 16 * used / len(raw)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=16, help="of bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    nbytes = options.mib << 20
    steps = rans_steps(nbytes // 2) + exact_steps(nbytes // 2)
    emit(beside_memcpy(steps, nbytes, track(range(options.rounds), "rans")))


if __name__ == "__main__":
    main()
