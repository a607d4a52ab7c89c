"""Exact, for any floats: exponents are entropy-coded, signs and mantissas kept as they are.

A row is all tokens of one head of one layer, K and V apart, with a frequency table of its own and an offset for each
channel. Where only the dtype is known (packed pages), or channels do not lie side by side, a row is 16,384 values of
memory in which every 64th is taken for the same channel. The native coder (csrc/xpl.cpp) does the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmkv import _native
from lmkv.codec import head
from lmkv.codec.base import Codec
from lmkv.codec.shape import Shape, split
from lmkv.errors import BadContainer, BadInput, ConfigError

MAGIC = b"LXP1"
# Bytes, exponent bits, mantissa bits.
_FLOATS = {
    "bfloat16": (2, 8, 7), "float16": (2, 5, 10), "float32": (4, 8, 23), "float8_e4m3fn": (1, 4, 3),
    "float8_e5m2": (1, 5, 2),
}  # fmt: skip
_CHANNELS, _TOKENS = 64, 256  # of a row of which nothing is known


class _Rows(NamedTuple):
    """What `_native.xpl_encode` calls rows."""

    starts: NDArray[np.int64]
    count0: int
    stride0: int
    count1: int
    stride1: int
    dim: int


class Xpl(Codec):
    """Lossless: every bit pattern comes back, NaNs and both zeros too. No levels."""

    name = "xpl"
    needs: Literal["bytes", "dtype", "geometry"] = "dtype"

    def __init__(self, level: int | None = None) -> None:
        if level is not None:
            raise ConfigError("level", "the codec xpl has no levels: leave it out")
        super().__init__(0)

    def encode(self, src: memoryview, dst: memoryview, shape: Shape | None = None) -> int:
        if shape is None or len(src) % shape.width or (shape.axes and len(src) != shape.nbytes):
            return 0
        try:
            start = head.pack(MAGIC, replace(shape, rope=None, first_token=0, first_layer=0, page_mask=0))
        except BadInput:
            return 0
        end = min(len(dst), len(src) - 1)
        if len(start) > end:
            return 0
        at = len(start)
        dst[:at] = start
        raw, values = _aligned(src, shape.width), len(src) // shape.width
        for rows in _sections(raw, shape, values):
            written = _native.xpl_encode(raw, _FLOATS[shape.dtype], *rows, dst[at:end])
            if not written:
                return 0
            at += written
        rest = bytes(src[len(src) - _loose(shape, values) * shape.width :])
        if at + len(rest) > end:
            return 0
        dst[at : at + len(rest)] = rest
        return at + len(rest)

    def decode(self, src: memoryview, dst: memoryview) -> None:
        shape, left = head.unpack(src, MAGIC)
        if len(dst) % shape.width or (shape.axes and len(dst) != shape.nbytes):
            raise BadContainer("codec", f"{len(dst)} bytes are not {shape}")
        out, values = _aligned(dst, shape.width), len(dst) // shape.width
        try:
            for rows in _sections(out, shape, values):
                left = left[_native.xpl_decode(left, _FLOATS[shape.dtype], *rows, out) :]
        except ValueError as error:
            raise BadContainer("codec", str(error)) from None
        loose = _loose(shape, values) * shape.width
        if len(left) != loose:
            raise BadContainer("codec", f"{len(left)} bytes where {loose} are due")
        if out is not dst:
            dst[:] = memoryview(out)
        dst[len(dst) - loose :] = left


def _by_head(shape: Shape) -> bool:
    return shape.axes.endswith("dim")


def _sections(raw: Any, shape: Shape, values: int) -> Iterator[_Rows]:
    """Rows that together are all values but the last `_loose` ones."""
    if _by_head(shape):
        base = np.frombuffer(raw, np.uint8).ctypes.data
        for view in split(raw, shape):
            layers, pages, tokens, heads, dim = view.shape
            if dim:
                layer, page, token, of_head, _ = (step // shape.width for step in view.strides)
                first = (view.ctypes.data - base) // shape.width
                starts = first + np.add.outer(np.arange(layers) * layer, np.arange(heads) * of_head)
                yield _Rows(starts.ravel().astype(np.int64), pages, page, tokens, token, dim)
        return
    runs = values // _CHANNELS
    whole = runs // _TOKENS
    if whole:
        starts = np.arange(whole, dtype=np.int64) * (_CHANNELS * _TOKENS)
        yield _Rows(starts, 1, 0, _TOKENS, _CHANNELS, _CHANNELS)
    if runs % _TOKENS:
        yield _Rows(np.array([whole * _CHANNELS * _TOKENS]), 1, 0, runs % _TOKENS, _CHANNELS, _CHANNELS)


def _loose(shape: Shape, values: int) -> int:
    """Values at the end that are kept as they are."""
    return 0 if _by_head(shape) else values % _CHANNELS


def _aligned(buffer: memoryview, width: int) -> Any:
    """The buffer, or a copy of it where its values are not aligned."""
    array = np.frombuffer(buffer, np.uint8)
    return buffer if array.ctypes.data % width == 0 else array.copy()
