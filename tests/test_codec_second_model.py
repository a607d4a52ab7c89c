"""A second architecture keeps the error classes: a tiny Qwen3 (grouped heads, QK-norm) that is trained here first.

It has learnt to look back a page of 256 bytes, so what comes after a prefix hangs on the whole of its cache.
"""

# ruff: noqa: E402 - torch and transformers are optional
from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lmkv.codec import Meanings, classes, profile
from lmkv.codec.report.model import Model
from lmkv.config import Config, TierConfig
from lmkv.errors import ConfigError

BENCH = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "second_architecture.py"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Where profiles are looked for is the process's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    profile.look_in([*Config().profiles])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3")


@pytest.fixture(scope="module")
def loss(folder: Path) -> dict[str, float]:
    return BENCH["learn"](folder, hidden=128, layers=3, steps=300)


@pytest.fixture(scope="module")
def rows(folder: Path, loss: dict[str, float]) -> list[dict[str, Any]]:
    assert loss
    return BENCH["held"](folder)


def test_texts_are_apart() -> None:
    learn = bytes(BENCH["corpus"]().tolist()).decode()
    parts = [dict(BENCH["pages"](BENCH[name])) for name in ("CALIBRATE", "FRESH")]
    assert len(learn) > 100_000
    assert not set(parts[0]) & set(parts[1])
    for text in (text for part in parts for text in part.values()):
        assert text[:256] == text[256:512] == text[512:768]
        assert not any(line in learn for line in text[:256].splitlines()[1:-1] if len(line) > 50)


def test_tokens_are_bytes() -> None:
    words, text = BENCH["tokenizer"](), "".join(map(chr, range(128))) + "é\u2603"
    assert words(text)["input_ids"] == list(text.encode())


def test_the_model_has_learnt_and_looks_back(folder: Path, loss: dict[str, float]) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.model_type == "qwen3"
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert loss["first"] < loss["frequencies"] - 0.3
    assert loss["again"] < loss["frequencies"] - 2


def test_each_class_keeps_its_bound_on_fresh_texts(rows: list[dict[str, Any]]) -> None:
    sound = {name: row for row in rows if not row["profile"] for name in row["classes"]}
    assert set(sound) == set(classes.BOUNDS)
    assert (sound["exact"]["codec"], sound["exact"]["KL"], sound["exact"]["top-1"]) == ("xpl", 0.0, 1.0)
    for name, bound in classes.BOUNDS.items():
        assert sound[name]["KL"] < bound or not bound
        assert (sound[name]["noted KL"] or 0) < bound or not bound
    q8 = next(row["bits/value"] for row in rows if row["codec"] == "q8:0")
    for name in ("kl<0.01", "kl<0.05"):  # the profile of so small a model is too small for the finest class
        assert sound[name]["codec"].startswith("klt:")
        assert sound[name]["bits/value"] < 0.4 * q8
    assert sound["kl<0.05"]["bits/value"] <= sound["kl<0.01"]["bits/value"] <= sound["kl<0.001"]["bits/value"]


def test_negative_control(rows: list[dict[str, Any]]) -> None:
    """A profile that says of itself what the sound one does, and is wrong, breaks every bound."""
    mixed = {name: row for row in rows if row["profile"] for name in row["classes"]}
    assert set(mixed) == set(classes.BOUNDS)
    assert mixed["exact"]["KL"] == 0.0
    broken = {name for name, row in mixed.items() if row["codec"].startswith("klt:")}
    assert broken >= {"kl<0.01", "kl<0.05"}
    assert all(mixed[name]["KL"] > 10 * classes.BOUNDS[name] for name in broken)


@pytest.mark.usefixtures("rows")
def test_the_profile_is_refused_for_another_model(folder: Path) -> None:
    file = str(next(folder.glob("*.lmkvp")))
    mine = Model(folder, threads=1).geometry.meaning
    other = BENCH["model"](hidden=128, layers=2)
    other.save_pretrained(folder / "other")
    BENCH["tokenizer"]().save_pretrained(folder / "other")
    theirs = Model(folder / "other", threads=1).geometry.meaning
    wanted = TierConfig(url="disk:///x", codec="kl<0.01", profile=file)
    assert classes.choose(wanted, Meanings.of({1: [mine]})).codec.name == "klt"
    with pytest.raises(ConfigError, match="has 3 layers that cache alike, here are 2"):
        classes.choose(wanted, Meanings.of({1: [theirs]}))
