"""What a codec is, how one is found, and how a whole container goes through it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from lmkv import chunk
from lmkv.chunk import AS_IS, HEADER_BYTES, LOSSY, PAGE, SEALED, Header, padded
from lmkv.errors import BadContainer, BadInput, ConfigError, nearest

GROUP = "lmkv.codecs"
BUILT_IN = {"raw": "lmkv.codec.raw:Raw", "zstd": "lmkv.codec.zstd:Zstd"}


class Codec(ABC):
    """Makes a part's bytes smaller and gives them back. Thread-safe; keeps no buffer.

    name: 1 to 16 characters of ``a-z 0-9 _ . + -``, as containers carry it. exact: decoding gives
    the same bytes. level: as set, written to headers for people; decoding does not need it.
    """

    name: str
    exact: bool = True

    def __init__(self, level: int) -> None:
        self.level = level

    @abstractmethod
    def encode(self, src: memoryview, dst: memoryview) -> int:
        """Encode all of ``src`` (never empty); the bytes written to ``dst``, 0 when too small."""

    @abstractmethod
    def decode(self, src: memoryview, dst: memoryview) -> None:
        """Decode all of ``src`` to exactly ``len(dst)`` bytes, never writing past them.

        BadContainer: ``src`` is not what ``encode`` writes, or holds more or fewer bytes.
        """


@cache
def _known() -> dict[str, EntryPoint]:
    # The built-in ones come last and win; they also work where lmkv runs uninstalled.
    built_in = [EntryPoint(name, value, GROUP) for name, value in BUILT_IN.items()]
    return {point.name: point for point in [*entry_points(group=GROUP), *built_in]}


def get(name: str, level: int | None = None) -> Codec:
    """The codec ``name`` at ``level`` (None: its default). ConfigError: no such codec or level."""
    point = _known().get(name)
    if point is None:
        raise ConfigError("codec", f"there is no codec {name!r}{nearest(name, _known())}")
    codec: Codec = point.load()(level)
    return codec


@cache
def _decoder(name: str) -> Codec:
    try:
        return get(name)
    except (ConfigError, ImportError) as error:
        raise BadContainer("codec", f"cannot decode {name!r}: {error}") from None


def encode_container(src: memoryview, header: Header, codec: Codec, dst: memoryview) -> Header | None:
    """Encode a raw container's parts into ``dst``, padding zeroed; None when that saves no page.

    Where pages are absent, ``src`` must have been through `chunk.zero_padding`. A part that does
    not shrink is kept as it is. The header page of ``dst`` is left to `chunk.seal`.
    """
    if header.codec != "raw":
        raise BadInput(f"a container of codec {header.codec} cannot be encoded again")
    limit = min(len(dst), header.total_bytes - PAGE)
    at, parts = HEADER_BYTES, []
    for part in header.parts:
        raw = src[part.offset : part.offset + part.raw]
        stored = codec.encode(raw, dst[at : min(limit, at + padded(part.raw) - PAGE)])
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
    encoded = replace(header, parts=tuple(parts), total_bytes=at, flags=flags, codec=codec.name, level=codec.level)
    chunk.zero_padding(dst, encoded)
    return encoded


def decode_container(src: memoryview, header: Header, dst: memoryview) -> Header:
    """Decode a verified container's parts into ``dst`` as a raw one, padding zeroed.

    Returns the raw header, unsealed and not written. BadContainer: unknown codec, bad stream,
    ``dst`` too small.
    """
    codec = _decoder(header.codec)
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
