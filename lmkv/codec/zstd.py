"""Zstandard, for KV that compresses (padding, repeated or quantised values). RFC 8878."""

from __future__ import annotations

import threading

import zstandard

from lmkv.codec.base import Codec
from lmkv.codec.shape import Shape
from lmkv.errors import BadContainer, ConfigError

DEFAULT_LEVEL = 1
_Reader = zstandard.ZstdCompressionReader | zstandard.ZstdDecompressionReader


class Zstd(Codec):
    """One zstd frame a part, with its content size. level: -7 to 22, default 1."""

    name = "zstd"

    def __init__(self, level: int | None = None) -> None:
        level = DEFAULT_LEVEL if level is None else level
        if not -7 <= level <= 22:
            raise ConfigError("level", f"zstd levels go from -7 to 22, not {level}")
        super().__init__(level)
        self._own = threading.local()  # a context serves one thread at a time, and costs megabytes

    def encode(self, src: memoryview, dst: memoryview, shape: Shape | None = None) -> int:
        try:
            compressor = self._own.compressor
        except AttributeError:
            compressor = self._own.compressor = zstandard.ZstdCompressor(level=self.level)
        if not len(src) or not len(dst):  # python-zstandard spins on empty buffers (issue 194)
            return 0
        with compressor.stream_reader(src, size=len(src)) as reader:
            written = _fill(reader, dst)
            return 0 if written == len(dst) and reader.readinto(bytearray(1)) else written

    def decode(self, src: memoryview, dst: memoryview) -> None:
        try:
            decompressor = self._own.decompressor
        except AttributeError:
            decompressor = self._own.decompressor = zstandard.ZstdDecompressor()
        try:
            # The size first: it bounds what the decoder allocates, and it decodes straight to dst.
            if zstandard.get_frame_parameters(src).content_size != len(dst) or not _one_frame(src):
                raise BadContainer("codec", "not one whole zstd frame of the part's size")
            with decompressor.stream_reader(src) as reader:
                if _fill(reader, dst) != len(dst) or reader.readinto(bytearray(1)):
                    raise BadContainer("codec", "a zstd frame of another size than it says")
        except zstandard.ZstdError as error:
            raise BadContainer("codec", str(error)) from None


def _fill(reader: _Reader, dst: memoryview) -> int:
    done = 0
    while done < len(dst) and (count := reader.readinto(dst[done:])):
        done += count
    return done


def _one_frame(src: memoryview) -> bool:
    """``src`` ends where its frame does; the stream reader takes a cut last block for an end."""
    at, last = zstandard.frame_header_size(src), False
    while not last and at + 3 <= len(src):
        header = int.from_bytes(src[at : at + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == 1 else size)
    checksum = 4 if zstandard.get_frame_parameters(src).has_checksum else 0
    return last and at + checksum == len(src)
