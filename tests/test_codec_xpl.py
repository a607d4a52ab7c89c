"""The exact codec: every bit pattern of every dtype and layout comes back, and damaged streams are refused."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkv import _native as native
from lmkv.codec.shape import FLOAT_BYTES, Rope, Shape
from lmkv.codec.xpl import Xpl
from lmkv.errors import BadContainer, ConfigError

AXES = [" ".join(order) for order in permutations(["kv", "token", "head", "dim"])]
PACKED = Shape("bfloat16", 1, 1, 1, 1, 1, 1, "")
EVERY_LEVEL = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def encode(raw: bytes, shape: Shape, room: int | None = None) -> bytes:
    dst = bytearray(len(raw) if room is None else room)
    return bytes(dst[: Xpl().encode(memoryview(raw), memoryview(dst), shape)])


def decode(stream: bytes, nbytes: int) -> bytes:
    out = bytearray(b"\xee" * nbytes)
    Xpl().decode(memoryview(stream), memoryview(out))
    return bytes(out)


def words(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The bit patterns of fp32 values in a dtype; bfloat16 is cut, the 8-bit floats are the top of fp16 or bfloat16."""
    if dtype == "float32":
        return values.astype(np.float32).view(np.uint32)
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    half = values.astype(np.float16).view(np.uint16)
    if dtype == "float16":
        return half
    if dtype == "float8_e5m2":
        return (half >> 8).astype(np.uint8)
    exponent = np.clip((half >> 10 & 31).astype(np.int32) - 15 + 7, 0, 15)
    return (half >> 15 << 7 | exponent.astype(np.uint16) << 3 | half >> 7 & 7).astype(np.uint8)


def kv(shape: Shape, seed: int = 0) -> bytes:
    """Normal values, each channel of its own size."""
    rng = np.random.default_rng(seed)
    count = shape.layers * shape.pages * shape.page_tokens * shape.heads * (shape.dim + shape.dim_v)
    scale = np.exp(rng.normal(size=64)).astype(np.float32)
    return words(rng.normal(size=count) * np.resize(scale, count), shape.dtype).tobytes()


@pytest.mark.parametrize("dtype", list(FLOAT_BYTES))
def test_every_bit_pattern_comes_back(dtype: str, level: str) -> None:
    """Among values that compress: all of them in 8 and 16 bits; in 32, all upper halves with two lower ones."""
    width = FLOAT_BYTES[dtype]
    every = np.arange(1 << min(8 * width, 16), dtype=np.uint32)
    if width == 4:
        every = np.concatenate([every << 16, every << 16 | 0xA5C3])
    every = np.random.default_rng(1).permutation(every).astype(f"<u{width}")
    shape = Shape(dtype, 2, 8, 16, 2, 64, 64, "kv head token dim")
    usual = np.frombuffer(kv(shape), f"<u{width}")
    for values, meaning in [
        (np.concatenate([np.resize(usual, 20 * len(every)), every]), Shape(dtype, 1, 1, 1, 1, 1, 1, "")),
        (np.concatenate([np.resize(usual, usual.size - len(every) % usual.size), every])[: usual.size], shape),
    ]:
        stream = encode(values.tobytes(), meaning)
        assert stream
        assert decode(stream, values.nbytes) == values.tobytes()


@pytest.mark.parametrize("axes", [*AXES, ""])
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (40, 24)])
def test_every_order_of_axes(axes: str, dim: int, dim_v: int) -> None:
    if axes and dim != dim_v and axes.index("dim") < axes.index("kv"):
        pytest.skip("not a layout")
    shape = Shape("bfloat16", 3, 4, 16, 3, dim, dim_v, axes)
    raw = kv(shape)
    stream = encode(raw, shape)
    assert 0 < len(stream) < 0.8 * len(raw)
    assert decode(stream, len(raw)) == raw


def test_latent_caches_have_no_values() -> None:
    shape = Shape("bfloat16", 2, 4, 16, 1, 576, 0, "head token dim")
    raw = kv(shape)
    assert decode(encode(raw, shape), len(raw)) == raw


@EVERY_LEVEL
@given(
    dtype=st.sampled_from(list(FLOAT_BYTES)),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.integers(1, 70)),
    axes=st.sampled_from(["kv head token dim", "token head kv dim", "dim token kv head", ""]),
    noise=st.floats(0, 0.2),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trips(dtype: str, sizes: tuple[int, ...], axes: str, noise: float, seed: int, level: str) -> None:
    layers, pages, tokens, heads, dim = sizes
    shape = Shape(dtype, layers, pages, tokens, heads, dim, dim, axes)
    raw = np.frombuffer(kv(shape, seed), np.uint8).copy()
    rng = np.random.default_rng(seed)
    wild = rng.random(raw.size) < noise
    raw[wild] = rng.integers(0, 256, int(wild.sum()), np.uint8)
    raw[: int(raw.size * rng.random() * 0.5)] = 0
    stream = encode(raw.tobytes(), shape, 2 * raw.size + 4000)
    assert len(stream) < raw.size
    if stream:
        assert decode(stream, raw.size) == raw.tobytes()
        native.limit_simd("portable")
        assert encode(raw.tobytes(), shape, 2 * raw.size + 4000) == stream
        native.limit_simd(level)


