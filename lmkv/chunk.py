"""The chunk container, format version 1: one 4 KiB header page, then parts padded to 4 KiB.

``docs/format.md`` is the contract. The same bytes are a slot in host memory, a file, a value and a
frame. Nothing here allocates by what a header says: a header is checked (checksum, identity, every
bound) before any number in it is used, and whatever fails is ``BadContainer``.
"""

from __future__ import annotations

import re
import struct
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lmkv import _native
from lmkv.errors import BadContainer, BadInput
from lmkv.keys import ChunkKey
from lmkv.spec import MAX_PAGES, KVSpec

MAGIC = b"LMKVCHNK"
VERSION = 1
PAGE = 4096
HEADER_BYTES = PAGE
MAX_PARTS = 88
LOSSY, SEALED = 1, 2  # header flags
AS_IS = 1  # part flag: the codec did not pay, the part is stored raw
PART_BYTES_AIM = 1 << 20
MAX_RAW_PARTS = 64

_HEAD = struct.Struct("<8sHHIQ16s8s32s8sIHHQII32sQ16si16sIQQH")
_PART = struct.Struct("<HHIQQQQ")
_TABLE = 512
_CHECKED = PAGE - 8
_U64 = struct.Struct("<Q")
_NAME = re.compile(rb"[a-z0-9_.+-]*\0*")


class Part(NamedTuple):
    """Whole layers of a group, contiguous in the container.

    first_layer: place in the group's layer list. offset: from the container's start, a multiple of
    4096. stored: bytes there; raw: bytes once decoded. checksum: XXH3-64 of the stored bytes with
    their zero padding, 0 until sealed.
    """

    first_layer: int
    layers: int
    flags: int
    offset: int
    stored: int
    raw: int
    checksum: int

    @property
    def stop(self) -> int:
        """Where the part's padding ends."""
        return self.offset + padded(self.stored)


