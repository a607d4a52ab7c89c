"""The codec contract, for every codec that is registered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmkv import codec
from lmkv.codec import Codec, Shape, profile
from lmkv.codec.profile import Block, Description, Level, Place
from lmkv.testing.codec_tests import PLAIN, ROPE, CodecTests, decode, encode, refuses

CASES = [
    (name, level)
    for name in codec.names()
    for level in ((0, 2, None) if name in ("klt", "kch", "cachegen") else (None,))
]


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A profile that changes nothing but rounds: for each layer and for K and V together, a unit matrix."""
    channels = PLAIN.heads * (PLAIN.dim + PLAIN.dim_v)
    ones, eye = np.ones(channels, np.float32), (1 << 14) * np.eye(channels, dtype=np.int16)
    block = (np.zeros(channels, np.float32), ones, ones / (1 << 14), eye, np.zeros((3, channels), np.uint8))
    places = [
        Place(first_layer=layer, layers=1, first_head=0, heads=PLAIN.heads, kv="kv", kept=channels)
        for layer in range(3)
    ]
    about = Description(
        model="unit", dtype="bfloat16", layers=3, heads=PLAIN.heads, dim=PLAIN.dim, dim_v=PLAIN.dim_v, sinks=4,
        levels=tuple(Level(step, 0.0, None) for step in (0.05, 0.1, 0.2)), blocks=tuple(places), inv_freq=ROPE.inv_freq,
    )  # fmt: skip
    made = profile.make(about, tuple(Block(place, *block) for place in places))
    profile.open_profile(str(made.save(tmp_path_factory.mktemp("profiles"))))
    return made.id


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def each(request: pytest.FixtureRequest, identity: str) -> Codec:
    name, level = request.param
    return codec.get(name, level, identity if name == "klt" else "")


class TestCodecs(CodecTests):
    @pytest.fixture
    def codec(self, each: Codec) -> Codec:
        return each

    def shapes(self, codec: Codec) -> list[Shape]:
        fits = [shape for shape in super().shapes(codec) if (shape.heads, shape.dim, shape.dim_v) == (2, 16, 16)]
        return fits if codec.name == "klt" else super().shapes(codec)


def test_the_registry_has_all_of_ours() -> None:
    assert {"raw", "zstd", "xpl", "fp8", "q8", "cachegen", "kch", "klt"} <= set(codec.names())
    assert [codec.kind(name).exact for name in ("raw", "zstd", "xpl", "fp8", "q8", "cachegen", "kch", "klt")] == [
        True, True, True, False, False, False, False, False,
    ]  # fmt: skip


def test_the_codec_in_the_documentation_is_one() -> None:
    page = (Path(__file__).parents[1] / "docs/codecs.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    space: dict[str, Any] = {}
    exec(code, space)
    half = space["Half"]()
    assert isinstance(half, Codec)
    assert decode(half, encode(half, b"abcd", None), 4) == b"aacc"
    assert encode(half, b"abc", None) == encode(half, b"abcd", None, 1) == b""
    assert refuses(half, b"ab", 3)
