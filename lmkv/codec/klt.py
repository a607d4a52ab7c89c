"""``klt``: a transform learnt from the model, one step for all coefficients, and rANS. Needs a profile.

The profile's transform decorrelates heads, K and V, and layers, weighted by how much each channel moves the model's
output, so one uniform step spends bits where they matter. Level 0 is the finest. Within the error of the arithmetic,
the error of every transformed coefficient is at most step / 2; coefficients that the profile leaves out are dropped.

Stream: head (without rope: the profile has it); 8 bytes of the profile's id; u8 level; u8 exact tokens; u16 blocks;
u32 bytes of each block; the words of the prompt's first tokens (`channels.exact_bytes`); then each block's
coefficients [kept, tokens] (`coefficients`), in the profile's order. The blocks that lie within the part are there.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmkv import _native
from lmkv.codec import channels, coefficients, head
from lmkv.codec import profile as profiles
from lmkv.codec.base import Codec
from lmkv.codec.coefficients import I16
from lmkv.codec.floats import F32, WIDE
from lmkv.codec.profile import Block, Place, Profile
from lmkv.codec.shape import Shape, Words, split
from lmkv.errors import BadContainer, BadInput, ConfigError

MAGIC = b"klt\x01"
_FRONT = struct.Struct("<8sBBH")


class Klt(Codec):
    """Profiled transform coding. level: one of the profile's, 0 the finest and default. profile: its id."""

    name = "klt"
    exact = False
    needs: Literal["bytes", "dtype", "geometry"] = "geometry"

    def __init__(self, level: int | None = None, profile: str = "") -> None:
        if not profile:
            raise ConfigError("profile", "the codec klt needs one: make it with `lmkv codec calibrate`")
        super().__init__(level or 0, profile)
        try:
            levels = len(profiles.find(profile).description.levels)
        except BadContainer:
            return  # a reader without it has a miss
        if not 0 <= self.level < levels:
            raise ConfigError("level", f"the profile {profile} has the levels 0 to {levels - 1}, not {level}")

    def encode(self, src: memoryview, dst: memoryview, shape: Shape | None = None) -> int:
        try:
            profile = profiles.find(self.profile)
            blocks = profile.of_part(shape) if shape else ()
        except (BadContainer, BadInput):
            return 0
        x = channels.read(src, shape, profile.rope)
        if x is None or shape is None:
            return 0
        exact = channels.exact_tokens(shape, profile.description.sinks)
        mask = channels.coded(shape, exact)
        bodies = []
        for block in blocks:
            q = quantise(block, rows(x, block.place, shape), profile.description.levels[self.level].step)
            if q is None:
                return 0
            q[:, ~mask] = 0
            bodies.append(coefficients.encode(q, block.defaults[self.level]))
        front = _FRONT.pack(bytes.fromhex(profile.id), self.level, exact, len(blocks))
        sizes = struct.pack(f"<{len(blocks)}I", *map(len, bodies))
        raw = channels.exact_bytes(src, shape, exact)
        stream = b"".join([head.pack(MAGIC, replace(shape, rope=None)), front, sizes, raw, *bodies])
        if len(stream) > len(dst):
            return 0
        dst[: len(stream)] = stream
        return len(stream)

    def decode(self, src: memoryview, dst: memoryview) -> None:
        shape, body = head.unpack(src, MAGIC)
        (identity, level, exact, count), body = head.take(body, _FRONT)
        profile = profiles.find(identity.hex())
        if shape.nbytes != len(dst) or shape.dtype not in WIDE or level >= len(profile.description.levels):
            raise BadContainer("codec", f"{len(dst)} bytes for {shape}")
        try:
            blocks = profile.of_part(shape)
        except BadInput as error:
            raise BadContainer("codec", str(error)) from None
        if count != len(blocks) or exact != channels.exact_tokens(shape, profile.description.sinks):
            raise BadContainer("codec", "blocks or exact tokens that are not the profile's")
        sizes, body = head.take(body, struct.Struct(f"<{count}I"))
        raw, body = head.cut(body, exact * shape.layers * channels.per_layer(shape) * shape.width)
        if len(body) != sum(sizes):
            raise BadContainer("codec", f"{len(body)} bytes of blocks of {sum(sizes)}")
        native, step = channels.native(dst, shape), np.float32(profile.description.levels[level].step)
        if native:
            halves, turned = split(dst, shape), channels.turns(profile.rope, shape)
        else:
            x = np.empty((shape.layers, channels.per_layer(shape), channels.tokens(shape)), np.float32)
        for block, size in zip(blocks, sizes, strict=True):
            mine, body = head.cut(body, size)
            q = coefficients.decode(mine, block.place.kept, channels.tokens(shape), block.defaults[level])
            if native:
                places = [channels.place(each, dst) for each in _inside(block.place, shape, halves)]
                still = channels.STILL if block.place.kv == "v" else turned
                _native.klt_write_block(block.packed, q, block.scale * step, block.mean, *still, places, dst)
            else:
                reconstruct(block, q, step, x, shape)
        if native:
            channels.clear(dst, shape)
        else:
            channels.write(x, dst, shape, profile.rope)
        channels.restore(raw, dst, shape, exact)


def quantise(block: Block, x: F32, step: float) -> I16 | None:
    """Coefficients [kept, tokens] of channels [C, tokens]; None: one does not fit."""
    y = block.forward @ (x - block.mean[:, None])
    y *= np.float32(1 / step)
    np.rint(y, out=y)
    return y.astype(np.int16) if np.abs(y).max() <= 32767 else None


def reconstruct(block: Block, q: I16, step: np.float32, x: F32, shape: Shape) -> None:
    """Put the block's channels, made of its coefficients as `klt_reference.transform` says, in their place in ``x``."""
    first, index = block.place.first_layer - shape.first_layer, _index(block.place, shape)
    made = np.empty((x.shape[2], len(block.mean)), np.float32)
    _native.klt_transform(block.packed, q, block.scale * step, block.mean, made)
    x[first : first + block.place.layers, index] = made.T.reshape(block.place.layers, len(index), -1)


def rows(x: NDArray[Any], place: Place, shape: Shape) -> NDArray[Any]:
    """The block's channels [C, tokens] of a part [layers, channels, tokens]; a view where it has all of its layers."""
    first = place.first_layer - shape.first_layer
    mine = x[first : first + place.layers]
    index = _index(place, shape)
    return (mine if len(index) == x.shape[1] else mine[:, index]).reshape(-1, x.shape[2])


def _inside(place: Place, shape: Shape, halves: tuple[Words, Words]) -> list[Words]:
    """The block's part of K and V [layers, pages, page_tokens, heads, dim], of which it may lack one."""
    first, heads = place.first_layer - shape.first_layer, slice(place.first_head, place.first_head + place.heads)
    return [
        half[first : first + place.layers, :, :, heads]
        for half, name in zip(halves, "kv", strict=True)
        if name in place.kv and half.shape[-1]
    ]


def _index(place: Place, shape: Shape) -> NDArray[np.int64]:
    stop = place.first_head + place.heads
    k = np.arange(place.first_head * shape.dim, stop * shape.dim)
    v = shape.heads * shape.dim + np.arange(place.first_head * shape.dim_v, stop * shape.dim_v)
    return np.concatenate([k] * ("k" in place.kv) + [v] * ("v" in place.kv))


def fits(profile: Profile, shape: Shape) -> bool:
    """`Klt` encodes such parts with this profile."""
    try:
        return bool(profile.of_part(shape)) and shape.dtype in WIDE
    except BadInput:
        return False
