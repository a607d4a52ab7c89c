"""What a reader of chunk containers refuses, and what sealing makes sure of."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from chunk_cases import KEY, MASK, SPEC, U64, body, reason, reseal, sealed, tampered
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv import _native, chunk
from lmkv.errors import BadContainer, BadInput
from lmkv.spec import SHAPES, KVSpec

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
