"""Local disk: one file a container, published whole by rename.

    <path>/lock                                      flock; its holder alone evicts and cleans up
    <path>/tmp/<pid>-<token>-<n>                     writes under way
    <path>/<scope>/<digest[0:2]>/<digest[2]>/<name>  name: the key's text without its scope

The place is a function of the key, so a probe is one stat; the name is the whole key, so a restart
reads no file. Each leaf folder has a lock and its own count of bytes, which makes the accounts
exact beside concurrent writes, deletes and scans. Other processes' doings show at the next scan.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import mmap
import os
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import BinaryIO
from urllib.parse import quote, unquote

from lmkv import _native as native
from lmkv.backends import base
from lmkv.backends.base import ALIGNMENT, Found, Health, Read, Result, Status, Usage, Write
from lmkv.errors import BackendError, BadInput, ConfigError
from lmkv.keys import ChunkKey

logger = logging.getLogger(__name__)

_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_STALE = 3600.0  # seconds; no write takes that long, whoever owns the temporary file
_FOREIGN = "foreign files"
_TMP = "tmp"
_READ = {errno.EBADMSG: Status.CORRUPT}
_READ |= dict.fromkeys((errno.ENOENT, errno.ENOTDIR), Status.MISSING)
_WRITE = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), Status.FULL)
_WRITE |= dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), Status.READ_ONLY)


class _Leaf:
    """The lowest folder: ``lock`` orders what changes its files, ``objects`` of ``used`` bytes."""

    __slots__ = ("lock", "objects", "root", "used")

    def __init__(self, root: str) -> None:
        self.root, self.lock = root, threading.Lock()
        self.used = self.objects = 0


class DiskBackend(base.Backend):
    """``disk:///path``, or ``disk:///a,/b`` where every key has one of the paths (',' is %2C).

    Args:
        fsync: flush a file and its folder before the write is OK. Without it the store survives
            ``kill -9``, with it power loss.
        direct: O_DIRECT "on" (or do not start), "off" or "auto": buffered, with one warning, where
            the file system refuses it or a buffer is not at a multiple of 4096.

    ConfigError for a path that is no folder and cannot be made one. A folder that takes no writes
    serves reads; `health` says so.
    """

    def __init__(self, url: str, *, fsync: bool | str = False, direct: str = "auto") -> None:
        if str(fsync).lower() not in _FLAGS:
            raise ConfigError("tiers.url", f"disk: fsync={fsync!r} must be 0 or 1")
        if direct not in ("auto", "on", "off"):
            raise ConfigError("tiers.url", f"disk: direct={direct!r} must be auto, on or off")
        self._fsync, self._direct = _FLAGS[str(fsync).lower()], direct != "off"
        self._roots = _paths(url)
        options = ["fsync=1"] * self._fsync + [f"direct={direct}"] * (direct != "auto")
        self.url = "disk://" + ",".join(quote(root) for root in self._roots)
        self.url += "?" * bool(options) + "&".join(options)
        self.shared, self._closed = True, False
        self._why_buffered = ""
        self._token, self._serial = os.urandom(6).hex(), itertools.count()
        self._mutex = threading.Lock()  # guards what follows; never held during I/O
        self._leaves: dict[str, _Leaf] = {}
        self._used = self._objects = 0
        self._counts: Counter[str] = Counter()
        self._lock_files: list[BinaryIO] = []
        try:
            for root in self._roots:
                os.makedirs(root, 0o700, exist_ok=True)
                os.listdir(root)
            self._take_lock()
        except (OSError, ValueError) as error:
            raise ConfigError("tiers.url", f"disk: cannot use {self.url}: {error}") from error
        _opened.add(self)
        for root in self._roots:
            self._probe(root)
        if direct == "on" and self._why_buffered:
            self.close()
            raise ConfigError("tiers.url", f"disk: {self._why_buffered}; use direct=auto")

    def contains(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        return [None if self._closed else _size(self._place(key)[2]) for key in keys]

    def read(self, reads: Sequence[Read]) -> list[Result]:
        return [self._read(key, into) for key, into in reads]

    def write(self, writes: Sequence[Write]) -> list[Result]:
        return [self._write(key, data) for key, data in writes]

    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [not self._closed and self._delete(key) for key in keys]

    def scan(self) -> Iterator[list[Found]]:
        """Recounts `usage` as well. Takes the lock if its holder is gone; the holder removes empty
        folders, files of impossible size, and files whose key has its place elsewhere."""
        if self._closed:
            return
        try:
            self._take_lock()
            self._counts.pop(_FOREIGN, None)
            seen = set()
            for root in self._roots:
                for path in self._walk(root):
                    seen.add(path)
                    if found := self._list(root, path):
                        yield found
        except OSError as error:
            raise BackendError(f"disk: cannot list {self.url}: {error}") from error
        with self._mutex:  # made or removed behind the walk's back
            rest = [(leaf.root, path) for path, leaf in self._leaves.items() if path not in seen]
        for root, path in rest:
            if found := self._list(root, path):
                yield found

    def usage(self) -> Usage:
        free: dict[int, int] = {}
        with suppress(OSError):
            for root in self._roots:
                room = os.statvfs(root)
                free[os.stat(root).st_dev] = room.f_bavail * room.f_frsize
        with self._mutex:
            return Usage(self._used, self._objects, sum(free.values()) if free else None)

    def health(self) -> Health:
        if self._closed:
            return Health(False, "closed")
        codes = {root: self._probe(root) for root in self._roots}
        notes = [f"{root}: {os.strerror(-code)}" for root, code in codes.items() if code < 0]
        ok = not notes
        notes += [f"buffered: {self._why_buffered}"] * bool(self._why_buffered)
        notes += ["another process holds the lock"] * self.shared
        with self._mutex:
            notes += [f"{count} {what}" for what, count in sorted(self._counts.items())]
        return Health(ok, "; ".join(notes) or "ok")

    def close(self) -> None:
        self._closed = True
        with self._mutex:
            files, self._lock_files = self._lock_files, []
        for file in files:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a fork has it open too
            file.close()

    def _place(self, key: ChunkKey) -> tuple[str, str, str]:
        """The key's path, leaf folder and file. Only hex and numbers: nothing can lead outside."""
        text, digest, root = str(key), key.digest.hex(), self._root(key.digest)
        leaf = f"{root}/{text[:32]}/{digest[:2]}/{digest[2]}"
        return root, leaf, f"{leaf}/{text[33:]}"

    def _root(self, digest: bytes) -> str:
        if len(self._roots) == 1:
            return self._roots[0]
        # rendezvous: one more path moves only the keys that it gets
        return max(self._roots, key=lambda root: blake2b(digest + os.fsencode(root)).digest())

    def _read(self, key: ChunkKey, into: memoryview) -> Result:
        if self._closed:
            return Result(Status.ERROR, detail="closed")
        if into.readonly or not into.c_contiguous:
            return Result(Status.ERROR, detail="buffer is read-only or scattered")
        file, address, size = self._place(key)[2], base.address_of(into), into.nbytes
        code = self._transfer(address, lambda d: native.read_file(file, address, size, d))
        if code == -errno.EFBIG:
            return Result(Status.ERROR, detail="short buffer")
        return Result(Status.OK, code) if code >= 0 else _failure(code, _READ)

    def _write(self, key: ChunkKey, data: memoryview) -> Result:
        if self._closed:
            return Result(Status.ERROR, detail="closed")
        size = data.nbytes
        if not size or size % ALIGNMENT or not data.c_contiguous:
            return Result(Status.ERROR, detail="not the size of a container, or scattered")
        root, path, file = self._place(key)
        address = base.address_of(data)

        def publish() -> int:
            name, fsync, write = self._temporary(root), self._fsync, native.write_file
            return self._transfer(address, lambda d: write(name, file, address, size, d, fsync))

        with self._leaf(root, path) as leaf:
            old = _size(file)
            code = publish() if leaf.objects else -errno.ENOENT  # it would cost a write to find out
            for _ in range(2):  # again when somebody removes a folder meanwhile
                if code == -errno.ENOENT:
                    code = self._make(path) or self._make(f"{root}/{_TMP}") or publish()
            new = _size(file)  # not taken from code: with fsync a failure may come after the rename
            more = (new is not None) - (old is not None)
            self._account(leaf, leaf.used + (new or 0) - (old or 0), leaf.objects + more)
        return Result(Status.OK, size) if code == 0 else _failure(code, _WRITE)

    def _delete(self, key: ChunkKey) -> bool:
        root, path, file = self._place(key)
        with self._leaf(root, path) as leaf:
            old = _size(file)
            try:
                os.unlink(file)
            except (FileNotFoundError, NotADirectoryError):
                return False
            except OSError as error:
                self._count(f"failed deletes ({error.strerror})")
                return False
            if old is not None:
                self._account(leaf, leaf.used - old, leaf.objects - 1)
        return True

    def _transfer(self, address: int, call: Callable[[bool], int]) -> int:
        """``call(direct)``, O_DIRECT where the buffer and the file system allow it."""
        aligned = address % ALIGNMENT == 0
        direct = self._direct and aligned
        code = call(direct)
        why = "a buffer is not aligned to 4096 bytes" if self._direct and not aligned else ""
        if direct and code == -errno.EINVAL:
            code = call(False)
            if code >= 0:
                self._direct, why = False, f"the file system of {self.url} refuses O_DIRECT"
        with self._mutex:
            first = why and not self._why_buffered
            self._why_buffered = self._why_buffered or why
        if first:
            logger.warning("disk: reading and writing through the page cache: %s", why)
        return code

    def _probe(self, root: str) -> int:
        """Write, read and remove one page: a number >= 0, or -errno."""
        name, page = self._temporary(root), mmap.mmap(-1, ALIGNMENT)
        file, address = f"{name}-probe", base.address_of(memoryview(page))
        write, read = native.write_file, native.read_file
        code = self._make(f"{root}/{_TMP}") or self._transfer(
            address, lambda d: write(name, file, address, ALIGNMENT, d, False)
        )
        if code == 0:
            code = self._transfer(address, lambda d: read(file, address, ALIGNMENT, d))
            with suppress(OSError):
                os.unlink(file)
        return code

    def _walk(self, root: str) -> Iterator[str]:
        for scope in self._folders(root, 32):
            for upper in self._folders(scope, 2):
                yield from self._folders(upper, 1)
                self._prune(upper)
            self._prune(scope)

    def _folders(self, path: str, digits: int) -> list[str]:
        """Folders of ours in ``path``: those named by so many hex digits."""
        try:
            names = os.listdir(path)
        except OSError as error:
            if digits == 32:
                raise
            self._count(f"unreadable folders ({error.strerror})")
            return []
        ours = [n for n in names if len(n) == digits and set(n) <= set("0123456789abcdef")]
        self._count(_FOREIGN, len(set(names) - {"lock", _TMP}) - len(ours))
        return [f"{path}/{name}" for name in ours]

    def _list(self, root: str, path: str) -> list[Found]:
        """What is in a leaf folder, which sets its account."""
        if self._closed:  # meanwhile
            return []
        found, (scope, *digits) = [], path[len(root) + 1 :].split("/")
        place = "".join(digits)
        with self._leaf(root, path) as leaf:
            try:
                entries = native.list_dir(path)
            except FileNotFoundError:
                entries = []
            except OSError as error:
                self._count(f"unreadable folders ({error.strerror})")
                return []
            for name, size, written in entries:
                try:
                    key = ChunkKey.parse(f"{scope}-{name}")
                except BadInput:
                    self._count(_FOREIGN)
                    continue
                here = name[17:20] == place and self._root(key.digest) == root
                if here and size and size % ALIGNMENT == 0:
                    found.append(Found(key, size, written / 1e9))
                elif not self.shared:
                    with suppress(OSError):
                        os.unlink(f"{path}/{name}")
                    self._count("damaged or misplaced files removed")
            self._account(leaf, sum(each.nbytes for each in found), len(found))
            self._prune(path)
        return found

    @contextmanager
    def _leaf(self, root: str, path: str) -> Iterator[_Leaf]:
        """The leaf, locked. Empty ones are forgotten, or a process would collect dead scopes'."""
        while True:
            with self._mutex:
                leaf = self._leaves.setdefault(path, _Leaf(root))
            with leaf.lock:
                if self._leaves.get(path) is leaf:
                    yield leaf
                    if not leaf.objects:
                        del self._leaves[path]
                    return

    def _account(self, leaf: _Leaf, used: int, objects: int) -> None:
        used, objects = max(used, 0), max(objects, 0)  # others' files may go before they count
        with self._mutex:
            self._used += used - leaf.used
            self._objects += objects - leaf.objects
        leaf.used, leaf.objects = used, objects

    def _count(self, what: str, by: int = 1) -> None:
        if by:
            with self._mutex:
                self._counts[what] += by

    def _make(self, path: str) -> int:
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            self._count(f"folders not made ({error.strerror})")
            return -(error.errno or errno.EIO)
        return 0

    def _prune(self, path: str) -> None:
        if not self.shared:
            with suppress(OSError):  # not empty
                os.rmdir(path)

    def _temporary(self, root: str) -> str:
        return f"{root}/{_TMP}/{os.getpid()}-{self._token}-{next(self._serial)}"

    def _take_lock(self) -> None:
        """All paths' locks or none, in one order for everybody. OSError when there is no flock."""
        if self._lock_files or self._closed:
            return
        files: list[BinaryIO] = []
        try:
            for root in sorted(self._roots):
                files.append(open(f"{root}/lock", "ab"))  # noqa: SIM115
                fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            for file in files:
                file.close()
            if error.errno in (errno.EWOULDBLOCK, errno.EROFS, errno.EACCES, errno.EPERM):
                return  # somebody else's, or nothing that we could evict
            raise
        self._lock_files, self.shared = files, False
        for root in self._roots:
            _remove_stale(f"{root}/{_TMP}")

    def _forked(self) -> None:
        """In a child: the lock stays the parent's, and no lock is held by a thread not here."""
        for file in self._lock_files:
            file.close()
        self._lock_files, self.shared, self._mutex = [], True, threading.Lock()
        for leaf in self._leaves.values():
            leaf.lock = threading.Lock()


