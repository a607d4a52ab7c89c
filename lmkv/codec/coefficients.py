"""Rows of quantised coefficients as bytes: the row ids, the rANS symbols, the low bits, the escapes.

Little-endian: u16 id that the row ids are told from, u8 row id of the differences, u8 0; u32 bytes of the
differences, of the symbols; then

- the differences ``id - default`` of all rows (the default, where there is a profile, else the u16), one row [1, rows]
  coded like any other: u32 bytes of rANS, the rANS of its symbols, its low bits, its escapes;
- rANS of the symbols of every row whose id is not 0, in order;
- their low bits: for each such row, for each of its ``shift`` bits from the lowest on, a bit for each column, eight to
  a byte from the lowest bit on;
- the escaped values, int16, row by row.

An encoder picks any ids; a symbol whose frequency is 0 goes out as an escape.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from lmkv import _native
from lmkv.codec import head
from lmkv.codec.tables import BITS, COSTS, ESCAPE, FREQS, IDS, MIDDLE, REACH, SHIFT, SHIFTS, TABLE
from lmkv.errors import BadContainer

I16 = NDArray[np.int16]
U8 = NDArray[np.uint8]
_FRONT, _SIZE = struct.Struct("<HBBII"), struct.Struct("<I")


def choose(q: I16, default: U8) -> U8:
    """The row id that takes the fewest bits for each row of q [rows, columns]."""
    rows = len(q)
    spread = np.sqrt((q.astype(np.float32) ** 2).mean(1))
    octaves = np.log2(np.maximum(spread, 1e-9) / 2.5)
    best, ids = np.full(rows, np.inf, np.float32), np.zeros(rows, np.uint8)
    distance = np.abs(np.arange(IDS)[None, :] - default[:, None].astype(np.int64))
    aside = 1.5 + 2 * np.log2(1 + distance.astype(np.float32))
    for shift in range(SHIFTS + 1):
        above, below = shift - 1.8 if shift else -np.inf, shift + 0.5 if shift < SHIFTS else np.inf
        some = np.flatnonzero((octaves > above) & (octaves <= below))
        of_shift = 1 + np.flatnonzero(SHIFT[1:] == shift)
        if not len(some):
            continue
        symbols = symbols_of(q[some], np.full(len(some), shift, np.uint8))[0]
        counts = np.bincount((symbols + np.arange(len(some))[:, None] * 16).reshape(-1), minlength=16 * len(some))
        bits = counts.reshape(-1, 16).astype(np.float32) @ COSTS[of_shift].T + aside[np.ix_(some, of_shift)]
        winner = bits.argmin(1)
        bits = bits[np.arange(len(some)), winner]
        better = bits < best[some]
        best[some[better]] = bits[better]
        ids[some[better]] = of_shift[winner[better]]
    ids[~q.any(1)] = 0
    return ids


def encode(q: I16, default: U8 | None = None) -> bytes:
    """q: [rows, columns]. default: row id expected of each row, which the decoder must have too; None: one for all."""
    rows = len(q)
    base = 0
    if default is None:
        base = int(np.bincount(choose(q, np.full(rows, MIDDLE, np.uint8))).argmax())
        default = np.full(rows, base, np.uint8)
    ids = choose(q, default)
    differences = (ids.astype(np.int16) - default)[None]
    own = choose(differences, np.array([4], np.uint8))
    first = _pack(differences, own)
    symbols, planes, escapes = _parts(q, ids)
    return b"".join([_FRONT.pack(base, int(own[0]), 0, len(first), len(symbols)), first, symbols, planes, escapes])


def decode(src: memoryview, rows: int, columns: int, default: U8 | None = None) -> I16:
    """int16 [rows, columns] of a whole stream. BadContainer("codec"): it is none of this size."""
    (base, own, zero, first, second), src = head.take(src, _FRONT)
    if zero or base >= IDS or own >= IDS:
        raise BadContainer("codec", "not the front of coefficients")
    raw, src = head.cut(src, first)
    (coded,), raw = head.take(raw, _SIZE)
    differences = _unpack(raw, np.array([own], np.uint8), coded, rows)[0]
    ids = differences.astype(np.int32) + (base if default is None else default)
    if ids.min() < 0 or ids.max() >= IDS:
        raise BadContainer("codec", "a row id that is none")
    return _unpack(src, ids.astype(np.uint8), second, columns)


def symbols_of(q: I16, shift: U8) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The symbols of rows, and ``q + half``."""
    wide = q + ((1 << shift.astype(np.int32)) >> 1)[:, None]
    high = (wide >> shift[:, None]) + np.int32(REACH)
    high[(high < 0) | (high > 2 * REACH)] = ESCAPE
    return high, wide


def _parts(q: I16, ids: U8) -> tuple[bytes, bytes, bytes]:
    some = np.flatnonzero(ids)
    if not len(some):
        return b"", b"", b""
    q, ids = q[some], ids[some]
    symbols, wide = symbols_of(q, SHIFT[ids])
    symbols[FREQS[TABLE[ids][:, None], symbols] == 0] = ESCAPE
    room = bytearray(q.size * 2 + 4 * 64 + 1024)
    used = _native.rans_encode(np.ascontiguousarray(symbols, np.uint8), TABLE[ids], FREQS, BITS, room)
    planes = np.zeros((int(SHIFT[ids].sum()), -(-q.shape[1] // 8)), np.uint8)
    starts = np.cumsum(SHIFT[ids].astype(np.int64)) - SHIFT[ids]
    for bit in range(int(SHIFT[ids].max())):
        rows = np.flatnonzero(SHIFT[ids] > bit)
        planes[starts[rows] + bit] = np.packbits((wide[rows] >> bit & 1).astype(np.uint8), axis=1, bitorder="little")
    return bytes(room[:used]), planes.tobytes(), q[symbols == ESCAPE].astype("<i2").tobytes()


def _pack(q: I16, ids: U8) -> bytes:
    symbols, planes, escapes = _parts(q, ids)
    return _SIZE.pack(len(symbols)) + symbols + planes + escapes


def _unpack(src: memoryview, ids: U8, coded: int, columns: int) -> I16:
    """The rows of these ids; ``coded``: bytes of rANS at the front of ``src``, whose end must be theirs."""
    out = np.zeros((len(ids), columns), np.int16)
    some = np.flatnonzero(ids)
    raw, src = head.cut(src, coded)
    shift = SHIFT[ids[some]]
    width = -(-columns // 8)
    low, src = head.cut(src, int(shift.sum()) * width)
    if not len(some):
        if len(raw) or len(src):
            raise BadContainer("codec", "bytes after the coefficients")
        return out
    symbols = np.empty((len(some), columns), np.uint8)
    q = np.empty((len(some), columns), np.int16)
    try:
        _native.rans_decode(raw, TABLE[ids[some]], FREQS, BITS, symbols)
        _native.coefficients_join(symbols, shift, low, src, q)
    except ValueError as error:
        raise BadContainer("codec", str(error)) from None
    if len(some) == len(ids):
        return q
    out[some] = q
    return out
