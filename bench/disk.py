"""The disk backend against fio: pairs in turn, the same file size, block size and depth.

    python bench/disk.py /path/on/the/disk --sizes 4MiB 32MiB --files 16 --pairs 7

Both sides: fresh files of the chunk's size, O_DIRECT, blocks of 4 MiB, four in flight, huge-page
buffers; fio with registered buffers and without scrambling what it writes. Which side goes first
alternates. A "checked read" also computes the XXH3-64 of what was read, as every load does.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from lmkv import _native, backends
from lmkv.backends import Read, Status, Write
from lmkv.cli.output import emit, track
from lmkv.errors import BackendError
from lmkv.keys import ChunkKey
from lmkv.units import parse_bytes
from lmkv_bench import DEPTH, EXTENT, Runs, fio


class Ours:
    """``count`` objects of ``nbytes`` in the disk backend, from and into huge pages."""

    def __init__(self, folder: str, count: int, nbytes: int) -> None:
        self.slab = _native.Slab(count * nbytes)
        noise, at = np.random.default_rng(0).bytes(nbytes), self.slab.address
        self.views = [_native.memory(at + i * nbytes, nbytes) for i in range(count)]
        for view in self.views:
            view[:] = noise
        self.keys = [ChunkKey(bytes(16), bytes(8), os.urandom(32), bytes(8), i, 0, 0) for i in range(count)]
        self.backend = backends.open(f"disk://{folder}?direct=on")
        # a file of several extents keeps the depth by itself; smaller ones need several readers
        self.pool = ThreadPoolExecutor(max(1, DEPTH // -(-nbytes // EXTENT)))

    def write(self) -> None:
        """Every object, anew."""
        self._each(lambda i: self.backend.write([Write(self.keys[i], self.views[i])])[0].status)

    def read(self) -> None:
        """Every object."""
        self._each(lambda i: self.backend.read([Read(self.keys[i], self.views[i])])[0].status)

    def checked(self) -> None:
        """Every object, and its checksum."""

        def one(i: int) -> Status:
            status = self.backend.read([Read(self.keys[i], self.views[i])])[0].status
            _native.xxh3_64(self.views[i])
            return status

        self._each(one)

    def remove(self) -> None:
        """Delete them all, so that the next write makes fresh files."""
        self.backend.delete(self.keys)

    def close(self) -> None:
        """Release everything."""
        self.pool.shutdown()
        self.backend.close()
        self.views.clear()
        self.slab.close()

    def _each(self, call: Callable[[int], Status]) -> None:
        failed = [s for s in self.pool.map(call, range(len(self.keys))) if s is not Status.OK]
        if failed:
            raise BackendError(f"{len(failed)} operations: {failed[0].value}")


def reference(runs: Runs, folder: str, operation: str, count: int, nbytes: int) -> None:
    """Fio's figure."""
    rate = fio(folder, operation, count, nbytes)
    if rate is None:
        raise SystemExit("fio is not installed")
    runs.note(f"fio {operation}", rate)


def pair(runs: Runs, ours: Ours, folder: str, number: int) -> None:
    """One measurement of each step beside fio's, the order alternating."""
    count, nbytes = len(ours.keys), len(ours.views[0])
    ours.remove()
    for operation, call in (("write", ours.write), ("read", ours.read)):
        fios = partial(reference, runs, folder, operation, count, nbytes)
        mine = partial(runs.rate, operation, count * nbytes, call, f"fio {operation}")
        for step in (fios, mine) if number % 2 else (mine, fios):
            step()
    runs.rate("checked read", count * nbytes, ours.checked, "fio read")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a folder on the disk")
    parser.add_argument("--sizes", type=parse_bytes, nargs="+", default=[4 << 20, 32 << 20])
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for nbytes in options.sizes:
            ours, runs = Ours(folder, options.files, nbytes), Runs()
            for number in track(range(options.pairs + 1), f"{nbytes >> 20} MiB"):
                pair(runs, ours, folder, number)
                if number == 0:
                    runs = Runs()
            ours.remove()
            ours.close()
            figures = {each["step"]: each for each in runs.figures()}
            for step in ("write", "read", "checked read"):
                mine, ratios = figures[step], sorted(runs.ratios(step))
                row = {"files": f"{nbytes >> 20} MiB", "step": step, "fio GB/s": figures[mine["of"]]["median"]}
                row |= {"ours GB/s": mine["median"], "ratio": mine["ratio"]}
                rows.append(row | {"lowest, highest": f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]"})
    emit(rows)


if __name__ == "__main__":
    main()