@dataclass(frozen=True)
class Header:
    """What a container says about itself. Units: bytes, tokens, unix seconds (expires 0: never).

    page_mask: bit j, page j of the chunk is present. geometry: ``KVSpec.geometry_id``.
    """

    key: ChunkKey
    token_start: int
    token_count: int
    page_tokens: int
    page_mask: int
    geometry: int
    parts: tuple[Part, ...]
    total_bytes: int
    flags: int = 0
    codec: str = "raw"
    level: int = 0
    profile: str = ""
    created: int = 0
    expires: int = 0

    @property
    def sealed(self) -> bool:
        """The part checksums are there."""
        return bool(self.flags & SEALED)

    @property
    def lossy(self) -> bool:
        """Decoding does not give back the exact bytes that were computed."""
        return bool(self.flags & LOSSY)

    @property
    def raw_bytes(self) -> int:
        """Container bytes once decoded."""
        return HEADER_BYTES + sum(padded(part.raw) for part in self.parts)

    @property
    def pages(self) -> int:
        """Pages each layer has room for."""
        return self.token_count // self.page_tokens


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to 4 KiB."""
    return (nbytes + PAGE - 1) & -PAGE


@lru_cache(maxsize=256)
def layout(spec: KVSpec, group: int) -> tuple[Part, ...]:
    """The parts of a raw container: at most 64, of whole layers, and 1 MiB or more if possible.

    Layers are spread evenly; inside a part they follow each other without padding.
    """
    layers, nbytes = len(spec.groups[group].layers), spec.chunk_bytes(group)
    per_layer = nbytes // layers
    parts, at = [], HEADER_BYTES
    for first, stop in pairwise(bounds(layers, per_layer)):
        size = (stop - first) * per_layer
        parts.append(Part(first, stop - first, 0, at, size, size, 0))
        at = parts[-1].stop
    return tuple(parts)


def bounds(layers: int, layer_bytes: int) -> list[int]:
    """Where the parts of so many layers begin, and where the last one ends."""
    count = min(MAX_RAW_PARTS, max(1, layers // -(-PART_BYTES_AIM // layer_bytes)))
    return [layers * i // count for i in range(count + 1)]


def container_bytes(spec: KVSpec, group: int) -> int:
    """Size of a raw container, header page and padding included."""
    return layout(spec, group)[-1].stop


def new_header(spec: KVSpec, key: ChunkKey, page_mask: int = 0, expires: int = 0, created: int | None = None) -> Header:
    """The header of a raw, unsealed container for ``key``, whose depth is its place in the prompt.

    page_mask: pages present, 0 for all. created: now when None.
    """
    parts, pages = layout(spec, key.group), spec.pages(key.group)
    return Header(
        key=key,
        token_start=key.depth * spec.chunk_tokens,
        token_count=spec.chunk_tokens,
        page_tokens=spec.chunk_tokens // pages,
        page_mask=page_mask or (1 << pages) - 1,
        geometry=spec.geometry_id,
        parts=parts,
        total_bytes=parts[-1].stop,
        created=int(time.time()) if created is None else created,
        expires=expires,
    )


def check_layout(header: Header, spec: KVSpec) -> None:
    """BadContainer("geometry") unless decoding gives exactly the parts that ``spec`` lays out."""
    same = header.geometry == spec.geometry_id and header.token_count == spec.chunk_tokens
    if same and header.key.group < len(spec.groups):
        wanted = layout(spec, header.key.group)
        if [(p.layers, p.raw) for p in header.parts] == [(p.layers, p.raw) for p in wanted]:
            return
    raise BadContainer("geometry", f"group {header.key.group} is laid out otherwise")


def write_header(view: memoryview, header: Header) -> None:
    """Write the header page, with its own checksum, to the first 4096 bytes of ``view``.

    BadInput: a value that its field cannot hold, more than 88 parts.
    """
    page, key = bytearray(HEADER_BYTES), header.key
    names = header.codec.encode(), header.profile.encode()
    fits = [len(field) for field in key[:4]] == [16, 8, 32, 8] and max(map(len, names)) <= 16
    try:
        if not fits or not 0 < len(header.parts) <= MAX_PARTS:
            raise ValueError(f"key {key}, codec {names}, {len(header.parts)} parts")
        _HEAD.pack_into(
            page, 0, MAGIC, VERSION, header.flags, HEADER_BYTES, header.total_bytes, *key,
            header.token_start, header.token_count, header.page_tokens,
            header.page_mask.to_bytes(32, "little"), header.geometry, names[0], header.level,
            names[1], 0, header.created, header.expires, len(header.parts),
        )  # fmt: skip
        for number, part in enumerate(header.parts):
            _PART.pack_into(page, _TABLE + number * _PART.size, *part)
    except (struct.error, ValueError, OverflowError) as error:
        raise BadInput(f"a header that cannot be written: {error}") from None
    _U64.pack_into(page, _CHECKED, _native.xxh3_64(memoryview(page)[:_CHECKED]))
    view[:HEADER_BYTES] = page


def parse(view: memoryview, key: ChunkKey | None = None) -> Header:
    """The header in the first 4096 bytes of ``view``, with every number in it checked.

    Checks in the order of docs/format.md. BadContainer reasons: short, magic, version, checksum,
    identity (another chunk than ``key``), flags, bounds, codec, parts, reserved.
    """
    if len(view) < HEADER_BYTES:
        raise BadContainer("short", f"{len(view)} bytes hold no header page")
    page = bytes(view[:HEADER_BYTES])  # checked and used as one, whatever writes to the slot
    magic, version, flags, header_bytes, total, *fields, count = _HEAD.unpack_from(page)
    if magic != MAGIC:
        raise BadContainer("magic")
    if version != VERSION or header_bytes != HEADER_BYTES:
        raise BadContainer("version", f"version {version} with {header_bytes} header bytes")
    if _native.xxh3_64(page[:_CHECKED]) != _U64.unpack_from(page, _CHECKED)[0]:
        raise BadContainer("checksum", "header")
    found = ChunkKey(*fields[:7])
    if key is not None and found != key:
        raise BadContainer("identity", f"holds {found}")
    if flags & ~(LOSSY | SEALED):
        raise BadContainer("flags", f"{flags:#x}")
    start, tokens, page_tokens, raw_mask, geometry, codec, level, profile, *rest = fields[7:]
    mask, pages = int.from_bytes(raw_mask, "little"), tokens // page_tokens if page_tokens else 0
    if not 0 < pages <= MAX_PAGES or tokens % page_tokens or not 0 < mask < 1 << pages:
        raise BadContainer("bounds", f"{tokens} tokens in pages of {page_tokens}, mask {mask:#x}")
    if not (_NAME.fullmatch(codec) and codec[0] and _NAME.fullmatch(profile)):
        raise BadContainer("codec", f"{codec!r} {profile!r}")
    if not 0 < count <= MAX_PARTS:
        raise BadContainer("parts", f"{count}")
    end = _TABLE + count * _PART.size
    unused = page[_HEAD.size : _TABLE] + page[end:_CHECKED]
    if rest[0] or unused != bytes(len(unused)):
        raise BadContainer("reserved", "bytes that must be zero are not")
    parts = tuple(map(Part._make, _PART.iter_unpack(page[_TABLE:end])))
    _check_parts(parts, pages, codec.rstrip(b"\0") == b"raw", total)
    names = [name.rstrip(b"\0").decode("ascii") for name in (codec, profile)]
    return Header(
        found, start, tokens, page_tokens, mask, geometry, parts, total, flags,
        names[0], level, names[1], *rest[1:],
    )  # fmt: skip


def _check_parts(parts: tuple[Part, ...], pages: int, raw_codec: bool, total: int) -> None:
    """Parts follow each other over all layers without a gap, up to the container's end."""
    layer, end = 0, HEADER_BYTES
    for first, layers, flags, offset, stored, raw, _ in parts:
        if first != layer or offset != end or flags > AS_IS or not layers:
            raise BadContainer("parts", f"layer {first}, offset {offset}, flags {flags:#x}")
        if not stored or not raw or raw % (layers * pages):
            raise BadContainer("parts", f"{stored} bytes for {raw} of {layers} layers")
        if stored != raw and (raw_codec or flags):
            raise BadContainer("parts", f"{stored} raw bytes for {raw}")
        layer += layers
        end = offset + padded(stored)
    if end != total:
        raise BadContainer("bounds", f"parts end at {end} of {total}")


