"""Tests that need an NVIDIA GPU and CuPy; everywhere else they skip with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The cases are those of tests/test_pages.py.
sys.path.insert(0, str(Path(__file__).parents[1]))


def missing() -> str | None:
    """Why there is nothing to test on, None when there is."""
    try:
        import cupy
    except ImportError as error:
        return f"no CuPy: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return None if count else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = missing() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
