"""What a server knows of its storage while the scan at start has not yet listed it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory import CHUNK, Memory, spec
from test_engine import TOKENS, disk, open_engine

from lmkv.backends.base import Found, Status
from lmkv.backends.disk import DiskBackend
from lmkv.index import Watch
from lmkv.keys import ChunkKey
from lmkv.server.catalog import Catalog


@pytest.fixture
def stored(tmp_path: Path) -> list[ChunkKey]:
    """Keys of chunks that an earlier process has left on disk."""
    memory = Memory(spec(), pages=128)
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        engine.store(TOKENS, memory.pages, memory.ids(160))
        assert engine.flush(10).safe
        keys = engine.keys(TOKENS)
        return [keys.key(i, engine.scope.digest, 0, 0) for i in range(len(TOKENS) // CHUNK)]


@pytest.fixture
def scan(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A scan has read all names, and tells of them when this is set."""
    go_on, real = threading.Event(), DiskBackend.scan

    def held(self: DiskBackend) -> Iterator[list[Found]]:
        found = [each for batch in real(self) for each in batch]
        assert go_on.wait(30)
        yield found

    monkeypatch.setattr(DiskBackend, "scan", held)
    yield go_on
    go_on.set()


def test_what_the_scan_has_not_told_of_is_found_pinned_and_deleted(
    stored: list[ChunkKey], scan: threading.Event, tmp_path: Path
) -> None:
    memory = Memory(spec(), pages=128)
    with open_engine(memory, tiers=disk(tmp_path)) as engine:
        catalog = Catalog(engine.storage, Watch())
        missing = stored[0]._replace(digest=bytes(32))
        places = catalog.locate([stored[0], missing])
        assert places[0] is not None
        assert places[1] is None
        assert catalog.pin("somebody", [stored[1], missing], 60.0) == [Status.OK, Status.MISSING]
        assert catalog.delete([stored[-1], missing]) == [True, False]
        scan.set()
        assert engine.storage.tiers[0].scanned.wait(10)
        assert [nbytes > 0 for nbytes in catalog.contains(stored)] == [True] * (len(stored) - 1) + [False]
        assert not [path for path in tmp_path.rglob("*") if stored[-1].digest.hex() in path.name]