def covering(header: Header, first_layer: int, stop_layer: int) -> tuple[Part, ...]:
    """The parts that hold the layers [first_layer, stop_layer) of the group's list.

    Read the bytes from the first one's ``offset`` to the last one's ``stop``, then `verify_parts`.
    """
    last = header.parts[-1]
    if not 0 <= first_layer < stop_layer <= last.first_layer + last.layers:
        raise BadInput(f"no layers [{first_layer}, {stop_layer})")
    return tuple(
        part for part in header.parts if part.first_layer < stop_layer and first_layer < part.first_layer + part.layers
    )


def zero_padding(view: memoryview, header: Header) -> None:
    """Zero what is not payload: the end of each part, and in raw parts the room of absent pages.

    Slots are reused; another chunk's bytes must not leave with this one.
    """
    absent = [j for j in range(header.pages) if not header.page_mask >> j & 1]
    for part in header.parts:
        end = part.offset + part.stored
        if end != part.stop:
            view[end : part.stop] = bytes(part.stop - end)
        if absent and header.codec == "raw":
            room = np.frombuffer(view[part.offset : end], np.uint8)
            room.reshape(part.layers, header.pages, -1)[:, absent] = 0


def seal(target: memoryview | int, header: Header) -> Header:
    """Zero the padding, compute the part checksums, write the header page; returns that header.

    target: the container's bytes, or their address. From here on the bytes may leave the process.
    A header that is sealed already is returned as it is: checksums are computed once.
    """
    if header.sealed:
        return header
    view = _native.memory(target, header.total_bytes) if isinstance(target, int) else target
    zero_padding(view, header)
    sums = _checksums(view, header.parts, 0)
    parts = tuple(part._replace(checksum=each) for part, each in zip(header.parts, sums, strict=True))
    sealed = replace(header, parts=parts, flags=header.flags | SEALED)
    write_header(view, sealed)
    return sealed


def verify(view: memoryview, header: Header, key: ChunkKey | None = None) -> None:
    """Check a whole container against its parsed header, and the header against ``key``.

    BadContainer reasons: identity, short, unsealed, checksum.
    """
    if key is not None and header.key != key:
        raise BadContainer("identity", f"holds {header.key}")
    if len(view) < header.total_bytes:
        raise BadContainer("short", f"{len(view)} of {header.total_bytes} bytes")
    if not header.sealed:
        raise BadContainer("unsealed")
    verify_parts(view, header.parts)


def verify_parts(view: memoryview, parts: tuple[Part, ...], base: int = 0) -> None:
    """Check some parts of a sealed container, where ``view`` begins at its byte ``base``."""
    if parts[0].offset < base or parts[-1].stop - base > len(view):
        raise BadContainer("short", f"{len(view)} bytes from {base}")
    for part, found in zip(parts, _checksums(view, parts, base), strict=True):
        if found != part.checksum:
            raise BadContainer("checksum", f"layers from {part.first_layer}")


def _checksums(view: memoryview, parts: tuple[Part, ...], base: int) -> list[int]:
    address = np.frombuffer(view, np.uint8).ctypes.data
    offsets = np.array([part.offset - base for part in parts], np.int64)
    lengths = np.array([padded(part.stored) for part in parts], np.int64)
    sums: list[int] = _native.checksums(address, offsets, lengths).tolist()
    return sums
