"""Profiles: what `klt` knows about one model's KV, in a file named by its own digest, ``<16 hex digits>.lmkvp``.

File, little-endian: magic ``LMKVPROF``; u16 version 1; u16 0; u32 bytes of the description; the description, JSON in
UTF-8; then for each block in its order: mean, weight, scale (fp32 [C] each), matrix (int16 [C, K]), default row ids
(u8 [levels, K]). Nothing follows. The id is the first 8 bytes of BLAKE3 of all of it.

A block takes some layers and heads, K, V or both: C channels, layer by layer, of each K's then V's, head by head. With
x a token's channels, K un-rotated, its coefficients are ``forward @ (x - mean)``, and ``x = scale * (matrix @ q) *
step + mean`` for coefficients rounded to ``q * step`` (`klt_reference`). The transform is a Karhunen-Loeve one of
``weight * x``, so ``forward = matrix' diag(scale * weight^2)`` is not stored.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmkv import _native
from lmkv.codec import head
from lmkv.codec.floats import F32
from lmkv.codec.shape import Rope, Shape
from lmkv.codec.tables import IDS
from lmkv.errors import BadContainer, BadInput

MAGIC, VERSION = b"LMKVPROF", 1
SUFFIX = ".lmkvp"
MOST_BYTES = 4 << 30
MOST_DESCRIPTION = 1 << 20
MOST_CHANNELS = 1 << 14
_FRONT = struct.Struct("<8sHHI")


class Level(msgspec.Struct, frozen=True):
    """step: of the weighted coefficients. bits: a value, on the calibration texts. kl: as measured, or None."""

    step: float
    bits: float
    kl: float | None = None


class Place(msgspec.Struct, frozen=True):
    """The channels of a block. kv: "kv", "k" or "v". kept: coefficients of it that are coded."""

    first_layer: int
    layers: int
    first_head: int
    heads: int
    kv: str
    kept: int


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The readable part of a profile. Geometry is of one group of layers; rope as in streams: fp32 frequencies."""

    model: str
    dtype: str
    layers: int
    heads: int
    dim: int
    dim_v: int
    sinks: int
    levels: tuple[Level, ...]
    blocks: tuple[Place, ...]
    inv_freq: tuple[float, ...] = ()
    interleaved: bool = False
    factor: float = 1.0


@dataclass(frozen=True)
class Block:
    """The arrays of one block: mean, weight, scale fp32 [C]; matrix int16 [C, K]; defaults uint8 [levels, K]."""

    place: Place
    mean: F32
    weight: F32
    scale: F32
    matrix: NDArray[np.int16]
    defaults: NDArray[np.uint8]

    @cached_property
    def packed(self) -> _native.KltMatrix:
        """``matrix`` as the native transform takes it."""
        return _native.KltMatrix(self.matrix)

    @cached_property
    def forward(self) -> F32:
        """fp32 [K, C]: coefficients of a unit step."""
        made: F32 = np.ascontiguousarray((self.matrix * (self.scale * self.weight**2)[:, None]).T, np.float32)
        return made


@dataclass(frozen=True)
class Profile:
    """One model's means and transforms. id: 16 hex digits. nbytes: of the file."""

    description: Description
    blocks: tuple[Block, ...]
    id: str
    nbytes: int

    @cached_property
    def rope(self) -> Rope | None:
        """How K was rotated; None: not at all."""
        about = self.description
        return Rope(about.inv_freq, about.interleaved, about.factor) if about.inv_freq else None

    @property
    def kl(self) -> dict[int, float]:
        """The measured error of each level."""
        return {i: level.kl for i, level in enumerate(self.description.levels) if level.kl is not None}

    def of_part(self, shape: Shape) -> tuple[Block, ...]:
        """The blocks that make up a part, in order. BadInput: another geometry, or blocks that cross its border."""
        about = self.description
        if (shape.heads, shape.dim, shape.dim_v) != (about.heads, about.dim, about.dim_v):
            raise BadInput(f"profile {self.id} is of {about.heads} heads of {about.dim} and {about.dim_v}")
        stop = shape.first_layer + shape.layers
        inside = tuple(
            block
            for block in self.blocks
            if block.place.first_layer >= shape.first_layer and block.place.first_layer + block.place.layers <= stop
        )
        if sum(len(block.mean) for block in inside) != shape.layers * shape.heads * (shape.dim + shape.dim_v):
            raise BadInput(f"the blocks of profile {self.id} do not fill layers {shape.first_layer} to {stop}")
        return inside

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the file to ``folder``, made if missing; where it is. Other readers see all of it or none."""
        target = Path(folder).expanduser() / (self.id + SUFFIX)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        partial.write_bytes(_pack(self.description, self.blocks))
        partial.replace(target)
        return target


def make(description: Description, blocks: tuple[Block, ...]) -> Profile:
    """A profile of new parts. BadInput: they do not fit together."""
    try:
        return parse(memoryview(_pack(description, blocks)))
    except BadContainer as error:
        raise BadInput(str(error)) from None


def load(path: str | os.PathLike[str]) -> Profile:
    """The profile in a file. BadContainer("profile"): it is none, or cannot be read."""
    try:
        if os.stat(path).st_size > MOST_BYTES:
            raise BadContainer("profile", f"{path} is larger than any profile")
        raw = Path(path).read_bytes()
    except OSError as error:
        raise BadContainer("profile", f"{path}: {error.strerror}") from None
    return parse(memoryview(raw))


def parse(raw: memoryview) -> Profile:
    """The profile in a file's bytes. BadContainer("profile"): they are none."""
    try:
        (magic, version, zero, size), body = head.take(raw, _FRONT)
        if magic != MAGIC or version != VERSION or zero or size > MOST_DESCRIPTION:
            raise BadContainer("profile", "not a profile of version 1")
        text, body = head.cut(body, size)
        about = msgspec.json.decode(text, type=Description)
        _check(about)
        blocks = []
        for place in about.blocks:
            block, body = _block(place, _channels(about, place), len(about.levels), body)
            blocks.append(block)
    except msgspec.MsgspecError as error:
        raise BadContainer("profile", str(error)) from None
    except BadContainer as error:
        raise BadContainer("profile", str(error)) from None
    if len(body):
        raise BadContainer("profile", f"{len(body)} bytes too many")
    return Profile(about, tuple(blocks), _native.blake3(raw)[:8].hex(), len(raw))


