"""fp8 and q8: bounds by arithmetic, every layout, and nothing but BadContainer from wrong bytes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.codec.floats import narrow, widen
from lmkv.codec.scaled import E4M3, Q8, Fp8, to_e4m3
from lmkv.codec.shape import Shape, split
from lmkv.errors import BadContainer, ConfigError

SHAPES = [
    Shape("bfloat16", 2, 3, 5, 2, 6, 4, "kv head token dim"), Shape("bfloat16", 1, 2, 4, 3, 8, 8, "token head kv dim"),
    Shape("float16", 2, 1, 7, 1, 4, 0, "token head dim"), Shape("float32", 1, 1, 3, 2, 8, 8, "head dim kv token"),
    Shape("float16", 3, 2, 4, 1, 1, 0, ""), Shape("bfloat16", 1, 4, 4, 1, 1, 0, "", page_mask=5),
]  # fmt: skip


def part(shape: Shape, seed: int = 0) -> bytes:
    count = shape.nbytes // shape.width or shape.layers * shape.pages * 64
    x = np.random.default_rng(seed).normal(0, 3, count).astype(np.float32)
    return narrow(x, shape.dtype).tobytes()


def through(codec: Any, raw: bytes, shape: Shape) -> tuple[bytes, bytes]:
    dst = memoryview(bytearray(2 * len(raw) + 500))
    stream = bytes(dst[: codec.encode(memoryview(raw), dst, shape)])
    assert stream
    out = bytearray(b"\xee" * (len(raw) + 64))
    codec.decode(memoryview(stream), memoryview(out)[32:-32])
    assert out[:32] == out[-32:] == b"\xee" * 32
    return stream, bytes(out[32:-32])


def values(raw: bytes, shape: Shape) -> Any:
    return widen(np.frombuffer(raw, f"<u{shape.width}"), shape.dtype).astype(np.float64)


def test_the_cast_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    x = np.concatenate([np.linspace(-448, 448, 4001), np.linspace(-0.1, 0.1, 4001), np.repeat(E4M3[:127], 3)])
    x = x.astype(np.float32)
    theirs = torch.from_numpy(x).to(torch.float8_e4m3fn)
    assert (to_e4m3(x) == theirs.view(torch.uint8).numpy()).all()
    finite = np.delete(np.arange(256), [127, 255]).astype(np.uint8)
    assert (E4M3[finite] == torch.from_numpy(finite).view(torch.float8_e4m3fn).float().numpy()).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_keeps_three_bits_of_mantissa(shape: Shape) -> None:
    raw = part(shape)
    stream, back = through(Fp8(), raw, shape)
    x, y = values(raw, shape), values(back, shape)
    peak = np.abs(x.reshape(shape.layers * shape.pages, -1)).max(1, keepdims=True)
    smallest = np.broadcast_to(peak * 2.0**-17, (len(peak), x.size // len(peak))).reshape(-1)
    assert (np.abs(y - x) <= np.maximum(np.abs(x) / 16, smallest)).all()
    assert len(stream) <= len(raw) // shape.width + 100


@pytest.mark.parametrize("shape", SHAPES)
def test_q8_errs_by_half_a_scale(shape: Shape) -> None:
    raw = part(shape)
    _, back = through(Q8(), raw, shape)
    pieces = [split(each, shape) if shape.axes else (np.frombuffer(each, f"<u{shape.width}"),) for each in (raw, back)]
    for before, after in zip(*pieces, strict=True):
        x, y = (widen(each, shape.dtype).astype(np.float64) for each in (before, after))
        if not shape.axes:
            x, y = (each.reshape(shape.layers * shape.pages, -1) for each in (x, y))
        if x.size:
            scale = np.abs(x).max(-1, keepdims=True) / 127 * (1 + 2**-7)
            assert (np.abs(y - x) <= scale / 2 + np.abs(x) * 2**-8).all()


@pytest.mark.parametrize("codec", [Fp8(), Q8()])
@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_and_the_largest_values_come_back_finite(codec: Any, shape: Shape) -> None:
    raw = part(shape)
    assert through(codec, bytes(len(raw)), shape)[1] == bytes(len(raw))
    top = narrow(np.full(len(raw) // shape.width, 65504, np.float32), shape.dtype).tobytes()
    back = values(through(codec, top, shape)[1], shape)
    assert np.isfinite(back).all()
    assert (np.abs(back / 65504 - 1) < 0.07).all()


@pytest.mark.parametrize("codec", [Fp8(), Q8()])
def test_what_they_do_not_take_is_left_raw(codec: Any) -> None:
    shape, dst = SHAPES[0], memoryview(bytearray(10_000))
    raw = bytearray(part(shape))
    assert not codec.encode(memoryview(raw), dst[:100], shape)
    assert not codec.encode(memoryview(raw), dst, replace(shape, dtype="float8_e4m3fn", dim=12, dim_v=8))
    assert not codec.encode(memoryview(raw)[:-1], dst, shape)
    raw[:2] = b"\xc0\x7f"  # NaN
    assert not codec.encode(memoryview(raw), dst, shape)
    with pytest.raises(ConfigError, match="no levels"):
        type(codec)(3)


@settings(max_examples=150)
@given(st.sampled_from(SHAPES), st.sampled_from([Fp8(), Q8()]), st.data())
def test_wrong_bytes_are_refused_or_stay_inside(shape: Shape, codec: Any, draw: st.DataObject) -> None:
    raw = part(shape)
    stream, _ = through(codec, raw, shape)
    out = memoryview(bytearray(len(raw)))
    cut = stream[: draw.draw(st.integers(0, len(stream) - 1))]
    larger = memoryview(bytearray(len(raw) * 2))
    for wrong, room in ((cut, out), (stream + b"\0", out), (stream, out[:-1]), (stream, out[:0]), (stream, larger)):
        with pytest.raises(BadContainer):
            codec.decode(memoryview(wrong), room)
    bad = bytearray(stream)
    for _ in range(3):
        bad[draw.draw(st.integers(0, min(60, len(bad) - 1)))] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(BadContainer):
        codec.decode(memoryview(bytes(bad)), out)
