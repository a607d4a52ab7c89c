"""The scripts in bench/ run: a few seconds each here, for figures see their own usage."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "bench"


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(name: str, *arguments: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_host(script: Any) -> None:
    only = "LBNHC to head-major, rows of 256"
    lines = script("host.py", "--tokens", 256, "--runs", 1, "--threads", 1, "--only", only)
    assert len(lines) == 2
    assert lines[1].startswith("LBNHC to head-major, rows of 256 B")


def test_lookup(script: Any) -> None:
    lines = script("lookup.py", "--tokens", 1024, "--runs", 1)
    assert [line.split()[0] for line in lines[1:]] == ["1,024"] * 7


def test_restart(script: Any, tmp_path: Path) -> None:
    lines = script("restart.py", tmp_path, "--entries", 200, "--runs", 1)
    assert lines[1].split()[0] == "200"
    assert list(tmp_path.iterdir()) == []


def test_rss(script: Any, tmp_path: Path) -> None:
    lines = script("rss.py", "--rounds", 10, "--samples", 2, "--tier", f"disk://{tmp_path}/d")
    assert [line.split()[0] for line in lines[1:4]] == ["0", "5", "10"]
    assert lines[4].endswith("retrieve_failures 0")


def test_redis_tier(script: Any) -> None:
    lines = script("redis_tier.py", "--mib", 2, "--objects", 1, "--rounds", 1)
    assert any(line.startswith("read and check, backend") for line in lines), lines
