"""Measuring: figures over several runs, and what this machine itself does in the same minute."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lmkv import _native
from lmkv.errors import BadInput

EXTENT = 4 << 20
DEPTH = 4
DISK = "fio" if shutil.which("fio") else "O_DIRECT"
_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Runs:
    """Figures by step, one a run: GB/s or microseconds."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[str, str, list[float]]] = {}

    def note(self, name: str, value: float, unit: str = "GB/s", of: str = "") -> None:
        """One more figure of a step; ``of`` is the step that it is compared with."""
        self._steps.setdefault(name, (unit, of, []))[2].append(value)

    def rate(self, name: str, nbytes: int, call: Callable[[], object], of: str = "") -> None:
        """Time a call that moves ``nbytes``."""
        self.note(name, nbytes / seconds(call) / 1e9, of=of)

    def time(self, name: str, call: Callable[[], object], of: str = "") -> None:
        """Time a call in microseconds."""
        self.note(name, seconds(call) * 1e6, "us", of)

    def ratios(self, name: str) -> list[float]:
        """A step's figures over those of the step it is compared with, run by run."""
        _, of, values = self._steps[name]
        return [mine / other for mine, other in zip(values, self._steps[of][2], strict=True)]

    def figures(self) -> list[dict[str, Any]]:
        """Each step's figures; ``ratio``: the median of `ratios`, None where there is nothing to compare with."""
        return [
            {"step": name, "unit": unit, "min": min(values), "median": statistics.median(values), "max": max(values)}
            | {"ratio": statistics.median(self.ratios(name)) if of else None, "of": of or None}
            for name, (unit, of, values) in self._steps.items()
        ]


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Step(NamedTuple):
    """What to time, the bytes of bfloat16 that it stands for, and its bits a value."""

    name: str
    call: Callable[[], object]
    nbytes: int
    bits: float


def beside_memcpy(steps: Sequence[Step], nbytes: int, rounds: Iterable[object]) -> list[dict[str, Any]]:
    """Rows of a table: CPU time of steps that keep to this thread, and of memcpy of ``nbytes``. Each round times every
    step once; ratios are of one round: median [lowest, highest]."""
    source, target, runs, rows = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8), Runs(), []
    for _ in rounds:
        for step in (Step("memcpy", lambda: np.copyto(target, source), nbytes, 16.0), *steps):
            start = time.thread_time()
            step.call()
            of = "" if step.name == "memcpy" else "memcpy"
            runs.note(step.name, step.nbytes / (time.thread_time() - start) / 1e9, of=of)
    bits = {step.name: step.bits for step in steps}
    for found in runs.figures():
        ratios = sorted(runs.ratios(found["step"])) if found["of"] else []
        rows.append(
            {"step": found["step"], "bits": bits.get(found["step"], 16.0), "GB/s": found["median"]}
            | {"of memcpy": f"{found['ratio']:.4f} [{ratios[0]:.4f}, {ratios[-1]:.4f}]" if ratios else ""}
        )
    return rows


class Memcpy:
    """libc's memcpy over a working set of ``nbytes``, in pieces, on ``threads`` threads."""

    def __init__(self, nbytes: int, piece: int, threads: int) -> None:
        self.source, self.target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        self._pieces = [(at, min(piece, nbytes - at)) for at in range(0, nbytes, piece)]
        self._pool = ThreadPoolExecutor(threads)

    def __call__(self) -> None:
        list(self._pool.map(self._copy, self._pieces))

    def _copy(self, piece: tuple[int, int]) -> None:
        at, nbytes = piece
        _memcpy(self.target.ctypes.data + at, self.source.ctypes.data + at, nbytes)


def fio(folder: str, operation: str, count: int, nbytes: int) -> float | None:
    """GB/s of fio: ``count`` fresh files of ``nbytes``, O_DIRECT, blocks of 4 MiB, four in flight.

    Huge-page buffers (glibc's malloc is told so; they double the figure), registered with io_uring;
    buffers are written as they are. None when fio is not installed; BadInput with its complaint.
    """
    if DISK != "fio":
        return None
    with tempfile.TemporaryDirectory(dir=folder, prefix="lmkv-fio-") as place:
        command = [
            "fio", "--name=f", f"--directory={place}", f"--rw={operation}", "--direct=1",
            f"--bs={min(EXTENT, nbytes)}", f"--filesize={nbytes}", f"--nrfiles={count}",
            f"--size={count * nbytes}", "--ioengine=io_uring", "--fixedbufs=1",
            f"--iodepth={DEPTH}", "--scramble_buffers=0", "--fallocate=none",
            "--output-format=json",
        ]  # fmt: skip
        env = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        _, brace, report = done.stdout.partition("{")
        if done.returncode or not brace:
            raise BadInput(f"fio: {' '.join((done.stderr or done.stdout).split())[:300]}")
        return float(json.loads(brace + report)["jobs"][0][operation]["bw_bytes"]) / 1e9


def disk(folder: str, operation: str, count: int, nbytes: int) -> float:
    """The disk's own GB/s: by fio where it is installed, else one file after another by us."""
    if rate := fio(folder, operation, count, nbytes):
        return rate
    slab, spent = _native.Slab(nbytes), dict.fromkeys(("write", "read"), 0.0)
    slab.touch(0, nbytes)
    with tempfile.TemporaryDirectory(dir=folder, prefix="lmkv-bench-") as place:
        for file in (f"{place}/{number}" for number in range(count)):
            write = partial(_native.write_file, f"{file}.tmp", file, slab.address, nbytes, True, False)
            spent["write"] += seconds(write)
            spent["read"] += seconds(partial(_native.read_file, file, slab.address, nbytes, True))
    return count * nbytes / spent[operation] / 1e9