_folders: list[str] = ["~/.cache/lmkv/profiles"]


def look_in(folders: list[str]) -> None:
    """Where `find` looks from now on: the setting ``profiles``."""
    _folders[:] = folders
    find.cache_clear()


@lru_cache(maxsize=16)
def find(identity: str) -> Profile:
    """The profile of this id, from the first folder that has it. BadContainer("profile"): none has, or not whole."""
    if len(identity) != 16 or set(identity) - set("0123456789abcdef"):
        raise BadContainer("profile", f"{identity!r} is no id")
    for folder in _folders:
        path = Path(folder).expanduser() / (identity + SUFFIX)
        if path.is_file():
            profile = load(path)
            if profile.id != identity:
                raise BadContainer("profile", f"{path} holds {profile.id}")
            return profile
    raise BadContainer("profile", f"there is no profile {identity} in {', '.join(_folders)}")


def open_profile(name: str) -> Profile:
    """A profile by its id or its file. BadContainer("profile"): there is none."""
    if name.endswith(SUFFIX) or os.sep in name:
        profile = load(Path(name).expanduser())
        folder = str(Path(name).expanduser().parent)
        if folder not in _folders:
            _folders.append(folder)  # streams name it by id
        return profile
    return find(name)


def _channels(about: Description, place: Place) -> int:
    width = about.dim * ("k" in place.kv) + about.dim_v * ("v" in place.kv)
    return place.layers * place.heads * width


def _check(about: Description) -> None:
    sizes = about.layers, about.heads, about.dim, len(about.levels), len(about.blocks)
    if min(sizes) < 1 or max(sizes) > 1 << 16 or not 0 <= about.dim_v <= 1 << 16 or not 0 <= about.sinks <= 256:
        raise BadContainer("profile", "sizes out of range")
    if len(about.levels) > 32 or any(not (math.isfinite(each.step) and each.step > 0) for each in about.levels):
        raise BadContainer("profile", "levels out of range")
    if 2 * len(about.inv_freq) > about.dim or not all(map(math.isfinite, (*about.inv_freq, about.factor or math.inf))):
        raise BadContainer("profile", "no rope")
    if about.inv_freq and not head.sane(0, Rope(about.inv_freq, about.interleaved, about.factor)):
        raise BadContainer("profile", "no rope")
    for place in about.blocks:
        layers, heads = place.first_layer + place.layers, place.first_head + place.heads
        if min(place.first_layer, place.first_head) < 0 or min(place.layers, place.heads) < 1:
            raise BadContainer("profile", f"{place}")
        if layers > about.layers or heads > about.heads or place.kv not in ("kv", "k", "v"):
            raise BadContainer("profile", f"{place}")
        channels = _channels(about, place)
        if not 1 <= place.kept <= channels <= MOST_CHANNELS:
            raise BadContainer("profile", f"{place.kept} coefficients of {channels} channels")


def _block(place: Place, channels: int, levels: int, body: memoryview) -> tuple[Block, memoryview]:
    def array(dtype: str, *sizes: int) -> NDArray[np.generic]:
        nonlocal body
        raw, body = head.cut(body, np.dtype(dtype).itemsize * math.prod(sizes))
        return np.array(np.frombuffer(raw, dtype).reshape(sizes), dtype)  # aligned

    mean, weight, scale = (array("<f4", channels) for _ in range(3))
    matrix, defaults = array("<i2", channels, place.kept), array("u1", levels, place.kept)
    for each in (mean, weight, scale):
        if not np.isfinite(each).all() or np.abs(each).max() > 1e30:
            raise BadContainer("profile", "a number that is none")
    if defaults.max() >= IDS:
        raise BadContainer("profile", "a row id that is none")
    return Block(place, mean, weight, scale, matrix, defaults), body  # type: ignore[arg-type]


def _pack(about: Description, blocks: tuple[Block, ...]) -> bytes:
    text = msgspec.json.encode(about)
    pieces = [_FRONT.pack(MAGIC, VERSION, 0, len(text)), text]
    for block in blocks:
        pieces += [np.ascontiguousarray(each, "<f4").tobytes() for each in (block.mean, block.weight, block.scale)]
        pieces += [np.ascontiguousarray(block.matrix, "<i2").tobytes(), np.ascontiguousarray(block.defaults).tobytes()]
    return b"".join(pieces)
