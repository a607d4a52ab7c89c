"""The first bytes of a lossy stream: which codec, and the shape of what it decodes to.

Little-endian: 4 bytes of magic; u8 dtype; u8 flags (1: rope follows, 2: its pairs are interleaved, 4: page mask
follows); u16 axes, a nibble each from the outermost on (1 head, 2 token, 3 dim, 4 kv; 0: packed pages); u16 layers,
pages, heads, dim, dim_v, first_layer; u32 page_tokens; u64 first_token. Then the page mask (32 bytes), then the rope:
u16 pairs, u16 0, f64 factor, f32 for each pair.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import numpy as np

from lmkv.codec.shape import FLOAT_BYTES, Rope, Shape
from lmkv.errors import BadContainer, BadInput
from lmkv.spec import MAX_PAGES

_HEAD = struct.Struct("<4sBBH6HIQ")
_ROPE = struct.Struct("<HHd")
_DTYPES = tuple(FLOAT_BYTES)
_AXES = ("", "head", "token", "dim", "kv")
ROPE, INTERLEAVED, MASK = 1, 2, 4
MOST_TOKENS = 1 << 30


def stored(rope: Rope) -> Rope:
    """``rope`` as a stream holds it: frequencies rounded to fp32. Encoders rotate by this one."""
    return replace(rope, inv_freq=tuple(np.array(rope.inv_freq, np.float32).tolist()))


def sane(first_token: int, rope: Rope | None) -> bool:
    """Positions and frequencies are such that `klt_reference.cos_sin` is exact to fp32."""
    if first_token >= MOST_TOKENS:
        return False
    return rope is None or (2.0**-16 < abs(rope.factor) < 2.0**16 and max(map(abs, rope.inv_freq)) <= 16)


def pack(magic: bytes, shape: Shape) -> bytes:
    """The head of a stream. BadInput: a number that its field cannot hold."""
    axes = 0
    for axis in shape.axes.split():
        axes = axes << 4 | _AXES.index(axis)
    flags = MASK * bool(shape.page_mask)
    tail = shape.page_mask.to_bytes(MAX_PAGES // 8, "little") if shape.page_mask else b""
    try:
        if shape.rope:
            flags |= ROPE | INTERLEAVED * shape.rope.interleaved
            tail += _ROPE.pack(len(shape.rope.inv_freq), 0, shape.rope.factor)
            tail += np.array(shape.rope.inv_freq, "<f4").tobytes()
        head = _HEAD.pack(
            magic, _DTYPES.index(shape.dtype), flags, axes, shape.layers, shape.pages, shape.heads, shape.dim,
            shape.dim_v, shape.first_layer, shape.page_tokens, shape.first_token,
        )  # fmt: skip
    except (struct.error, OverflowError) as error:
        raise BadInput(f"{shape} has no stream: {error}") from None
    return head + tail


def unpack(src: memoryview, magic: bytes) -> tuple[Shape, memoryview]:
    """The shape, and the stream after its head. BadContainer("codec"): not the head of such a stream."""
    fields, src = take(src, _HEAD)
    found, dtype, flags, axes, layers, pages, heads, dim, dim_v, first_layer, page_tokens, first_token = fields
    nibbles = [axes >> shift & 15 for shift in (12, 8, 4, 0) if axes >> shift]
    torn = dim != dim_v and {3, 4} <= set(nibbles) and nibbles.index(3) < nibbles.index(4)  # K and V would overlap
    if found != magic or torn or dtype >= len(_DTYPES) or flags >> 3 or any(n not in range(1, 5) for n in nibbles):
        raise BadContainer("codec", f"not a stream of {magic.decode()}")
    mask, rope = 0, None
    if flags & MASK:
        (raw,), src = take(src, struct.Struct(f"<{MAX_PAGES // 8}s"))
        mask = int.from_bytes(raw, "little")
    if flags & ROPE:
        (pairs, zero, factor), src = take(src, _ROPE)
        freqs, src = take(src, struct.Struct(f"<{pairs}f"))
        if zero or not pairs or not all(map(math.isfinite, freqs)):
            raise BadContainer("codec", "no rope")
        rope = (freqs, bool(flags & INTERLEAVED), factor)
    try:
        shape = Shape(
            _DTYPES[dtype], layers, pages, page_tokens, heads, dim, dim_v, " ".join(_AXES[n] for n in nibbles),
            first_layer, first_token, Rope(*rope) if rope else None, mask,
        )  # fmt: skip
    except BadInput as error:
        raise BadContainer("codec", str(error)) from None
    if not sane(first_token, shape.rope):
        raise BadContainer("codec", "positions or frequencies out of range")
    return shape, src


def take(src: memoryview, fields: struct.Struct) -> tuple[tuple, memoryview]:  # type: ignore[type-arg]
    """Unpack ``fields`` from the front; what follows them. BadContainer("codec"): there is less."""
    if len(src) < fields.size:
        raise BadContainer("codec", f"{len(src)} bytes where {fields.size} are due")
    return fields.unpack_from(src), src[fields.size :]


def cut(src: memoryview, nbytes: int) -> tuple[memoryview, memoryview]:
    """The first ``nbytes`` and the rest. BadContainer("codec"): there are fewer."""
    if nbytes > len(src):
        raise BadContainer("codec", f"{len(src)} bytes where {nbytes} are due")
    return src[:nbytes], src[nbytes:]
