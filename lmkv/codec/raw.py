"""The codec that changes nothing."""

from __future__ import annotations

from lmkv.codec.base import Codec
from lmkv.codec.shape import Shape
from lmkv.errors import BadContainer, ConfigError


class Raw(Codec):
    """Bytes as they are. Containers with codec ``raw`` are never encoded; this is their decoder."""

    name = "raw"

    def __init__(self, level: int | None = None) -> None:
        if level is not None:
            raise ConfigError("level", "the codec raw has no levels: leave it out")
        super().__init__(0)

    def encode(self, src: memoryview, dst: memoryview, shape: Shape | None = None) -> int:
        if len(src) > len(dst):
            return 0
        dst[: len(src)] = src
        return len(src)

    def decode(self, src: memoryview, dst: memoryview) -> None:
        if len(src) != len(dst):
            raise BadContainer("codec", f"{len(src)} raw bytes for {len(dst)}")
        dst[:] = src
