"""The native way back from coefficients, against the numpy definition of lmkv/codec/klt_reference.py bit by bit."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkv import _native as native
from lmkv.codec import coefficients, tables
from lmkv.codec.klt_reference import cos_sin, pairs, rotate, to_bfloat16, transform
from lmkv.codec.shape import Rope
from lmkv.errors import BadContainer

EVERY_LEVEL = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@EVERY_LEVEL
@given(
    channels=st.integers(1, 30),
    kept=st.integers(1, 20),
    tokens=st.sampled_from([1, 7, 16, 33, 64]),
    reach=st.sampled_from([1, 30, 900, 32767]),
    empty=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_transform(channels: int, kept: int, tokens: int, reach: int, empty: float, seed: int, level: str) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.integers(-32768, 32768, (channels, kept)).astype(np.int16)
    q = rng.integers(-reach - 1, reach + 1, (kept, tokens)).astype(np.int16)
    q[rng.random(kept) < empty] = 0
    scale = np.exp(rng.normal(size=channels) * 3).astype(np.float32)
    mean = rng.normal(size=channels).astype(np.float32)
    out = np.full((tokens, channels), np.nan, np.float32)
    native.klt_transform(native.KltMatrix(matrix), q, scale, mean, out)
    expected = np.ascontiguousarray(transform(matrix, q, scale, mean).T)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


def test_a_transform_of_more_than_one_slab_chunk_and_tile(level: str) -> None:
    """Slabs are of 64 channels, chunks of 160 coefficients, tiles of at most 256 tokens; one token's sums are wide."""
    rng = np.random.default_rng(5)
    matrix = rng.integers(-4095, 4096, (150, 401)).astype(np.int16)
    q = (rng.normal(size=(401, 300)) * 2).astype(np.int16)
    q[:, 270] = rng.integers(-32768, 32768, 401)
    scale, mean = rng.random(150, np.float32), rng.random(150, np.float32)
    out = np.empty((300, 150), np.float32)
    native.klt_transform(native.KltMatrix(matrix), q, scale, mean, out)
    sums = (matrix.astype(np.int64) @ q.astype(np.int64)).astype(np.float32)
    np.testing.assert_array_equal(out.T, sums * scale[:, None] + mean[:, None])


@pytest.mark.parametrize("value", [-32768, 32767])
def test_the_largest_sums_are_exact(value: int, level: str) -> None:
    """2^16 products of two 16-bit extremes need more than 32 bits; one pair of them needs one bit more than 31."""
    for kept in (1, 2, 1 << 10):
        matrix, q = np.full((3, kept), value, np.int16), np.full((kept, 20), value, np.int16)
        out = np.empty((20, 3), np.float32)
        native.klt_transform(native.KltMatrix(matrix), q, np.ones(3, np.float32), np.zeros(3, np.float32), out)
        assert (out == np.float32(kept * value * value)).all()


@pytest.mark.parametrize("first", [0, 1000, (1 << 30) - 70])
def test_cos_and_sin(first: int) -> None:
    freqs = (*(float(np.float32(1e4 ** (-i / 32))) for i in range(32)), -1.5, 16.0, 0.0)
    for factor in (1.0, 1.25):
        cos, sin = np.empty((2, 70, len(freqs)), np.float32)
        native.klt_cos_sin(np.array(freqs), first, factor, cos, sin)
        for found, expected in zip((cos, sin), cos_sin(Rope(freqs, False, factor), first, 70), strict=True):
            np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


AXES = ("layer", "page", "token", "head", "channel")


def turned_by(rope: Rope | None, tokens: int, factor: float = 1.0) -> tuple[np.ndarray | None, np.ndarray | None, bool]:
    if rope is None:
        return None, None, False
    cos, sin = cos_sin(rope, 1000, tokens)
    return cos / np.float32(factor), sin / np.float32(factor), rope.interleaved


def laid_out(sizes: tuple[int, ...], order: list[str]) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """Places in a buffer behind 5 words that are left alone, the buffer, and a view of it [layer, page, ...]."""
    steps, step = {}, 1
    for axis in reversed(order):
        steps[axis], step = step, step * sizes[AXES.index(axis)]
    words = np.full(5 + step, 0xAAAA, np.uint16)
    places = (5, *(steps[axis] for axis in AXES))
    return places, words, np.lib.stride_tricks.as_strided(words[5:], sizes, [2 * each for each in places[1:]])


