"""Streams of the lossy codecs, written once, in tests/data/codec_streams.txt: they decode to the same bytes for ever.

A line: codec, bytes decoded, BLAKE3 of them, the stream in base 85. The line ``profile`` has the one of the klt stream.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import blake3
import pytest

from lmkv import codec
from lmkv.codec import profile

LINES = [line.split() for line in (Path(__file__).parent / "data" / "codec_streams.txt").read_text().splitlines()]
STREAMS = [line for line in LINES if line[0] != "profile"]


@pytest.fixture
def known(tmp_path: Path) -> Iterator[str]:
    before = list(profile._folders)
    profile.look_in([str(tmp_path)])
    stored = next(line for line in LINES if line[0] == "profile")
    raw = base64.b85decode(stored[3])
    (tmp_path / (stored[2][:16] + profile.SUFFIX)).write_bytes(raw)
    assert blake3.blake3(raw).hexdigest() == stored[2]
    yield stored[2][:16]
    profile.look_in(before)


@pytest.mark.parametrize("line", STREAMS, ids=[line[0] for line in STREAMS])
def test_an_old_stream_decodes_to_the_same_bytes(line: list[str], known: str) -> None:
    name, nbytes, digest, stream = line
    decoder = codec.get(name, None, known if name == "klt" else None)
    out = memoryview(bytearray(int(nbytes)))
    decoder.decode(memoryview(base64.b85decode(stream)), out)
    assert blake3.blake3(out).hexdigest() == digest


def test_there_is_one_of_each() -> None:
    assert sorted(line[0] for line in STREAMS) == ["cachegen", "fp8", "kch", "kch", "klt", "q8"]
