"""Profiles: a file is what its id says, wrong files are refused, and a real architecture can be calibrated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import blake3
import msgspec
import numpy as np
import pytest
from codec_parts import ROPE, part
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.codec import channels, profile
from lmkv.codec.fit import Statistics, fit, places, with_levels
from lmkv.codec.klt import Klt
from lmkv.codec.profile import Level, Profile
from lmkv.codec.shape import Rope, Shape
from lmkv.errors import BadContainer, BadInput

GEOMETRY = Shape("bfloat16", 2, 1, 1, 1, 6, 4, "kv head token dim", rope=ROPE)


@pytest.fixture(scope="module")
def statistics() -> Statistics:
    found = Statistics(GEOMETRY)
    shape = Shape("bfloat16", 2, 1, 600, 1, 6, 4, "kv head token dim", rope=ROPE)
    found.add(memoryview(part(shape)), 600)
    return found


@pytest.fixture(scope="module")
def made(statistics: Statistics) -> Profile:
    return fit(statistics, "made up", places(GEOMETRY, 16, 1), (4.0, 2.0))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = list(profile._folders)
    profile.look_in(["/nowhere", str(tmp_path)])
    yield tmp_path
    profile.look_in(before)


def test_a_profile_is_found_by_its_id_and_comes_back_whole(made: Profile, folder: Path) -> None:
    path = made.save(folder / "deeper")
    raw = path.read_bytes()
    assert path.name == made.id + ".lmkvp" == blake3.blake3(raw).digest()[:8].hex() + ".lmkvp"
    assert len(raw) == made.nbytes
    path.rename(folder / path.name)
    found = profile.find(made.id)
    assert found is profile.find(made.id)
    for each in (found, profile.open_profile(str(folder / path.name)), profile.open_profile(made.id)):
        assert (each.id, each.description, each.rope) == (made.id, made.description, ROPE)
        for ours, theirs in zip(made.blocks, each.blocks, strict=True):
            assert ours.place == theirs.place
            for name in ("mean", "weight", "scale", "matrix", "defaults", "forward"):
                assert (getattr(ours, name) == getattr(theirs, name)).all()
    assert made.description.blocks[0].kv == "kv"
    assert [each.name for each in folder.iterdir() if each.suffix == ".tmp"] == []


def test_forward_undoes_inverse(made: Profile) -> None:
    for block in made.blocks:
        inverse = block.matrix.astype(np.float64) * block.scale[:, None]
        assert np.abs(block.forward @ inverse - np.eye(block.place.kept)).max() < 1e-3


def test_measured_errors_are_notes_that_change_the_id(statistics: Statistics, made: Profile) -> None:
    asked: list[int] = []

    def measure(found: Profile, level: int) -> float:
        asked.append(level)
        assert found.id == made.id
        return 0.001 * (level + 1)

    noted = fit(statistics, "made up", places(GEOMETRY, 16, 1), (4.0, 2.0), measure)
    assert asked == [0, 1]
    assert noted.kl == {0: 0.001, 1: 0.002}
    assert made.kl == {}
    assert noted.id != made.id
    assert with_levels(made, noted.description.levels).id == noted.id


def test_the_limit_of_bytes_leaves_out_the_least_coefficients(statistics: Statistics, made: Profile) -> None:
    small = fit(statistics, "made up", places(GEOMETRY, 16, 1), (4.0, 2.0), most_bytes=1100)
    overhead = made.nbytes - sum(2 * block.matrix.size for block in made.blocks)
    assert small.nbytes - overhead < 1100 < made.nbytes
    for less, more in zip(small.blocks, made.blocks, strict=True):
        assert less.place.kept <= more.place.kept
        assert (less.matrix == more.matrix[:, : less.place.kept]).all()


def test_unknown_and_damaged_profiles_are_misses(made: Profile, folder: Path) -> None:
    for wrong in ("0123456789abcdef", "", "../../etc/passwd", "0123456789ABCDEF", made.id[:-1]):
        with pytest.raises(BadContainer) as caught:
            profile.find(wrong)
        assert caught.value.reason == "profile"
    path = made.save(folder)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(BadContainer) as caught:
        profile.find(made.id)
    assert caught.value.reason == "profile"


@settings(max_examples=100)
@given(st.data())
def test_wrong_files_are_refused(made: Profile, draw: st.DataObject) -> None:
    raw = profile._pack(made.description, made.blocks)
    for wrong in (raw[: draw.draw(st.integers(0, len(raw) - 1))], raw + b"\0", b""):
        with pytest.raises(BadContainer) as caught:
            profile.parse(memoryview(wrong))
        assert caught.value.reason == "profile"
    bad = bytearray(raw)
    for _ in range(3):
        bad[draw.draw(st.integers(0, min(900, len(bad) - 1)))] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(BadContainer):
        assert profile.parse(memoryview(bytes(bad))).id != made.id


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0}, {"heads": 1 << 20}, {"dim": -1}, {"sinks": 1000}, {"levels": (Level(0.0, 1.0),) * 2},
        {"inv_freq": (1.0,) * 9}, {"inv_freq": (1e9,)}, {"factor": 0.0}, {"blocks": ()},
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(made: Profile, change: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        profile.make(msgspec.structs.replace(made.description, **change), made.blocks)


def test_a_model_is_calibrated_and_its_cache_comes_back(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    tiny_models = pytest.importorskip("tiny_models")
    from lmkv.codec.calibrate import calibrate, gather

    model = tiny_models.tiny("qwen3")
    rope = Rope(tuple(model.model.rotary_emb.inv_freq.tolist()))
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 256, (300,), generator=generator) for _ in range(3)]
    done: list[int] = []
    found = calibrate(model, texts, rope=rope, layers=2, chunk_tokens=32, bits=(4.0, 2.0), progress=done.append)
    assert done == [1, 2, 3]
    about = found.description
    config = model.config
    assert (about.layers, about.heads, about.dim) == (config.num_hidden_layers, config.num_key_value_heads, 16)
    assert found.nbytes <= sum(each.numel() for each in model.parameters()) * 2 // 10 + 4096
    seen = gather(model, texts[:1], rope)
    assert (np.asarray(seen.fisher) > 0).all()
    found.save(folder)
    shape = Shape("bfloat16", about.layers, 1, 296, about.heads, 16, 16, "kv head token dim", 0, 4, rope)
    x = (seen.kv[0][:, :, 4:].astype(np.uint32) << 16).view(np.float32)
    raw = memoryview(bytearray(shape.nbytes))
    channels.write(x.copy(), raw, shape, rope)
    errors = []
    for level in range(2):
        codec, dst, out = Klt(level, found.id), memoryview(bytearray(99_999)), memoryview(bytearray(shape.nbytes))
        codec.decode(dst[: codec.encode(raw, dst, shape)], out)
        back = channels.read(out, shape, rope)
        assert back is not None
        errors.append(float(np.abs(back - x).mean() / np.abs(x).mean()))
    assert errors[0] < errors[1] < 0.9
    assert errors[0] < 0.3