ANY_PLACE = {
    "sizes": st.tuples(
        st.integers(1, 2), st.integers(1, 4), st.sampled_from([1, 3, 16]), st.integers(1, 3), st.integers(1, 20)
    ),
    "half": st.integers(0, 10),
    "interleaved": st.booleans(),
    "order": st.permutations(AXES),
    "seed": st.integers(0, 2**32 - 1),
}


@EVERY_LEVEL
@given(**ANY_PLACE)
def test_rotated_rounded_and_in_place(
    sizes: tuple[int, ...], half: int, interleaved: bool, order: list[str], seed: int, level: str
) -> None:
    layers, pages, page_tokens, heads, dim = sizes
    tokens, half = pages * page_tokens, min(half, dim // 2)
    rng = np.random.default_rng(seed)
    # More channels than are written: the layers lie apart.
    wide = (rng.normal(size=(layers, heads * dim + 3, tokens)) * 10).astype(np.float32)
    x = wide[:, : heads * dim]
    rope = Rope(tuple(rng.random(half) + 0.01), interleaved, 1.25) if half else None
    expected = x.copy().reshape(layers, heads, dim, tokens)
    if rope:
        rotate(expected, rope, 1000)
    places, words, found = laid_out(sizes, order)
    native.klt_write_bf16(x, *turned_by(rope, tokens), sizes, places, words)
    rounded = to_bfloat16(np.ascontiguousarray(expected)).reshape(layers, heads, dim, pages, page_tokens)
    np.testing.assert_array_equal(found, rounded.transpose(0, 3, 4, 1, 2))
    assert (words[:5] == 0xAAAA).all()


@EVERY_LEVEL
@given(**ANY_PLACE)
def test_read_and_unrotated(
    sizes: tuple[int, ...], half: int, interleaved: bool, order: list[str], seed: int, level: str
) -> None:
    layers, pages, page_tokens, heads, dim = sizes
    tokens, half = pages * page_tokens, min(half, dim // 2)
    rng = np.random.default_rng(seed)
    places, words, view = laid_out(sizes, order)
    view[...] = to_bfloat16(rng.normal(size=sizes).astype(np.float32))
    rope = Rope(tuple(rng.random(half) + 0.01), interleaved) if half else None
    wide = np.full((layers, heads * dim + 3, tokens), np.nan, np.float32)
    turned = turned_by(rope, tokens)
    largest = native.klt_read_bf16(words, *turned, sizes, places, wide[:, : heads * dim])
    assert largest == (view & 0x7FFF).max()
    expected = (view.astype(np.uint32) << 16).view(np.float32).transpose(0, 3, 4, 1, 2)
    expected = np.ascontiguousarray(expected).reshape(layers, heads, dim, tokens)
    if turned[0] is not None and turned[1] is not None:
        one, two = pairs(rope, dim)
        a, b, cos, sin = expected[:, :, one].copy(), expected[:, :, two].copy(), turned[0].T, turned[1].T
        expected[:, :, one], expected[:, :, two] = a * cos + b * sin, b * cos - a * sin
    np.testing.assert_array_equal(wide[:, : heads * dim], expected.reshape(layers, heads * dim, tokens))
    assert np.isnan(wide[:, heads * dim :]).all()


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC1, 0xFFFF])
def test_numbers_that_are_not_finite_are_seen(value: int, level: str) -> None:
    words = np.zeros(64 * 4, np.uint16)
    words[77] = value
    x = np.empty((1, 64, 4), np.float32)
    assert native.klt_read_bf16(words, None, None, False, (1, 1, 4, 1, 64), (0, 256, 256, 64, 64, 1), x) >= 0x7F80


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_block_is_transformed_rotated_and_written(interleaved: bool, level: str) -> None:
    """Two layers of K, two heads of 6, and V, two heads of 4, in 3 pages of 7 tokens: 'head kv token dim'."""
    rng = np.random.default_rng(8)
    matrix = rng.integers(-4095, 4096, (40, 33)).astype(np.int16)
    q = rng.integers(-9, 10, (33, 21)).astype(np.int16)
    scale, mean = rng.random(40, np.float32) * np.float32(1e-3), rng.random(40, np.float32)
    rope = Rope((1.0, 0.1), interleaved)
    words = np.zeros(2 * 3 * 2 * 7 * 10, np.uint16)
    k = (2, 3, 7, 2, 6), (0, 420, 140, 6, 70, 1)
    v = (2, 3, 7, 2, 4), (42, 420, 140, 4, 70, 1)
    native.klt_write_block(native.KltMatrix(matrix), q, scale, mean, *turned_by(rope, 21), [k, v], words)
    made = transform(matrix, q, scale, mean).reshape(2, 20, 21)
    keys, values = made[:, :12].reshape(2, 2, 6, 21).copy(), made[:, 12:].reshape(2, 2, 4, 21)
    rotate(keys, rope, 1000)
    for (sizes, places), expected in ((k, keys), (v, values)):
        found = np.lib.stride_tricks.as_strided(words[places[0] :], sizes, [2 * each for each in places[1:]])
        rounded = to_bfloat16(np.ascontiguousarray(expected)).reshape(2, 2, -1, 3, 7)
        np.testing.assert_array_equal(found, rounded.transpose(0, 3, 4, 1, 2))


