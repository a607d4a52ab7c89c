"""Local disk: one file a container, published whole by rename.

    <path>/lock                                      flock; its holder alone evicts and cleans up
    <path>/tmp/<pid>-<random>                        writes under way
    <path>/<scope>/<digest[0:2]>/<digest[2]>/<name>  name: the key's text without its scope

The place is a function of the key, so a probe is one stat; the name is the whole key, so a restart reads no file. What
changes a lowest folder holds its lock: accounts are exact, and learn at the next scan what other processes did.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from hashlib import blake2b
from itertools import islice
from typing import BinaryIO
from urllib.parse import quote, unquote

import numpy as np

from lmkv import _native as native
from lmkv.backends.base import ALIGNMENT, Backend, Found, Health, Read, Result, Status, Usage, Write
from lmkv.errors import BackendError, BadInput, ConfigError
from lmkv.keys import ChunkKey
from lmkv.workers import Workers

_FSYNC = dict.fromkeys(("0", "off", "false", False), False) | dict.fromkeys(("1", "on", "true", True), True)
LIST_AHEAD = 16  # folders
_TMP = "tmp"
_FOREIGN = "foreign files"
_CLOSED = Result(Status.ERROR, detail="closed")
_READ = {errno.EBADMSG: Status.CORRUPT, errno.ENOENT: Status.MISSING, errno.ENOTDIR: Status.MISSING}
_WRITE = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), Status.FULL)
_WRITE |= dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), Status.READ_ONLY)


class DiskBackend(Backend):
    """``disk:///path``, or ``disk:///a,/b`` where every key has one of them (',' is %2C). Read-only, it serves reads.

    fsync: a write that is OK survives power loss, not only ``kill -9``. direct: O_DIRECT "on" (or do not start), "off"
    or "auto": buffered, with one warning, where the file system refuses it or a buffer is not at a multiple of 4096.
    """

    def __init__(self, url: str, *, fsync: bool | str = False, direct: str = "auto") -> None:
        if fsync not in _FSYNC or direct not in ("auto", "on", "off"):
            raise ConfigError("tiers.url", f"disk: fsync={fsync!r} must be 0 or 1, direct={direct!r} auto, on or off")
        scheme, _, rest = url.partition("://")
        self._roots = [os.path.normpath(unquote(path)) for path in rest.split(",")]
        if scheme != "disk" or not all(map(os.path.isabs, self._roots)) or len(set(self._roots)) < len(self._roots):
            raise ConfigError("tiers.url", f"{url!r}: write disk:///absolute/path or disk:///a,/b, and no path twice")
        self._fsync, self._direct = _FSYNC[fsync], direct != "off"
        query = "&".join(["fsync=1"] * self._fsync + [f"direct={direct}"] * (direct != "auto"))
        self.url = f"disk://{','.join(map(quote, self._roots))}{'?' * bool(query)}{query}"
        self._closed, self._why_buffered = False, ""
        self._accounts: dict[str, tuple[int, int]] = {}  # bytes and objects of each lowest folder that has any
        self._counts: Counter[str] = Counter()  # of what `health` tells
        self._lock_files: list[BinaryIO] = []
        self._let_go()
        try:
            for root in self._roots:
                os.makedirs(root, 0o700, exist_ok=True)
                os.listdir(root)
                self._probe(root)
            if direct == "on" and self._why_buffered:
                raise ConfigError("tiers.url", f"disk: {self._why_buffered}; use direct=auto")
            self._take_lock()
        except (OSError, ValueError) as error:
            raise ConfigError("tiers.url", f"disk: cannot use {self.url}: {error}") from error
        _opened.add(self)

    def contains(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        return [None if self._closed else _size(self._place(key)[1]) or None for key in keys]

    def read(self, reads: Sequence[Read]) -> list[Result]:
        return [_CLOSED if self._closed else self._read(*each) for each in reads]

    def write(self, writes: Sequence[Write]) -> list[Result]:
        return [_CLOSED if self._closed else self._write(*each) for each in writes]

    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [not self._closed and self._delete(self._place(key)[1]) for key in keys]

    def scan(self) -> Iterator[list[Found]]:
        """Also recounts `usage`, tries for the lock, and as its holder removes what can be no object."""
        if self._closed:
            return
        try:
            if self.shared:
                self._take_lock()
            self._counts.pop(_FOREIGN, None)
            vanished = set(self._accounts)
            for root in self._roots:
                yield from self._list_ahead(root, vanished)
            list(map(self._list, vanished))
        except OSError as error:
            raise BackendError(f"disk: cannot list {self.url}: {error}") from error

    def usage(self) -> Usage:
        used, objects = map(sum, zip((0, 0), *list(self._accounts.values()), strict=True))
        with suppress(OSError):
            devices = {os.stat(root).st_dev: os.statvfs(root) for root in self._roots}
            return Usage(used, objects, sum(room.f_bavail * room.f_frsize for room in devices.values()))
        return Usage(used, objects, None)

    def health(self) -> Health:
        if self._closed:
            return Health(False, "closed")
        failed = [f"{root}: {os.strerror(-code)}" for root in self._roots if (code := self._probe(root)) < 0]
        notes = [f"buffered: {self._why_buffered}"] * bool(self._why_buffered)
        notes += ["another process holds the lock"] * self.shared
        notes += [f"{count} {what}" for what, count in sorted(dict(self._counts).items())]
        return Health(not failed, "; ".join(failed + notes) or "ok")

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            for file in self._lock_files:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a fork has it open too
            self._let_go()

    def _place(self, key: ChunkKey) -> tuple[str, str]:
        """The key's path, by rendezvous: one more moves only the keys that it gets. And its file, always inside."""
        text, digest = str(key), key.digest.hex()
        first, *more = self._roots
        root = max(self._roots, key=lambda root: blake2b(key.digest + os.fsencode(root)).digest()) if more else first
        return root, f"{root}/{text[:32]}/{digest[:2]}/{digest[2]}/{text[33:]}"

    def _read(self, key: ChunkKey, into: memoryview) -> Result:
        if into.readonly or not into.c_contiguous:
            return Result(Status.ERROR, detail="buffer is read-only or scattered")
        code = self._transfer(native.read_file, self._place(key)[1:], into)
        return Result(Status.ERROR, detail="short buffer") if code == -errno.EFBIG else _result(code, _READ)

    def _write(self, key: ChunkKey, data: memoryview) -> Result:
        if not data.nbytes or data.nbytes % ALIGNMENT or not data.c_contiguous:
            return Result(Status.ERROR, detail="not the size of a container, or scattered")
        root, file = self._place(key)
        with self._changing(file):
            code = self._publish(root, file, data)
        return _result(code or data.nbytes, _WRITE)

    def _delete(self, file: str) -> bool:
        with self._counted("failed deletes"), suppress(FileNotFoundError, NotADirectoryError), self._changing(file):
            os.unlink(file)
            return True
        return False

    def _publish(self, root: str, file: str, data: memoryview, tries: int = 20) -> int:
        """Write a whole file, making its folders, which somebody's scan may remove while empty: 0 or -errno."""
        tmp = f"{root}/{_TMP}/{os.getpid()}-{os.urandom(8).hex()}"
        try:
            for path in (file, tmp):
                os.makedirs(os.path.dirname(path), exist_ok=True)
            code = self._transfer(native.write_file, (tmp, file), data, self._fsync)
        except OSError as error:
            code = -(error.errno or errno.EIO)
            self._count(f"folders not made ({error.strerror})")
        raced = code in (-errno.ENOENT, -errno.EEXIST)
        return self._publish(root, file, data, tries - 1) if raced and tries > 1 else code

    def _transfer(self, call: Callable[..., int], files: tuple[str, ...], buffer: memoryview, *flags: bool) -> int:
        """A native call, with O_DIRECT where the buffer and the file system allow it."""
        address, direct, why = np.frombuffer(buffer, np.uint8).ctypes.data, self._direct, ""
        if direct and address % ALIGNMENT:
            direct, why = False, "a buffer is not aligned to 4096 bytes"
        code = call(*files, address, buffer.nbytes, direct, *flags)
        if direct and code == -errno.EINVAL and (code := call(*files, address, buffer.nbytes, False, *flags)) >= 0:
            self._direct, why = False, f"the file system of {self.url} refuses O_DIRECT"
        with self._mutex:
            first, self._why_buffered = why and not self._why_buffered, self._why_buffered or why
        if first:
            logging.getLogger(__name__).warning("disk: reading and writing through the page cache: %s", why)
        return code

    def _probe(self, root: str) -> int:
        """Write, read and remove one page: a number >= 0, or -errno."""
        file, page = f"{root}/{_TMP}/{os.getpid()}-{os.urandom(8).hex()}", memoryview(mmap.mmap(-1, ALIGNMENT))
        code = self._publish(root, file, page) or self._transfer(native.read_file, (file,), page)
        self._delete(file)
        return code

    def _list_ahead(self, root: str, vanished: set[str]) -> Iterator[list[Found]]:
        """The objects below, folder by folder; the disk looks for the next ones meanwhile. Takes what is there out of
        ``vanished``."""
        lister, listing = Workers("disk-list", 1), deque[Future[list[Found]]]()
        folders = self._walk(root)
        try:
            while not self._closed:
                for folder in islice(folders, LIST_AHEAD - len(listing)):
                    vanished.discard(folder)
                    listing.append(lister.submit(self._list, folder))
                if not listing:
                    return
                if found := listing.popleft().result():
                    yield found
        finally:
            lister.close(time.monotonic())

    def _walk(self, folder: str, digits: Sequence[int] = (32, 2, 1)) -> Iterator[str]:
        """The lowest folders below, through names of so many hex digits."""
        if not digits:
            yield folder
            return
        with nullcontext() if folder in self._roots else self._counted("unreadable folders"):
            for name in os.listdir(folder):
                if len(name) == digits[0] and not name.strip("0123456789abcdef"):
                    yield from self._walk(f"{folder}/{name}", digits[1:])
                elif name not in ("lock", _TMP):
                    self._count(_FOREIGN)
        self._remove_empty(folder)

    def _remove_empty(self, folder: str) -> None:
        """A holder removes a folder without files, and what that leaves empty above it."""
        with suppress(OSError):  # not empty
            while not self.shared and folder not in self._roots:
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def _list(self, folder: str) -> list[Found]:
        """The objects in a lowest folder, which sets its account. The holder removes what can be none."""
        found, files = list[Found](), list[tuple[str, int, int]]()
        scope, two, one = folder.split("/")[-3:]
        with self._locks[hash(folder) % len(self._locks)], self._counted("unreadable folders"):
            with suppress(FileNotFoundError):
                files = native.list_dir(folder)
            for name, size, written in files:
                try:
                    key = ChunkKey.parse(f"{scope}-{name}")
                except BadInput:
                    self._count(_FOREIGN)
                    continue
                placed = name.startswith(two + one, 17)
                if len(self._roots) > 1:
                    placed = placed and self._place(key)[1] == f"{folder}/{name}"
                if placed and size and size % ALIGNMENT == 0:
                    found.append(Found(key, size, written / 1e9))
                elif not self.shared:
                    self._count("damaged or misplaced files removed")
                    with suppress(OSError):
                        os.unlink(f"{folder}/{name}")
            self._account(folder, sum(each.nbytes for each in found), len(found))
        if not found:
            self._remove_empty(folder)
        return found

    @contextmanager
    def _changing(self, file: str) -> Iterator[None]:
        """Accounts for what becomes of a file: by looking, as a failed fsync comes after the rename."""
        folder = os.path.dirname(file)
        with self._locks[hash(folder) % len(self._locks)]:
            old, (used, objects) = _size(file), self._accounts.get(folder, (0, 0))
            yield
            new = _size(file)
            self._account(folder, used + new - old, objects + bool(new) - bool(old))

    def _account(self, folder: str, used: int, objects: int) -> None:
        self._accounts[folder] = max(used, 0), max(objects, 0)  # others' files may go before they were counted
        if objects < 1:  # dead scopes' would collect
            del self._accounts[folder]

    def _count(self, what: str) -> None:
        with self._mutex:
            self._counts[what] += 1

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        """An OSError inside is counted and passed over."""
        try:
            yield
        except OSError as error:
            self._count(f"{what} ({error.strerror})")

    def _let_go(self) -> None:
        """Of the lock files; and in a forked child, which has none of the other threads, of their locks."""
        for file in self._lock_files:
            file.close()
        self._lock_files, self.shared = [], True
        self._mutex = threading.Lock()  # never held during I/O
        self._locks = [threading.Lock() for _ in range(256)]  # one guards many lowest folders

    def _take_lock(self) -> None:
        """All paths' locks or none, in one order for everybody. OSError when there is no flock."""
        try:
            with ExitStack() as stack:
                files: list[BinaryIO] = [stack.enter_context(open(f"{r}/lock", "ab")) for r in sorted(self._roots)]
                for file in files:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stack.pop_all()
            self._lock_files, self.shared = files, False
            list(map(_remove_stale, self._roots))
        except OSError as error:  # somebody else's, or nothing that we could evict
            if error.errno not in (errno.EWOULDBLOCK, errno.EROFS, errno.EACCES, errno.EPERM):
                raise


_opened: weakref.WeakSet[DiskBackend] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: list(map(DiskBackend._let_go, _opened)))


def _remove_stale(root: str) -> None:
    """Files of writers that are dead, or at it for an hour. One that is only in another container tries again."""
    with suppress(FileNotFoundError):
        for entry in os.scandir(f"{root}/{_TMP}"):
            with suppress(OSError, ValueError):
                pid = int(entry.name.partition("-")[0])
                alive = pid != os.getpid() and os.path.exists(f"/proc/{pid}")
                if not alive or time.time() - entry.stat().st_mtime > 3600:
                    os.unlink(entry.path)


def _size(file: str) -> int:
    """Bytes of a file that can be a container, else 0."""
    with suppress(OSError):
        found = os.lstat(file)
        return found.st_size if stat.S_ISREG(found.st_mode) and found.st_size % ALIGNMENT == 0 else 0
    return 0


def _result(code: int, statuses: dict[int, Status]) -> Result:
    status = Status.OK if code >= 0 else statuses.get(-code, Status.ERROR)
    return Result(status, max(code, 0), os.strerror(-code).lower() if code < 0 else "")
