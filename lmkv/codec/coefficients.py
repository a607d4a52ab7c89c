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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmkv import _native
from lmkv.codec.tables import BITS, COSTS, FREQS, IDS, MIDDLE, SHIFT, SHIFTS, TABLE
from lmkv.errors import BadContainer

I16 = NDArray[np.int16]
U8 = NDArray[np.uint8]
# Bits of a row id's difference from the one that is expected, roughly: what a choice between ids weighs.
_ASIDE = 1.5 + 2 * np.log2(1 + np.arange(IDS, dtype=np.float32))
_FRONT, _SIZE = struct.Struct("<HBBII"), struct.Struct("<I")


def choose(q: I16, default: U8) -> U8:
    """The row id that takes the fewest bits for each row of q [rows, columns]."""
    return _cheapest(_priced(q), default)


class _Prices(NamedTuple):
    """zero: bool [rows], all zero. some: (rows, row ids, bits [those rows, those ids]) wherever it may pay."""

    zero: NDArray[np.bool_]
    some: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]]


def _priced(q: I16) -> _Prices:
    q, squares = np.ascontiguousarray(q), np.empty(len(q), np.int64)
    _native.coefficients_squares(q, squares)
    spread = np.sqrt(squares.astype(np.float32) / np.float32(q.shape[1]))
    octaves = np.log2(np.maximum(spread, 1e-9) / 2.5)
    found = []
    for shift in range(SHIFTS + 1):
        above, below = shift - 1.8 if shift else -np.inf, shift + 0.5 if shift < SHIFTS else np.inf
        some = np.flatnonzero((octaves > above) & (octaves <= below))
        if len(some):
            counts = np.empty((len(some), 16), np.uint32)
            _native.coefficients_counts(q, some.astype(np.uint32), shift, counts)
            of_shift = 1 + np.flatnonzero(SHIFT[1:] == shift)
            found.append((some, of_shift, counts.astype(np.float32) @ COSTS[of_shift].T))
    return _Prices(squares == 0, found)


def _cheapest(prices: _Prices, default: U8) -> U8:
    best, ids = np.full(len(default), np.inf, np.float32), np.zeros(len(default), np.uint8)
    for some, of_shift, bits in prices.some:
        bits = bits + _ASIDE[np.abs(of_shift - default[some].astype(np.int64)[:, None])]  # noqa: PLW2901
        winner = bits.argmin(1)
        least = bits[np.arange(len(some)), winner]
        better = least < best[some]
        best[some[better]] = least[better]
        ids[some[better]] = of_shift[winner[better]]
    ids[prices.zero] = 0
    return ids


def encode(q: I16, default: U8 | None = None) -> bytes:
    """q: [rows, columns]. default: row id expected of each row, which the decoder must have too; None: one for all."""
    base, prices = 0, _priced(q)
    if default is None:
        base = int(np.bincount(_cheapest(prices, np.full(len(q), MIDDLE, np.uint8))).argmax())
        default = np.full(len(q), base, np.uint8)
    ids = _cheapest(prices, default)
    differences = (ids.astype(np.int16) - default)[None]
    own = choose(differences, np.array([4], np.uint8))
    first = _pack(differences, own)
    symbols, planes, escapes = _parts(q, ids)
    return b"".join([_FRONT.pack(base, int(own[0]), 0, len(first), len(symbols)), first, symbols, planes, escapes])


def decode(src: memoryview, rows: int, columns: int, default: U8 | None = None) -> I16:
    """int16 [rows, columns] of a whole stream. BadContainer("codec"): it is none of this size."""
    q = np.empty((rows, columns), np.int16)
    try:
        _native.coefficients_decode(src, TABLE, SHIFT, FREQS, BITS, default, q)
    except ValueError as error:
        raise BadContainer("codec", str(error)) from None
    return q


def _parts(q: I16, ids: U8) -> tuple[bytes, bytes, bytes]:
    some = np.flatnonzero(ids)
    if not len(some):
        return b"", b"", b""
    q, ids = np.ascontiguousarray(q), ids[some]
    symbols, table = np.empty((len(some), q.shape[1]), np.uint8), TABLE[ids]
    low, escapes = bytearray(int(SHIFT[ids].sum()) * -(-q.shape[1] // 8)), bytearray(2 * symbols.size)
    count = _native.coefficients_split(q, some.astype(np.uint32), SHIFT[ids], table, FREQS, symbols, low, escapes)
    room = bytearray(symbols.size * 2 + 4 * 64 + 1024)
    used = _native.rans_encode(symbols, table, FREQS, BITS, room)
    return bytes(memoryview(room)[:used]), bytes(low), bytes(memoryview(escapes)[: 2 * count])


def _pack(q: I16, ids: U8) -> bytes:
    symbols, planes, escapes = _parts(q, ids)
    return _SIZE.pack(len(symbols)) + symbols + planes + escapes
