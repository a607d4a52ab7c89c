"""Codecs: the registry, streams, and whole containers through them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv import chunk, codec
from lmkv.chunk import AS_IS, Header
from lmkv.codec import base
from lmkv.codec.raw import Raw
from lmkv.codec.zstd import Zstd
from lmkv.errors import BadContainer, BadInput, ConfigError
from lmkv.keys import ChunkKey
from lmkv.spec import Kind, KVSpec, LayerGroup

ZSTD = Zstd()
KEY = ChunkKey(bytes(16), bytes(8), bytes(range(32)), bytes(8), 0, 0, 0)
SPEC = KVSpec((LayerGroup(Kind.FULL, (0, 1, 2), 16, 8, 128, page_padding=16),), 256)
NOISE = np.random.default_rng(5).integers(0, 256, 2 << 20, np.uint8).tobytes()
datas = (
    st.binary(min_size=1, max_size=2000)
    | st.tuples(st.binary(min_size=1, max_size=50), st.integers(1, 20_000)).map(lambda t: t[0] * t[1])
    | st.integers(1, 300_000).map(lambda n: NOISE[:n])
)  # fmt: skip


def encoded(data: bytes, with_codec: codec.Codec = ZSTD) -> bytes:
    dst = memoryview(bytearray(len(data) + len(data) // 100 + 1000))
    return bytes(dst[: with_codec.encode(memoryview(data), dst)])


def decoded(data: bytes, nbytes: int, with_codec: codec.Codec = ZSTD) -> bytes:
    """Decode into the middle of a guarded buffer; whatever happens, the guards must survive."""
    guarded = bytearray(b"\xee" * (nbytes + 64))
    try:
        with_codec.decode(memoryview(data), memoryview(guarded)[32 : 32 + nbytes])
    finally:
        assert guarded[:32] == guarded[32 + nbytes :] == b"\xee" * 32
    return bytes(guarded[32 : 32 + nbytes])


# Registry.


def test_built_in_codecs_by_name() -> None:
    assert isinstance(codec.get("raw"), Raw)
    zstd = codec.get("zstd", 3)
    assert (type(zstd), zstd.name, zstd.exact, zstd.level) == (Zstd, "zstd", True, 3)
    assert codec.get("zstd").level == 1


@pytest.mark.parametrize(
    ("name", "level", "says"),
    [
        ("zst", None, "did you mean 'zstd'"), ("lzma", None, "known: .*raw.*zstd"), ("", None, "known"),
        ("zstd", 23, "-7 to 22"), ("zstd", -8, "-7 to 22"), ("raw", 1, "no levels"),
    ],
)  # fmt: skip
def test_a_wrong_setting_names_the_fix(name: str, level: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        codec.get(name, level)


class Halver(codec.Codec):
    """A lossy codec of somebody else: keeps every other byte."""

    name = "halver"
    exact = False

    def __init__(self, level: int | None = None) -> None:
        super().__init__(level or 0)

    def encode(self, src: memoryview, dst: memoryview) -> int:
        count = len(src) // 2
        if len(src) % 2 or count > len(dst):
            return 0
        dst[:count] = src[::2]
        return count

    def decode(self, src: memoryview, dst: memoryview) -> None:
        if len(dst) != 2 * len(src):
            raise BadContainer("codec")
        dst[::2] = dst[1::2] = src


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Any:
    def points(group: str) -> list[importlib.metadata.EntryPoint]:
        assert group == "lmkv.codecs"
        found = {"halver": f"{__name__}:Halver", "raw": f"{__name__}:Halver", "gone": "no_module:X"}
        return [importlib.metadata.EntryPoint(*item, group) for item in found.items()]

    monkeypatch.setattr(base, "entry_points", points)
    base._known.cache_clear()
    base._decoder.cache_clear()
    yield
    base._known.cache_clear()
    base._decoder.cache_clear()


@pytest.mark.usefixtures("plugins")
def test_codecs_of_others_come_from_entry_points_and_cannot_replace_ours() -> None:
    assert isinstance(codec.get("halver"), Halver)
    assert isinstance(codec.get("raw"), Raw)
    assert isinstance(codec.get("zstd"), Zstd)


# Streams.


@given(datas)
def test_any_bytes_come_back(data: bytes) -> None:
    for each in (ZSTD, Raw()):
        assert decoded(encoded(data, each), len(data), each) == data


@given(datas, st.integers(0, 400))
def test_encode_stays_inside_its_room(data: bytes, room: int) -> None:
    for each in (ZSTD, Raw()):
        guarded = bytearray(b"\xee" * (room + 64))
        count = each.encode(memoryview(data), memoryview(guarded)[32 : 32 + room])
        assert guarded[:32] == guarded[32 + room :] == b"\xee" * 32
        assert count <= room
        assert count == 0 or decoded(bytes(guarded[32 : 32 + count]), len(data), each) == data
        assert bool(count) == (0 < len(encoded(data, each)) <= room)


@settings(max_examples=200)
@given(datas, st.data())
def test_a_truncated_or_longer_stream_is_refused(data: bytes, draw: st.DataObject) -> None:
    stream = encoded(data)
    cut = stream[: draw.draw(st.integers(0, len(stream) - 1))]
    longer = stream + draw.draw(st.binary(min_size=1, max_size=20))
    for wrong in (cut, longer, stream + stream):
        with pytest.raises(BadContainer):
            decoded(wrong, len(data))
    assert not encoded(b"")
    for size in (len(data) + 1, max(0, len(data) - 1), 0):
        if size != len(data):
            with pytest.raises(BadContainer):
                decoded(stream, size)


@pytest.mark.parametrize("size", [1 << 17, 1 << 20, (1 << 20) + 1])
@pytest.mark.parametrize("tail", range(1, 9))
def test_the_last_bytes_of_a_frame_are_missed(size: int, tail: int) -> None:
    stream = encoded(NOISE[: size // 2] + bytes(size - size // 2))
    with pytest.raises(BadContainer):
        decoded(stream[:-tail], size)


@settings(max_examples=200)
@given(datas.filter(bool), st.data())
def test_a_corrupt_stream_never_leaves_its_room(data: bytes, draw: st.DataObject) -> None:
    stream = bytearray(encoded(data))
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(stream) - 1) | st.integers(0, min(20, len(stream) - 1)))
        stream[at] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(BadContainer):
        assert len(decoded(bytes(stream), len(data))) == len(data)


@given(st.binary(max_size=300), st.integers(0, 300))
def test_arbitrary_streams_are_refused(stream: bytes, size: int) -> None:
    for wrong in (stream, b"\x28\xb5\x2f\xfd" + stream):
        try:
            result = decoded(wrong, size)
        except BadContainer:
            continue
        assert zstandard.ZstdDecompressor().decompress(wrong) == result
    with pytest.raises(BadContainer):
        decoded(stream, len(stream) + 1, Raw())


def test_a_frame_with_a_huge_window_or_size_allocates_nothing() -> None:
    huge = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27, compression_level=1)
    )
    claimed = huge.compressobj(size=1 << 40)
    bomb = claimed.compress(bytes(1 << 20)) + claimed.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    with pytest.raises(BadContainer):
        decoded(bomb, 1 << 20)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    with pytest.raises(BadContainer):
        decoded(unsized, 1000)


def test_frames_of_other_writers_decode() -> None:
    data = NOISE[:5000] * 3
    for options in ({"level": 19}, {"level": -5}, {"write_checksum": True}):
        frame = zstandard.ZstdCompressor(**options).compress(data)
        assert decoded(frame, len(data)) == data


def test_one_codec_serves_many_threads() -> None:
    failures: list[Exception] = []

    def work(seed: int) -> None:
        data = NOISE[seed * 1000 : seed * 1000 + 300_000] + bytes(100_000)
        try:
            for _ in range(10):
                assert decoded(encoded(data), len(data)) == data
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures


# Containers.


def container(compressible: tuple[bool, ...] = (True, True, True)) -> tuple[memoryview, Header]:
    """A sealed raw container whose layers are zeros and some text, or noise."""
    header = chunk.new_header(SPEC, KEY, created=1)
    view = memoryview(bytearray(b"\xaa" * header.total_bytes))
    for part, easy in zip(header.parts, compressible, strict=True):
        fill = (b"text %d, " % part.first_layer * part.raw)[: part.raw] if easy else NOISE[: part.raw]
        view[part.offset : part.offset + part.raw] = fill
    return view, chunk.seal(view, header)


@pytest.mark.parametrize("easy", [(True, True, True), (False, True, False), (True, False, True)])
def test_a_container_comes_back_through_zstd(easy: tuple[bool, ...]) -> None:
    view, header = container(easy)
    dst = memoryview(bytearray(b"\xbb" * len(view)))
    made = codec.encode_container(view, header, codec.get("zstd", 3), dst)
    assert made is not None
    assert (made.codec, made.level, made.sealed, made.lossy) == ("zstd", 3, False, False)
    assert made.raw_bytes == header.total_bytes
    assert [bool(part.flags & AS_IS) for part in made.parts] == [not each for each in easy]
    made = chunk.seal(dst, made)
    stored = memoryview(bytes(dst[: made.total_bytes]))
    read = chunk.parse(stored, KEY)
    assert read == made
    chunk.verify(stored, read, KEY)
    for part in read.parts:
        assert not any(stored[part.offset + part.stored : part.stop])
    back = memoryview(bytearray(b"\xcc" * len(view)))
    raw = codec.decode_container(stored, read, back)
    assert raw == chunk.new_header(SPEC, KEY, created=1)
    assert chunk.seal(back, raw) == header
    assert back == view


def test_what_does_not_shrink_is_not_encoded() -> None:
    view, header = container((False, False, False))
    dst = memoryview(bytearray(len(view)))
    assert codec.encode_container(view, header, ZSTD, dst) is None
    assert codec.encode_container(view, header, codec.get("raw"), dst) is None


def test_a_small_destination_is_enough_or_refused() -> None:
    view, header = container()
    dst = memoryview(bytearray(len(view)))
    made = codec.encode_container(view, header, ZSTD, dst)
    assert made is not None
    small = memoryview(bytearray(made.total_bytes))
    assert codec.encode_container(view, header, ZSTD, small) == made
    for size in (made.total_bytes - 1, 8192, 4096, 100, 0):
        assert codec.encode_container(view, header, ZSTD, dst[:size]) is None
    view, header = container((False, True, True))
    assert codec.encode_container(view, header, ZSTD, dst[: 1 << 20]) is None


def test_encoded_containers_are_not_encoded_again() -> None:
    view, header = container()
    with pytest.raises(BadInput, match="zstd"):
        codec.encode_container(view, replace(header, codec="zstd"), ZSTD, view)


def test_decoding_refuses_what_it_cannot_trust() -> None:
    view, header = container()
    dst = memoryview(bytearray(len(view)))
    made = codec.encode_container(view, header, ZSTD, dst)
    assert made is not None
    out = memoryview(bytearray(len(view)))
    for wrong, room, expected in (
        (replace(made, codec="nobodys"), len(view), "codec"),
        (made, len(view) - 1, "bounds"),
        (replace(made, parts=tuple(p._replace(raw=p.raw * 2) for p in made.parts)), 1 << 30, "bounds"),
        (replace(made, parts=tuple(p._replace(raw=p.raw - 48) for p in made.parts)), len(view), "codec"),
        (replace(made, parts=tuple(p._replace(stored=p.stored - 1) for p in made.parts)), len(view), "codec"),
    ):
        with pytest.raises(BadContainer) as caught:
            codec.decode_container(dst, wrong, out[:room])
        assert caught.value.reason == expected


@pytest.mark.usefixtures("plugins")
def test_a_lossy_codec_marks_what_it_made() -> None:
    view, header = container()
    dst, out = memoryview(bytearray(len(view))), memoryview(bytearray(len(view)))
    made = codec.encode_container(view, header, codec.get("halver"), dst)
    assert made is not None
    assert made.lossy
    raw = codec.decode_container(dst, made, out)
    assert raw.lossy
    assert raw.codec == "raw"
    part = raw.parts[0]
    assert out[part.offset : part.offset + part.raw : 2] == view[part.offset : part.offset + part.raw : 2]
    with pytest.raises(BadContainer) as caught:
        codec.decode_container(dst, replace(made, codec="gone"), out)
    assert caught.value.reason == "codec"
