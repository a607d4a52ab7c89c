"""``kch``: un-rotated K, the mean of each channel over the part, one step a layer, rANS. Needs no profile.

The step of K, and that of V, in a layer is the root mean square of all channels around their means times a number that
the level gives. The error of a value, un-rotated, is at most step / 2 + step / 32, beside the arithmetic's.

Stream: head with the rope; u8 level; u8 exact tokens; u16 0; u32 bytes of the means; fp32 steps [layers, 2]; the words
of the prompt's first tokens (`channels.exact_bytes`); the means as coefficients [layers, channels], in 16ths of the
step; then the coefficients [layers * channels, tokens]. x = f32(f32(q * step) + f32(mean * f32(step / 16))).
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Literal

import numpy as np

from lmkv.codec import channels, coefficients, head
from lmkv.codec.base import Codec, checked_level
from lmkv.codec.floats import F32, WIDE
from lmkv.codec.shape import Shape
from lmkv.errors import BadContainer

MAGIC = b"kch\x01"
STEPS = (0.06, 0.125, 0.25, 0.35, 0.5, 0.7, 1.0)  # of each level, in root mean squares
DEFAULT = 4
MEAN = np.float32(1 / 16)
_FRONT = struct.Struct("<BBHI")


class Kch(Codec):
    """Per-channel coding without a profile. level: 0, the finest, to 6; default 4."""

    name = "kch"
    exact = False
    needs: Literal["bytes", "dtype", "geometry"] = "geometry"

    def __init__(self, level: int | None = None, profile: str = "") -> None:
        super().__init__(checked_level(self.name, level, DEFAULT, len(STEPS), profile))

    def encode(self, src: memoryview, dst: memoryview, shape: Shape | None = None) -> int:
        if shape is not None and shape.rope:
            shape = replace(shape, rope=head.stored(shape.rope))
        x = channels.read(src, shape, shape.rope if shape else None)
        if x is None or shape is None:
            return 0
        exact = channels.exact_tokens(shape)
        mask = channels.coded(shape, exact)
        count = max(1, int(np.count_nonzero(mask)))
        x[..., ~mask] = 0
        means = x.sum(2, dtype=np.float64) / count
        x -= means[..., None].astype(np.float32)
        x[..., ~mask] = 0
        steps = _steps(x, shape, count) * np.float32(STEPS[self.level])
        step = _spread(steps, shape)
        means = np.rint(means / (step * MEAN))
        q = np.rint(x / step[..., None])
        if max(np.abs(means).max(), np.abs(q).max()) > 32767:
            return 0
        first = coefficients.encode(means.astype(np.int16))
        stream = b"".join(
            [
                head.pack(MAGIC, shape), _FRONT.pack(self.level, exact, 0, len(first)), steps.astype("<f4").tobytes(),
                channels.exact_bytes(src, shape, exact), first,
                coefficients.encode(q.astype(np.int16).reshape(-1, q.shape[2])),
            ]
        )  # fmt: skip
        if len(stream) > len(dst):
            return 0
        dst[: len(stream)] = stream
        return len(stream)

    def decode(self, src: memoryview, dst: memoryview) -> None:
        shape, body = head.unpack(src, MAGIC)
        (_, exact, zero, size), body = head.take(body, _FRONT)
        if shape.nbytes != len(dst) or shape.dtype not in WIDE or zero or exact != channels.exact_tokens(shape):
            raise BadContainer("codec", f"{len(dst)} bytes for {shape}")
        raw, body = head.cut(body, 8 * shape.layers)
        steps = np.frombuffer(raw, "<f4").reshape(-1, 2)
        if not ((steps > 0) & (steps < channels.LARGEST)).all():
            raise BadContainer("codec", "a step that is none")
        raw, body = head.cut(body, exact * shape.layers * channels.per_layer(shape) * shape.width)
        first, body = head.cut(body, size)
        width, tokens = channels.per_layer(shape), channels.tokens(shape)
        means = coefficients.decode(first, shape.layers, width)
        q = coefficients.decode(body, shape.layers * width, tokens)
        step = _spread(steps, shape)
        x = q.reshape(shape.layers, width, tokens).astype(np.float32)
        x *= step[..., None]
        x += (means.astype(np.float32) * (step * MEAN))[..., None]
        channels.write(x, dst, shape, shape.rope)
        channels.restore(raw, dst, shape, exact)


def _steps(x: F32, shape: Shape, count: int) -> F32:
    """The root mean square of K and of V in each layer, fp32 [layers, 2]; 1 where there is nothing."""
    border = shape.heads * shape.dim
    square = [np.einsum("lct,lct->l", each, each) / (each.shape[1] * count) if each.shape[1] else np.zeros(len(x))
              for each in (x[:, :border], x[:, border:])]  # fmt: skip
    root = np.sqrt(np.stack(square, axis=1))
    return np.where(root > 2.0**-100, root, 1).astype(np.float32)


def _spread(steps: F32, shape: Shape) -> F32:
    """The step of each channel [layers, channels]."""
    return np.repeat(steps.astype(np.float32), [shape.heads * shape.dim, shape.heads * shape.dim_v], axis=1)