@pytest.mark.parametrize("nbytes", [2 * 63, 2 * 64 * 256 * 3, 2 * (64 * 256 + 64 * 7 + 13), 2 * 64 * 300])
def test_packed_pages_of_any_length(nbytes: int) -> None:
    raw = kv(Shape("bfloat16", 1, 1, 1, 1, nbytes // 2, 0, "token head dim"))
    stream = encode(raw, PACKED)
    assert stream or nbytes < 1000
    if stream:
        assert decode(stream, nbytes) == raw


def test_buffers_need_not_be_aligned() -> None:
    shape = Shape("float32", 1, 4, 16, 2, 64, 64, "kv head token dim")
    raw = kv(shape)
    src = memoryview(b"x" + raw)[1:]
    dst, out = bytearray(len(raw)), bytearray(len(raw) + 1)
    used = Xpl().encode(src, memoryview(dst), shape)
    Xpl().decode(memoryview(dst)[:used], memoryview(out)[1:])
    assert bytes(out[1:]) == raw


def test_zeros_cost_little_more_than_their_signs_and_mantissas() -> None:
    shape = Shape("bfloat16", 4, 16, 16, 3, 64, 64, "kv head token dim")
    raw = np.frombuffer(kv(shape), np.uint16).reshape(4, 16, -1).copy()
    raw[:, 5:] = 0  # absent pages
    assert len(encode(raw.tobytes(), shape)) < 0.62 * raw.nbytes


def test_what_does_not_shrink_is_left_alone() -> None:
    shape = Shape("bfloat16", 2, 4, 16, 2, 64, 64, "kv head token dim")
    noise = np.random.default_rng(0).integers(0, 256, shape.nbytes, np.uint8).tobytes()
    assert encode(noise, shape) == b""
    assert encode(noise[:-1], PACKED) == b""  # half a value
    assert encode(noise[:-2], shape) == b""  # not of that shape
    raw = kv(shape)
    stream = encode(raw, shape)
    assert encode(raw, shape, len(stream)) == stream
    for room in (0, 1, 20, len(stream) // 2, len(stream) - 1):
        assert encode(raw, shape, room) == b""


def test_streams_say_nothing_of_positions() -> None:
    """The same bytes give the same stream wherever they were in the prompt."""
    shape = Shape("bfloat16", 1, 2, 16, 2, 64, 64, "kv head token dim")
    rope = Rope((1.0, 0.5))
    moved = Shape("bfloat16", 1, 2, 16, 2, 64, 64, "kv head token dim", 7, 512, rope, 3)
    assert encode(kv(shape), shape) == encode(kv(shape), moved)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_damaged_streams_are_refused(dtype: str) -> None:
    """Every cut; every byte changed gives other values at worst."""
    shape = Shape(dtype, 1, 2 if dtype == "bfloat16" else 8, 16, 1, 32, 32, "kv head token dim")
    raw = kv(shape)
    stream = encode(raw, shape) or pytest.fail("nothing to damage")
    for length in range(len(stream)):
        with pytest.raises(BadContainer):
            decode(stream[:length], len(raw))
    with pytest.raises(BadContainer):
        decode(stream + b"\0", len(raw))
    for other in (len(raw) - FLOAT_BYTES[dtype], len(raw) + 64, 0):
        with pytest.raises(BadContainer):
            decode(stream, other)
    for at in range(len(stream)):
        bad = bytearray(stream)
        bad[at] ^= 0x41
        try:
            assert len(decode(bytes(bad), len(raw))) == len(raw)
        except BadContainer:
            continue


def test_rows_outside_of_the_buffer_are_refused() -> None:
    good = {"count0": 2, "stride0": 64, "count1": 2, "stride1": 32, "dim": 32}
    values, starts = bytearray(2 * 128), np.zeros(1, np.int64)
    for change in (
        {"count0": 3}, {"stride0": 65}, {"stride1": -1}, {"dim": 33}, {"dim": 0}, {"count1": 1 << 50},
        {"stride0": 1 << 62}, {"count0": 1 << 32, "count1": 1 << 32},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"row|stride"):
            native.xpl_encode(values, (2, 8, 7), starts, **(good | change), out=bytearray(999))
    for wrong in (np.array([1]), np.array([-1]), np.array([], np.int64)):
        with pytest.raises(ValueError, match="row"):
            native.xpl_decode(b"", (2, 8, 7), wrong, **good, values=values)
    with pytest.raises(ValueError, match="float"):
        native.xpl_encode(values, (2, 7, 8), starts, **good, out=bytearray(999))
    with pytest.raises(ValueError, match="whole values"):
        native.xpl_encode(values[:-1], (2, 8, 7), starts, **good, out=bytearray(999))


def test_it_has_no_levels() -> None:
    with pytest.raises(ConfigError, match="no levels"):
        Xpl(3)
