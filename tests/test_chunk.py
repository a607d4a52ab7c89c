"""The chunk container: golden bytes and layout."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import xxhash
from chunk_cases import GOLDEN, KEY, MASK, SPEC, body, sealed
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv import chunk
from lmkv.chunk import Header, Part
from lmkv.errors import BadContainer, BadInput
from lmkv.keys import ChunkKey
from lmkv.spec import SHAPES, Kind, KVSpec, LayerGroup

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