def _after_fork() -> None:
    for each in list(_opened):
        each._forked()


_opened: weakref.WeakSet[DiskBackend] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)


def _paths(url: str) -> list[str]:
    scheme, _, rest = url.partition("://")
    paths = [os.path.normpath(unquote(part)) for part in rest.split(",")]
    if scheme != "disk" or not all(part.startswith("/") for part in rest.split(",")):
        raise ConfigError("tiers.url", f"{url!r}: write disk:///absolute/path or disk:///a,/b")
    if len(set(paths)) < len(paths):
        raise ConfigError("tiers.url", f"{url!r} names a path twice")
    return paths


def _size(file: str) -> int | None:
    """Bytes of a file that can be a container."""
    try:
        found = os.lstat(file)
    except OSError:
        return None
    whole = stat.S_ISREG(found.st_mode) and found.st_size and found.st_size % ALIGNMENT == 0
    return found.st_size if whole else None


def _failure(code: int, statuses: dict[int, Status]) -> Result:
    return Result(statuses.get(-code, Status.ERROR), detail=os.strerror(-code).lower())


def _remove_stale(folder: str) -> None:
    """What dead processes left. A live one whose pid only looks dead (another container's) finds
    its file gone at the rename and writes again."""
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            with suppress(OSError, ValueError):
                pid = int(entry.name.partition("-")[0])
                alive = pid != os.getpid() and os.path.exists(f"/proc/{pid}")
                if not alive or time.time() - entry.stat().st_mtime > _STALE:
                    os.unlink(entry.path)