def test_nothing_is_written_outside_of_the_buffer() -> None:
    x = np.zeros((1, 8, 32), np.float32)
    sizes, good = (1, 2, 16, 2, 4), (0, 256, 16 * 8, 8, 4, 1)  # 2 pages of 16 tokens, 2 heads of 4 channels
    native.klt_write_bf16(x, None, None, False, sizes, good, np.zeros(256, np.uint16))
    far = ((0, 256, 129, 8, 4, 1), (0, 256, -1, 8, 4, 1), (0, 256, 1 << 62, 8, 4, 1))
    for places in ((1, *good[1:]), (-1, *good[1:]), *far):
        with pytest.raises(ValueError, match="outside"):
            native.klt_write_bf16(x, None, None, False, sizes, places, np.zeros(256, np.uint16))
        with pytest.raises(ValueError, match="outside"):
            native.klt_read_bf16(np.zeros(256, np.uint16), None, None, False, sizes, places, x)
    for wrong in ((1, 3, 16, 2, 4), (1, 2, 15, 2, 4), (1, 2, 16, 3, 4), (1, 1, 16, 2, 4), (2, 2, 16, 2, 4)):
        with pytest.raises(ValueError, match=r"x must be|outside"):
            native.klt_write_bf16(x, None, None, False, wrong, good, np.zeros(256, np.uint16))
    with pytest.raises(ValueError, match="sizes"):
        native.klt_write_bf16(x, None, None, False, (1, 0, 16, 2, 4), good, np.zeros(256, np.uint16))


