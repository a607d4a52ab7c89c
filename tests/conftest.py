"""Shared test settings."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# A loaded machine is slow, not wrong: no example fails for the time it took.
settings.register_profile("lmkv", deadline=None)
settings.load_profile("lmkv")


@pytest.fixture(params=["portable", "avx2", "avx512"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once for every vector level of this machine."""
    from lmkv import _native as native

    if native.limit_simd(request.param) != request.param:
        native.limit_simd("avx512")
        pytest.skip("not on this machine")
    yield request.param
    native.limit_simd("avx512")
