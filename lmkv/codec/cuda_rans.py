"""The entropy decoder on a GPU (``csrc/cuda/rans.cu``): a warp a stream, the same symbols as `_native.rans_decode`.

CuPy, imported inside functions, compiles the kernel with NVRTC on first use.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmkv.cuda import kernel_source

VERSION, LANES, THREADS = 0xA1, 32, 128
Entries = NDArray[np.uint32]
Streams = NDArray[np.int64]


def entries_of(freqs: NDArray[np.uint16], bits: int) -> Entries:
    """The kernel's tables, uint32 [T, 16, 2]: the alias tables of freqs [T, A], A <= 16 (docs/codecs.md)."""
    size = 1 << (bits - 4)
    out = np.zeros((len(freqs), 16, 2), np.uint32)
    for entry, row in zip(out, freqs.tolist(), strict=True):
        left = row + [0] * (16 - len(row))
        entry[:, 1] = left
        opened = set(range(16))
        while smaller := [s for s in sorted(opened) if left[s] < size]:
            small, large = smaller[0], next(s for s in sorted(opened) if left[s] > size)
            left[large] -= size - left[small]
            entry[small, 0] = left[small] | large << 8 | ((left[large] - left[small]) & 0xFFFF) << 16
            opened.remove(small)
        for s in opened:
            entry[s, 0] = s << 8
    return out


def streams_of(src: memoryview, rows: int) -> Streams:
    """The kernel's streams, int64 [n, 4]: byte offset of the states, words, first row, rows. ValueError: none such."""
    count = src[1] if len(src) > 1 and src[0] == VERSION else 0
    if not 1 <= count <= min(rows, 16) or len(src) < 2 + 4 * count:
        raise ValueError("not a rANS stream of this version")
    words, each, at = struct.unpack_from(f"<{count}I", src, 2), -(-rows // count), 2 + 4 * count
    out = np.zeros((count, 4), np.int64)
    for i, size in enumerate(words):
        first = min(i * each, rows)
        out[i] = at, size, first, min(each, rows - first)
        at += 4 * LANES + 2 * size
    if at != len(src):
        raise ValueError("a truncated rANS stream, or bytes after its end")
    return out


@functools.cache
def _kernel(device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        return cupy.RawModule(code=kernel_source("rans.cu"), options=("-std=c++17",)).get_function("rans_decode")


def rans_decode(
    src: memoryview, tables: NDArray[np.uint16], freqs: NDArray[np.uint16], bits: int, rows: int, cols: int
) -> Any:
    """The symbols of a stream, a CuPy uint8 [rows, cols] on the current device and stream.

    As `_native.rans_decode`, for at most 16 symbols. ValueError: a damaged stream, or arguments that do not fit.
    """
    import cupy

    if len(tables) != rows or freqs.shape[1] > 16 or not 8 <= bits <= 12 or min(rows, cols) < 1:
        raise ValueError("tables, frequencies, bits or sizes that do not fit")
    if int(tables.max()) >= len(freqs) or (freqs.sum(1, dtype=np.int64) != 1 << bits).any():
        raise ValueError("a table number too high, or frequencies of another sum")
    streams = cupy.asarray(streams_of(src, rows))
    symbols, bad = cupy.empty((rows, cols), np.uint8), cupy.ones(len(streams), np.uint32)
    arguments = (
        cupy.asarray(np.frombuffer(src, np.uint8)), streams, np.int64(len(streams)), cupy.asarray(tables),
        cupy.asarray(entries_of(freqs, bits)), np.uint32(bits), np.uint32(cols), symbols, bad,
    )  # fmt: skip
    blocks = -(-len(streams) * LANES // THREADS)
    _kernel(cupy.cuda.runtime.getDevice())((blocks,), (THREADS,), arguments)
    if bool(bad.any()):
        raise ValueError("a corrupt rANS stream")
    return symbols
