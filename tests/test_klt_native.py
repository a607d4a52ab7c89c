"""The native way back from coefficients, against the numpy definition of lmkv/codec/klt_reference.py bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkv import _native as native
from lmkv.codec.klt_reference import cos_sin, rotate, to_bfloat16, transform
from lmkv.codec.shape import Rope

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
    out = np.full((channels, tokens), np.nan, np.float32)
    native.klt_transform(matrix, q, scale, mean, out)
    np.testing.assert_array_equal(out.view(np.uint32), transform(matrix, q, scale, mean).view(np.uint32))


@pytest.mark.parametrize("value", [-32768, 32767])
def test_the_largest_sums_are_exact(value: int, level: str) -> None:
    """2^16 products of two 16-bit extremes need more than 32 bits; one pair of them needs one bit more than 31."""
    for kept in (1, 2, 1 << 10):
        matrix, q = np.full((3, kept), value, np.int16), np.full((kept, 20), value, np.int16)
        out = np.empty((3, 20), np.float32)
        native.klt_transform(matrix, q, np.ones(3, np.float32), np.zeros(3, np.float32), out)
        assert (out == np.float32(kept * value * value)).all()


@EVERY_LEVEL
@given(
    sizes=st.tuples(st.integers(1, 4), st.sampled_from([1, 3, 16]), st.integers(1, 3), st.integers(1, 20)),
    half=st.integers(0, 10),
    interleaved=st.booleans(),
    order=st.permutations(["page", "token", "head", "channel"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rotated_rounded_and_in_place(
    sizes: tuple[int, ...], half: int, interleaved: bool, order: list[str], seed: int, level: str
) -> None:
    pages, page_tokens, heads, dim = sizes
    tokens, half = pages * page_tokens, min(half, dim // 2)
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(heads * dim, tokens)) * 10).astype(np.float32)
    rope = Rope(tuple(rng.random(half) + 0.01), interleaved, 1.25) if half else None
    expected = x.copy().reshape(heads, dim, tokens)
    turned = (None, None)
    if rope:
        rotate(expected, rope, 1000)
        turned = tuple(np.ascontiguousarray(each.T) for each in cos_sin(rope, 1000, tokens))
    # [page, token, head, channel], laid out in any order behind 5 words that are left alone.
    extent = dict(zip(["page", "token", "head", "channel"], sizes, strict=True))
    steps, step = {}, 1
    for axis in reversed(order):
        steps[axis], step = step, step * extent[axis]
    words = np.full(5 + step, 0xAAAA, np.uint16)
    places = (5, *(steps[axis] for axis in ("page", "token", "head", "channel")))
    native.klt_write_bf16(x, *turned, interleaved, pages, page_tokens, heads, places, words)
    byte_steps = tuple(2 * each for each in places[1:])
    found = np.lib.stride_tricks.as_strided(words[5:], sizes, byte_steps)
    rounded = to_bfloat16(np.ascontiguousarray(expected)).reshape(heads, dim, pages, page_tokens)
    np.testing.assert_array_equal(found, rounded.transpose(2, 3, 0, 1))
    assert (words[:5] == 0xAAAA).all()


def test_nothing_is_written_outside_of_the_buffer() -> None:
    x = np.zeros((8, 32), np.float32)
    good = (0, 16 * 8, 8, 4, 1)  # 2 pages of 16 tokens, 2 heads of 4 channels
    native.klt_write_bf16(x, None, None, False, 2, 16, 2, good, np.zeros(256, np.uint16))
    for places in ((1, *good[1:]), (-1, *good[1:]), (0, 129, 8, 4, 1), (0, -1, 8, 4, 1), (0, 1 << 62, 8, 4, 1)):
        with pytest.raises(ValueError, match="outside"):
            native.klt_write_bf16(x, None, None, False, 2, 16, 2, places, np.zeros(256, np.uint16))
    for pages, page_tokens, heads in ((3, 16, 2), (2, 15, 2), (2, 16, 3), (0, 16, 2)):
        with pytest.raises(ValueError, match="x must be"):
            native.klt_write_bf16(x, None, None, False, pages, page_tokens, heads, good, np.zeros(256, np.uint16))


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
@given(rows=st.integers(1, 6), cols=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_coefficients(rows: int, cols: int, seed: int, level: str) -> None:
    rng = np.random.default_rng(seed)
    symbols = rng.integers(0, 16, (rows, cols), np.uint8)
    shifts = rng.integers(0, 9, rows).astype(np.uint8)
    low = rng.integers(0, 256, (int(shifts.sum()), -(-cols // 8)), np.uint8)
    escapes = rng.integers(-32768, 32768, int((symbols == 15).sum())).astype("<i2")
    q = np.empty((rows, cols), np.int16)
    native.coefficients_join(symbols, shifts, low.tobytes(), escapes.tobytes(), q)
    np.testing.assert_array_equal(q, plainly_joined(symbols, shifts.tolist(), low, escapes.tolist()))
    for wrong in (escapes.tobytes() + b"\0\0", escapes.tobytes()[2:]):
        if wrong != escapes.tobytes():
            with pytest.raises(ValueError, match="escapes"):
                native.coefficients_join(symbols, shifts, low.tobytes(), wrong, q)
    with pytest.raises(ValueError, match="low bits"):
        native.coefficients_join(symbols, shifts, low.tobytes() + b"\0", escapes.tobytes(), q)
