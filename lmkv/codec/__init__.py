"""Codecs, one file each, found by name through the entry points ``lmkv.codecs``.

``base`` says what a codec is and takes whole containers through one; ``raw`` and ``zstd`` are ours.
"""

from lmkv.codec.base import Codec, decode_container, encode_container, get

__all__ = ["Codec", "decode_container", "encode_container", "get"]