def plainly_joined(symbols: np.ndarray, shifts: list[int], low: np.ndarray, escapes: list[int]) -> np.ndarray:
    """Coefficients value by value; low: [bit rows, bytes]."""
    out, planes, left = np.zeros(symbols.shape, np.int16), iter(low.tolist()), iter(escapes)
    for r, shift in enumerate(shifts):
        bits = [next(planes) for _ in range(shift)]
        for c, symbol in enumerate(symbols[r].tolist()):
            below = sum((plane[c // 8] >> c % 8 & 1) << bit for bit, plane in enumerate(bits))
            out[r, c] = next(left) if symbol == 15 else ((symbol - 7) << shift) - ((1 << shift) >> 1) + below
    return out


@EVERY_LEVEL
@given(rows=st.integers(1, 6), cols=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), own=st.booleans())
def test_coefficients(rows: int, cols: int, seed: int, own: bool, level: str) -> None:
    """A stream put together from its pieces, and each piece too short or too long."""
    rng = np.random.default_rng(seed)
    ids = (rng.integers(0, tables.IDS, rows) * rng.integers(0, 2, rows)).astype(np.uint8)
    default = None if own else rng.integers(0, tables.IDS, rows).astype(np.uint8)
    some, base = np.flatnonzero(ids), int(rng.integers(0, tables.IDS)) if own else 0
    shifts, table = tables.SHIFT[ids[some]], tables.TABLE[ids[some]]
    symbols = np.array([rng.choice(np.flatnonzero(tables.FREQS[row]), cols) for row in table], np.uint8)
    symbols = symbols.reshape(len(some), cols)
    low = rng.integers(0, 256, (int(shifts.sum()), -(-cols // 8)), np.uint8)
    escapes = rng.integers(-32768, 32768, int((symbols == 15).sum())).astype("<i2")
    room = bytearray(2 * symbols.size + 2000)
    used = native.rans_encode(symbols, table, tables.FREQS, tables.BITS, room) if len(some) else 0
    differences = (ids.astype(np.int16) - (base if default is None else default))[None]
    of_ids = coefficients.choose(differences, np.array([4], np.uint8))

    def decoded(base: int, zero: int, first: bytes, second: bytes, low: bytes, escapes: bytes) -> np.ndarray:
        front = struct.pack("<HBBII", base, of_ids[0], zero, len(first), len(second))
        stream = front + first + second + low + escapes
        return coefficients.decode(memoryview(stream), rows, cols, default)

    parts = base, 0, coefficients._pack(differences, of_ids), bytes(room[:used]), low.tobytes(), escapes.tobytes()
    q = decoded(*parts)
    np.testing.assert_array_equal(q[some], plainly_joined(symbols, shifts.tolist(), low, escapes.tolist()))
    assert not np.delete(q, some, 0).any()
    wrong = [(0, tables.IDS), (1, 1), *((i, b"\0\0" + parts[i]) for i in range(2, 6))]
    for number, other in [*wrong, *((i, parts[i][2:]) for i in range(2, 6) if parts[i])]:
        with pytest.raises(BadContainer):
            decoded(*parts[:number], other, *parts[number + 1 :])


@EVERY_LEVEL
@given(rows=st.integers(1, 6), cols=st.integers(1, 40), reach=st.sampled_from([1, 9, 3000]), seed=st.integers(0, 999))
def test_split_and_joined_again(rows: int, cols: int, reach: int, seed: int, level: str) -> None:
    """Symbols, low bits and escapes say q; a symbol without frequency is always an escape."""
    rng = np.random.default_rng(seed)
    q = rng.integers(-reach, reach + 1, (2 * rows, cols)).astype(np.int16)
    shifts, table = rng.integers(0, 9, rows).astype(np.uint8), rng.integers(0, 3, rows).astype(np.uint16)
    some = np.sort(rng.permutation(2 * rows)[:rows]).astype(np.uint32)
    freqs = rng.integers(0, 2, (3, 16)).astype(np.uint16)
    symbols, escapes = np.empty((rows, cols), np.uint8), np.empty(rows * cols, np.int16)
    low = np.empty(int(shifts.sum()) * -(-cols // 8), np.uint8)
    count = native.coefficients_split(q, some, shifts, table, freqs, symbols, low, escapes)
    assert count == (symbols == 15).sum()
    wide = q[some].astype(np.int32) + (1 << shifts.astype(np.int32) >> 1)[:, None]
    high = (wide >> shifts[:, None]) + 7
    fits = (high >= 0) & (high < 15) & (freqs[table[:, None], high.clip(0, 14)] > 0)
    np.testing.assert_array_equal(symbols, np.where(fits, high, 15))
    planes = low.reshape(int(shifts.sum()), -(-cols // 8))
    np.testing.assert_array_equal(plainly_joined(symbols, shifts.tolist(), planes, escapes.tolist()), q[some])
    for shift in (0, 3):
        counts, every = np.empty((rows, 16), np.uint32), (q[some].astype(int) + (1 << shift >> 1) >> shift) + 7
        native.coefficients_counts(q, some, shift, counts)
        every[(every < 0) | (every > 14)] = 15
        assert counts.tolist() == [np.bincount(row, minlength=16).tolist() for row in every]
    squares = np.empty(2 * rows, np.int64)
    native.coefficients_squares(q, squares)
    assert squares.tolist() == (q.astype(np.int64) ** 2).sum(1).tolist()
