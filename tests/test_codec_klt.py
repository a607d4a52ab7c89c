"""klt: the arithmetic of its decoder bit for bit, its error bound, exact sinks, and refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from codec_parts import ROPE, TWISTED, by_token, decoded, encoded, part, unrotated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkv.codec import channels, profile
from lmkv.codec.fit import Statistics, fit, places
from lmkv.codec.klt import Klt, fits, quantise, rows
from lmkv.codec.klt_reference import cos_sin, rotate, to_bfloat16, transform
from lmkv.codec.profile import Place, Profile
from lmkv.codec.shape import Rope, Shape
from lmkv.errors import BadContainer, ConfigError

GEOMETRY = Shape("bfloat16", 4, 1, 1, 2, 6, 4, "kv head token dim", rope=ROPE)
SHAPE = replace(GEOMETRY, layers=2, pages=3, page_tokens=11, first_layer=2)
STEPS = (6.0, 3.0, 1.5)


def statistics(geometry: Shape = GEOMETRY) -> Statistics:
    found = Statistics(geometry)
    for seed in range(3):
        shape = replace(geometry, page_tokens=400)
        found.add(memoryview(part(shape, seed // 3)), 400)
    rng = np.random.default_rng(9)
    size = geometry.layers, channels.per_layer(geometry), 50
    found.add_gradient((rng.normal(0, 1, size) * np.exp(rng.normal(0, 1, (*size[:2], 1)))).astype(np.float32))
    return found


def made(layers: int, heads: int, joint: bool, geometry: Shape = GEOMETRY) -> Profile:
    blocks = places(geometry, 256, layers, heads, joint)
    return fit(statistics(geometry), "made up", blocks, STEPS)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found, before = tmp_path_factory.mktemp("profiles"), list(profile._folders)
    profile.look_in([str(found)])
    yield found
    profile.look_in(before)


@pytest.fixture(scope="module", params=[(2, 0, True), (1, 1, False), (2, 1, True)], ids=str)
def known(request: pytest.FixtureRequest, folder: Path) -> Profile:
    found = made(*request.param)
    found.save(folder)
    return found


# The reference.


def test_transform_is_exact_integers_then_two_roundings() -> None:
    rng = np.random.default_rng(3)
    for most in (3, 900, 32767):
        matrix = rng.integers(-32767, 32768, (7, 40)).astype(np.int16)
        q = rng.integers(-most, most + 1, (40, 5)).astype(np.int16)
        scale, mean = rng.normal(0, 1e-4, 7).astype(np.float32), rng.normal(0, 1, 7).astype(np.float32)
        found = transform(matrix, q, scale, mean)
        for c in range(7):
            for t in range(5):
                total = sum(int(matrix[c, k]) * int(q[k, t]) for k in range(40))
                assert found[c, t] == np.float32(np.float32(np.float32(total) * scale[c]) + mean[c])


def test_cos_and_sin_are_those_of_the_platform_to_half_an_ulp() -> None:
    rope = Rope(tuple(float(np.float32(1e5 ** (-i / 32))) for i in range(32)))
    for first in (0, 1000, 1 << 20, 1 << 28):
        cos, sin = cos_sin(rope, first, 64)
        angle = (first + np.arange(64.0))[:, None] * np.array(rope.inv_freq)
        assert np.abs(cos - np.cos(angle)).max() < 2.0**-24
        assert np.abs(sin - np.sin(angle)).max() < 2.0**-24
    cos, sin = cos_sin(replace(rope, factor=2.0), 0, 2)
    assert cos[0, 0] == 2.0
    assert sin[1, 0] == np.float32(2 * np.sin(1.0))


@pytest.mark.parametrize("rope", [ROPE, TWISTED])
def test_rotation_turns_pairs(rope: Rope) -> None:
    k = np.random.default_rng(0).normal(0, 1, (1, 8, 3)).astype(np.float32)
    half = len(rope.inv_freq)
    wanted = k.astype(np.complex128)
    for i, freq in enumerate(rope.inv_freq):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        turned = (k[:, a] + 1j * k[:, b]) * np.exp(1j * freq * (7 + np.arange(3))) * rope.factor
        wanted[:, a], wanted[:, b] = turned.real, turned.imag
    rotate(k, rope, 7)
    assert np.abs(k - wanted.real).max() < 1e-6


def test_bfloat16_is_rounded_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x80000000, 0xC2FFFFFF], np.uint32)
    assert to_bfloat16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x8000, 0xC300]


# The codec.


def test_decoding_is_the_reference_bit_for_bit(known: Profile) -> None:
    raw = part(SHAPE, 5)
    for level, about in enumerate(known.description.levels):
        codec = Klt(level, known.id)
        back = decoded(codec, encoded(codec, raw, SHAPE), len(raw))
        x = channels.read(memoryview(raw), SHAPE, ROPE)
        assert x is not None
        out = np.empty((2, 2, 10, 33), np.float32)  # layers, heads, dims of K and V, tokens
        for block in known.of_part(SHAPE):
            p = block.place
            q = quantise(block, rows(x, p, SHAPE), about.step)
            assert q is not None
            q[:, :4] = 0
            scale = (block.scale * np.float32(about.step)).astype(np.float32)
            y = (block.matrix.astype(object) @ q.astype(object)).astype(np.float32) * scale[:, None] + block.mean[
                :, None
            ]
            y = y.reshape(p.layers, -1, 33)
            layers = slice(p.first_layer - 2, p.first_layer - 2 + p.layers)
            heads = range(p.first_head, p.first_head + p.heads)
            border = 6 * p.heads * ("k" in p.kv)
            for i, each in enumerate(heads):
                if "k" in p.kv:
                    out[layers, each, :6] = y[:, 6 * i : 6 * i + 6]
                if "v" in p.kv:
                    out[layers, each, 6:] = y[:, border + 4 * i : border + 4 * i + 4]
        rotate(out[:, :, :6], ROPE, 0)
        words = to_bfloat16(out)
        k, v = by_token(back, SHAPE)
        wide = (words.astype(np.uint32) << 16).view(np.float32).transpose(0, 3, 1, 2)
        assert (k[:, 4:] == wide[:, 4:, :, :6]).all()
        assert (v[:, 4:] == wide[:, 4:, :, 6:]).all()


def test_every_coefficient_errs_by_half_a_step(folder: Path) -> None:
    geometry = replace(GEOMETRY, dtype="float32")
    known = made(2, 0, True, geometry)
    known.save(folder)
    shape = replace(geometry, layers=2, pages=1, page_tokens=300, first_layer=2, first_token=1000)
    raw = part(shape, 0)
    for level, about in enumerate(known.description.levels):
        codec = Klt(level, known.id)
        back = decoded(codec, encoded(codec, raw, shape), len(raw))
        error = unrotated(back, shape, ROPE) - unrotated(raw, shape, ROPE)
        for block in known.of_part(shape):
            moved = block.forward.astype(np.float64) @ rows(error, block.place, shape)
            largest = np.abs(
                block.forward @ (rows(unrotated(raw, shape, ROPE), block.place, shape) - block.mean[:, None])
            ).max()
            assert np.abs(moved).max() <= about.step / 2 + 2.0**-11 * largest  # entries of 13 bits


def test_sinks_are_exact_and_absent_pages_zero(known: Profile) -> None:
    for shape in (SHAPE, replace(SHAPE, first_token=3), replace(SHAPE, page_tokens=1), replace(SHAPE, page_mask=0b101)):
        raw = bytearray(part(shape, 2))
        codec = Klt(2, known.id)
        back = decoded(codec, encoded(codec, bytes(raw), shape), len(raw))
        kept = min(max(0, 4 - shape.first_token), channels.tokens(shape))
        for before, after in zip(by_token(bytes(raw), shape), by_token(back, shape), strict=True):
            assert (before[:, :kept] == after[:, :kept]).all()
            assert kept == channels.tokens(shape) or (before[:, kept:] != after[:, kept:]).any()
            if shape.page_mask:
                assert not after[:, 11:22].any()


def test_levels_fall_in_bits_and_a_finer_one_is_nearer(known: Profile) -> None:
    raw = part(replace(SHAPE, page_tokens=80), 0)
    shape = replace(SHAPE, page_tokens=80)
    sizes, errors = [], []
    for level in range(3):
        codec = Klt(level, known.id)
        stream = encoded(codec, raw, shape)
        sizes.append(len(stream))
        errors.append(
            np.abs(unrotated(decoded(codec, stream, len(raw)), shape, ROPE) - unrotated(raw, shape, ROPE)).mean()
        )
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)


@pytest.mark.parametrize(
    "other",
    [
        {"heads": 1}, {"dim": 8}, {"dim_v": 6}, {"layers": 1, "first_layer": 1}, {"first_layer": 7}, {"axes": ""},
        {"dtype": "float8_e5m2"},
    ],
)  # fmt: skip
def test_other_parts_are_left_raw(folder: Path, other: dict[str, object]) -> None:
    known = made(2, 0, True)
    known.save(folder)
    shape = replace(SHAPE, rope=None, **other)  # type: ignore[arg-type]
    raw = bytes(shape.nbytes or 2000)
    assert not Klt(0, known.id).encode(memoryview(raw), memoryview(bytearray(len(raw) + 9999)), shape)
    assert not shape.axes or not fits(known, shape) or shape.axes == ""
    assert fits(known, SHAPE)


def test_values_that_are_not_finite_are_left_raw(known: Profile) -> None:
    raw = bytearray(part(SHAPE))
    raw[100:102] = b"\x80\x7f"
    assert not Klt(0, known.id).encode(memoryview(raw), memoryview(bytearray(99_999)), SHAPE)


def test_profiles_and_levels_are_checked(known: Profile) -> None:
    with pytest.raises(ConfigError, match="calibrate"):
        Klt(0)
    with pytest.raises(ConfigError, match="0 to 2"):
        Klt(3, known.id)
    missing = Klt(0, "0123456789abcdef")
    assert not missing.encode(memoryview(part(SHAPE)), memoryview(bytearray(99_999)), SHAPE)
    stream = bytearray(encoded(Klt(1, known.id), part(SHAPE), SHAPE))
    at = stream.index(bytes.fromhex(known.id))
    stream[at] ^= 1
    with pytest.raises(BadContainer) as caught:
        decoded(missing, bytes(stream), SHAPE.nbytes)
    assert caught.value.reason == "profile"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_wrong_bytes_are_refused_or_stay_inside(known: Profile, draw: st.DataObject) -> None:
    codec, raw = Klt(1, known.id), part(SHAPE)
    stream = encoded(codec, raw, SHAPE)
    for wrong, size in (
        (stream[: draw.draw(st.integers(0, len(stream) - 1))], len(raw)), (stream + b"\0", len(raw)),
        (stream, len(raw) - 1), (stream, 0), (stream, 2 * len(raw)),
    ):  # fmt: skip
        with pytest.raises(BadContainer):
            decoded(codec, wrong, size)
    bad = bytearray(stream)
    for _ in range(3):
        bad[draw.draw(st.integers(0, min(300, len(bad) - 1)))] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(BadContainer):
        decoded(codec, bytes(bad), len(raw))


def test_blocks_do_not_cross_parts() -> None:
    # 256 tokens of 3 * 128 bfloat16 are 196,608 bytes a layer: parts of 6 layers have 1 MiB or more
    geometry = Shape("bfloat16", 30, 1, 1, 3, 64, 64, "kv head token dim")
    assert places(geometry, 256) == [Place(first, 3, 0, 3, "kv", 1) for first in range(0, 30, 3)]
    four = places(geometry, 256, 4)
    assert [(each.first_layer, each.layers) for each in four[:4]] == [(0, 4), (4, 2), (6, 4), (10, 2)]
    apart = places(geometry, 256, 6, 1, joint=False)
    assert len(apart) == 5 * 3 * 2
    assert apart[3] == Place(0, 6, 1, 1, "v", 1)


def test_a_kept_coefficient_is_one_that_some_level_codes(known: Profile) -> None:
    for block in known.blocks:
        assert block.defaults.shape == (3, block.place.kept)
        assert block.place.kept == block.matrix.shape[1] <= len(block.mean)
