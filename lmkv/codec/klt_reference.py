"""The normative inverse transform of ``klt``: every step in order, so that all implementations give the same bits.

A block is a set of output channels (heads x K and V x layers) of one part. Its decoded values are

    acc[c, t] = sum over k of matrix[c, k] * coefficients[k, t]        exact integers (|acc| < 2^62)
    x[c, t]   = f32(f32(acc) * scale[c]) + mean[c]                     each operation rounded to fp32, no fma

after which the first channels of each K head are rotated to their positions (`rotate`) and everything is rounded to
the cache's dtype (`to_bfloat16`; fp16 is the IEEE conversion after a clip to +-65504; fp32 is as it is). ``f32(acc)``
rounds to nearest even, once, from the exact integer. cos and sin come from `cos_sin`, which is fp64 arithmetic in a
fixed order without fma, rounded once to fp32.

Native and GPU versions are free in how they compute, not in what: they are tested against this file bit for bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lmkv.codec.shape import Rope

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

# pi/2 in three parts: the first two have 23 bits each, so products with n < 2^30 are exact.
_INVERSE = 0.6366197723675814  # 2 / pi
_PARTS = (1.570796251296997, 7.549789415861596e-08, 5.390302858158119e-15)
_SIN = (-1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800)
_COS = (-1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600, -1.0 / 87178291200)


def transform(matrix: NDArray[np.int16], coefficients: NDArray[np.int16], scale: F32, mean: F32) -> F32:
    """The block's channels as fp32 [C, T]. matrix: [C, K]; coefficients: [K, T]; scale, mean: [C]."""
    bound = int(np.abs(coefficients.astype(np.int32)).max(initial=0)) * int(
        np.abs(matrix.astype(np.int64)).sum(1).max(initial=0)
    )
    if bound < 1 << 24:  # every partial sum is an integer that fp32 holds
        acc = matrix.astype(np.float32) @ coefficients.astype(np.float32)
    elif bound < 1 << 53:  # the same of fp64
        acc = (matrix.astype(np.float64) @ coefficients.astype(np.float64)).astype(np.float32)
    else:
        acc = (matrix.astype(np.int64) @ coefficients.astype(np.int64)).astype(np.float32)
    acc *= scale[:, None]
    acc += mean[:, None]
    return acc


def cos_sin(rope: Rope, first: int, tokens: int) -> tuple[F32, F32]:
    """cos and sin of each token's angles, times ``rope.factor``: fp32 [tokens, len(inv_freq)].

    angle = f64(position * inv_freq). Positions and angles below 2^30.
    """
    position = np.arange(first, first + tokens, dtype=np.float64)
    angle = position[:, None] * np.array(rope.inv_freq, np.float64)
    turns = np.floor(angle * _INVERSE + 0.5)
    r = ((angle - turns * _PARTS[0]) - turns * _PARTS[1]) - turns * _PARTS[2]
    square = r * r
    sine = np.full_like(r, _SIN[-1])
    for factor in _SIN[-2::-1]:
        sine = sine * square + factor
    sine = r + r * (square * sine)
    cosine = np.full_like(r, _COS[-1])
    for factor in _COS[-2::-1]:
        cosine = cosine * square + factor
    cosine = 1.0 + square * cosine
    quarter = turns.astype(np.int64) & 3
    odd = (quarter & 1).astype(bool)
    cos = np.where(odd, sine, cosine) * np.where((quarter == 1) | (quarter == 2), -1.0, 1.0)
    sin = np.where(odd, cosine, sine) * np.where(quarter >= 2, -1.0, 1.0)
    return (cos * rope.factor).astype(np.float32), (sin * rope.factor).astype(np.float32)


def pairs(rope: Rope, dim: int) -> tuple[slice, slice]:
    """The channels of a head that are the first and the second of each rotated pair."""
    half = len(rope.inv_freq)
    if 2 * half > dim:
        raise ValueError(f"a rope of {2 * half} channels for heads of {dim}")
    if rope.interleaved:
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    return slice(0, half), slice(half, 2 * half)


def rotate(k: F32, rope: Rope, first: int) -> None:
    """Rotate heads in place to positions from ``first`` on. k: fp32 [..., dim, tokens].

    a' = f32(f32(a * cos) - f32(b * sin)); b' = f32(f32(b * cos) + f32(a * sin)).
    """
    cos, sin = cos_sin(rope, first, k.shape[-1])
    cos, sin = np.ascontiguousarray(cos.T), np.ascontiguousarray(sin.T)
    one, two = pairs(rope, k.shape[-2])
    a, b = k[..., one, :], k[..., two, :]
    rotated = a * cos - b * sin
    k[..., two, :] = b * cos + a * sin
    k[..., one, :] = rotated


def to_bfloat16(x: F32) -> NDArray[np.uint16]:
    """Round to nearest even; x is finite, and so small that it stays finite."""
    bits = x.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: NDArray[np.uint16] = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return rounded
