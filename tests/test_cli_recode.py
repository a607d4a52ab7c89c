"""``lmkv cache recode``: what a disk tier holds in another codec, in place and restartable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory import CHUNK, Memory, full, spec

from lmkv import Engine, chunk, codec
from lmkv.cli import main, recode

COUNT = 5
TOKENS = np.arange(COUNT * CHUNK, dtype=np.int32)


@pytest.fixture
def tier(tmp_path: Path) -> tuple[Path, Memory]:
    """A disk tier of five chunks that shrink, one layer of float32 in eight steps, and the pages they are of."""
    memory = Memory(spec(full(layers=4, heads=2, dim=64)))
    steps = np.random.default_rng(1).integers(1, 9, memory.arrays[0].size // 4).astype("<f4")
    memory.arrays[0][:] = steps.view(np.uint8).reshape(memory.arrays[0].shape)
    with open_engine(memory, tmp_path) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(len(TOKENS)))
        assert engine.flush(10).written == {"disk": COUNT}
    return tmp_path, memory


def open_engine(memory: Memory, place: Path, options: str = "codec=raw") -> Engine:
    settings: dict[str, Any] = {"cpu_budget": "8MiB", "cpu_touch": False, "tiers": f"disk://{place}?{options}"}
    return Engine(memory.spec, weights="test", layout=memory.pages.layout, **settings)


def run(capsys: pytest.CaptureFixture[str], place: Path, *arguments: str) -> tuple[int, list[str]]:
    with pytest.raises(SystemExit) as ended:
        main(["cache", "recode", str(place), *arguments])
    said = capsys.readouterr()
    return int(ended.value.code or 0), (said.out or said.err).splitlines()


def files(place: Path) -> list[Path]:
    return sorted(each for each in place.rglob("*-*") if each.is_file())


def codecs(place: Path) -> list[str]:
    return [chunk.parse(memoryview(each.read_bytes())).codec for each in files(place)]


def test_files_change_their_codec_and_keep_name_age_and_content(
    tier: tuple[Path, Memory], capsys: pytest.CaptureFixture[str]
) -> None:
    place, memory = tier
    names, before = files(place), [each.read_bytes() for each in files(place)]
    for each in names:
        os.utime(each, (1e9, 1e9))
    code, said = run(capsys, place, "--codec", "zstd", "--level", "3")
    assert (code, said[0]) == (0, f"{COUNT} recoded")
    assert codecs(place) == ["zstd"] * COUNT
    assert sum(each.stat().st_size for each in names) < sum(map(len, before)) / 2
    assert {each.stat().st_mtime for each in names} == {1e9}
    assert files(place) == names
    assert not list((place / "tmp").iterdir())
    ids = memory.ids(len(TOKENS))
    wanted = memory.read(ids)[0].copy()
    memory.wipe()
    with open_engine(memory, place) as engine:
        assert engine.retrieve(TOKENS, memory.pages, ids).tokens == len(TOKENS)
    np.testing.assert_array_equal(memory.read(ids)[0], wanted)
    assert run(capsys, place, "--codec", "raw")[1][0] == f"{COUNT} recoded"
    assert [each.read_bytes() for each in names] == before


def test_a_run_that_was_stopped_goes_on_where_it_was(
    tier: tuple[Path, Memory], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = tier
    publish, done = recode._publish, []

    def stop(*arguments: Any) -> None:
        if len(done) == 2:
            raise OSError("stopped")
        publish(*arguments)
        done.append(arguments)

    with monkeypatch.context() as patched:
        patched.setattr(recode, "_publish", stop)
        assert run(capsys, place, "--codec", "zstd") == (1, ["lmkv: stopped"])
    assert sorted(codecs(place)) == ["raw"] * 3 + ["zstd"] * 2
    assert run(capsys, place, "--codec", "zstd")[1][:2] == ["3 recoded", "2 had the codec already"]
    assert codecs(place) == ["zstd"] * COUNT


def test_what_is_lossy_or_bad_stays_as_it_is(tier: tuple[Path, Memory], capsys: pytest.CaptureFixture[str]) -> None:
    place, _ = tier
    assert run(capsys, place, "--codec", "fp8")[1] == ["lmkv: --dtype: is needed for fp8"]
    assert run(capsys, place, "--codec", "fp8", "--dtype", "float3")[1] == [
        "lmkv: --dtype: unknown dtype 'float3'; did you mean 'float32'?"
    ]
    assert run(capsys, place, "--codec", "fp8", "--dtype", "float32")[1][0] == f"{COUNT} recoded"
    assert codecs(place) == ["fp8"] * COUNT
    first = files(place)[0]
    damaged = bytearray(first.read_bytes())
    damaged[-1] ^= 1
    first.write_bytes(damaged)
    held = [each.read_bytes() for each in files(place)]
    for arguments in (("zstd",), ("raw",), ("q8", "--dtype", "float32")):
        code, said = run(capsys, place, "--codec", *arguments)
        assert (code, said[:3]) == (
            0,
            ["0 recoded", "4 lossy, left as they are", "1 bad or unreadable, left as they are"],
        )
        assert [each.read_bytes() for each in files(place)] == held


def test_a_tier_in_use_and_codecs_that_cannot_know_enough_are_refused(
    tier: tuple[Path, Memory], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, memory = tier
    with open_engine(memory, place):
        code, said = run(capsys, place, "--codec", "zstd")
        assert code == 1
        assert "an engine is using it" in said[0]
    monkeypatch.setattr(codec.kind("fp8"), "needs", "geometry")
    assert "fp8 must know how pages are laid out, which no file says" in run(capsys, place, "--codec", "fp8")[1][0]
    assert "did you mean 'zstd'" in run(capsys, place, "--codec", "zst")[1][0]
    assert codecs(place) == ["raw"] * COUNT
