"""``cachegen``: the encoding of CacheGen (Liu et al., SIGCOMM 2024, arXiv 2310.07240), section 5, as a baseline.

Tokens go in groups of ten. The first of each, the anchor, is kept at 8 bits; the others are differences to it,
quantised by layer: bins of 0.5, 1 and 1.5 in the first, middle and last third of the layers, times what the level
gives, in units of each channel's standard deviation. Everything is entropy coded with a distribution for each layer and
channel; here these come from the tables that all our codecs share, chosen by chunk, where CacheGen's own coder stores
them. K is taken as it is cached, rotated, and no token is kept exact.

The error of a value is at most half its channel's bin, of an anchor half of 1/127 of the largest anchor's size, rounded
up to a power of 2^(1/8), beside the arithmetic's.

Stream: head; u8 level; three u8 0; u32 bytes of marks, of anchors; fp32 bins [layers]; the marks, code - 160 as
coefficients [2 * layers, channels]: the deviations, then the largest anchors, 2^((code - 160) / 8), 0 for none; the
anchors as coefficients [layers * channels, groups]; the differences [layers * channels, tokens that are none].
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmkv.codec import channels, coefficients, head
from lmkv.codec.base import Codec, checked_level
from lmkv.codec.floats import F32, WIDE
from lmkv.codec.shape import Shape
from lmkv.errors import BadContainer

MAGIC = b"cgn\x01"
GROUP = 10
BINS = (0.5, 1.0, 1.5)  # of each third of the layers
SCALES = (0.06, 0.12, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4)  # of each level; 1 are the paper's bins
DEFAULT = 3
LAYERS = 32  # taken for the model's where nobody says
MIDDLE = 160
_FRONT = struct.Struct("<BBHII")


class CacheGen(Codec):
    """Anchors and differences, binned by layer. level: 0, the finest, to 8; 7 has the paper's bins; default 3."""

    name = "cachegen"
    exact = False
    needs: Literal["bytes", "dtype", "geometry"] = "geometry"

    def __init__(self, level: int | None = None, profile: str = "") -> None:
        super().__init__(checked_level(self.name, level, DEFAULT, len(SCALES), profile))

    def encode(self, src: memoryview, dst: memoryview, shape: Shape | None = None) -> int:
        x = channels.read(src, shape, None)
        if x is None or shape is None:
            return 0
        total = shape.of_layers or max(LAYERS, shape.first_layer + shape.layers)
        thirds = (shape.first_layer + np.arange(shape.layers)) * 3 // total
        bins = (SCALES[self.level] * np.array(BINS)[thirds]).astype(np.float32)
        marks = np.stack([_code(x.std(2)), _code(np.abs(x[..., ::GROUP]).max(2))])
        fine, coarse = _steps(marks, bins)
        anchors = np.rint(_over(x[..., ::GROUP], fine))
        others = _others(x.shape[2])
        q = np.rint(_over(x[..., others] - (anchors * fine[..., None])[..., others // GROUP], coarse))
        if not np.abs(q).max(initial=0) <= 32767:
            return 0
        notes = coefficients.encode((marks.astype(np.int16) - MIDDLE).reshape(-1, x.shape[1]))
        first = coefficients.encode(anchors.astype(np.int16).reshape(-1, anchors.shape[2]))
        rest = coefficients.encode(q.astype(np.int16).reshape(-1, len(others))) if len(others) else b""
        stream = b"".join(
            [
                head.pack(MAGIC, replace(shape, rope=None)), _FRONT.pack(self.level, 0, 0, len(notes), len(first)),
                bins.astype("<f4").tobytes(), notes, first, rest,
            ]
        )  # fmt: skip
        if len(stream) > len(dst):
            return 0
        dst[: len(stream)] = stream
        return len(stream)

    def decode(self, src: memoryview, dst: memoryview) -> None:
        shape, body = head.unpack(src, MAGIC)
        (_, *zeros, noted, size), body = head.take(body, _FRONT)
        if shape.nbytes != len(dst) or shape.dtype not in WIDE or any(zeros):
            raise BadContainer("codec", f"{len(dst)} bytes for {shape}")
        raw, body = head.cut(body, 4 * shape.layers)
        bins = np.frombuffer(raw, "<f4")
        if not ((bins > 0) & (bins < 1e3)).all():
            raise BadContainer("codec", "a bin that is none")
        layers, width, tokens = shape.layers, channels.per_layer(shape), channels.tokens(shape)
        raw, body = head.cut(body, noted)
        marks = coefficients.decode(raw, 2 * layers, width).reshape(2, layers, width).astype(np.int32) + MIDDLE
        if marks.min() < 0 or marks.max() > 255:
            raise BadContainer("codec", "a mark that is none")
        fine, coarse = _steps(marks, bins)
        first, body = head.cut(body, size)
        others = _others(tokens)
        if not len(others) and len(body):
            raise BadContainer("codec", "differences of no token")
        anchors = (
            coefficients.decode(first, layers * width, tokens - len(others)).reshape(layers, width, -1)
            * fine[..., None]
        )
        x = np.empty((layers, width, tokens), np.float32)
        x[..., ::GROUP] = anchors
        if len(others):
            q = coefficients.decode(body, layers * width, len(others)).reshape(layers, width, -1)
            x[..., others] = q * coarse[..., None] + anchors[..., others // GROUP]
        channels.write(x, dst, shape, None)


def _others(tokens: int) -> NDArray[np.int64]:
    """The tokens that are no anchors."""
    return np.flatnonzero(np.arange(tokens) % GROUP)


def _code(x: F32) -> NDArray[np.uint8]:
    """The least code whose size is at least ``x``; 0 for nothing."""
    with np.errstate(divide="ignore"):
        code = np.ceil(np.log2(x) * 8 + MIDDLE - 1e-4)
    return np.where(x > 0, np.clip(code, 1, 255), 0).astype(np.uint8)


_EIGHTHS = (1.0, 1.0905077, 1.1892071, 1.2968396, 1.4142135, 1.5422108, 1.6817929, 1.8340081)  # 2^(i / 8)
_SIZES = np.array([0.0] + [2.0 ** (code // 8 - 20) * _EIGHTHS[code % 8] for code in range(1, 256)], np.float32)


def _steps(marks: NDArray[Any], bins: F32) -> tuple[F32, F32]:
    """The step of anchors, and that of differences, of each channel: fp32 [layers, channels] each."""
    fine = _SIZES[marks[1]] / np.float32(127)
    return fine, _SIZES[marks[0]] * bins[:, None]


def _over(x: F32, step: F32) -> NDArray[Any]:
    return np.divide(x, step[..., None], out=np.zeros_like(x), where=step[..., None] > 0)
