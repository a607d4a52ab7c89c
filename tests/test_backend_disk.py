import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmkv import _native
from lmkv.backends.base import Backend, Read, Result, Status, Write
from lmkv.backends.disk import DiskBackend
from lmkv.errors import BackendError, ConfigError
from lmkv.testing import BackendTests, container, key_of
from lmkv.testing.backend_tests import buffer, fetch, listed, put

PAGE = 4096
Mount = Callable[..., Path]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskBackend]:
    with closing(DiskBackend(f"disk://{tmp_path}/kv")) as backend:
        yield backend


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a fresh file system of a kind and gives its path."""
    path = tmp_path / "mounted"
    path.mkdir()

    def mount(*arguments: str) -> Path:
        done = subprocess.run(["mount", *arguments, "none", str(path)], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"needs the right to mount: {done.stderr.decode().strip()}")
        return path

    yield mount
    while os.path.ismount(path):
        subprocess.run(["umount", str(path)], check=True)


def root_of(backend: Backend) -> Path:
    return Path(backend.url.removeprefix("disk://").partition("?")[0])


def file_of(backend: Backend, number: int) -> Path:
    key = key_of(number)
    digest, (scope, name) = key.digest.hex(), str(key).split("-", 1)
    return root_of(backend) / scope / digest[:2] / digest[2] / name


def files_in(path: Path | str) -> set[str]:
    return {str(p.relative_to(path)) for p in Path(path).rglob("*") if not p.is_dir()}


@pytest.mark.parametrize("url", ["{}/kv", "{}/kv?direct=off", "{}/kv?fsync=1", "{0}/a,{0}/b"])
class TestDisk(BackendTests):
    @pytest.fixture
    def backend(self, tmp_path: Path, url: str) -> Iterator[Backend]:
        place, _, query = url.format(tmp_path).partition("?")
        options = dict([query.split("=")]) if query else {}
        with closing(DiskBackend(f"disk://{place}", **options)) as backend:
            self.again = partial(DiskBackend, f"disk://{place}", **options)
            yield backend

    def reopen(self, backend: Backend) -> Backend:
        backend.close()
        return self.again()


# Files.


def test_place_and_name_are_functions_of_the_key(store: DiskBackend) -> None:
    put(store, 1)
    assert files_in(root_of(store)) == {"lock", str(file_of(store, 1).relative_to(root_of(store)))}
    assert file_of(store, 1).read_bytes() == container(1, PAGE)
    assert file_of(store, 1).stat().st_mode & 0o077 == 0
    assert root_of(store).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, 8191])
def test_a_file_of_impossible_size_is_corrupt_and_can_be_deleted(store: DiskBackend, nbytes: int) -> None:
    put(store, 1, 2 * PAGE)
    os.truncate(file_of(store, 1), nbytes)
    assert fetch(store, key_of(1)) is Status.CORRUPT
    assert store.contains([key_of(1)]) == [None]
    assert store.delete([key_of(1), key_of(1)]) == [True, False]
    assert fetch(store, key_of(1)) is Status.MISSING


def test_a_file_of_impossible_size_is_overwritten(store: DiskBackend) -> None:
    put(store, 1, 2 * PAGE)
    os.truncate(file_of(store, 1), 5000)
    assert listed(store) == {}
    data = put(store, 1, 3 * PAGE)
    assert fetch(store, key_of(1)) == data
    assert store.usage()[:2] == (3 * PAGE, 1)


def test_damage_inside_whole_pages_is_passed_up_as_read(store: DiskBackend) -> None:
    data = put(store, 1, 2 * PAGE)
    with open(file_of(store, 1), "r+b") as file:
        file.seek(5000)
        file.write(bytes([data[5000] ^ 1]))
    flipped = bytearray(data)
    flipped[5000] ^= 1
    assert fetch(store, key_of(1)) == memoryview(flipped)
    os.truncate(file_of(store, 1), PAGE)
    assert fetch(store, key_of(1)) == data[:PAGE]


def test_a_vanished_file_is_missing(store: DiskBackend) -> None:
    put(store, 1)
    file_of(store, 1).unlink()
    assert fetch(store, key_of(1)) is Status.MISSING
    assert store.delete([key_of(1)]) == [False]


@pytest.mark.parametrize("up", [0, 1, 2, 3])
def test_removed_folders_are_made_again(store: DiskBackend, up: int) -> None:
    put(store, 1)
    shutil.rmtree(file_of(store, 1).parents[up])
    put(store, 1)
    if up == 3:
        assert files_in(root_of(store)) == {str(file_of(store, 1).relative_to(root_of(store)))}
    assert listed(store) == {key_of(1): PAGE}
    shutil.rmtree(file_of(store, 1).parents[2])
    assert listed(store) == {}
    assert store.usage()[:2] == (0, 0)


def test_foreign_things_are_left_alone_and_counted(store: DiskBackend) -> None:
    put(store, 1)
    leaf = file_of(store, 1).parent
    foreign = [root_of(store) / "notes.txt", leaf.parent / "x", leaf / "a.tmp", leaf / "UPPER-1"]
    foreign += [leaf / (file_of(store, 1).name + "0"), leaf.parents[1] / "zz"]
    for path in foreign:
        path.write_bytes(bytes(PAGE))
    (leaf / file_of(store, 2).name).symlink_to("/etc/passwd")
    (root_of(store) / "folder" / "of" / "others").mkdir(parents=True)
    for _ in range(2):
        assert listed(store) == {key_of(1): PAGE}
        assert store.usage()[:2] == (PAGE, 1)
        assert store.health() == (True, f"{len(foreign) + 1} foreign files")
    assert all(path.exists() for path in foreign)


def test_a_folder_in_a_files_place(store: DiskBackend) -> None:
    file_of(store, 1).mkdir(parents=True)
    assert store.contains([key_of(1)]) == [None]
    assert store.delete([key_of(1)]) == [False]
    assert fetch(store, key_of(1)) is Status.CORRUPT
    assert store.write([Write(key_of(1), container(1, PAGE))])[0].status is Status.ERROR
    assert listed(store) == {}
    assert "1 failed deletes" in store.health().detail
    assert os.listdir(root_of(store) / "tmp") == []


def test_a_file_in_a_folders_place(store: DiskBackend) -> None:
    put(store, 1)
    scope = file_of(store, 1).parents[2]
    shutil.rmtree(scope)
    scope.write_bytes(b"")
    result = store.write([Write(key_of(2), container(1, PAGE))])[0]
    assert result.status is Status.ERROR
    assert fetch(store, key_of(2)) is Status.MISSING
    assert listed(store) == {}
    assert "1 folders not made" in store.health().detail


def test_damaged_and_misplaced_files_go_at_the_holders_scan(store: DiskBackend) -> None:
    put(store, 1)
    put(store, 2)
    wrong = file_of(store, 1).parent / file_of(store, 2).name
    wrong.write_bytes(bytes(PAGE))
    os.truncate(file_of(store, 2), 5)
    with closing(DiskBackend(store.url)) as other:
        assert listed(other) == {key_of(1): PAGE}
        assert wrong.exists()
    assert listed(store) == {key_of(1): PAGE}
    assert not wrong.exists()
    assert not file_of(store, 2).exists()
    assert "2 damaged or misplaced files removed" in store.health().detail


def test_empty_folders_go_at_the_holders_scan(store: DiskBackend) -> None:
    for number in range(50):
        put(store, number)
    assert store.delete([key_of(number) for number in range(1, 50)]) == [True] * 49
    assert listed(store) == {key_of(0): PAGE}
    folders = {path for path in root_of(store).rglob("*") if path.is_dir()}
    assert folders == {root_of(store) / "tmp", *list(file_of(store, 0).parents)[:3]}
    put(store, 7)
    assert listed(store) == {key_of(0): PAGE, key_of(7): PAGE}


# What the file system says.


def test_a_full_disk_is_full_and_keeps_nothing_of_the_write(mounted: Mount) -> None:
    path = mounted("-t", "tmpfs", "-o", "size=1m")
    with closing(DiskBackend(f"disk://{path}")) as store:
        first = put(store, 0, 512 << 10)
        for number in (1, 0):  # a new key, and one that is there
            write = Write(key_of(number), container(9, 768 << 10))
            assert store.write([write]) == [Result(Status.FULL, 0, "no space left on device")]
        assert os.listdir(path / "tmp") == []
        assert fetch(store, key_of(0)) == first
        assert listed(store) == {key_of(0): 512 << 10}
        assert store.usage() == (512 << 10, 1, 512 << 10)
        assert store.delete([key_of(0)]) == [True]
        put(store, 1, 768 << 10)


@pytest.fixture
def read_only(tmp_path: Path, mounted: Mount) -> Iterator[DiskBackend]:
    """An open store with key 1 in it, on a path that turned read-only afterwards."""
    root = os.geteuid() == 0  # permissions do not bind root: it gets a read-only mount on top
    path = mounted("-t", "tmpfs") if root else tmp_path
    with closing(DiskBackend(f"disk://{path}/kv")) as store:
        put(store, 1)
        if root:
            subprocess.run(["mount", "--bind", path, path], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
        folders = [] if root else [folder for folder, _, _ in os.walk(path)]
        for folder in folders:
            os.chmod(folder, 0o500)
        yield store
        for folder in folders:
            os.chmod(folder, 0o700)


def test_a_read_only_path_serves_reads(read_only: DiskBackend) -> None:
    read_only.close()
    with closing(DiskBackend(read_only.url)) as store:
        for key in (key_of(1), key_of(2)):
            assert store.write([Write(key, container(2, PAGE))])[0].status is Status.READ_ONLY
        assert fetch(store, key_of(1)) == container(1, PAGE)
        assert store.delete([key_of(1)]) == [False]
        assert listed(store) == {key_of(1): PAGE}
        health = store.health()
        assert not health.ok
        assert "failed deletes" in health.detail


def test_a_path_that_turns_read_only(read_only: DiskBackend) -> None:
    for number in (1, 2):
        write = Write(key_of(number), container(2, PAGE))
        assert read_only.write([write])[0].status is Status.READ_ONLY
    assert fetch(read_only, key_of(1)) == container(1, PAGE)
    assert read_only.usage()[:2] == (PAGE, 1)


READ_ERRORS = {"ENOENT": "MISSING", "ENOTDIR": "MISSING", "EBADMSG": "CORRUPT", "EIO": "ERROR"}
WRITE_ERRORS = {"ENOSPC": "FULL", "EDQUOT": "FULL", "EIO": "ERROR", "EFBIG": "ERROR"}
WRITE_ERRORS |= dict.fromkeys(("EROFS", "EACCES", "EPERM"), "READ_ONLY")


def test_errors_become_statuses(store: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    data = container(1, PAGE)
    for name, status in READ_ERRORS.items():
        monkeypatch.setattr(_native, "read_file", lambda *_, n=name: -getattr(errno, n))
        assert store.read([Read(key_of(1), data)])[0].status is Status[status], name
    for name, status in WRITE_ERRORS.items():
        monkeypatch.setattr(_native, "write_file", lambda *_, n=name: -getattr(errno, n))
        assert store.write([Write(key_of(1), data)])[0].status is Status[status], name
    assert store.usage()[:2] == (0, 0)


def test_one_unreadable_folder_does_not_end_a_scan(store: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, 1)
    put(store, 2)
    real = _native.list_dir

    def list_dir(path: str) -> list[tuple[str, int, int]]:
        if path == str(file_of(store, 1).parent):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(_native, "list_dir", list_dir)
    assert listed(store) == {key_of(2): PAGE}
    assert "1 unreadable folders (Permission denied)" in store.health().detail


def test_a_path_that_cannot_be_listed_ends_a_scan(store: DiskBackend) -> None:
    shutil.rmtree(root_of(store))
    with pytest.raises(BackendError, match="cannot list"):
        listed(store)


def test_a_scan_ends_when_closed(store: DiskBackend) -> None:
    for number in range(9):
        put(store, number)
    scan = store.scan()
    assert len(next(scan)) == 1
    store.close()
    assert list(scan) == []


# O_DIRECT.


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_aligned_buffers_go_direct(
    store: DiskBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[str, bool]] = []

    def spy(name: str, position: int) -> None:
        real = getattr(_native, name)

        def call(*arguments: Any) -> Any:
            asked.append((name, arguments[position]))
            return real(*arguments)

        monkeypatch.setattr(_native, name, call)

    spy("read_file", 3)
    spy("write_file", 4)
    data = put(store, 1, 1 << 20)
    assert fetch(store, key_of(1)) == data
    assert asked == [("write_file", True), ("read_file", True)]
    assert warnings_in(caplog) == []
    assert store.health() == (True, "ok")


def test_without_direct_it_goes_on_buffered_with_one_warning(mounted: Mount, caplog: pytest.LogCaptureFixture) -> None:
    path = mounted("-t", "ramfs")
    with closing(DiskBackend(f"disk://{path}/kv")) as store:
        for number in range(3):
            data = put(store, number)
            assert fetch(store, key_of(number)) == data
        assert store.health().ok
        assert f"buffered: the file system of disk://{path}/kv refuses" in store.health().detail
        assert os.listdir(path / "kv" / "tmp") == []
    assert len(warnings_in(caplog)) == 1
    with pytest.raises(ConfigError, match="refuses O_DIRECT"):
        DiskBackend(f"disk://{path}/kv", direct="on")
    with closing(DiskBackend(f"disk://{path}/kv", direct="off")) as store:
        assert not store.shared  # the one refused let go of the lock
        assert store.health() == (True, "ok")


def test_an_unaligned_buffer_is_buffered_with_one_warning(store: DiskBackend, caplog: pytest.LogCaptureFixture) -> None:
    data = buffer(2 * PAGE)[8 : 8 + PAGE]
    for _ in range(2):
        assert store.write([Write(key_of(1), data)]) == [Result(Status.OK, PAGE)]
        assert store.read([Read(key_of(1), data)]) == [Result(Status.OK, PAGE)]
    assert len(warnings_in(caplog)) == 1
    assert "buffered: a buffer is not aligned" in store.health().detail


def test_scattered_or_read_only_buffers_are_errors(store: DiskBackend) -> None:
    data = put(store, 1)
    scattered = buffer(2 * PAGE)[::2]
    assert store.write([Write(key_of(1), scattered)])[0].status is Status.ERROR
    assert store.read([Read(key_of(1), scattered)])[0].status is Status.ERROR
    assert store.read([Read(key_of(1), memoryview(bytes(data)))])[0].status is Status.ERROR
    assert store.read([Read(key_of(1), data[:0])])[0].status is Status.ERROR


# Several paths.


def test_more_paths_move_only_the_keys_they_get(tmp_path: Path) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    keys = [key_of(number) for number in range(60)]
    with closing(DiskBackend(f"disk://{a},{b}")) as two:
        for number in range(60):
            put(two, number)
        split = {name: len(files_in(name)) - 1 for name in (a, b)}
        assert min(split.values()) > 15
        assert sum(split.values()) == 60
        room, free = os.statvfs(a), two.usage().free
        assert free is not None
        assert free < 1.5 * room.f_bavail * room.f_frsize  # one device counts once
    with closing(DiskBackend(f"disk://{b},{a}")) as turned:
        assert turned.contains(keys) == [PAGE] * 60
    with closing(DiskBackend(f"disk://{a},{b},{c}")) as three:
        there = [size for size in three.contains(keys) if size]
        assert 25 < len(there) < 55
        assert len(listed(three)) == len(there)  # and those that moved are removed
        assert three.usage()[:2] == (sum(there), len(there))
        assert sum(len(files_in(name)) - 1 for name in (a, b, c)) == len(there)


def test_urls_print_back(tmp_path: Path) -> None:
    place = f"{tmp_path}/with%20space,{tmp_path}/with%2Ccomma/../x%2Cy"
    with closing(DiskBackend(f"disk://{place}/", fsync="on", direct="off")) as store:
        assert store.url == (f"disk://{tmp_path}/with%20space,{tmp_path}/x%2Cy?fsync=1&direct=off")
        assert sorted(os.listdir(tmp_path)) == ["with space", "x,y"]


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("disk://relative/path", {}, "absolute"),
        ("disk:///a,b", {}, "absolute"),
        ("disk://", {}, "absolute"),
        ("disk:///tmp/x,/tmp/y/../x", {}, "twice"),
        ("disk:///proc/no-such-folder", {}, "cannot use"),
        ("disk:///etc/passwd", {}, "cannot use"),
        ("disk:///tmp/x", {"fsync": "maybe"}, "fsync"),
        ("disk:///tmp/x", {"direct": "yes"}, "direct"),
    ],
)
def test_wrong_settings_do_not_start(url: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        DiskBackend(url, **options)
    assert error.value.key == "tiers.url"
