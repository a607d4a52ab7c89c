"""The contract of `lmkv.codec.Codec` as tests that any codec can inherit; docs/codecs.md shows how."""

# ruff: noqa: S101

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from lmkv.codec import Codec, Rope, Shape, split
from lmkv.codec.shape import FLOAT_BYTES
from lmkv.errors import BadContainer

GUARD = b"\xee" * 64
PACKED = Shape("bfloat16", 2, 4, 16, 0, 0, 0, "")
PACKED_VALUES = 512  # a page
ROPE = Rope(tuple(10000.0 ** (-i / 8) for i in range(8)))
PLAIN = Shape("bfloat16", 3, 4, 16, 2, 16, 16, "kv head token dim", first_token=256, rope=ROPE)
SHAPES = (
    PACKED,
    replace(PACKED, dtype="float16"),
    PLAIN,
    replace(PLAIN, dtype="float16", axes="token head kv dim", first_token=0, rope=None),
    replace(PLAIN, dtype="float32", axes="head token kv dim", pages=1, page_tokens=37, rope=replace(ROPE, factor=1.3)),
    replace(PLAIN, axes="kv token head dim", page_mask=0b1010, rope=replace(ROPE, interleaved=True)),
    replace(PLAIN, axes="head token dim", dim_v=0, heads=1, layers=6),
    replace(PLAIN, dim_v=8),
    replace(PLAIN, layers=1, pages=1, page_tokens=1, first_layer=2),
)


def kv(shape: Shape, seed: int = 0) -> bytes:
    """Raw bytes of a part as models make them: each channel normal around a mean of its own, absent pages zero."""
    rng = np.random.default_rng(seed)
    if not shape.axes:
        return narrow(rng.normal(0.5, 1, (shape.layers * shape.pages, PACKED_VALUES)), shape.dtype)
    raw = bytearray(shape.nbytes)
    for words in split(raw, shape):
        mean, spread = rng.normal(0, 2, words.shape[-2:]), np.exp(rng.normal(0, 0.5, words.shape[-2:]))
        values = rng.normal(mean, spread, words.shape)
        if shape.page_mask:
            values[:, [not shape.page_mask >> page & 1 for page in range(shape.pages)]] = 0
        words[...] = np.frombuffer(narrow(values, shape.dtype), f"<u{shape.width}").reshape(words.shape)
    return bytes(raw)


