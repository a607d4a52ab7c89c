"""A part as rows of channels over tokens, K un-rotated, and back to its place in the raw bytes.

Channels of a layer: heads x dim of K, then heads x dim_v of V.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmkv import _native
from lmkv.codec import head
from lmkv.codec.floats import F32, WIDE, narrow, widen
from lmkv.codec.klt_reference import cos_sin, pairs, rotate
from lmkv.codec.shape import Rope, Shape, split
from lmkv.errors import BadContainer

Turns = tuple[F32 | None, F32 | None, bool]  # cos and sin, [tokens, pairs] each; interleaved
NativePlace = tuple[tuple[int, ...], tuple[int, ...]]  # sizes, then the first word and the steps

STILL: Turns = (None, None, False)
SINKS = 4  # first tokens of a prompt that are kept exact: attention sinks
LARGEST = 2.0**100  # beyond it nothing is taken: sums of squares and steps stay finite


def per_layer(shape: Shape) -> int:
    """Channels of one layer."""
    return shape.heads * (shape.dim + shape.dim_v)


def tokens(shape: Shape) -> int:
    """Tokens of the part, absent pages included."""
    return shape.pages * shape.page_tokens


def read(src: memoryview, shape: Shape | None, rope: Rope | None) -> F32 | None:
    """fp32 [layers, channels, tokens]; None where there is nothing that a lossy codec takes."""
    if shape is None or not shape.axes or shape.dtype not in WIDE or len(src) != shape.nbytes:
        return None
    if not head.sane(shape.first_token, rope):
        return None
    x = np.empty((shape.layers, per_layer(shape), tokens(shape)), np.float32)
    if native(src, shape):
        cos, sin, twisted = turns(rope, shape)
        if rope and cos is not None and sin is not None:
            cos, sin = cos / np.float32(rope.factor) ** 2, sin / np.float32(rope.factor) ** 2
        largest = [
            _native.klt_read_bf16(src, *turned, *where, mine)
            for mine, where, turned in _halves(x, src, shape, (cos, sin, twisted))
        ]
        return x if widen(np.array(largest, np.uint16), shape.dtype).max() < LARGEST else None
    at = 0
    for words in split(src, shape):
        width = words.shape[-1] * shape.heads
        value = widen(words, shape.dtype).reshape(shape.layers, tokens(shape), width)
        x[:, at : at + width] = value.transpose(0, 2, 1)
        at += width
    if not (np.abs(x).max() < LARGEST):
        return None
    if rope:
        _unrotate(_k(x, shape), rope, shape)
    return x


def write(x: F32, dst: memoryview, shape: Shape, rope: Rope | None) -> None:
    """The inverse of `read`, in place on ``x``; absent pages become zero. ``shape`` is of ``dst``."""
    if native(dst, shape):
        for mine, where, turned in _halves(x, dst, shape, turns(rope, shape)):
            _native.klt_write_bf16(mine, *turned, *where, dst)
    else:
        if rope:
            rotate(_k(x, shape), rope, shape.first_token)
        at = 0
        for words in split(dst, shape):
            width = words.shape[-1] * shape.heads
            words[...] = narrow(x[:, at : at + width], shape.dtype).transpose(0, 2, 1).reshape(words.shape)
            at += width
    clear(dst, shape)


def clear(dst: memoryview, shape: Shape) -> None:
    """Absent pages become zero."""
    if shape.page_mask:
        for words in split(dst, shape):
            words[:, [j for j in range(shape.pages) if not shape.page_mask >> j & 1]] = 0


def native(raw: memoryview, shape: Shape) -> bool:
    """The native readers and writers take these bytes."""
    return shape.dtype == "bfloat16" and _address(np.frombuffer(raw, np.uint8)) % 2 == 0


def place(words: NDArray[Any], raw: memoryview) -> NativePlace:
    """Where in ``raw`` a view of it lies, as `split` makes them or a part of one, for the native functions."""
    steps = (step // words.itemsize for step in words.strides)
    start = _address(words) - _address(np.frombuffer(raw, np.uint8))
    return words.shape, (start // words.itemsize, *steps)


def turns(rope: Rope | None, shape: Shape) -> Turns:
    """cos and sin of the part's tokens as `klt_reference.cos_sin` makes them, and whether pairs are interleaved."""
    if not rope:
        return STILL
    cos, sin = np.empty((2, tokens(shape), len(rope.inv_freq)), np.float32)
    _native.klt_cos_sin(np.array(rope.inv_freq, np.float64), shape.first_token, rope.factor, cos, sin)
    return cos, sin, rope.interleaved


