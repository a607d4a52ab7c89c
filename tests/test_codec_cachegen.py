"""cachegen: bounds of anchors and differences, thirds of the layers, and refusals."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from codec_parts import SHAPES, decoded, encoded, part, unrotated
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.codec import channels
from lmkv.codec.cachegen import SCALES, CacheGen
from lmkv.codec.shape import Shape
from lmkv.errors import BadContainer, ConfigError

UP = 2 ** (1 / 8) * 1.001
WHOLE = [replace(shape, page_mask=0) for shape in SHAPES]


@pytest.mark.parametrize("level", range(len(SCALES)))
@pytest.mark.parametrize("shape", WHOLE)
@pytest.mark.parametrize("third", range(3))
def test_bins_are_of_the_layers_third_and_anchors_have_8_bits(shape: Shape, level: int, third: int) -> None:
    shape = replace(shape, first_layer=(0, 12, 25)[third], of_layers=30)
    raw = part(shape, level)
    back = decoded(CacheGen(level), encoded(CacheGen(level), raw, shape), len(raw))
    x, y = (unrotated(each, shape, None) for each in (raw, back))
    error = np.abs(y - x)
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-20}[shape.dtype] * np.abs(x)
    anchor = np.abs(x[..., ::10]).max(2, keepdims=True) * UP / 127 / 2
    bins = x.std(2, keepdims=True) * UP * (0.5, 1.0, 1.5)[third] * SCALES[level] / 2
    others = np.arange(x.shape[2]) % 10 != 0
    assert (error[..., ::10] <= anchor + rounding[..., ::10] * 1.01).all()
    assert (error[..., others] <= bins * 1.001 + rounding[..., others] * 1.01 + 1e-6).all()


def test_constant_channels_and_zeros() -> None:
    shape = WHOLE[2]
    raw = np.full(shape.nbytes // 4, -3.0, "<f4").tobytes()
    back = np.frombuffer(decoded(CacheGen(), encoded(CacheGen(), raw, shape), len(raw)), "<f4")
    assert np.abs(back + 3.0).max() <= 3 * UP / 254
    assert decoded(CacheGen(), encoded(CacheGen(), bytes(len(raw)), shape), len(raw)) == bytes(len(raw))


def test_settings_and_what_is_left_raw() -> None:
    assert (CacheGen().level, CacheGen().exact, CacheGen().needs) == (3, False, "geometry")
    with pytest.raises(ConfigError, match="0 to 8"):
        CacheGen(9)
    with pytest.raises(ConfigError, match="no profiles"):
        CacheGen(1, "0123456789abcdef")
    raw = part(WHOLE[0])
    assert not CacheGen().encode(memoryview(raw), memoryview(bytearray(40)), WHOLE[0])
    assert not CacheGen().encode(memoryview(raw), memoryview(bytearray(9999)), replace(WHOLE[0], axes="", rope=None))
    assert channels.tokens(WHOLE[0]) == 32


@settings(max_examples=60)
@given(st.sampled_from(WHOLE), st.data())
def test_wrong_bytes_are_refused_or_stay_inside(shape: Shape, draw: st.DataObject) -> None:
    raw = part(shape)
    stream = encoded(CacheGen(), raw, shape)
    for wrong, size in (
        (stream[: draw.draw(st.integers(0, len(stream) - 1))], len(raw)), (stream + b"\0", len(raw)),
        (stream, len(raw) - 1), (stream, 0), (stream, 2 * len(raw)),
    ):  # fmt: skip
        with pytest.raises(BadContainer):
            decoded(CacheGen(), wrong, size)
    bad = bytearray(stream)
    for _ in range(3):
        bad[draw.draw(st.integers(0, min(200, len(bad) - 1)))] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(BadContainer):
        decoded(CacheGen(), bytes(bad), len(raw))