def narrow(values: Any, dtype: str) -> bytes:
    """Numbers as bytes of a dtype, bfloat16 by truncation."""
    if dtype == "bfloat16":
        return np.ascontiguousarray(np.ascontiguousarray(values, "<f4").view("<u2").reshape(-1)[1::2]).tobytes()
    return np.ascontiguousarray(values, {"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()


def widen(raw: bytes, dtype: str) -> Any:
    """Bytes of a dtype as float64."""
    if dtype == "bfloat16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(raw, {"float16": "<f2", "float32": "<f4"}[dtype]).astype(np.float64)


def encode(codec: Codec, raw: bytes, shape: Shape | None, room: int | None = None) -> bytes:
    """The stream, b"" for none; fails where anything beyond ``room`` bytes is written."""
    room = 2 * len(raw) + 4096 if room is None else room
    guarded = bytearray(GUARD + bytes(room) + GUARD)
    args = () if codec.needs == "bytes" else (shape,)
    count = codec.encode(memoryview(raw), memoryview(guarded)[len(GUARD) : len(GUARD) + room], *args)
    assert 0 <= count <= room
    assert guarded[: len(GUARD)] == guarded[len(GUARD) + room :] == GUARD
    return bytes(guarded[len(GUARD) : len(GUARD) + count])


def decode(codec: Codec, stream: bytes, nbytes: int) -> bytes:
    """What it decodes to; fails where anything beyond ``nbytes`` bytes is written, also before BadContainer."""
    guarded = bytearray(GUARD + b"\xcc" * nbytes + GUARD)
    try:
        codec.decode(memoryview(stream), memoryview(guarded)[len(GUARD) : len(GUARD) + nbytes])
    finally:
        assert guarded[: len(GUARD)] == guarded[len(GUARD) + nbytes :] == GUARD
    return bytes(guarded[len(GUARD) : len(GUARD) + nbytes])


def refuses(codec: Codec, stream: bytes, nbytes: int) -> bool:
    """Decoding raises BadContainer; anything else that is raised fails the test."""
    try:
        decode(codec, stream, nbytes)
    except BadContainer:
        return True
    return False


class CodecTests:
    """Inherit, and give a fixture ``codec``.

    shapes: parts it must take; by default those of `SHAPES` that its ``needs`` let it. error: for lossy codecs, the
    most that the root mean square error may be of that of the values around their mean.
    """

    error: float = 0.5

    def shapes(self, codec: Codec) -> list[Shape]:
        return [shape for shape in SHAPES if shape.axes or codec.needs != "geometry"]

    def test_it_describes_itself(self, codec: Codec) -> None:
        assert re.fullmatch(r"[a-z0-9_.+-]{1,16}", codec.name)
        assert re.fullmatch(r"([0-9a-f]{16})?", codec.profile)
        assert codec.needs in ("bytes", "dtype", "geometry")
        assert isinstance(codec.level, int)

    def test_parts_come_back(self, codec: Codec) -> None:
        for number, shape in enumerate(self.shapes(codec)):
            raw = kv(shape, number)
            stream = encode(codec, raw, shape)
            if not stream:
                assert len(raw) < 4096, f"{shape} is not taken"
                continue
            back = decode(codec, stream, len(raw))
            if codec.exact:
                assert back == raw, shape
                continue
            wanted, found = widen(raw, shape.dtype), widen(back, shape.dtype)
            assert np.isfinite(found).all(), shape
            if shape.page_mask:  # the storage zeroes absent pages
                found[wanted == 0] = 0
            assert np.sqrt(np.mean((found - wanted) ** 2)) <= self.error * wanted.std(), shape

    def test_any_bytes_come_back_or_are_not_taken(self, codec: Codec) -> None:
        rng = np.random.default_rng(3)
        for size in (1, 2, 3, 4, 6, 31, 32, 33, 4094, 4095, 4096, 4097, 70_000):
            for raw in (rng.bytes(size), bytes(size), b"\xff" * size):
                for dtype in ("bfloat16", "float32", "float8_e4m3fn"):
                    stream = encode(codec, raw, Shape(dtype, 1, 1, 1, 0, 0, 0, ""))
                    if stream:
                        back = decode(codec, stream, size)
                        assert back == raw or not codec.exact, (size, dtype)
        for shape in self.shapes(codec):  # NaN and infinities among them
            raw = rng.bytes(len(kv(shape)))
            if stream := encode(codec, raw, shape):
                assert decode(codec, stream, len(raw)) == raw or not codec.exact

    def test_every_pattern_of_a_dtype_comes_back(self, codec: Codec) -> None:
        if not codec.exact:
            return
        rng = np.random.default_rng(4)
        for dtype, width in FLOAT_BYTES.items():
            patterns = np.arange(1 << 8 * min(width, 2), dtype=f"<u{min(width, 2)}")
            if width == 4:
                patterns = patterns.astype("<u4") << 16
            for order in (patterns, rng.permutation(patterns)):
                raw = np.tile(order, max(1, 4096 // len(order))).tobytes()
                stream = encode(codec, raw, Shape(dtype, 1, 1, 1, 0, 0, 0, ""))
                assert not stream or decode(codec, stream, len(raw)) == raw, dtype

    def test_a_room_that_is_too_small_is_said(self, codec: Codec) -> None:
        for shape in self.shapes(codec)[:3]:
            raw = kv(shape)
            size = len(encode(codec, raw, shape))
            assert len(encode(codec, raw, shape, size)) == size
            for room in {0, 1, 7, 64, size // 2, size - 1} - {size}:
                if 0 <= room < size:
                    assert encode(codec, raw, shape, room) == b"", (shape, room)

    def test_streams_that_are_cut_or_longer_are_refused(self, codec: Codec) -> None:
        for shape in self.shapes(codec)[:3]:
            raw = kv(shape)
            stream = encode(codec, raw, shape)
            rng = np.random.default_rng(5)
            cuts = {*range(min(len(stream), 80)), len(stream) - 1, len(stream) - 4, *rng.integers(0, len(stream), 30)}
            for cut in sorted(cuts):
                assert refuses(codec, stream[:cut], len(raw)), (shape, cut)
            for more in (b"\0", b"\xff", bytes(32), stream):
                assert refuses(codec, stream + more, len(raw)), shape
            for nbytes in (0, 1, len(raw) - 1, len(raw) - 2, len(raw) + 2, 2 * len(raw)):
                assert refuses(codec, stream, nbytes), (shape, nbytes)

    def test_damaged_streams_never_leave_their_room(self, codec: Codec) -> None:
        rng = np.random.default_rng(6)
        for shape in self.shapes(codec)[:3]:
            raw = kv(shape)
            stream = encode(codec, raw, shape)
            for at in [*range(min(len(stream), 96)), *rng.integers(0, len(stream), 100)]:
                wrong = bytearray(stream)
                wrong[at] ^= int(rng.integers(1, 256))
                with suppress(BadContainer):
                    decode(codec, bytes(wrong), len(raw))
            for size in (0, 1, 15, 16, 100, len(stream)):
                with suppress(BadContainer):
                    decode(codec, rng.bytes(size), len(raw))

    def test_threads_share_it(self, codec: Codec) -> None:
        cases = [(shape, kv(shape, seed)) for seed, shape in enumerate(self.shapes(codec))]
        alone = [encode(codec, raw, shape) for shape, raw in cases]

        def work(_: int) -> bool:
            made = [encode(codec, raw, shape) for shape, raw in cases]
            backs = [decode(codec, stream, len(raw)) for stream, (_, raw) in zip(alone, cases, strict=True) if stream]
            return made == alone and (
                backs == [raw for s, (_, raw) in zip(alone, cases, strict=True) if s] or not codec.exact
            )

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(4)))
