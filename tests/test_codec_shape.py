"""What a part's bytes mean: `split` against arrays put together axis by axis, and shapes that are none."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from lmkv import BadInput, chunk
from lmkv.codec import Meaning, Meanings, Rope, Shape, meanings, split
from lmkv.keys import ChunkKey
from lmkv.spec import Kind, KVSpec, LayerGroup

SHAPE = Shape("bfloat16", 2, 3, 4, 5, 6, 6, "kv head token dim")
KEY = ChunkKey(bytes(16), bytes(8), bytes(32), bytes(8), 3, 0, 0)


@pytest.mark.parametrize("axes", [" ".join(each) for each in itertools.permutations(("kv", "head", "token", "dim"))])
def test_k_and_v_are_where_the_axes_say(axes: str) -> None:
    names = axes.split()
    page = [{"kv": 2, "head": 5, "token": 4, "dim": 6}[name] for name in names]
    array = np.arange(2 * 3 * np.prod(page), dtype="<u2").reshape(2, 3, *page)
    wanted = array.transpose(0, 1, *(2 + names.index(name) for name in ("kv", "token", "head", "dim")))
    keys, values = split(bytearray(array.tobytes()), replace(SHAPE, axes=axes))
    np.testing.assert_array_equal(keys, wanted[:, :, 0])
    np.testing.assert_array_equal(values, wanted[:, :, 1])


@pytest.mark.parametrize(
    ("axes", "inner"), [("kv head token dim", 2), ("head kv token dim", 3), ("token head kv dim", 4)]
)
def test_k_and_v_of_two_widths_follow_each_other_where_kv_stands(axes: str, inner: int) -> None:
    """An axis inside of kv is laid out for K and V apart: the bytes are those of the two arrays one after the other."""
    sizes = {"head": 5, "token": 4}
    outer, rest = axes.split(" kv ")[0].split() if " kv " in axes else [], axes.partition("kv ")[2].split()
    assert len(outer) + 2 == inner
    boxes = [[*(sizes[name] for name in outer), *(sizes.get(name, dim) for name in rest)] for dim in (6, 3)]
    parts = [
        np.arange(2 * 3 * np.prod(box), dtype="<u4").reshape(2, 3, *box) + 10**6 * i for i, box in enumerate(boxes)
    ]
    flat = np.concatenate([part.reshape(*part.shape[:inner], -1) for part in parts], -1)
    keys, values = split(flat.tobytes(), replace(SHAPE, dtype="float32", dim_v=3, axes=axes))
    order = [*outer, *rest]
    for found, part in ((keys, parts[0]), (values, parts[1])):
        np.testing.assert_array_equal(
            found, part.transpose(0, 1, *(2 + order.index(n) for n in ("token", "head", "dim")))
        )


def test_views_write_through_and_latents_have_no_v() -> None:
    shape = replace(SHAPE, dtype="float8_e5m2", heads=1, dim_v=0, axes="head token dim")
    raw = bytearray(shape.nbytes)
    keys, values = split(raw, shape)
    keys[1, 2, 3, 0, 5] = 7
    assert (raw[-1], values.shape, keys.dtype.itemsize) == (7, (2, 3, 4, 1, 0), 1)
    with pytest.raises(ValueError, match="read-only"):
        split(bytes(raw), shape)[0][:] = 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "int8"}, {"axes": "kv head token"}, {"axes": "kv head token dim dim"}, {"axes": "head token dim"},
        {"axes": "kv  head token dim"}, {"axes": "head dim kv token", "dim_v": 5},
        {"layers": 0}, {"heads": 0}, {"dim_v": -1}, {"first_token": -1},
        {"page_mask": 8}, {"layers": 1 << 30, "pages": 1 << 20}, {"rope": Rope((1.0,) * 4)},
    ],
)  # fmt: skip
def test_shapes_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        replace(SHAPE, **wrong)  # type: ignore[arg-type]


def test_ropes_and_parts_that_are_none_are_refused() -> None:
    for freqs, factor in (((), 1.0), ((float("nan"),), 1.0), ((1.0,), 0.0), ((1.0,), float("inf"))):
        with pytest.raises(BadInput):
            Rope(freqs, factor=factor)
    for raw, shape in ((bytes(SHAPE.nbytes - 2), SHAPE), (bytes(100), replace(SHAPE, axes=""))):
        with pytest.raises(BadInput):
            split(raw, shape)


def test_parts_of_a_spec_have_their_place() -> None:
    rope = Rope((1.0, 0.1))
    group = LayerGroup(Kind.FULL, tuple(range(12)), 16, 8, 128)
    state = LayerGroup(Kind.RECURRENT, (12,), 256, dtype="float32", state_bytes=4096)
    packed = LayerGroup(Kind.FULL, (13,), 16, 1, 64, page_padding=64)
    spec = KVSpec((group, state, packed), 256)
    known = Meanings.of({spec.geometry_id: meanings(spec, "token head kv dim", [rope, None, None])})
    header = chunk.new_header(spec, KEY, 0b110)
    shapes = [known.shape_of(header, part) for part in header.parts]
    assert [shape and (shape.first_layer, shape.layers) for shape in shapes] == [(i, 1) for i in range(12)]
    assert shapes[5] == Shape("bfloat16", 1, 16, 16, 8, 128, 128, "token head kv dim", 5, 768, rope, 0b110, 12)
    assert shapes[5].nbytes == header.parts[5].raw
    whole = chunk.new_header(spec, KEY)
    assert [known.shape_of(whole, part).page_mask for part in whole.parts] == [0] * 12  # type: ignore[union-attr]
    for number, wanted in ((1, None), (2, Meaning("bfloat16", 1, 64, 64, "", None, 1))):
        other = chunk.new_header(spec, KEY._replace(group=number))
        found = known.shape_of(other, other.parts[0])
        assert found == (wanted and wanted.of_part(other, other.parts[0]))
    stranger = chunk.Header(**{**vars(header), "geometry": 1})
    assert known.shape_of(stranger, header.parts[0]) is None
