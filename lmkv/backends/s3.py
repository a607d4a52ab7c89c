"""S3: one object a container, under ``<prefix>/<scope>/<key text>``, with exactly the container's bytes.

obstore moves the bytes, driven by an event loop in a thread of its own, so that a call can be given up in the middle;
boto3 finds the credentials and sees nothing else. Writes go from the caller's buffer to the socket. Reads come in
pieces small enough to stay in the processor's cache until they lie in the caller's buffer.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError
from obstore.store import S3Store

from lmkv.backends.base import ALIGNMENT, Backend, Found, Health, Read, Result, Status, Usage, Write
from lmkv.backends.existence import Accounts, Existence
from lmkv.backends.s3_loop import GRACE, Do, Loop, settle, usable
from lmkv.backends.s3_options import DEFAULTS, Options, connect, meaning, refusal, unsupported
from lmkv.errors import BackendError, BadInput, ConfigError
from lmkv.keys import ChunkKey

PIECE = 1 << 20  # bytes read at a time, where an object is more than a few
PART = 16 << 20  # bytes of one part of a multipart upload
PAGE = 1000  # objects of one page of a listing


class S3Backend(Backend):
    """``s3://bucket/prefix?endpoint=http://host:port&region=...``; docs/s3.md has the options.

    A store that honours conditional puts (asked at the first write) keeps the object that is there; elsewhere, and
    above ``multipart`` bytes, a write looks first. What others did counts in `usage` from the end of the next scan.
    """

    shared = remote = True

    def __init__(
        self,
        url: str,
        *,
        endpoint: str = DEFAULTS["endpoint"],
        region: str = DEFAULTS["region"],
        timeout: str | float = DEFAULTS["timeout"],
        lookup_timeout: str | float = DEFAULTS["lookup_timeout"],
        concurrency: str | int = DEFAULTS["concurrency"],
        multipart: str | int = DEFAULTS["multipart"],
        negative: str | float = DEFAULTS["negative"],
        positive: str | float = DEFAULTS["positive"],
        path_style: str | bool = DEFAULTS["path_style"],
        anonymous: str | bool = DEFAULTS["anonymous"],
    ) -> None:
        given = {name: value for name, value in locals().items() if name in DEFAULTS}
        self._options = options = Options(url, given)
        self.url = options.url
        if not usable():
            raise ConfigError("tiers.url", "s3: it was used before this process was forked; start processes by spawn")
        self._store, self._lookups = connect(options)
        self._known = Existence(options.positive, options.negative)
        self._accounts = Accounts()
        self._conditional: bool | None = None  # whether the store honours If-None-Match, once it was asked
        self._served = False  # a read was allowed, so a denied write is a matter of rights
        self._closed = False
        self._loop = Loop(f"lmkv-s3-{options.bucket}")
        self._probe: asyncio.Task[None] | None = None
        self._transfers, self._asking = (asyncio.Semaphore(options.concurrency) for _ in range(2))
        self._busy: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def contains(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        """What is not known already is asked for with one HEAD an object, `concurrency` at a time."""
        sizes = {key: self._known.get(key) for key in keys}
        ask = [key for key, size in sizes.items() if size is None]
        answers = self._each(self._ask, ask, self._options.lookup_timeout, self._asking)
        sizes |= zip(ask, answers, strict=True)
        ended = self._unusable is not None
        return [size if isinstance(size, int) and size and not ended else None for size in map(sizes.get, keys)]

    def read(self, reads: Sequence[Read]) -> list[Result]:
        return self._results(self._read, reads)

    def read_range(self, key: ChunkKey, offset: int, into: memoryview) -> Result:
        """Fill ``into`` with the object's bytes from ``offset``. ERROR where the object ends before; else as `read`."""
        return self._results(lambda part: self._fetch(*part), [(key, into, offset)])[0]

    def write(self, writes: Sequence[Write]) -> list[Result]:
        return self._results(self._write, writes)

    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [end is True for end in self._each(self._delete, keys, self._options.timeout, self._transfers)]

    def scan(self) -> Iterator[list[Found]]:
        if self._unusable:
            return
        listing = self._accounts.listing()
        try:
            stream = obstore.list(self._store, self._options.prefix or None, chunk_size=PAGE).__aiter__()
            while page := self._each(_next_page, [stream], self._options.timeout, self._asking)[0]:
                if isinstance(page, Result):
                    raise BackendError(f"s3: cannot list {self.url}: {page.detail or page.status.value}")
                found = list(filter(None, map(self._found, page)))
                listing.add((self._name(each.key), each.nbytes) for each in found)
                if found:
                    yield found
            listing.finish()
        finally:
            listing.drop()

    def usage(self) -> Usage:
        return Usage(self._accounts.used, self._accounts.objects, None)

    def health(self) -> Health:
        result = self._results(self._try_out, [f"{self._options.prefix}lmkv-health-{os.urandom(8).hex()}"])[0]
        return Health(result.status is Status.OK, result.detail or result.status.value)

    def close(self) -> None:
        self._closed = True
        self._loop.close()

    @property
    def _unusable(self) -> Result | None:
        if self._loop.forked:
            return Result(Status.ERROR, detail="opened before this process was forked")
        return Result(Status.ERROR, detail="closed") if self._closed else None

    def _results(self, do: Do, items: Sequence[Any]) -> list[Result]:
        return self._each(do, items, self._options.timeout, self._transfers)

    def _each(self, do: Do, items: Sequence[Any], timeout: float, turns: asyncio.Semaphore) -> list[Any]:
        """What ``do`` gives for each item; a Result where it failed or did not end in time."""
        if self._unusable or not items:
            return [self._unusable] * len(items)
        return [self._end(each) for each in self._loop.each(do, items, timeout, turns)]

    def _end(self, end: Any) -> Any:
        if isinstance(end, TimeoutError):
            return self._unusable or Result(Status.TIMEOUT, detail="timeout")
        return meaning(end) if isinstance(end, BaseException) else end

    # The event loop runs the rest.

    def _name(self, key: ChunkKey) -> str:
        text = str(key)
        return f"{self._options.prefix}{text[:32]}/{text}"

    def _alone(self, name: str) -> asyncio.Lock:
        """Held while this process changes an object: whether a write made it, or a delete removed it, is then exact."""
        return self._busy.setdefault(name, asyncio.Lock())

    async def _head(self, key: ChunkKey, client: S3Store) -> int | None:
        """The object's size, or None; makes it known."""
        asked = self._known.clock()
        try:
            size: int = (await obstore.head_async(client, self._name(key)))["size"]
        except FileNotFoundError:
            self._known.heard(key, 0, asked)
            return None
        self._served = True
        self._known.heard(key, _whole(size), asked)
        return size

    async def _ask(self, key: ChunkKey) -> int:
        return _whole(await self._head(key, self._lookups) or 0)

    async def _read(self, read: Read) -> Result:
        return await self._fetch(read.key, read.into)

    async def _fetch(self, key: ChunkKey, into: memoryview, offset: int | None = None) -> Result:
        if into.readonly or not into.c_contiguous:
            return Result(Status.ERROR, detail="buffer is read-only or scattered")
        asked, into = self._known.clock(), into.cast("B")
        span: dict[str, Any] = {} if offset is None else {"options": {"range": (offset, offset + into.nbytes)}}
        try:
            got = await obstore.get_async(self._store, self._name(key), **span)
        except FileNotFoundError as error:
            if (result := meaning(error)).status is Status.MISSING:
                self._known.heard(key, 0, asked)
            return result
        self._served = True
        size: int = got.meta["size"]
        self._known.heard(key, _whole(size), asked)
        if not _whole(size):
            return Result(Status.CORRUPT, detail=f"{size} bytes are no container")
        nbytes = size if offset is None else into.nbytes
        if nbytes > into.nbytes:
            return Result(Status.ERROR, detail="short buffer")
        if nbytes <= 4 * PIECE:
            body = memoryview(await got.bytes_async())
            into[: min(body.nbytes, nbytes)] = body[:nbytes]
            good = body.nbytes == nbytes
            return Result(Status.OK, nbytes) if good else Result(Status.ERROR, detail=f"a body of {body.nbytes} bytes")
        done = 0
        async for piece in got.stream(min_chunk_size=PIECE):
            if done + len(piece) > nbytes:
                return Result(Status.ERROR, detail="long body")
            into[done : done + len(piece)] = piece
            done += len(piece)
            if done == nbytes:
                return Result(Status.OK, nbytes)
        return Result(Status.ERROR, detail="short body")

    async def _write(self, write: Write) -> Result:
        key, data = write
        if not data.nbytes or data.nbytes % ALIGNMENT or not data.c_contiguous:
            return Result(Status.ERROR, detail="not the size of a container, or scattered")
        name, whole = self._name(key), data.nbytes <= self._options.multipart
        async with self._alone(name):
            try:
                if whole and self._conditional is None:
                    await self._try_conditional()
                create = whole and bool(self._conditional)
                if create or await self._head(key, self._store) is None:
                    if await self._send(name, data, create):
                        self._accounts.changed(name, 0, data.nbytes)
                        self._known.did(key, data.nbytes)
                    else:
                        self._known.doubt(key)
            except BaseException as error:
                self._known.doubt(key)
                if isinstance(error, asyncio.CancelledError):
                    raise
                return refusal(error, self._served)
        return Result(Status.OK, data.nbytes)

    async def _send(self, name: str, data: memoryview, create: bool) -> bool:
        """Put an object; False: there is one, and it was kept. Nothing reads ``data`` when this ends."""
        view, released = memoryview(data), asyncio.get_running_loop().create_future()
        watch = weakref.ref(view, lambda _: settle(released))
        mode: dict[str, Any] = {"mode": "create"} if create else {"mode": "overwrite"}
        multipart = data.nbytes > self._options.multipart
        putting = obstore.put_async(self._store, name, view, use_multipart=multipart, chunk_size=PART, **mode)
        del view
        try:
            await putting
        except AlreadyExistsError:
            return False
        finally:
            if not released.done():
                await asyncio.wait([released], timeout=GRACE)
            del watch
        return True

    async def _try_conditional(self) -> None:
        """Find out whether a second conditional put of an object is refused. Raises what the first one raises, for all
        who wait: one after the other would be late."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._put_twice())
            self._probe.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._probe)

    async def _put_twice(self) -> None:
        name, page = f"{self._options.prefix}lmkv-probe-{os.urandom(8).hex()}", memoryview(bytes(ALIGNMENT))
        try:
            await self._send(name, page, True)
            self._conditional = not await self._send(name, page, True)
        except GenericError as error:
            if not unsupported(error):
                raise
            self._conditional = False
        with suppress(Exception):
            await obstore.delete_async(self._store, name)

    async def _delete(self, key: ChunkKey) -> bool:
        name = self._name(key)
        async with self._alone(name):
            size = await self._head(key, self._store)
            if size is None:
                return False
            try:
                await obstore.delete_async(self._store, name)
            except BaseException:
                self._known.doubt(key)
                raise
            self._known.did(key, 0)
            self._accounts.changed(name, _whole(size), 0)
        return True

    def _found(self, meta: Any) -> Found | None:
        """A listed object, if it is a container of ours."""
        name, size = meta["path"], _whole(meta["size"])
        with suppress(BadInput):
            key = ChunkKey.parse(name.rpartition("/")[2])
            if size and self._name(key) == name:
                return Found(key, size, meta["last_modified"].timestamp())
        return None

    async def _try_out(self, name: str) -> Result:
        began, page = time.monotonic(), memoryview(os.urandom(ALIGNMENT))
        await self._send(name, page, False)
        got = await (await obstore.get_async(self._store, name)).bytes_async()
        await obstore.delete_async(self._store, name)
        if memoryview(got) != page:
            return Result(Status.ERROR, detail="what was read is not what was written")
        puts = {None: "not tried yet", True: "honoured", False: "ignored: a write looks first"}[self._conditional]
        milliseconds = 1e3 * (time.monotonic() - began)
        return Result(Status.OK, detail=f"{milliseconds:.1f} ms to put, get and delete 4 KiB; conditional puts: {puts}")


async def _next_page(stream: AsyncIterator[Sequence[Any]]) -> Sequence[Any]:
    """Metadata of the next objects, or none at the end."""
    async for page in stream:
        return page
    return ()


def _whole(size: int) -> int:
    """The size of something that can be a container, else 0."""
    return 0 if size % ALIGNMENT else size
