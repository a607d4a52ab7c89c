"""The S3 backend against obstore alone, with the same settings: pairs in turn, wall and CPU time.

    python bench/s3.py 's3://bucket/prefix?endpoint=http://host:port' --pairs 7
    python bench/s3.py --start rgw          # or moto: a server of its own on loopback, which shares the processors

obstore alone puts the same buffers and drops what it gets as soon as it has it; the backend also has it in the caller's
buffer, and compares. Small objects go as one batch, on obstore's side as one `asyncio.gather` with as many at once.
Which side goes first alternates. CPU is this process's, user and system. Ratios are of medians, above 1 is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import obstore

from lmkv import backends
from lmkv.backends.base import Read, Status, Write
from lmkv.backends.existence import Existence
from lmkv.backends.s3 import S3Backend
from lmkv.backends.s3_options import connect
from lmkv.cli.output import emit, track
from lmkv.keys import ChunkKey

MIB = 1 << 20


def key_of(number: int) -> ChunkKey:
    return ChunkKey(b"lmkv-bench-scope", bytes(8), os.urandom(32), bytes(8), number, 0, 0)


def buffer(nbytes: int) -> memoryview:
    """Memory that is there already."""
    view = memoryview(mmap.mmap(-1, nbytes))
    view[:] = os.urandom(nbytes)
    return view


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


class Sides:
    """The same work done by the backend and by obstore alone, for one size and count of objects."""

    def __init__(self, backend: S3Backend, nbytes: int, count: int) -> None:
        self.backend, self.nbytes, self.count = backend, nbytes, count
        self.store, _ = connect(backend._options)
        self.data, self.into = buffer(nbytes * count), buffer(nbytes * count)
        self.parts = [self.data[i * nbytes : (i + 1) * nbytes] for i in range(count)]
        self.loop = asyncio.new_event_loop()
        self.fresh()

    def fresh(self) -> None:
        """New objects, for puts that must not meet old ones."""
        self.keys = [key_of(i) for i in range(self.count)]
        self.names = [f"{self.backend._options.prefix}obstore-alone/{os.urandom(16).hex()}" for _ in self.keys]

    def put(self) -> None:
        results = self.backend.write([Write(*each) for each in zip(self.keys, self.parts, strict=True)])
        assert all(each.status is Status.OK for each in results), results

    def get(self) -> None:
        size = self.nbytes
        reads = [Read(key, self.into[i * size : (i + 1) * size]) for i, key in enumerate(self.keys)]
        results = self.backend.read(reads)
        assert all(each.status is Status.OK for each in results), results

    def put_alone(self) -> None:
        async def put(item: tuple[str, memoryview]) -> None:
            await obstore.put_async(self.store, *item, use_multipart=False, mode="create")

        self._alone(put, list(zip(self.names, self.parts, strict=True)))

    def get_alone(self) -> None:
        async def get(name: str) -> None:
            assert len(await (await obstore.get_async(self.store, name)).bytes_async()) == self.nbytes

        self._alone(get, self.names)

    def _alone(self, do: Callable[[Any], Any], items: list[Any]) -> None:
        async def all_of_them() -> None:
            turns = asyncio.Semaphore(self.backend._options.concurrency)

            async def one(item: Any) -> None:
                async with turns:
                    await do(item)

            await asyncio.gather(*map(one, items))

        self.loop.run_until_complete(all_of_them())

    def measure(self, pairs: int) -> list[dict[str, Any]]:
        steps = {"put": (self.put, self.put_alone), "get": (self.get, self.get_alone)}
        times: dict[str, tuple[list[tuple[float, float]], list[tuple[float, float]]]] = {}
        for number in track(range(pairs + 1), f"{self.count} x {self.nbytes // MIB} MiB"):
            self.fresh()
            for name, sides in steps.items():
                for side in (0, 1) if number % 2 else (1, 0):
                    took = timed(sides[side])
                    if number:  # the first pair opens the connections
                        times.setdefault(name, ([], []))[side].append(took)
            assert self.into == self.data
            self.backend.delete(self.keys)
            obstore.delete(self.store, self.names)
        self.loop.close()
        return [self._row(name, *both) for name, both in times.items()]

    def _row(self, step: str, ours: list[tuple[float, float]], alone: list[tuple[float, float]]) -> dict[str, Any]:
        gigabytes = 1e-9 * self.nbytes * self.count
        (wall, cpu), (wall_alone, cpu_alone) = (
            [median(each) for each in zip(*side, strict=True)] for side in (ours, alone)
        )
        ratios = sorted(theirs[0] / mine[0] for mine, theirs in zip(ours, alone, strict=True))
        return {
            "objects": f"{self.count} x {self.nbytes // MIB} MiB",
            "step": step,
            "GB/s": round(gigabytes / wall, 3),
            "alone GB/s": round(gigabytes / wall_alone, 3),
            "ratio": round(wall_alone / wall, 2),
            "lowest, highest": f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]",
            "CPU s/GB": round(cpu / gigabytes, 2),
            "alone CPU s/GB": round(cpu_alone / gigabytes, 2),
        }


def lookups(backend: S3Backend, count: int, pairs: int) -> list[dict[str, Any]]:
    """A lookup of ``count`` objects that are there and unknown, beside one HEAD; and once they are known."""
    keys = [key_of(i) for i in range(count)]
    page = buffer(4096)
    backend.write([Write(key, page) for key in keys])
    known, store = backend._known, connect(backend._options)[1]
    took: dict[str, list[float]] = {}
    for _ in range(pairs + 1):
        backend._known = Existence(60, 60)
        for name, call in (
            ("one HEAD", lambda: obstore.head(store, backend._name(keys[0]))),
            (f"lookup of {count}", lambda: backend.contains(keys)),
            (f"lookup of {count}, known", lambda: backend.contains(keys)),
        ):
            took.setdefault(name, []).append(timed(call)[0])
    assert backend.contains(keys) == [page.nbytes] * count
    backend._known = known
    backend.delete(keys)
    head = median(took["one HEAD"][1:])
    return [
        {"step": name, "ms": round(1e3 * median(each[1:]), 3), "of one HEAD": round(median(each[1:]) / head, 1)}
        for name, each in took.items()
    ]


@contextmanager
def started(kind: str) -> Iterator[str]:
    """A server of the tests' and the URL of a bucket on it."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from s3_servers import KEY, SECRET, Moto, Rgw, bucket

    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    with tempfile.TemporaryDirectory() as folder:
        server: Any = Moto() if kind == "moto" else Rgw(Path(folder))
        try:
            server.start()
            yield bucket(server)
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", help="an S3 tier's URL, of a bucket that is there")
    parser.add_argument("--start", choices=["moto", "rgw"], help="start a server instead")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--large", type=int, default=1, help="objects of 32 MiB at once")
    parser.add_argument("--small", type=int, default=64, help="objects of 1 MiB at once")
    options = parser.parse_args()
    if bool(options.url) == bool(options.start):
        parser.error("give a URL, or --start")
    if options.start:
        with started(options.start) as url:
            run(f"{url}&timeout=60s&lookup_timeout=30s", options)
    else:
        run(options.url, options)


def run(url: str, options: argparse.Namespace) -> None:
    backend = backends.open(url)
    assert isinstance(backend, S3Backend)
    with closing(backend):
        large = Sides(backend, 32 * MIB, options.large).measure(options.pairs)
        emit(large + Sides(backend, MIB, options.small).measure(options.pairs))
        emit(lookups(backend, 128, options.pairs))


if __name__ == "__main__":
    main()
