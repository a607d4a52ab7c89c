"""Parts of made-up KV for the tests of lossy codecs: channels with means, scales and correlation, K rotated."""

from __future__ import annotations

from typing import Any

import numpy as np

from lmkv.codec import channels
from lmkv.codec.floats import widen
from lmkv.codec.head import stored
from lmkv.codec.shape import Rope, Shape, split

ROPE = stored(Rope((1.0, 0.1, 0.01)))
TWISTED = stored(Rope((0.7, 0.05), interleaved=True, factor=1.2))
SHAPES = [
    Shape("bfloat16", 2, 2, 16, 2, 6, 4, "kv head token dim", 2, 0, ROPE),
    Shape("float16", 1, 3, 7, 1, 8, 8, "token head kv dim", 0, 2, TWISTED),
    Shape("float32", 3, 1, 33, 2, 6, 6, "head token kv dim", 1, 640, ROPE),
    Shape("bfloat16", 2, 1, 1, 1, 6, 6, "head dim kv token", 0, 5, ROPE),
    Shape("float16", 2, 4, 8, 3, 8, 0, "token head dim", 0, 0, None, page_mask=0b1011),
]


def part(shape: Shape, seed: int = 0) -> bytes:
    """Raw bytes of a part; absent pages are zero."""
    rng = np.random.default_rng(seed)
    width, tokens = channels.per_layer(shape), channels.tokens(shape)
    mix = rng.normal(0, 1, (shape.layers, width, width)) * np.exp(rng.normal(0, 0.7, (shape.layers, width, 1)))
    x = mix @ rng.normal(0, 0.3, (shape.layers, width, tokens)) + rng.normal(0, 3, (shape.layers, width, 1))
    raw = memoryview(bytearray(shape.nbytes))
    channels.write(x.astype(np.float32), raw, shape, shape.rope)
    return bytes(raw)


def encoded(codec: Any, raw: bytes, shape: Shape) -> bytes:
    dst = memoryview(bytearray(4 * len(raw) + 20_000))
    stream = bytes(dst[: codec.encode(memoryview(raw), dst, shape)])
    assert stream
    return stream


def decoded(codec: Any, stream: bytes, nbytes: int) -> bytes:
    """Decode into the middle of a guarded buffer."""
    out = bytearray(b"\xee" * (nbytes + 64))
    try:
        codec.decode(memoryview(stream), memoryview(out)[32 : 32 + nbytes])
    finally:
        assert out[:32] == out[32 + nbytes :] == b"\xee" * 32
    return bytes(out[32 : 32 + nbytes])


def unrotated(raw: bytes, shape: Shape, rope: Rope | None) -> Any:
    """fp64 [layers, channels, tokens]."""
    x = channels.read(memoryview(raw), shape, rope)
    assert x is not None
    return x.astype(np.float64)


def by_token(raw: bytes, shape: Shape) -> list[Any]:
    """K and V as fp64 [layers, tokens, heads, dim]."""
    return [
        widen(each, shape.dtype).astype(np.float64).reshape(shape.layers, channels.tokens(shape), *each.shape[3:])
        for each in split(raw, shape)
    ]
