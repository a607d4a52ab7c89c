"""8 bits a value, without a profile: ``fp8``, a cast, and ``q8``, integers with a scale per token and head.

Both take any layout. fp8 stream: head, one signed byte for each page of each layer (its values were multiplied by
two to that power, so that the page uses e4m3's range), then a byte for each value in the order of the raw ones.
q8 stream: head, the scales as bfloat16, K's then V's, [layers, pages, page_tokens, heads] each, or for packed pages
one for each page of each layer; then an int8 for each value, q = round(x / scale), in the order of the raw ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmkv.codec import head
from lmkv.codec.base import Codec
from lmkv.codec.floats import F32, WIDE, narrow, widen
from lmkv.codec.shape import Shape, split
from lmkv.errors import BadContainer, ConfigError

LARGEST_SCALE = 2.0**120  # 127 times that is finite
E4M3_MAX, E4M3_SMALLEST, E4M3_BIAS = 448.0, 2.0**-9, 7


class Fp8(Codec):
    """float8_e4m3fn, each page scaled by a power of two. Values that are not finite are not taken."""

    name = "fp8"
    exact = False
    needs: Literal["bytes", "dtype", "geometry"] = "dtype"

    def __init__(self, level: int | None = None, profile: str = "") -> None:
        super().__init__(_no_level(self.name, level), profile)

    def encode(self, src: memoryview, dst: memoryview, shape: Shape | None = None) -> int:
        x, start = _values(b"fp8\x01", src, shape)
        if x is None or shape is None:
            return 0
        peak = np.abs(x).max(axis=-1, keepdims=True)
        power = np.clip(8 - np.frexp(peak)[1], -127, 127).astype(np.int8)  # peak * 2^power is in [128, 256)
        codes = to_e4m3(np.ldexp(x, power.astype(np.int32)))
        return _write(dst, start, power, codes)

    def decode(self, src: memoryview, dst: memoryview) -> None:
        shape, body = head.unpack(src, b"fp8\x01")
        pages, each = _pages(shape, dst)
        power, body = head.cut(body, pages)
        if len(body) != pages * each:
            raise BadContainer("codec", f"{len(body)} values for {pages * each}")
        x = E4M3[np.frombuffer(body, np.uint8)].reshape(pages, each)
        x = np.ldexp(x, -np.frombuffer(power, np.int8).astype(np.int32)[:, None])
        with np.errstate(over="ignore", invalid="ignore"):
            np.frombuffer(dst, f"<u{shape.width}")[:] = narrow(x, shape.dtype).reshape(-1)


class Q8(Codec):
    """int8 with a bfloat16 scale per token and head, or per page where pages are packed.

    The error of a value is at most scale / 2, with scale = peak / 127 rounded up to bfloat16, and the rounding to the
    cache's dtype.
    """

    name = "q8"
    exact = False
    needs: Literal["bytes", "dtype", "geometry"] = "dtype"

    def __init__(self, level: int | None = None, profile: str = "") -> None:
        super().__init__(_no_level(self.name, level), profile)

    def encode(self, src: memoryview, dst: memoryview, shape: Shape | None = None) -> int:
        x, start = _values(b"q8\0\x01", src, shape)
        if x is None or shape is None:
            return 0
        codes = np.empty(x.size, np.int8)
        scales = []
        values = [widen(each, shape.dtype) for each in split(src, shape) if each.size] if shape.axes else [x]
        for value, room in zip(values, _places(codes, shape), strict=True):
            scale = _up(np.abs(value).max(axis=-1) / np.float32(127))
            if scale.max() >= LARGEST_SCALE:
                return 0
            scales.append((scale.view(np.uint32) >> np.uint32(16)).astype("<u2").reshape(-1))
            room[...] = np.rint(value / np.maximum(scale, np.float32(1e-38))[..., None])
        return _write(dst, start, *scales, codes)

    def decode(self, src: memoryview, dst: memoryview) -> None:
        shape, body = head.unpack(src, b"q8\0\x01")
        pages, each = _pages(shape, dst)
        heads = shape.page_tokens * shape.heads if shape.axes else 1
        wide = [dim for dim in ((shape.dim, shape.dim_v) if shape.axes else (each,)) if dim]
        raw, body = head.cut(body, 2 * pages * heads * len(wide))
        if len(body) != pages * each:
            raise BadContainer("codec", f"{len(body)} values for {pages * each}")
        scales = widen(np.frombuffer(raw, "<u2"), "bfloat16").reshape(len(wide), -1)
        if not (np.isfinite(scales).all() and (scales >= 0).all() and scales.max() < LARGEST_SCALE):
            raise BadContainer("codec", "a scale that is none")
        places = split(dst, shape) if shape.axes else (np.frombuffer(dst, f"<u{shape.width}").reshape(pages, each),)
        for room, code, scale in zip(places, _places(np.frombuffer(body, np.int8), shape), scales, strict=False):
            x = code.astype(np.float32)
            x *= scale.reshape(*code.shape[:-1], 1)
            room[...] = narrow(x, shape.dtype)


def to_e4m3(x: F32) -> NDArray[np.uint8]:
    """The nearest float8_e4m3fn of finite ``x``, ties to even; beyond 448 it is 448. OCP 8-bit floating point 1.0."""
    size = np.minimum(np.abs(x), np.float32(E4M3_MAX))
    bits = size.view(np.uint32)
    bits = (bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    normal = bits.astype(np.int32) - ((127 - E4M3_BIAS) << 3)
    tiny = np.rint(size * np.float32(1 / E4M3_SMALLEST)).astype(np.int32)
    code = np.where(size < 2.0**-6, tiny, normal).astype(np.uint8)
    return np.asarray(code | np.where(np.signbit(x), np.uint8(128), np.uint8(0)))


def _e4m3_values() -> F32:
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    size = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - E4M3_BIAS), mantissa * E4M3_SMALLEST)
    size[127] = np.nan
    return np.concatenate([size, -size]).astype(np.float32)


E4M3 = _e4m3_values()  # the value of each code


def _no_level(name: str, level: int | None) -> int:
    if level:
        raise ConfigError("level", f"the codec {name} has no levels: leave it out")
    return 0


def _values(magic: bytes, src: memoryview, shape: Shape | None) -> tuple[F32 | None, bytes]:
    """All values as [layers * pages, values of a page], and the stream's head; None: not to be taken."""
    if shape is None or shape.dtype not in WIDE or len(src) % (shape.layers * shape.pages * shape.width):
        return None, b""
    x = widen(np.frombuffer(src, f"<u{shape.width}").reshape(shape.layers * shape.pages, -1), shape.dtype)
    if not np.isfinite(x).all():
        return None, b""
    return x, head.pack(magic, replace(shape, rope=None))


