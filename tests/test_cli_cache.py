"""``lmkv cache`` over a disk tier at rest: listing, sums, checks and removal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv import backends, chunk
from lmkv.backends.base import Write
from lmkv.cli import main
from lmkv.cli.store import Object, oldest
from lmkv.keys import ChunkKey, ChunkKeys, Identity, Scope
from lmkv.spec import Kind, KVSpec, LayerGroup

SPEC = KVSpec((LayerGroup(Kind.FULL, (0, 1), 16, kv_heads=1, head_dim=16),), chunk_tokens=64)
BYTES = chunk.container_bytes(SPEC, 0)
SCOPES = [Scope(weights, "bfloat16", "x", 64).digest for weights in ("a", "b")]
DEAD_PID = 2**22 + 1  # above the kernel's largest


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def lmkv(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Run ``lmkv cache COMMAND tmp_path ...`` in this process."""

    def run(command: str, *arguments: object, place: object = tmp_path) -> Outcome:
        with pytest.raises(SystemExit) as exit_:
            main(["cache", command, str(place), *map(str, arguments)])
        code = exit_.value.code
        assert code is None or isinstance(code, int)
        return Outcome(code or 0, *capsys.readouterr())

    return run


class Disk:
    """A tier's folder, filled chunk by chunk."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.url = f"disk://{place}?direct=off"
        backends.open(self.url).close()

    def prompt(
        self, seed: int, chunks: int, scope: int = 0, salt: str = "", age: float = 0, ttl: int = 0
    ) -> list[ChunkKey]:
        """Store a prompt's chunks, each a second younger than the one before."""
        tokens = np.random.default_rng(seed).integers(0, 1000, chunks * 64)
        digests = ChunkKeys.from_tokens(tokens, 64, Identity(salt))
        keys = [digests.key(i, SCOPES[scope]) for i in range(chunks)]
        now = time.time() - age
        backend = backends.open(self.url)
        for key in keys:
            header = chunk.new_header(SPEC, key, 0, int(now) + ttl if ttl else 0, int(now))
            data = memoryview(bytearray(np.random.default_rng(key.depth).bytes(BYTES)))
            chunk.seal(data, header)
            assert backend.write([Write(key, data)])[0].nbytes == BYTES
            os.utime(self.file(key), (now + key.depth, now + key.depth))
        backend.close()
        return keys

    def file(self, key: ChunkKey) -> Path:
        (found,) = self.place.rglob(str(key)[33:])
        return found

    def held(self) -> set[ChunkKey]:
        """What is there, from the names alone."""
        files = [file for file in self.place.rglob("*-*") if file.parent.name != "tmp"]
        return {ChunkKey.parse(f"{file.relative_to(self.place).parts[0]}-{file.name}") for file in files}


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


# ls, du, show


def test_ls_lists_newest_first(lmkv: Any, disk: Disk) -> None:
    old, new = disk.prompt(1, 2, age=7200), disk.prompt(2, 1, scope=1)
    rows = json.loads(lmkv("ls", "--json").out)
    assert [row["digest"] for row in rows] == [key.digest.hex() for key in (*new, old[1], old[0])]
    written = datetime.fromtimestamp(disk.file(old[1]).stat().st_mtime)
    assert rows[1] == {
        "scope": SCOPES[0].hex(), "digest": old[1].digest.hex(), "created": written.isoformat(" ", "seconds"),
        "depth": 1, "group": 0, "shard": 0, "bytes": BYTES, "start": 64, "tokens": 64, "codec": "raw",
    }  # fmt: skip
    table = lmkv("ls").out.splitlines()
    assert table[0].split()[0] == "scope"
    assert table[1].split()[:2] == [SCOPES[1].hex()[:8], new[0].digest.hex()[:16]]


