"""The tables of coefficients are constants; rows of any integers come back, in about their entropy."""

from __future__ import annotations

import contextlib
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lmkv.codec import coefficients
from lmkv.codec.tables import BITS, COSTS, ESCAPE, FREQS, IDS, REACH, SHIFT, TABLE
from lmkv.errors import BadContainer

rows = arrays.arrays(
    np.int16,
    st.tuples(st.integers(1, 12), st.integers(1, 70)),
    elements=st.sampled_from([0, 0, 0, 1, -1, 7, -8]) | st.integers(-(1 << 15), (1 << 15) - 1),
    fill=st.just(0),
)


def test_the_tables_never_change() -> None:
    found = hashlib.sha256(FREQS.astype("<u2").tobytes() + TABLE.astype("<u2").tobytes() + SHIFT.tobytes()).hexdigest()
    assert found == "20bb6a4afccaa813911b24ddc0ca029029ce0fb7d6c175a9a5fceb157d836718"
    assert (FREQS.shape, IDS, len(TABLE), len(SHIFT)) == ((48, 16), 177, 177, 177)


def test_every_table_is_symmetric_sums_to_1024_and_can_escape() -> None:
    assert (FREQS.sum(axis=1) == 1 << BITS).all()
    assert (FREQS[:, : 2 * REACH + 1] == FREQS[:, 2 * REACH :: -1]).all()
    assert (FREQS[:, ESCAPE] > 0).all()
    assert (FREQS[:, REACH] > 0).all()


def test_a_table_is_the_shape_that_it_says() -> None:
    # width 12 is 0.12 * 2^3 = 0.96; shape 1: exp(-(h / 0.96)^2), shape 0: exp(-|h| / 0.96)
    high = np.arange(-200, 201)
    for shape in (0, 1):
        mass = np.exp(-((np.abs(high) / 0.96) ** (shape + 1)))
        share = mass / mass.sum() * 1024
        off = np.abs(FREQS[2 * 12 + shape, :15] - share[200 - 7 : 200 + 8])
        assert np.delete(off, 7).max() < 1  # rounded; what is left over goes to zero
        assert off[7] < 8


def test_costs_are_the_code_lengths() -> None:
    assert COSTS[1 + 2 * 12, REACH] == pytest.approx(10 - np.log2(FREQS[24, REACH]))
    assert COSTS[-1, REACH] == pytest.approx(10 - np.log2(FREQS[TABLE[-1], REACH]) + 8)


@given(rows)
def test_any_integers_come_back(q: np.ndarray) -> None:
    for default in (None, np.full(len(q), 30, np.uint8)):
        stream = coefficients.encode(q, default)
        assert (coefficients.decode(memoryview(stream), *q.shape, default) == q).all()


def test_normal_and_laplacian_rows_take_their_entropy() -> None:
    rng = np.random.default_rng(1)
    scale = 2.0 ** rng.uniform(-3, 3, (200, 1))
    for draw in (rng.normal, rng.laplace):
        q = np.rint(draw(0, 1, (200, 2048)) * scale).astype(np.int16)
        ideal = 0.0
        for row, width in zip(q, scale[:, 0], strict=True):
            values, counts = np.unique(row, return_counts=True)
            assert width > 0
            assert len(values)
            ideal -= (counts * np.log2(counts / 2048)).sum()
        bits = 8 * len(coefficients.encode(q))
        assert ideal < bits < ideal + q.size * 0.085 + 200 * 8


def test_zero_rows_cost_nothing_but_their_ids() -> None:
    assert len(coefficients.encode(np.zeros((1000, 256), np.int16))) <= 300


@settings(max_examples=200)
@given(rows, st.data())
def test_wrong_streams_are_refused_or_decode_to_something(q: np.ndarray, draw: st.DataObject) -> None:
    stream = coefficients.encode(q)
    for wrong in (stream[: draw.draw(st.integers(0, len(stream) - 1))], stream + b"\0\0"):
        with pytest.raises(BadContainer):
            coefficients.decode(memoryview(wrong), *q.shape)
    bad = bytearray(stream)
    for _ in range(draw.draw(st.integers(1, 3))):
        bad[draw.draw(st.integers(0, len(bad) - 1))] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(BadContainer):
        assert coefficients.decode(memoryview(bytes(bad)), *q.shape).shape == q.shape


@given(st.binary(max_size=200), st.integers(1, 40), st.integers(1, 40))
def test_arbitrary_bytes_never_crash(stream: bytes, height: int, width: int) -> None:
    with contextlib.suppress(BadContainer):
        coefficients.decode(memoryview(stream), height, width)
