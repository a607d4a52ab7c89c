"""The chunk container: golden bytes, layout, and what a reader refuses."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv import _native, chunk
from lmkv.chunk import Header, Part
from lmkv.errors import BadContainer, BadInput
from lmkv.keys import ChunkKey
from lmkv.spec import SHAPES, Kind, KVSpec, LayerGroup

GOLDEN = Path(__file__).parent / "data" / "container_v1.txt"
SPEC = KVSpec(
    (
        LayerGroup(Kind.FULL, (0, 2), 16, 1, 8),
        LayerGroup(Kind.SLIDING, (1, 3, 5), 16, 8, 128, window=100, page_padding=16),
    ),
    chunk_tokens=256,
    shards=2,
)
KEY = ChunkKey(
    bytes(range(16)), b"tenant-8", bytes(range(32, 64)), bytes(range(24, 32)), 5, 1, 1
)  # fmt: skip
MASK = 0xFE00
U64 = struct.Struct("<Q")


def body(nbytes: int) -> bytes:
    """Payload byte i of the golden container, counted from the container's start: (i * 7 + i // 4096) % 256."""
    at = np.arange(nbytes, dtype=np.uint32)
    return ((at * 7 + at // 4096) % 256).astype(np.uint8).tobytes()


def sealed(spec: KVSpec = SPEC, key: ChunkKey = KEY, **more: Any) -> tuple[memoryview, Header]:
    header = chunk.new_header(spec, key, created=1_700_000_000, **more)
    view = memoryview(bytearray(body(header.total_bytes)))
    return view, chunk.seal(view, header)


def reseal(page: bytearray) -> memoryview:
    """Give a header page that was tampered with a checksum that is right again."""
    U64.pack_into(page, 4088, xxhash.xxh3_64_intdigest(bytes(page[:4088])))
    return memoryview(page)


def reason(view: Any, key: ChunkKey | None = None) -> str:
    with pytest.raises(BadContainer) as caught:
        chunk.parse(memoryview(view), key)
    return caught.value.reason


def tampered(offset: int, layout: str, *values: Any) -> str:
    page = bytearray(sealed()[0][:4096])
    struct.pack_into(layout, page, offset, *values)
    return reason(reseal(page))


# Format.


def golden_page() -> bytes:
    page = bytearray(4096)
    for line in GOLDEN.read_text().splitlines():
        if line and not line.startswith("#"):
            offset, data = line.split(":")
            raw = bytes.fromhex(data)
            page[int(offset) : int(offset) + len(raw)] = raw
    return bytes(page)


def page_by_hand() -> tuple[bytes, bytes]:
    """The golden container from the tables of docs/format.md: (whole container, its header page)."""
    per_layer = 16 * (16 * 8 * 256 * 2 + 16)
    stored = 1 * per_layer
    room = -(-stored // 4096) * 4096
    total = 4096 + 3 * room
    whole = bytearray(body(total))
    whole[:4096] = bytes(4096)
    for i in range(3):
        at = 4096 + i * room
        whole[at : at + 9 * (per_layer // 16)] = bytes(9 * (per_layer // 16))
        whole[at + stored : at + room] = bytes(room - stored)
    put = struct.pack_into
    whole[0:8] = b"LMKVCHNK"
    put("<H", whole, 8, 1)
    put("<H", whole, 10, 2)
    put("<I", whole, 12, 4096)
    put("<Q", whole, 16, total)
    whole[24:40] = bytes(range(16))
    whole[40:48] = b"tenant-8"
    whole[48:80] = bytes(range(32, 64))
    whole[80:88] = bytes(range(24, 32))
    put("<I", whole, 88, 5)
    put("<H", whole, 92, 1)
    put("<H", whole, 94, 1)
    put("<Q", whole, 96, 1280)
    put("<I", whole, 104, 256)
    put("<I", whole, 108, 16)
    put("<I", whole, 112, 0xFE00)
    put("<Q", whole, 144, SPEC.geometry_id)
    whole[152:155] = b"raw"
    put("<i", whole, 168, 0)
    put("<Q", whole, 192, 1_700_000_000)
    put("<Q", whole, 200, 1_800_000_000)
    put("<H", whole, 208, 3)
    for i in range(3):
        at = 4096 + i * room
        checksum = xxhash.xxh3_64_intdigest(bytes(whole[at : at + room]))
        put("<HHIQQQQ", whole, 512 + 40 * i, i, 1, 0, at, stored, stored, checksum)
    put("<Q", whole, 4088, xxhash.xxh3_64_intdigest(bytes(whole[:4088])))
    return bytes(whole), bytes(whole[:4096])


def test_version_1_bytes_are_golden() -> None:
    view, header = sealed(page_mask=MASK, expires=1_800_000_000)
    whole, page = page_by_hand()
    assert bytes(view) == whole
    assert page == golden_page()
    assert chunk.parse(memoryview(golden_page()), KEY) == header
    chunk.verify(memoryview(whole), header, KEY)


def test_golden_header_reads_as_written() -> None:
    header = chunk.parse(memoryview(golden_page()))
    assert header.key == KEY
    assert (header.token_start, header.token_count, header.page_tokens) == (1280, 256, 16)
    assert (header.page_mask, header.geometry) == (0xFE00, SPEC.geometry_id)
    assert (header.codec, header.level, header.profile) == ("raw", 0, "")
    assert (header.created, header.expires) == (1_700_000_000, 1_800_000_000)
    assert header.sealed
    assert not header.lossy
    assert header.total_bytes == header.raw_bytes == chunk.container_bytes(SPEC, 1) == 3_162_112
    assert header.parts[2].first_layer == 2
    assert header.parts[2].stop == header.total_bytes


names = st.text("abcz019_.+-", min_size=1, max_size=16)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    pages = draw(st.integers(1, 256))
    codec = draw(names)
    parts: list[Part] = []
    layer, at = 0, 4096
    for _ in range(draw(st.integers(1, 88))):
        layers = draw(st.integers(1, 700))
        raw = draw(st.integers(1, 10**6)) * layers * pages
        as_is = draw(st.booleans())
        stored = raw if as_is or codec == "raw" else draw(st.integers(1, 2**40))
        parts.append(Part(layer, layers, int(as_is), at, stored, raw, draw(st.integers(0, 2**64 - 1))))
        layer, at = layer + layers, parts[-1].stop
    page_tokens = draw(st.integers(1, 2**24 - 1))
    sizes, tops = (16, 8, 32, 8), (2**32 - 1, 2**16 - 1, 2**16 - 1)
    fields = [draw(st.binary(min_size=n, max_size=n)) for n in sizes]
    key = ChunkKey._make([*fields, *(draw(st.integers(0, top)) for top in tops)])
    u64 = st.integers(0, 2**64 - 1)
    return Header(
        key, draw(u64), pages * page_tokens, page_tokens, draw(st.integers(1, 2**pages - 1)),
        draw(u64), tuple(parts), at, draw(st.integers(0, 3)), codec,
        draw(st.integers(-(2**31), 2**31 - 1)), draw(names | st.just("")), draw(u64), draw(u64),
    )  # fmt: skip


@settings(max_examples=50)
@given(headers())
def test_any_header_survives_its_page(header: Header) -> None:
    if header.parts[-1].first_layer + header.parts[-1].layers > 2**16:
        return
    view = memoryview(bytearray(b"\xff" * 4096))
    chunk.write_header(view, header)
    assert chunk.parse(view, header.key) == header


@pytest.mark.parametrize(
    "change",
    [
        {"key": KEY._replace(scope=b"short")}, {"key": KEY._replace(tenant=bytes(9))},
        {"key": KEY._replace(depth=2**32)}, {"key": KEY._replace(group=-1)},
        {"codec": "x" * 17}, {"profile": "é" * 9}, {"level": 2**31}, {"page_mask": 1 << 256},
        {"page_mask": -1}, {"parts": ()}, {"total_bytes": -1}, {"expires": 2**64},
        {"parts": chunk.layout(SPEC, 1) * 30},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_header_that_does_not_fit_is_not_written(change: dict[str, Any]) -> None:
    view = memoryview(bytearray(4096))
    with pytest.raises(BadInput):
        chunk.write_header(view, replace(chunk.new_header(SPEC, KEY), **change))
    assert bytes(view) == bytes(4096)


# Layout.


@pytest.mark.parametrize(
    ("name", "group", "parts"),
    [
        ("llama-3.1-8b", 0, 32), ("llama-3.1-70b", 0, 64), ("smollm2-135m", 0, 5),
        ("deepseek-v3", 0, 15), ("gpt-oss-120b", 0, 9), ("gemma-3-27b", 1, 52),
    ],
)  # fmt: skip
def test_parts_are_whole_layers_of_a_mib_or_more(name: str, group: int, parts: int) -> None:
    spec = KVSpec.from_hf_config(SHAPES[name])
    layout = chunk.layout(spec, group)
    assert len(layout) == parts
    layers = len(spec.groups[group].layers)
    assert layout[0].first_layer == 0
    assert sum(part.layers for part in layout) == layers
    assert sum(part.raw for part in layout) == spec.chunk_bytes(group)
    assert all(part.raw == part.layers * spec.chunk_bytes(group) // layers for part in layout)
    if len(layout) < layers:
        assert len(layout) == 64 or min(part.raw for part in layout) >= 1 << 20
    for one, other in pairwise(layout):
        assert other.first_layer == one.first_layer + one.layers
        assert other.offset == one.stop
    assert all(part.offset % 4096 == 0 for part in layout)
    assert layout[0].offset == 4096


@given(layers=st.integers(1, 200), page=st.integers(1, 64), heads=st.integers(1, 64))
def test_every_layout_can_be_written_and_read(layers: int, page: int, heads: int) -> None:
    spec = KVSpec((LayerGroup(Kind.FULL, tuple(range(layers)), page, heads, 64),), page * 4)
    header = chunk.new_header(spec, KEY._replace(group=0))
    assert len(header.parts) <= 64
    view = memoryview(bytearray(4096))
    chunk.write_header(view, header)
    assert chunk.parse(view) == header
    chunk.check_layout(header, spec)


def test_recurrent_states_and_small_groups_have_one_part() -> None:
    spec = KVSpec((LayerGroup(Kind.RECURRENT, (0, 1, 2), 16, state_bytes=1000),), 64)
    header = chunk.new_header(spec, KEY._replace(group=0))
    assert header.parts == (Part(0, 3, 0, 4096, 3000, 3000, 0),)
    assert (header.page_tokens, header.page_mask, header.total_bytes) == (64, 1, 8192)
    assert chunk.container_bytes(SPEC, 0) == 4096 + 16 * 16 * 16 * 2 * 2


def test_new_header_states_the_place_in_the_prompt() -> None:
    header = chunk.new_header(SPEC, KEY)
    assert header.token_start == 5 * 256
    assert header.page_mask == 0xFFFF
    assert header.created > 1_700_000_000
    assert not header.sealed


def test_another_layout_is_refused() -> None:
    header = chunk.new_header(SPEC, KEY)
    chunk.check_layout(header, SPEC)
    for other in (
        replace(header, geometry=1),
        replace(header, key=KEY._replace(group=0)),
        replace(header, key=KEY._replace(group=9)),
        replace(header, parts=header.parts[:2]),
        replace(header, token_count=512),
    ):
        with pytest.raises(BadContainer) as caught:
            chunk.check_layout(other, SPEC)
        assert caught.value.reason == "geometry"


# Reading.


def test_every_single_bit_flip_of_a_header_is_refused() -> None:
    page = bytearray(sealed()[0][:4096])
    for at in range(4096):
        for bit in range(8):
            page[at] ^= 1 << bit
            try:
                chunk.parse(memoryview(page))
            except BadContainer:
                page[at] ^= 1 << bit
                continue
            pytest.fail(f"bit {bit} of byte {at} was not noticed")


def test_reasons_say_what_is_wrong() -> None:
    view, _ = sealed()
    assert reason(view[:4095]) == "short"
    assert reason(bytes(4096)) == "magic"
    assert tampered(8, "<H", 2) == "version"
    assert tampered(12, "<I", 8192) == "version"
    assert tampered(10, "<H", 4) == "flags"
    assert tampered(16, "<Q", 4096) == "bounds"
    assert tampered(104, "<I", 0) == "bounds"
    assert tampered(104, "<I", 255) == "bounds"
    assert tampered(104, "<I", 0xFFFFFFF0) == "bounds"
    assert tampered(104, "<I", 16 * 257) == "bounds"
    assert tampered(108, "<I", 0) == "bounds"
    assert tampered(112, "<I", 0) == "bounds"
    assert tampered(112, "<I", 0x10000) == "bounds"
    assert tampered(152, "<3s", b"RAW") == "codec"
    assert tampered(152, "<3s", b"r\0w") == "codec"
    assert tampered(152, "<3s", b"\0\0\0") == "codec"
    assert tampered(172, "<3s", b"\xffab") == "codec"
    assert tampered(188, "<I", 1) == "reserved"
    assert tampered(208, "<H", 0) == "parts"
    assert tampered(208, "<H", 89) == "parts"
    assert tampered(208, "<H", 2) == "reserved"
    assert tampered(210, "<H", 1) == "reserved"
    assert tampered(4080, "<H", 1) == "reserved"
    page = bytearray(view[:4096])
    page[100] ^= 1
    assert reason(page) == "checksum"


@pytest.mark.parametrize(
    ("field", "layout", "value"),
    [
        (0, "<H", 1), (2, "<H", 0), (2, "<H", 2), (4, "<I", 2), (8, "<Q", 0), (8, "<Q", 8192),
        (8, "<Q", 4097), (8, "<Q", 2**64 - 4096), (16, "<Q", 0), (16, "<Q", 2**64 - 1),
        (16, "<Q", 1_048_832 - 4096), (24, "<Q", 0), (24, "<Q", 1_048_833),
    ],
)  # fmt: skip
def test_every_field_of_a_part_is_checked(field: int, layout: str, value: int) -> None:
    assert tampered(512 + field, layout, value) == "parts"
    if (field, value) != (2, 2):  # two layers in the last part are another model, not another format
        assert tampered(512 + 80 + field, layout, value) in ("parts", "bounds")


def test_identity_comes_before_bounds() -> None:
    view, _ = sealed()
    chunk.parse(view, KEY)
    page = bytearray(view[:4096])
    U64.pack_into(page, 16, 2**63)
    for other in (
        KEY._replace(scope=bytes(16)), KEY._replace(tenant=bytes(8)), KEY._replace(digest=bytes(32)),
        KEY._replace(parent=bytes(8)), KEY._replace(depth=6), KEY._replace(group=0),
        KEY._replace(shard=0),
    ):  # fmt: skip
        assert reason(view, other) == "identity"
        assert reason(reseal(page), other) == "identity"


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*range(8, 212, 2), *range(512, 640, 2), *range(4000, 4088, 8)]),
            st.sampled_from(["<H", "<I", "<Q"]),
            st.integers(0, 2**64 - 1) | st.integers(0, 70_000),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_hostile_header_is_refused_or_in_bounds(changes: list[tuple[int, str, int]]) -> None:
    page = bytearray(sealed(SPEC, KEY._replace(group=0))[0][:4096])
    for offset, layout, value in changes:
        struct.pack_into(layout, page, offset, value % 2 ** (8 * struct.calcsize(layout)))
    try:
        header = chunk.parse(reseal(page))
    except BadContainer:
        return
    end = 4096
    for part in header.parts:
        assert part.offset == end
        assert 0 < part.stored <= part.stop - part.offset
        assert part.raw % (part.layers * header.pages) == 0
        end = part.stop
    assert end == header.total_bytes
    assert 0 < header.page_mask < 1 << header.pages
    assert header.pages <= 256


@given(st.binary(max_size=5000))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert reason(data) in ("short", "magic")
    page = bytearray(4096)
    page[:8], page[8:16] = b"LMKVCHNK", bytes.fromhex("0100020000100000")
    page[16 : 16 + len(data)] = data
    assert reason(reseal(page[:4096])) in ("flags", "bounds", "codec", "parts", "reserved")


def test_body_damage_is_found_wherever_it_is() -> None:
    view, header = sealed()
    chunk.verify(view, header, KEY)
    for part in header.parts:
        for at in (part.offset, part.offset + part.stored - 1, part.offset + part.stored, part.stop - 1):
            view[at] ^= 0x10
            with pytest.raises(BadContainer) as caught:
                chunk.verify(view, header, KEY)
            assert caught.value.reason == "checksum"
            view[at] ^= 0x10
    chunk.verify(view, header, KEY)


def test_verify_refuses_what_is_short_unsealed_or_another_chunk() -> None:
    view, header = sealed()
    for part, other, expected in (
        (view[:-1], header, "short"),
        (view, chunk.new_header(SPEC, KEY), "unsealed"),
        (view, replace(header, key=KEY._replace(depth=0)), "identity"),
    ):
        with pytest.raises(BadContainer) as caught:
            chunk.verify(part, other, KEY)
        assert caught.value.reason == expected


def test_layers_can_be_read_and_verified_alone() -> None:
    view, header = sealed()
    whole = bytes(view)
    for first in range(3):
        for stop in range(first + 1, 4):
            parts = chunk.covering(header, first, stop)
            assert [part.first_layer for part in parts] == list(range(first, stop))
            base = parts[0].offset
            alone = memoryview(bytearray(whole[base : parts[-1].stop]))
            chunk.verify_parts(alone, parts, base)
            alone[-1] ^= 1
            with pytest.raises(BadContainer):
                chunk.verify_parts(alone, parts, base)
            with pytest.raises(BadContainer) as caught:
                chunk.verify_parts(alone[:-1], parts, base)
            assert caught.value.reason == "short"
    for first, stop in ((0, 0), (-1, 2), (1, 4), (2, 1)):
        with pytest.raises(BadInput):
            chunk.covering(header, first, stop)


def test_covering_finds_layers_that_share_a_part() -> None:
    spec = KVSpec.from_hf_config(SHAPES["smollm2-135m"])
    header = chunk.new_header(spec, KEY._replace(group=0))
    assert [part.first_layer for part in chunk.covering(header, 5, 7)] == [0, 6]
    assert [part.first_layer for part in chunk.covering(header, 29, 30)] == [24]


# Sealing.


def test_old_bytes_never_leave_with_a_reused_slot() -> None:
    slot = memoryview(bytearray(b"\xaa" * chunk.container_bytes(SPEC, 1)))
    header = chunk.seal(slot, chunk.new_header(SPEC, KEY, page_mask=MASK))
    page = 16 * 8 * 256 * 2 + 16
    for part in header.parts:
        room = np.frombuffer(slot[part.offset : part.offset + part.stored], np.uint8)
        pages = room.reshape(part.layers, 16, page)
        assert [bool(pages[:, j].all()) for j in range(16)] == [bool(MASK >> j & 1) for j in range(16)]
        assert not pages[:, :9].any()
        assert not any(slot[part.offset + part.stored : part.stop])
    assert bytes(slot[:4096]).count(0xAA) < 64
    chunk.verify(slot, chunk.parse(slot), KEY)


def test_sealing_by_address_or_view_is_the_same_and_happens_once() -> None:
    view, header = sealed()
    slab = _native.Slab(header.total_bytes)
    again = _native.memory(slab.address, header.total_bytes)
    again[:] = body(header.total_bytes)
    assert chunk.seal(slab.address, replace(header, flags=0)) == header
    assert bytes(again) == bytes(view)
    again[5000] ^= 1
    assert chunk.seal(again, header) is header
    again.release()
    slab.close()


def test_unsealed_headers_have_a_checksum_of_their_own() -> None:
    header = chunk.new_header(SPEC, KEY)
    page = bytearray(4096)
    chunk.write_header(memoryview(page), header)
    assert chunk.parse(memoryview(page)) == header
    page[96] ^= 1
    assert reason(page) == "checksum"