def test_ls_with_a_limit(lmkv: Any, disk: Disk) -> None:
    disk.prompt(1, 3)
    disk.prompt(2, 1, scope=1)
    shown = lmkv("ls", "--limit", 1).out.splitlines()
    assert len(shown) == 3
    assert shown[-1] == "... and 3 more (--limit 0 shows all)"
    assert len(json.loads(lmkv("ls", "--limit", 0, "--json").out)) == 4


def test_ls_shows_a_bad_header_as_bad(lmkv: Any, disk: Disk) -> None:
    (key,) = disk.prompt(1, 1)
    disk.file(key).write_bytes(bytes(BYTES))
    (row,) = json.loads(lmkv("ls", "--json").out)
    assert row["codec"] == "bad: magic"


def test_ls_of_an_empty_tier(lmkv: Any, disk: Disk) -> None:
    assert lmkv("ls").code == 0
    assert json.loads(lmkv("ls", "--json").out) == []


def test_du_sums_each_scope(lmkv: Any, disk: Disk) -> None:
    disk.prompt(1, 3)
    disk.prompt(2, 2, salt="tenant")
    disk.prompt(3, 1, scope=1)
    rows = json.loads(lmkv("du", "--json").out)
    assert rows == [
        {"scope": SCOPES[0].hex(), "objects": 5, "bytes": 5 * BYTES, "tokens": 320},
        {"scope": SCOPES[1].hex(), "objects": 1, "bytes": BYTES, "tokens": 64},
    ]
    assert lmkv("du").out.splitlines()[-1].split()[:4] == ["all", "6", str(6 * BYTES), "384"]


def test_show_decodes_the_header_and_the_parts(lmkv: Any, disk: Disk) -> None:
    keys = disk.prompt(1, 2)
    for name in (str(keys[1]), keys[1].digest.hex()[:12]):
        (header,) = json.loads(lmkv("show", name).out)
        assert header["key"] == str(keys[1])
        assert (header["token_start"], header["token_count"], header["page_mask"]) == (64, 64, "0xf")
        assert [part["layers"] for part in header["parts"]] == [2]
        assert header["parts"][0]["checksum"] != 0


@pytest.mark.parametrize("key", ["", "zz"])
def test_show_needs_exactly_one_chunk(lmkv: Any, disk: Disk, key: str) -> None:
    disk.prompt(1, 2)
    found = lmkv("show", key)
    assert found.code == 1
    assert "not one chunk" in found.err


# verify


def test_verify_of_good_objects(lmkv: Any, disk: Disk) -> None:
    disk.prompt(1, 3)
    assert lmkv("verify") == (0, "3 objects, 0 bad, 0 removed\n", "")


def damage_payload(disk: Disk, keys: list[ChunkKey]) -> str:
    data = bytearray(disk.file(keys[0]).read_bytes())
    data[-1000] ^= 1
    disk.file(keys[0]).write_bytes(data)
    return "checksum"


def damage_header(disk: Disk, keys: list[ChunkKey]) -> str:
    data = bytearray(disk.file(keys[0]).read_bytes())
    data[3000] ^= 1
    disk.file(keys[0]).write_bytes(data)
    return "checksum: header"


def swap(disk: Disk, keys: list[ChunkKey]) -> str:
    disk.file(keys[0]).write_bytes(disk.file(keys[1]).read_bytes())
    return "identity"


def cut_a_page(disk: Disk, keys: list[ChunkKey]) -> str:
    os.truncate(disk.file(keys[0]), BYTES - 4096)
    return "short"


def cut_a_byte(disk: Disk, keys: list[ChunkKey]) -> str:
    os.truncate(disk.file(keys[0]), BYTES - 1)
    return "short"


def empty(disk: Disk, keys: list[ChunkKey]) -> str:
    os.truncate(disk.file(keys[0]), 0)
    return "short"


def misplace(disk: Disk, keys: list[ChunkKey]) -> str:
    file = disk.file(keys[0])
    file.rename(disk.file(keys[1]).parent.parent.parent / file.name)
    return "misplaced"


