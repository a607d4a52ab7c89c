"""KV through a codec and back, in containers as a tier keeps them, with every byte and second counted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lmkv import chunk
from lmkv.chunk import Header
from lmkv.codec import Codec, decode_container, encode_container, get, kind, names
from lmkv.codec.report.model import KV, Geometry
from lmkv.codec.shape import split
from lmkv.errors import ConfigError
from lmkv.keys import ChunkKey

LEVELS = range(16)  # that a lossy codec is asked for


@dataclass
class Coded:
    """KV after a codec. One number for each chunk: bits, of the encoded streams; stored, bytes of the container with
    its header page and padding; encode, decode and copy, seconds (copy: the raw bytes, by memcpy); none where the
    codec is only simulated."""

    kv: KV
    bits: list[float]
    stored: list[int] = field(default_factory=list)
    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)


class Method(Protocol):
    """Something that makes KV smaller. profile_bytes: what a reader must have beside the streams."""

    @property
    def name(self) -> str:
        """For tables: ``klt:3``."""

    @property
    def profile_bytes(self) -> int:
        """0 without a profile."""

    def code(self, kv: KV) -> Coded:
        """Take whole chunks of KV, from position 0 on, through it."""


@dataclass(frozen=True)
class ThroughCodec:
    """A codec of `lmkv.codec`."""

    codec: Codec
    geometry: Geometry
    name: str
    profile_bytes: int = 0

    def code(self, kv: KV) -> Coded:
        """One container a chunk, encoded and decoded as a tier does it."""
        spec, result = self.geometry.spec, Coded(KV(np.empty_like(kv.k), np.empty_like(kv.v)), [])
        size = chunk.container_bytes(spec, 0)
        raw, packed, back = (memoryview(bytearray(size)) for _ in range(3))
        for depth in range(kv.k.shape[2] // spec.chunk_tokens):
            header = chunk.new_header(spec, ChunkKey(bytes(16), bytes(8), bytes(32), bytes(8), depth, 0, 0), created=0)
            tokens = slice(depth * spec.chunk_tokens, (depth + 1) * spec.chunk_tokens)
            self.fill(raw, header, kv.part(tokens))
            start = time.perf_counter()
            encoded = encode_container(raw, header, self.codec, packed, self.geometry.meaning.of_part)
            middle = time.perf_counter()
            if encoded is None:
                encoded = header
                packed[:] = raw
            begin = time.perf_counter()
            decode_container(packed, encoded, back)
            end = time.perf_counter()
            raw[:] = back
            result.copy.append(time.perf_counter() - end)
            result.encode.append(middle - start)
            result.decode.append(end - begin)
            result.bits.append(8.0 * sum(part.stored for part in encoded.parts))
            result.stored.append(encoded.total_bytes)
            for stored, given in _places(back, header, self.geometry, result.kv.part(tokens)):
                given[:] = stored
        return result

    def fill(self, raw: memoryview, header: Header, kv: KV) -> None:
        """Write one chunk's KV into a raw container, but for its header page."""
        for stored, given in _places(raw, header, self.geometry, kv):
            stored[:] = given


def chosen(wanted: Sequence[str], geometry: Geometry, profile: str = "", profile_bytes: int = 0) -> list[ThroughCodec]:
    """Codecs by name, ``klt:3`` for one level; none named: all there are. A lossy codec comes at each of its levels.

    profile: an id; codecs that need one are left out without it, where nobody named them. ConfigError: no such codec
    or level.
    """
    found = []
    for word in wanted or names():
        name, colon, text = word.partition(":")
        if colon and not text.removeprefix("-").isdigit():
            raise ConfigError("--codecs", f"{word!r}: the level is a number, as in klt:3")
        try:
            codecs = [open_codec(name, int(text), profile)] if colon else _levels(name, profile)
        except ConfigError as error:
            if wanted:
                raise ConfigError("--codecs", f"{word}: {error.message}") from None
            continue
        several = len(codecs) > 1 or colon
        for codec in codecs:
            label = f"{name}:{codec.level}" if several else name
            found.append(ThroughCodec(codec, geometry, label, profile_bytes if codec.profile else 0))
    return found


def open_codec(name: str, level: int | None, profile: str) -> Codec:
    """A codec, with the profile where it takes one."""
    if profile:
        try:
            return get(name, level, profile)
        except ConfigError as error:
            if error.key != "profile":
                raise
    return get(name, level)


def _levels(name: str, profile: str) -> list[Codec]:
    if kind(name).exact:
        return [open_codec(name, None, profile)]
    codecs = [codec for level in LEVELS if (codec := _try(name, level, profile))]
    return codecs or [open_codec(name, None, profile)]


def _try(name: str, level: int, profile: str) -> Codec | None:
    try:
        return open_codec(name, level, profile)
    except ConfigError:
        return None


def _places(raw: memoryview, header: Header, geometry: Geometry, kv: KV) -> Iterator[tuple[Any, Any]]:
    """Views of the same values in a raw container and in one chunk's KV: [layers, tokens, heads, dim] of each part."""
    for part in header.parts:
        layers = slice(part.first_layer, part.first_layer + part.layers)
        shape = geometry.meaning.of_part(header, part)
        for place, side in zip(split(raw[part.offset : part.offset + part.raw], shape), kv, strict=True):
            yield place[:, 0], side[layers].swapaxes(1, 2)


def profile_bits(profile_bytes: int, raw_bytes: float = 1e9) -> float:
    """What a profile adds to a value's bits when it serves ``raw_bytes`` of 16-bit KV."""
    return profile_bytes * 8 / (raw_bytes / 2)