def _pages(shape: Shape, dst: memoryview) -> tuple[int, int]:
    """How many pages, and the values of one. BadContainer: ``dst`` is of another size."""
    pages = shape.layers * shape.pages
    each = len(dst) // (pages * shape.width)
    if shape.dtype not in WIDE or len(dst) != pages * each * shape.width or shape.nbytes not in (0, len(dst)):
        raise BadContainer("codec", f"{len(dst)} bytes for {shape}")
    return pages, each


def _places(codes: NDArray[np.int8], shape: Shape) -> list[NDArray[np.int8]]:
    """Where K's and V's codes are, as `split` gives them; all of each page where pages are packed."""
    if not shape.axes:
        return [codes.reshape(shape.layers * shape.pages, -1)]
    return [each.view(np.int8) for each in split(codes, replace(shape, dtype="float8_e5m2", rope=None)) if each.size]


def _up(x: F32) -> F32:
    """``x`` rounded up to a bfloat16; not negative."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded: F32 = ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    return rounded


def _write(dst: memoryview, *pieces: Any) -> int:
    """The pieces one after the other; the bytes written, 0 when there is no room."""
    views = [memoryview(piece).cast("B") if isinstance(piece, bytes) else memoryview(piece.reshape(-1)).cast("B")
             for piece in pieces]  # fmt: skip
    total = sum(map(len, views))
    if total > len(dst):
        return 0
    at = 0
    for view in views:
        dst[at : at + len(view)] = view
        at += len(view)
    return total
