"""Codecs, one file each, found by name through the entry points ``lmkv.codecs``.

``base`` says what a codec is and takes whole containers through one; ``shape`` what a part's bytes mean.
"""

from lmkv.codec.base import Codec, decode_container, encode_container, get, kind, names
from lmkv.codec.shape import Known, Meaning, Meanings, Rope, Shape, meanings, split

__all__ = [
    "Codec",
    "Known",
    "Meaning",
    "Meanings",
    "Rope",
    "Shape",
    "decode_container",
    "encode_container",
    "get",
    "kind",
    "meanings",
    "names",
    "split",
]
