"""What a codec is, how one is found, and how a whole container goes through it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Literal

from lmkv import chunk
from lmkv.chunk import AS_IS, HEADER_BYTES, LOSSY, PAGE, SEALED, Header, Part, padded
from lmkv.codec.shape import Shape
from lmkv.errors import BadContainer, BadInput, ConfigError, nearest

GROUP = "lmkv.codecs"
BUILT_IN = {
    "raw": "lmkv.codec.raw:Raw",
    "zstd": "lmkv.codec.zstd:Zstd",
    "xpl": "lmkv.codec.xpl:Xpl",
    "fp8": "lmkv.codec.scaled:Fp8",
    "q8": "lmkv.codec.scaled:Q8",
    "cachegen": "lmkv.codec.cachegen:CacheGen",
    "kch": "lmkv.codec.kch:Kch",
    "klt": "lmkv.codec.klt:Klt",
}


class Codec(ABC):
    """Makes a part's bytes smaller and gives them back. Thread-safe; keeps no buffer.

    A codec's class is called with the level, None for its default, and with the profile's id as ``profile=`` where one
    is set. name: 1 to 16 characters of ``a-z 0-9 _ . + -``, as containers carry it. exact: decoding gives the same
    bytes. needs: what `encode` must be told of the bytes: nothing ("bytes"), their dtype ("dtype"), or also the axes
    ("geometry"). level: as set, written to headers for people; decoding does not need it. profile: id of the profile
    that streams are decoded with, 16 hex digits, "" for none.
    """

    name: str
    exact: bool = True
    needs: Literal["bytes", "dtype", "geometry"] = "bytes"

    def __init__(self, level: int, profile: str = "") -> None:
        self.level, self.profile = level, profile

    @abstractmethod
    def encode(self, src: memoryview, dst: memoryview, shape: Shape | None = None) -> int:
        """Encode all of ``src`` (never empty); the bytes written to ``dst``, 0 when too small or not worth it.

        shape: what ``src`` is; never None where ``needs`` says more than "bytes", with ``axes`` where it says
        "geometry".
        """

    @abstractmethod
    def decode(self, src: memoryview, dst: memoryview) -> None:
        """Decode all of ``src`` to exactly ``len(dst)`` bytes, never writing past them.

        BadContainer: ``src`` is not what ``encode`` writes, or holds more or fewer bytes.
        """


def checked_level(codec: str, level: int | None, default: int, levels: int, profile: str) -> int:
    """The level of a codec that has so many, 0 the finest, and no profiles. ConfigError: it is none, or one is set."""
    if profile:
        raise ConfigError("profile", f"the codec {codec} has no profiles: leave it out")
    level = default if level is None else level
    if not 0 <= level < levels:
        raise ConfigError("level", f"{codec} levels go from 0 to {levels - 1}, not {level}")
    return level


@cache
def _known() -> dict[str, EntryPoint]:
    # The built-in ones come last and win; they also work where lmkv runs uninstalled.
    built_in = [EntryPoint(name, value, GROUP) for name, value in BUILT_IN.items()]
    return {point.name: point for point in [*entry_points(group=GROUP), *built_in]}


def names() -> list[str]:
    """Every codec that can be asked for."""
    return sorted(_known())


def kind(name: str) -> type[Codec]:
    """The class of the codec ``name``. ConfigError: there is none, or it cannot be loaded."""
    point = _known().get(name)
    if point is None:
        raise ConfigError("codec", f"there is no codec {name!r}{nearest(name, _known())}")
    try:
        found: type[Codec] = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError("codec", f"{name!r} cannot be loaded: {error}") from None
    return found


def get(name: str, level: int | None = None, profile: str | None = None) -> Codec:
    """The codec ``name`` at ``level`` (None: its default) with the profile of id ``profile`` (None: without).

    ConfigError: no such codec, level or profile; a profile for a codec that has none.
    """
    codec = kind(name)
    if not profile:
        return codec(level)  # type: ignore[arg-type]
    try:
        return codec(level, profile=profile)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError("profile", f"the codec {name} has no profiles: leave it out") from None


class Unknown(BadContainer):
    """A container that cannot be decoded here, but may be elsewhere: nothing is wrong with it."""


@cache
def _decoder(name: str, profile: str) -> Codec:
    try:
        return get(name, None, profile)
    except ConfigError as error:
        raise Unknown("codec", f"cannot decode {name!r}: {error}") from None


ShapeOf = Callable[[Header, Part], Shape | None]


def encode_container(
    src: memoryview, header: Header, codec: Codec, dst: memoryview, shape_of: ShapeOf | None = None
) -> Header | None:
    """Encode a raw container's parts into ``dst``, padding zeroed; None when that saves no page.

    shape_of: what a part's bytes are, or None where that is not known: a codec that needs it encodes nothing then.

    Where pages are absent, ``src`` must have been through `chunk.zero_padding`. A part that does
    not shrink is kept as it is. The header page of ``dst`` is left to `chunk.seal`.
    """
    if header.codec != "raw":
        raise BadInput(f"a container of codec {header.codec} cannot be encoded again")
    limit = min(len(dst), header.total_bytes - PAGE)
    at, parts = HEADER_BYTES, []
    for part in header.parts:
        raw = src[part.offset : part.offset + part.raw]
        room = dst[at : min(limit, at + padded(part.raw) - PAGE)]
        stored = _encode(codec, raw, room, shape_of(header, part) if shape_of else None)
        flags = 0 if stored else AS_IS
        if not stored:
            if at + part.raw > limit:
                return None
            stored, dst[at : at + part.raw] = part.raw, raw
        parts.append(part._replace(flags=flags, offset=at, stored=stored, checksum=0))
        at = parts[-1].stop
    if at > limit:
        return None
    flags = (header.flags | (0 if codec.exact else LOSSY)) & ~SEALED
    encoded = replace(
        header, parts=tuple(parts), total_bytes=at, flags=flags, codec=codec.name, level=codec.level,
        profile=codec.profile,
    )  # fmt: skip
    chunk.zero_padding(dst, encoded)
    return encoded


def _encode(codec: Codec, raw: memoryview, room: memoryview, shape: Shape | None) -> int:
    if codec.needs == "bytes":
        return codec.encode(raw, room)
    if shape is None or (codec.needs == "geometry" and not shape.axes):
        return 0
    return codec.encode(raw, room, shape)


def decode_container(src: memoryview, header: Header, dst: memoryview) -> Header:
    """Decode a verified container's parts into ``dst`` as a raw one, padding zeroed.

    Returns the raw header, unsealed and not written. BadContainer: unknown codec or profile, bad
    stream, ``dst`` too small.
    """
    codec = _decoder(header.codec, header.profile)
    if header.raw_bytes > len(dst):
        raise BadContainer("bounds", f"{header.raw_bytes} bytes decoded, room for {len(dst)}")
    at, parts = HEADER_BYTES, []
    for part in header.parts:
        body, out = src[part.offset : part.offset + part.stored], dst[at : at + part.raw]
        if part.flags & AS_IS:
            out[:] = body
        else:
            codec.decode(body, out)
        parts.append(part._replace(flags=0, offset=at, stored=part.raw, checksum=0))
        at = parts[-1].stop
    raw = replace(
        header, parts=tuple(parts), total_bytes=at, flags=header.flags & ~SEALED, codec="raw",
        level=0, profile="",
    )  # fmt: skip
    chunk.zero_padding(dst, raw)
    return raw
