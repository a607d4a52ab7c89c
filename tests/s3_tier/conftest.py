"""S3 servers: a shared one, one that a test may kill, and one that does what a test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from s3_servers import Moto, Scripted, bucket, keys_in_environment, opened

from lmkv.backends.s3 import S3Backend
from lmkv.testing.backend_tests import put


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys_in_environment(monkeypatch)


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    server = Moto()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_moto() -> Iterator[Moto]:
    """One that a test may start, stop and kill."""
    server = Moto()
    yield server
    server.stop()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.stop()


@pytest.fixture
def store(moto: Moto) -> Iterator[S3Backend]:
    with closing(opened(bucket(moto))) as backend:
        yield backend


@pytest.fixture
def faked(scripted: Scripted) -> Iterator[S3Backend]:
    """A backend on the scripted server, with the object of number 1 stored."""
    with closing(opened(f"s3://bucket/kv?endpoint={scripted.endpoint}&timeout=1s&lookup_timeout=500ms")) as backend:
        put(backend, 1)
        scripted.requests.clear()
        yield backend
