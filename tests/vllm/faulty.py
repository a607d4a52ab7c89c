"""Faults inside the processes under test: a backend ``faulty:///folder`` for the host service, and a vLLM plugin.

`install` makes a folder for PYTHONPATH that both find by entry points. `Gate` is the test's end: the next time the
named point is reached, in whichever process, it waits there until the test lets it go.

Points: read and write (the service, at its disk), fill (a worker amid the copy into reserved memory; what is there
then is garbage that looks whole), scatter (a worker, about to copy into vLLM's blocks).
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmkv.backends.base import Read, Result, Status
from lmkv.backends.disk import DiskBackend
from lmkv.testing import Fault, FaultyBackend

GATES = "FAULTY_GATES"
RESERVE_SECONDS = "FAULTY_RESERVE_SECONDS"
WAIT = 60.0
ENTRY_POINTS = """[lmkv.backends]
faulty = faulty:open_backend
[vllm.general_plugins]
faulty = faulty:patch_worker
"""


def install(folder: Path, **env: str) -> dict[str, str]:
    """Put this module into ``folder`` as an installed distribution. Returns the environment that finds it."""
    info = folder / "faulty-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    shutil.copy(__file__, folder)
    return {"PYTHONPATH": str(folder), GATES: str(folder), **env}


class Gate:
    """While open as a context, whoever reaches ``point`` waits here. folder: the one of `install`."""

    def __init__(self, folder: Path, point: str) -> None:
        self._path = folder / point
        self._held: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        self._listener.settimeout(WAIT)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def wait(self) -> None:
        """Until somebody has come."""
        self._held.append(self._listener.accept()[0])

    def let_go(self) -> None:
        """All who wait, and whoever comes later, go on."""
        self._path.unlink(missing_ok=True)
        self._listener.close()
        for each in self._held:
            each.close()


def pass_gate(point: str) -> None:
    """Wait at ``point`` if a test holds its gate."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2 * WAIT)
        sock.connect(os.path.join(os.environ[GATES], point))
        sock.recv(1)


class GatedBackend(FaultyBackend):
    """A disk tier with gates."""

    def _enter(self, operation: str) -> Fault:
        pass_gate(operation)
        return super()._enter(operation)


class FailingReads(GatedBackend):
    """A disk tier, of whose reads a share fails: half of those say so, half have a byte changed."""

    def __init__(self, inner: DiskBackend, share: float) -> None:
        super().__init__(inner)
        self._share, self._random, self._mutex2 = share, random.Random(5), threading.Lock()

    def read(self, reads: Sequence[Read]) -> list[Result]:
        results = super().read(reads)
        for i, each in enumerate(reads):
            with self._mutex2:
                luck = self._random.random()
            if luck < self._share / 2:
                results[i] = Result(Status.ERROR, 0, "injected")
            elif luck < self._share and results[i].status is Status.OK:
                each.into[results[i].nbytes // 2] ^= 0xFF
        return results


def open_backend(url: str, *, failing: str = "0") -> FaultyBackend:
    """The entry point. failing: share of reads, 0 to 1."""
    inner = DiskBackend("disk" + url.removeprefix("faulty"))
    return FailingReads(inner, float(failing)) if float(failing) else GatedBackend(inner)


def patch_worker() -> None:
    """The vLLM plugin: gates in the worker's copies, and shorter reservations if the environment says so."""
    from lmkv import chunk, rows
    from lmkv_vllm import worker

    worker.RESERVE_SECONDS = float(os.environ.get(RESERVE_SECONDS, worker.RESERVE_SECONDS))
    if hasattr(rows.PageRows, "unpatched"):
        return
    rows.PageRows.unpatched = True  # type: ignore[attr-defined]
    fill, scatter = rows.PageRows.fill, rows.PageRows.scatter

    def fill_twice(self: rows.PageRows, containers: Any, expires: int = 0, after: Any = None) -> list[int]:
        if os.path.exists(os.path.join(os.environ[GATES], "fill")):
            fill(self, containers, expires, after)
            for key, slot in containers:
                size = chunk.container_bytes(self.spec, key.group) - chunk.HEADER_BYTES
                ctypes.memset(slot.address + chunk.HEADER_BYTES, 0x3E, size)
            pass_gate("fill")
        return fill(self, containers, expires, after)

    def scatter_held(self: rows.PageRows, containers: Any, after: Any = None) -> None:
        pass_gate("scatter")
        scatter(self, containers, after)

    rows.PageRows.fill, rows.PageRows.scatter = fill_twice, scatter_held  # type: ignore[method-assign]
