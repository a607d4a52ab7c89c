"""The command line: configuration, doctor, bench, and one line for an error."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lmkv import backends
from lmkv.backends import Read, Result, Write
from lmkv.backends.cpu import CpuBackend
from lmkv.cli import main
from lmkv.cli.output import human
from lmkv.config import markdown


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def lmkv(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command line in this process."""
    for name in ("LMKV_CONFIG", "LMKV_TIERS", "LMKV_CPU_BUDGET"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as exit_:
            main([str(each) for each in arguments])
        code = exit_.value.code
        assert code is None or isinstance(code, int)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Outcome(code or 0, out, err)

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lmkv.toml"
    path.write_text(f'[cpu]\nbudget = "64MiB"\n[[tiers]]\nurl = "disk://{tmp_path}/tier?fsync=1"\n')
    return path


# The command itself


def test_no_command_prints_the_commands(lmkv: Any) -> None:
    text = "".join(lmkv()[1:])
    assert all(name in text for name in ("config", "cache", "doctor", "bench"))


def test_version(lmkv: Any) -> None:
    assert lmkv("--version").out.strip()


def test_unknown_command_and_option_are_two(lmkv: Any) -> None:
    assert lmkv("frobnicate").code == 2
    assert lmkv("bench", "--nope").code == 2
    assert lmkv("bench", "--runs", 0).code == 2


def test_error_is_one_line_on_stderr_without_a_traceback(tmp_path: Path) -> None:
    code = "from lmkv.cli import main; main()"
    command = [sys.executable, "-c", code, "config", "check", str(tmp_path / "none.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("lmkv: config: cannot read ")
    assert done.stderr.count("\n") == 1


# config


def test_show_prints_values_and_origins(lmkv: Any, file: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("LMKV_CHUNK_TOKENS", "512")
    found = lmkv("config", "show", "--config", file)
    assert found.code == 0
    rows = {row.split()[0]: row for row in found.out.splitlines()}
    assert rows["chunk_tokens"].split()[1:] == ["512", "env", "LMKV_CHUNK_TOKENS"]
    assert rows["cpu.budget"].split()[1:] == ["64MiB", "file", str(file)]
    assert rows["cpu.touch"].split()[1:] == ["true", "default"]
    assert "?fsync=1" in rows["tiers.0.url"]


def test_show_json(lmkv: Any, file: Path) -> None:
    shown = json.loads(lmkv("config", "show", "-c", file, "--json").out)
    assert {"key": "cpu.budget", "value": "64MiB", "from": f"file {file}"} in shown
    assert {"key": "tiers.0.budget", "value": "0.5", "from": "default"} in shown


def test_check_accepts_a_good_file(lmkv: Any, file: Path) -> None:
    found = lmkv("config", "check", file)
    assert (found.code, found.out) == (0, f"{file}: fine\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk_token = 3", "chunk_token: unknown key; did you mean 'chunk_tokens'?"),
        ('policy = "lrv"', "policy: "),
        ('tiers = ["disk:///a?codec=zstdd"]', "did you mean"),
        ('tiers = ["dsk:///a"]', "tiers.0.url: no backend 'dsk'; did you mean 'disk'?"),
    ],
)
def test_check_refuses_a_bad_file(lmkv: Any, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    found = lmkv("config", "check", tmp_path / "bad.toml")
    assert (found.code, found.out) == (1, "")
    assert message in found.err


def test_docs_are_the_reference(lmkv: Any) -> None:
    assert lmkv("config", "docs").out == markdown()


# doctor


def test_doctor_stores_and_reads_back_in_every_tier(lmkv: Any, file: Path, tmp_path: Path) -> None:
    found = lmkv("doctor", "--config", file)
    assert found.code == 0, found
    verdicts = {line[6:].partition(":")[0]: line for line in found.out.splitlines()}
    assert {"processor", "memory", "huge pages", "cuda", "cpu", "disk"} <= set(verdicts)
    assert all(line.startswith(("OK", "NOTE")) for line in verdicts.values())
    assert all("stored and read back" in verdicts[tier] for tier in ("cpu", "disk"))
    assert [path.name for path in (tmp_path / "tier").rglob("*") if path.is_file()] == ["lock"]


def test_doctor_fails_with_the_fix(lmkv: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("LMKV_CPU_BUDGET", "1000TiB")
    (tmp_path / "file").write_text("")
    tiers = f"disk://{tmp_path}/file disk://{tmp_path}/odd?fsync=maybe disk://{tmp_path}/good"
    monkeypatch.setenv("LMKV_TIERS", tiers)
    found = lmkv("doctor")
    assert found.code == 1
    lines = found.out.splitlines()
    failed = [number for number, line in enumerate(lines) if line.startswith("FAIL")]
    assert len(failed) == 3
    assert all(lines[number + 1].startswith("      fix: ") for number in failed)
    assert any("lower cpu.budget" in line for line in lines)
    assert any("fix: " in line and "fsync" in line for line in lines)
    assert sum(line.startswith("OK") and "read back" in line for line in lines) == 2


class Hanging(CpuBackend):
    """A medium that answers nothing until the test is over."""

    over = threading.Event()

    def write(self, writes: Sequence[Write]) -> list[Result]:
        self.over.wait()
        return []


class Forgetful(CpuBackend):
    """A medium that gives back other bytes than it took."""

    def read(self, reads: Sequence[Read]) -> list[Result]:
        found = super().read(reads)
        reads[0].into[5] ^= 1
        return found


def test_doctor_names_a_medium_that_hangs_and_one_that_is_faulty(lmkv: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("LMKV_OPERATION_TIMEOUT", "0.1")
    for backend, finding in ((Hanging, "no answer in 0.1 s"), (Forgetful, "other bytes came back")):
        monkeypatch.setattr(backends, "open", lambda url, made=backend: made())
        found = lmkv("doctor")
        assert found.code == 1
        assert f"FAIL  cpu://: {finding}\n      fix: " in found.out
    Hanging.over.set()


# bench


def figures(found: Outcome) -> dict[str, Any]:
    assert found.code == 0, found
    return {each["step"]: each for each in json.loads(found.out)["figures"]}


@pytest.mark.parametrize("layout", ["LBNHC", "BHLNC", "HF"])
def test_bench_measures_each_step_beside_its_reference(lmkv: Any, layout: str) -> None:
    command = ["bench", "--model", "smollm2-135m", "--layout", layout, "--tokens", 256]
    found = figures(lmkv(*command, "--runs", 2, "--json"))
    assert found["store"]["of"] == found["retrieve"]["of"] == "memcpy"
    for each in found.values():
        assert 0 < each["min"] <= each["median"] <= each["max"]
    assert {"lookup, all hit", "lookup, miss at once", "hash, array", "hash, list"} <= set(found)


def test_bench_of_a_model_with_windows(lmkv: Any) -> None:
    command = ["bench", "--model", "gpt-oss-120b", "--tokens", 512, "--threads", 2]
    assert figures(lmkv(*command, "--runs", 1, "--json"))["retrieve"]["median"] > 0


@pytest.mark.parametrize(("codec", "layout", "most"), [("xpl", "LBHNC", 12), ("fp8", "HF", 8.2), ("kch", "LBNHC", 5)])
def test_bench_of_a_codec_tells_what_a_value_takes(lmkv: Any, codec: str, layout: str, most: float) -> None:
    command = ["bench", "--model", "smollm2-135m", "--layout", layout, "--tokens", 256, "--runs", 1, "--codec", codec]
    found = figures(lmkv(*command, "--json"))
    assert found["size"]["unit"] == "bits/value"
    assert 1 < found["size"]["median"] < most
    assert (found["store"]["of"], found["retrieve"]["of"]) == ("memcpy", "memcpy")


def test_bench_of_a_disk_leaves_nothing(lmkv: Any, tmp_path: Path) -> None:
    command = ["bench", "--model", "smollm2-135m", "--tier", f"disk://{tmp_path}/d"]
    found = lmkv(*command, "--tokens", 256, "--runs", 1)
    assert found.code == 0, found
    store = next(line for line in found.out.splitlines() if line.startswith("store"))
    assert store.rstrip().endswith(" write")
    left = [path for path in (tmp_path / "d").rglob("*") if path.name not in ("lock", "tmp")]
    assert left == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "lama-3.1-8b"], "--model: unknown shape 'lama-3.1-8b'; did you mean 'llama"),
        (["--layout", "LBNH"], "--layout: unknown layout 'LBNH'; did you mean"),
        (["--tokens", 300], "--tokens: 300 is not a multiple of the chunk, 256"),
        (["--tier", "dsk:///x"], "did you mean"),
    ],
)  # fmt: skip
def test_bench_refuses(lmkv: Any, options: list[object], message: str) -> None:
    found = lmkv("bench", "--tokens", 256, *options)
    assert (found.code, found.out) == (1, "")
    assert message in found.err


# Numbers for people


def test_sizes_for_people() -> None:
    assert [human(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40)] == ["0B", "1023B", "1.5KiB", "5.0GiB", "3.0TiB"]
