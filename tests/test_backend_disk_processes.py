import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from lmkv.backends.disk import DiskBackend
from lmkv.testing import key_of
from lmkv.testing.backend_tests import fetch, listed, put

PAGE = 4096
PRELUDE = """
import os, signal, sys
from lmkv.backends.base import Status, Write
from lmkv.backends.disk import DiskBackend
from lmkv.testing.backend_tests import buffer, key_of, put
store = DiskBackend(sys.argv[1])
"""


class Child(NamedTuple):
    process: "subprocess.Popen[str]"
    lines: IO[str]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running(url: str, code: str) -> Iterator[Child]:
    """Runs code after the prelude; killed at the end."""
    command = [sys.executable, "-c", PRELUDE + code, url]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        try:
            yield Child(process, process.stdout)
        finally:
            process.kill()


def is_shared(store: DiskBackend) -> bool:
    return store.shared


def test_the_second_process_shares_and_takes_over(tmp_path: Path) -> None:
    url = f"disk://{tmp_path}"
    with running(url, "put(store, 1); print(store.shared, flush=True); input()") as holder:
        assert holder.lines.readline() == "False\n"
        left = tmp_path / "tmp" / "999999999-dead-0"
        left.write_bytes(b"")
        with closing(DiskBackend(url)) as store:
            assert is_shared(store)
            assert "another process holds the lock" in store.health().detail
            assert store.contains([key_of(1)]) == [PAGE]
            put(store, 2)
            assert store.delete([key_of(1)]) == [True]
            assert listed(store) == {key_of(2): PAGE}
            assert is_shared(store)
            assert left.exists()
            holder.kill()
            assert listed(store) == {key_of(2): PAGE}
            assert not is_shared(store)
            assert not left.exists()


def test_the_holder_removes_what_dead_writers_left(tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    for name in ("999999999-dead-0", f"{os.getpid()}-earlier-0", f"{os.getppid()}-old-0"):
        (folder / name).write_bytes(b"torn")
    os.utime(folder / f"{os.getppid()}-old-0", (1, 1))
    for name in (f"{os.getppid()}-live-0", "not ours"):
        (folder / name).write_bytes(b"")
    with closing(DiskBackend(f"disk://{tmp_path}")) as store:
        assert set(os.listdir(folder)) == {f"{os.getppid()}-live-0", "not ours"}
        assert listed(store) == {}


def test_kill_in_the_middle_of_writes_leaves_no_torn_file(tmp_path: Path) -> None:
    code = """
import threading
def write(worker):
    for i in range(10**9):
        fill, pages = i % 251, 256 + i % 3
        data = buffer(pages * 4096)
        data[:] = bytes([fill]) * len(data)
        assert store.write([Write(key_of(worker * 8 + i % 8), data)])[0].status is Status.OK
        print(i, flush=True)
for worker in (0, 1):
    threading.Thread(target=write, args=(worker,), daemon=True).start()
input()
"""
    url = f"disk://{tmp_path}"
    for lines in (20, 45):
        with running(url, code) as writer:
            for _ in range(lines):
                assert writer.lines.readline()
            writer.kill()
        with closing(DiskBackend(url)) as store:
            assert not store.shared
            found = listed(store)
            assert 9 <= len(found) <= 16
            assert os.listdir(tmp_path / "tmp") == []
            assert store.usage()[:2] == (sum(found.values()), len(found))
            for key, nbytes in found.items():
                read = fetch(store, key, 2 << 20)
                assert isinstance(read, memoryview)
                data = bytes(read)
                assert len(data) == nbytes
                assert data.count(data[:1]) == nbytes


def test_a_file_size_limit_leaves_nothing_behind(tmp_path: Path) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
put(store, 1, 65536)
print(store.write([Write(key_of(2), buffer(1 << 20))])[0].status.name, store.usage()[:2])
"""
    with running(f"disk://{tmp_path}", code) as limited:
        assert limited.lines.read() == "ERROR (65536, 1)\n"
    assert os.listdir(tmp_path / "tmp") == []


def test_a_forked_child_works_but_never_holds_the_lock(tmp_path: Path) -> None:
    code = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
put(store, 1)
store._mutex.acquire()  # as if another thread were inside at the fork
if (child := os.fork()) == 0:
    assert store.shared and store.contains([key_of(1)]) == [4096]
    put(store, 2)
    again = DiskBackend(sys.argv[1])
    assert again.shared
    store.close()
    again.close()
    assert DiskBackend(sys.argv[1]).shared
    os._exit(7)
store._mutex.release()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert not store.shared and store.contains([key_of(2)]) == [4096]
if os.fork() == 0:
    print("child", flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""
    url = f"disk://{tmp_path}"
    with running(url, code) as parent:
        assert parent.lines.readline() == "child\n"
        with closing(DiskBackend(url)) as store:
            assert store.shared
        parent.kill()
        with closing(DiskBackend(url)) as store:  # while the child lives
            assert not store.shared
