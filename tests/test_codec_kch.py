"""kch: error bounds by arithmetic, exact sinks, and nothing but BadContainer from wrong bytes."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from codec_parts import SHAPES, by_token, decoded, encoded, part, unrotated
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.codec import channels
from lmkv.codec.kch import STEPS, Kch
from lmkv.codec.shape import Shape
from lmkv.errors import BadContainer, ConfigError

EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}


@pytest.mark.parametrize("level", range(len(STEPS)))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_value_errs_by_half_a_step_and_its_mean_by_a_32nd(shape: Shape, level: int) -> None:
    raw = part(shape, level)
    back = decoded(Kch(level), encoded(Kch(level), raw, shape), len(raw))
    mask = channels.coded(shape, channels.exact_tokens(shape))
    if not mask.any():
        assert back == raw
        return
    x, y = (unrotated(each, shape, shape.rope)[..., mask] for each in (raw, back))
    border = shape.heads * shape.dim
    for layer in range(shape.layers):
        for these in (slice(0, border), slice(border, None)):
            if not x[layer, these].size:
                continue
            spread = x[layer, these] - x[layer, these].mean(1, keepdims=True)
            step = STEPS[level] * np.sqrt((spread**2).mean()) or 1.0
            rounding = EPSILON[shape.dtype] * (2 * np.abs(x[layer]).max() + step)
            assert np.abs(y - x)[layer, these].max() <= step * (1 / 2 + 1 / 32) * 1.001 + rounding


@pytest.mark.parametrize("first", [0, 1, 3, 4, 99])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_four_tokens_of_a_prompt_are_exact(shape: Shape, first: int) -> None:
    shape = replace(shape, first_token=first)
    raw = part(shape, 1)
    back = decoded(Kch(6), encoded(Kch(6), raw, shape), len(raw))
    kept = max(0, 4 - first)
    for before, after in zip(by_token(raw, shape), by_token(back, shape), strict=True):
        assert (before[:, :kept] == after[:, :kept]).all()
        assert not before[:, kept:].size or (before[:, kept:] != after[:, kept:]).any()


def test_absent_pages_are_zero_and_do_not_count() -> None:
    shape = SHAPES[-1]
    raw = part(shape)
    back = decoded(Kch(), encoded(Kch(), raw, shape), len(raw))
    for before, after in zip(by_token(raw, shape), by_token(back, shape), strict=True):
        assert not before[:, 16:24].any()
        assert not after[:, 16:24].any()


def test_a_channel_that_does_not_change_and_zeros() -> None:
    shape = replace(SHAPES[2], rope=None)
    raw = np.full(shape.nbytes // 4, 2.5, "<f4").tobytes()
    back = np.frombuffer(decoded(Kch(0), encoded(Kch(0), raw, shape), len(raw)), "<f4")
    assert np.abs(back - 2.5).max() <= 1 / 32
    zeros = bytes(shape.nbytes)
    assert decoded(Kch(), encoded(Kch(), zeros, shape), len(zeros)) == zeros


def test_half_a_deviation_takes_about_three_bits() -> None:
    shape = Shape("bfloat16", 2, 1, 256, 2, 32, 32, "kv head token dim", 0, 512)
    x = np.random.default_rng(0).normal(0, 1, shape.nbytes // 2).astype(np.float32)
    raw = (x.view(np.uint32) >> 16).astype("<u2").tobytes()
    bits = 8 * len(encoded(Kch(4), raw, shape)) / len(x)
    assert 3.05 < bits < 3.25  # log2(sqrt(2 pi e) / 0.5) = 3.05


def test_settings_and_what_is_left_raw() -> None:
    assert (Kch().level, Kch().exact, Kch().needs) == (4, False, "geometry")
    for level in (-1, 7):
        with pytest.raises(ConfigError, match="0 to 6"):
            Kch(level)
    with pytest.raises(ConfigError, match="no profiles"):
        Kch(3, "0123456789abcdef")
    shape = SHAPES[0]
    raw, dst = bytearray(part(shape)), memoryview(bytearray(9999))
    assert not Kch().encode(memoryview(raw), dst[:50], shape)
    assert not Kch().encode(memoryview(raw), dst, replace(shape, axes="", rope=None))
    assert not Kch().encode(memoryview(raw), dst, None)
    raw[8:10] = b"\x80\xff"  # minus infinity
    assert not Kch().encode(memoryview(raw), dst, shape)


@settings(max_examples=60)
@given(st.sampled_from(SHAPES), st.data())
def test_wrong_bytes_are_refused_or_stay_inside(shape: Shape, draw: st.DataObject) -> None:
    raw = part(shape)
    stream = encoded(Kch(), raw, shape)
    for wrong, size in (
        (stream[: draw.draw(st.integers(0, len(stream) - 1))], len(raw)), (stream + b"\0", len(raw)),
        (stream, len(raw) - 1), (stream, 0), (stream, 2 * len(raw)),
    ):  # fmt: skip
        with pytest.raises(BadContainer):
            decoded(Kch(), wrong, size)
    bad = bytearray(stream)
    for _ in range(3):
        bad[draw.draw(st.integers(0, min(200, len(bad) - 1)))] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(BadContainer):
        decoded(Kch(), bytes(bad), len(raw))
