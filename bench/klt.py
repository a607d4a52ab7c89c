"""`klt` and `kch` on real KV, on one thread, against memcpy of the decoded bytes; rANS against zstd on their symbols.

    python bench/klt.py --profile FILE.lmkvp --kv KV.npz --levels 2 6 8

KV is a file that `lmkv codec report --work` keeps: k and v, bfloat16 bits [layers, heads, tokens, dim], of the model
that the profile is of. Parts are of 256 tokens and as many layers as told; encoding and decoding take every part once
in turn. A symbol of rANS counts as the two bytes of the value that it stands for; "symbols" are those of the rows that
are coded at all, one byte each, which zstd's fastest level has too. Each round times every step once, memcpy among
them, and ratios are of one round: median [lowest, highest]. Times are the thread's CPU time.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

# One thread, also of the library that numpy multiplies with; it reads this once, when it is loaded.
os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import numpy as np
import zstandard

from lmkv import _native
from lmkv.cli.output import emit, track
from lmkv.codec import channels, coefficients
from lmkv.codec.base import Codec
from lmkv.codec.kch import Kch
from lmkv.codec.klt import Klt, quantise, rows
from lmkv.codec.profile import Profile, open_profile
from lmkv.codec.shape import Shape
from lmkv.codec.tables import BITS, FREQS, SHIFT, TABLE
from lmkv_bench import Step, beside_memcpy

TOKENS = 256
Part = tuple[memoryview, Shape]


def parts(path: Path, profile: Profile, layers: int, count: int) -> list[Part]:
    """Parts from all over the file, as they lie in a container."""
    with np.load(path) as file:
        k, v = file["k"], file["v"]
    places = [
        (a, t) for t in range(0, k.shape[2] - TOKENS + 1, TOKENS) for a in range(0, k.shape[0] - layers + 1, layers)
    ]
    made = []
    for at in np.linspace(0, len(places) - 1, min(count, len(places))).astype(int).tolist():
        first, token = places[at]
        here = slice(first, first + layers), slice(None), slice(token, token + TOKENS)
        raw = np.stack([k[here], v[here]], 1).tobytes()
        shape = Shape(
            "bfloat16", layers, 1, TOKENS, k.shape[1], k.shape[3], v.shape[3], "kv head token dim", first, token,
            profile.rope,
        )  # fmt: skip
        made.append((memoryview(raw), shape))
    return made


def codec_steps(name: str, codec: Codec, some: list[Part]) -> list[Step]:
    """Encode and decode every part."""
    out, back = memoryview(bytearray(2 * len(some[0][0]))), memoryview(bytearray(len(some[0][0])))
    streams = [memoryview(bytes(out[: codec.encode(raw, out, shape)])) for raw, shape in some]
    nbytes = sum(len(raw) for raw, _ in some)
    bits = 16 * sum(map(len, streams)) / nbytes

    def encode() -> None:
        for raw, shape in some:
            codec.encode(raw, out, shape)

    def decode() -> None:
        for stream in streams:
            codec.decode(stream, back)

    return [Step(f"{name} encode", encode, nbytes, bits), Step(f"{name} decode", decode, nbytes, bits)]


def symbol_steps(name: str, profile: Profile, level: int, some: list[Part]) -> list[Step]:
    """The symbols of all blocks of all parts, through rANS and zstd."""
    coded: list[tuple[Any, Any]] = []
    for raw, shape in some:
        x = channels.read(raw, shape, profile.rope)
        assert x is not None
        for block in profile.of_part(shape):
            q = quantise(block, rows(x, block.place, shape), profile.description.levels[level].step)
            assert q is not None
            q[:, : channels.exact_tokens(shape, profile.description.sinks)] = 0
            ids = coefficients.choose(q, block.defaults[level])
            kept, ids = np.flatnonzero(ids).astype(np.uint32), ids[ids > 0]
            symbols = np.empty((len(kept), TOKENS), np.uint8)
            low, escapes = bytearray(int(SHIFT[ids].sum()) * (TOKENS // 8)), bytearray(2 * symbols.size)
            _native.coefficients_split(q, kept, SHIFT[ids], TABLE[ids], FREQS, symbols, low, escapes)
            coded.append((symbols, TABLE[ids]))
    streams, packed = [], [zstandard.ZstdCompressor(1).compress(symbols) for symbols, _ in coded]
    for symbols, tables in coded:
        room = bytearray(2 * symbols.size + 2000)
        streams.append(memoryview(room)[: _native.rans_encode(symbols, tables, FREQS, BITS, room)])
    back = [np.empty_like(symbols) for symbols, _ in coded]
    count = sum(symbols.size for symbols, _ in coded)

    def rans() -> None:
        for stream, (_, tables), into in zip(streams, coded, back, strict=True):
            _native.rans_decode(stream, tables, FREQS, BITS, into)

    def zstd() -> None:
        for each in packed:
            zstandard.ZstdDecompressor().decompress(each)

    rans()
    assert all((symbols == into).all() for (symbols, _), into in zip(coded, back, strict=True))
    sizes = [8 * sum(map(len, each)) / count for each in (streams, packed)]
    return [
        Step(f"{name} rANS decode", rans, 2 * count, sizes[0]),
        Step(f"{name} zstd-1 decode", zstd, 2 * count, sizes[1]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", required=True, help="a file, or an id")
    parser.add_argument("--kv", required=True, type=Path)
    parser.add_argument("--levels", type=int, nargs="+", default=[2, 6, 8])
    parser.add_argument("--layers", type=int, default=6, help="of a part; no block may cross its border")
    parser.add_argument("--parts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    profile = open_profile(options.profile)
    some, steps = parts(options.kv, profile, options.layers, options.parts), []
    for level in options.levels:
        steps += codec_steps(f"klt:{level}", Klt(level, profile.id), some)
        steps += symbol_steps(f"klt:{level}", profile, level, some)
    steps += codec_steps("kch", Kch(), some)
    emit(beside_memcpy(steps, 32 << 20, track(range(options.rounds), "klt")))


if __name__ == "__main__":
    main()