@pytest.mark.parametrize("damage", [damage_payload, damage_header, swap, cut_a_page, cut_a_byte, empty, misplace])
def test_verify_finds_and_removes_what_is_bad(lmkv: Any, disk: Disk, damage: Any) -> None:
    keys = disk.prompt(1, 2)
    reason = damage(disk, keys)
    found = lmkv("verify")
    assert found.code == 1
    bad, total = found.out.splitlines()
    assert str(keys[0])[33:] in bad
    assert reason in bad.rpartition(str(keys[0])[33:])[2]
    assert total == "2 objects, 1 bad, 0 removed"
    assert keys[0] in disk.held()
    found = lmkv("verify", "--delete")
    assert (found.code, found.out.splitlines()[-1]) == (1, "2 objects, 1 bad, 1 removed")
    assert disk.held() == {keys[1]}
    assert lmkv("verify").code == 0


def test_verify_names_foreign_files_and_leaves_them(lmkv: Any, disk: Disk) -> None:
    disk.prompt(1, 1)
    (disk.place / "notes.txt").write_text("mine")
    found = lmkv("verify", "--delete")
    assert found.code == 0
    assert found.out.startswith(f"{disk.place}/notes.txt: foreign\n")
    assert (disk.place / "notes.txt").exists()


# gc


def test_gc_evicts_the_oldest_leaves_first(lmkv: Any, disk: Disk) -> None:
    old, new = disk.prompt(1, 3, age=1000), disk.prompt(2, 2)
    found = lmkv("gc", "--budget", 3 * BYTES)
    assert found.code == 0
    assert "over budget: freed 2 objects" in found.out
    assert disk.held() == {old[0], *new}


def test_gc_never_leaves_a_chunk_without_its_prefix(lmkv: Any, disk: Disk) -> None:
    keys = [*disk.prompt(1, 4, age=50), *disk.prompt(2, 3, age=49), *disk.prompt(3, 2, scope=1)]
    for left in range(len(keys) - 1, 0, -2):
        assert lmkv("gc", "--budget", left * BYTES).code == 0
        there = disk.held()
        assert len(there) == left
        digests = {key.digest[:8] for key in there}
        assert all(key.depth == 0 or key.parent in digests for key in there)


def test_gc_removes_what_has_expired(lmkv: Any, disk: Disk) -> None:
    disk.prompt(1, 2, age=100, ttl=50)
    kept = {*disk.prompt(2, 1, age=100, ttl=5000), *disk.prompt(3, 1)}
    assert "expired: freed 2 objects" in lmkv("gc").out
    assert disk.held() == kept


def test_gc_removes_orphans_only_when_asked(lmkv: Any, disk: Disk) -> None:
    keys, kept = disk.prompt(1, 4), disk.prompt(2, 2)
    disk.file(keys[1]).unlink()
    lmkv("gc")
    assert disk.held() == {keys[0], keys[2], keys[3], *kept}
    assert "orphans: freed 2 objects" in lmkv("gc", "--orphans").out
    assert disk.held() == {keys[0], *kept}


def test_gc_removes_what_dead_writers_left(lmkv: Any, disk: Disk) -> None:
    folder = disk.place / "tmp"
    folder.mkdir(exist_ok=True)
    (folder / f"{DEAD_PID}-a-0").write_text("x")
    (folder / f"{os.getppid()}-a-0").write_text("x")
    (folder / f"{os.getppid()}-a-1").write_text("x")
    os.utime(folder / f"{os.getppid()}-a-1", (0, 0))
    assert lmkv("gc", "--dry-run").code == 0
    assert len(list(folder.iterdir())) == 3
    assert lmkv("gc").code == 0
    assert [file.name for file in folder.iterdir()] == [f"{os.getppid()}-a-0"]


