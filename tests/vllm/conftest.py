"""Tests against a real vLLM, in an environment of their own (`make test-vllm`); elsewhere they are not collected."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "tools")]

_found = importlib.util.find_spec("vllm")
if _found is None or _found.origin is None:  # this folder itself can pass for a package named vllm
    collect_ignore_glob = ["test_*.py", "hooks"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "all: a model or case beyond the default set, for `make test-vllm-all`")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """One child process for all tests that can have vLLM in a single process; each opens what it needs."""
    from engine import Engine

    with Engine(tmp_path_factory.mktemp("vllm") / "engine.log") as found:
        yield found


@pytest.fixture
def place() -> Iterator[Path]:
    """A private folder with a short path, as a Unix socket needs; a service left on it is ended."""
    from service import stop_service

    folder = Path(tempfile.mkdtemp(prefix="lmkv-"))
    yield folder
    stop_service(folder / "socket")
    shutil.rmtree(folder)
