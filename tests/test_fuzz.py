"""Replays the corpus of ``make fuzz``: nothing in it may crash, hang, or keep memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "fuzz"
sys.path.insert(0, str(HERE))

from targets import TARGETS  # noqa: E402

FILES = sorted((HERE / "corpus").glob("*/*"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_replay(file: Path) -> None:
    TARGETS[file.parent.name](file.read_bytes())


def test_every_target_has_a_corpus() -> None:
    assert {file.parent.name for file in FILES} == set(TARGETS)