def test_gc_dry_run_changes_nothing(lmkv: Any, disk: Disk) -> None:
    keys = {*disk.prompt(1, 3, age=100, ttl=10), *disk.prompt(2, 3)}
    found = lmkv("gc", "--budget", BYTES, "--dry-run")
    assert "expired: would free 3 objects" in found.out
    assert "over budget: would free 2 objects" in found.out
    assert disk.held() == keys


@pytest.mark.parametrize("budget", ["0", "8", "lots", "-5GiB", "200%"])
def test_gc_refuses_a_bad_budget(lmkv: Any, disk: Disk, budget: str) -> None:
    found = lmkv("gc", f"--budget={budget}")
    assert found.code == 2
    assert "Invalid value for '--budget'" in found.err


# Beside an engine, and places that are none


@pytest.fixture
def engine(disk: Disk) -> Iterator[backends.Backend]:
    """What an engine does: the tier is open and its lock is held."""
    backend = backends.open(disk.url)
    assert not backend.shared
    yield backend
    backend.close()


@pytest.mark.usefixtures("engine")
def test_removal_beside_an_engine_is_refused(lmkv: Any, disk: Disk) -> None:
    keys = disk.prompt(1, 2)
    for command in (["gc", "--budget", BYTES], ["verify", "--delete"]):
        found = lmkv(*command)
        assert found.code == 1
        assert "an engine is using it" in found.err
    assert disk.held() == {*keys}


@pytest.mark.usefixtures("engine")
def test_reading_beside_an_engine_is_fine(lmkv: Any, disk: Disk) -> None:
    disk.prompt(1, 2)
    commands = (["ls"], ["du"], ["verify"], ["gc", "--dry-run"])
    assert [lmkv(*command).code for command in commands] == [0, 0, 0, 0]


def test_reading_leaves_damaged_files_where_they_are(lmkv: Any, disk: Disk) -> None:
    (key,) = disk.prompt(1, 1)
    os.truncate(disk.file(key), 10)
    for command in ("ls", "du", "verify"):
        lmkv(command)
    assert disk.held() == {key}


@pytest.mark.parametrize("command", ["ls", "du", "verify", "gc"])
def test_a_place_that_is_no_tier_is_refused_and_not_made(lmkv: Any, tmp_path: Path, command: str) -> None:
    for place in (tmp_path, tmp_path / "none", f"disk://{tmp_path}/none", "dsk:///x"):
        found = lmkv(command, place=place)
        assert found.code == 1
        assert "is no disk tier" in found.err
    assert list(tmp_path.iterdir()) == []


def test_several_paths_by_url(lmkv: Any, tmp_path: Path) -> None:
    url = f"disk://{tmp_path}/a,{tmp_path}/b%20c?direct=off"
    backends.open(url).close()
    for folder in ("a", "b c"):
        part = Disk(tmp_path / folder)
        part.url = url
    part.place = tmp_path
    part.prompt(1, 8)
    assert json.loads(lmkv("du", "--json", place=url).out)[0]["tokens"] == 512
    assert lmkv("verify", place=url).out == "8 objects, 0 bad, 0 removed\n"


# What goes


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 100)), max_size=40), st.integers(0, 40))
def test_what_is_over_budget_leaves_no_chunk_without_its_prefix(parents: list[tuple[int, int]], kept: int) -> None:
    objects: list[Object] = []
    for i, (at, created) in enumerate(parents):
        under = objects[at % (i + 1) - 1].key if at % (i + 1) else None
        parent, depth = (under.digest[:8], under.depth + 1) if under else (bytes(8), 0)
        digest = (i + 1).to_bytes(8, "little") * 4
        objects.append(Object("", ChunkKey(bytes(16), bytes(8), digest, parent, depth, 0, 0), 1, created))
    gone = oldest(objects, kept)
    assert len(objects) - len(gone) == min(kept, len(objects))
    place = {each.key.digest[:8]: n for n, each in enumerate(gone)}
    assert len(place) == len(gone)
    for each in objects:
        if each.key.parent in place:
            assert place[each.key.digest[:8]] < place[each.key.parent]