def coded(shape: Shape, exact: int) -> NDArray[np.bool_]:
    """bool [tokens]: those that are there and not kept exact."""
    mask = shape.page_mask or (1 << shape.pages) - 1
    there = np.repeat([bool(mask >> j & 1) for j in range(shape.pages)], shape.page_tokens)
    there[:exact] = False
    return np.asarray(there)


def exact_tokens(shape: Shape, sinks: int = SINKS) -> int:
    """How many of the part's first tokens are among the prompt's first ``sinks``."""
    return min(max(0, sinks - shape.first_token), tokens(shape))


def exact_bytes(src: memoryview, shape: Shape, count: int) -> bytes:
    """The words of the first ``count`` tokens, K's then V's: [layers, count, heads, dim] each."""
    return b"".join(
        np.ascontiguousarray(_by_token(words)[:, :count]).astype(f"<u{shape.width}").tobytes()
        for words in (split(src, shape) if count else ())
    )


def restore(raw: memoryview, dst: memoryview, shape: Shape, count: int) -> None:
    """Put back what `exact_bytes` took. BadContainer: ``raw`` has another size."""
    if len(raw) != count * shape.layers * per_layer(shape) * shape.width:
        raise BadContainer("codec", f"{len(raw)} bytes of {count} exact tokens")
    for words in split(dst, shape) if count else ():
        size = shape.layers * count * shape.heads * words.shape[-1]
        mine, raw = head.cut(raw, size * shape.width)
        values = np.frombuffer(mine, f"<u{shape.width}").reshape(shape.layers, count, *words.shape[3:])
        page, left = divmod(count, shape.page_tokens)
        words[:, :page] = values[:, : page * shape.page_tokens].reshape(words[:, :page].shape)
        if left:
            words[:, page, :left] = values[:, page * shape.page_tokens :]


def _by_token(words: NDArray[Any]) -> NDArray[Any]:
    return words.reshape(len(words), words.shape[1] * words.shape[2], *words.shape[3:])


def _k(x: F32, shape: Shape) -> F32:
    """K of ``x`` as a view [layers, heads, dim, tokens]."""
    return x[:, : shape.heads * shape.dim].reshape(shape.layers, shape.heads, shape.dim, -1)


def _address(words: NDArray[Any]) -> int:
    found: int = words.__array_interface__["data"][0]
    return found


def _halves(x: F32, raw: memoryview, shape: Shape, turned: Turns) -> Iterator[tuple[F32, NativePlace, Turns]]:
    """K of ``x``, where it lies, how it turns; then the same of V, where there is one."""
    at = 0
    for words in split(raw, shape):
        width = words.shape[-1] * shape.heads
        if width:
            yield x[:, at : at + width], place(words, raw), STILL if at else turned
        at += width


def _unrotate(k: F32, rope: Rope, shape: Shape) -> None:
    cos, sin = (
        np.ascontiguousarray(each.T) / np.float32(rope.factor) ** 2
        for each in cos_sin(rope, shape.first_token, tokens(shape))
    )
    one, two = pairs(rope, k.shape[-2])
    a, b = k[..., one, :], k[..., two, :]
    rotated = a * cos + b * sin
    k[..., two, :] = b * cos - a * sin
    k[..., one, :] = rotated
