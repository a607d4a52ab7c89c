"""The host service as the tests see it: its counters, the end of its saves, its end, and what it left on disk."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmkv import chunk
from lmkv.config import Config
from lmkv.server.client import Host

POLL = 0.02


@contextmanager
def watching(path: Path) -> Iterator[Host]:
    """A client of the service that listens on ``path``."""
    host = Host(str(path), config=Config.load(env={}, cpu_touch=False), spawn=False, name="test")
    try:
        host.register([chunk.HEADER_BYTES])
        yield host
    finally:
        host.close()


def settled(path: Path, objects: int, timeout: float = 60) -> dict[str, Any]:
    """Wait until host memory has at least ``objects`` chunks and gets no more, and all of them are in every tier.

    Returns the service's counters then. A worker's saves follow its steps at once, on a thread of their own; a
    quarter of a second without a new chunk is taken for their end.
    """
    deadline, calm, before = time.monotonic() + timeout, 0, -1
    with watching(path) as host:
        while True:
            stats = host.stats()
            cpu = stats["tiers"]["cpu"]
            quiet = cpu["objects"] == before and cpu["objects"] >= objects and not cpu["reservations"]
            calm, before = (calm + 1 if quiet else 0), cpu["objects"]
            if calm * POLL > 0.25 and host.flush(max(1.0, deadline - time.monotonic())):
                return host.stats()
            assert time.monotonic() < deadline, f"not {objects} chunks after {timeout} s: {stats}"
            threading.Event().wait(POLL)


def service_pid(path: Path) -> int | None:
    """Process id of whoever listens on ``path``, None when nobody does."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        try:
            sock.connect(str(path))
        except OSError:
            return None
        return struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def stop_service(path: Path, signum: int = signal.SIGTERM, timeout: float = 30) -> bool:
    """End the service on ``path`` and wait for its process to be gone; False when there was none."""
    pid = service_pid(path)
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signum)
            assert select.select([descriptor], [], [], timeout)[0], f"service {pid} is still there after {timeout} s"
        finally:
            os.close(descriptor)
    return True


def corrupt(folder: Path) -> int:
    """Change every stored value under a disk tier's ``folder``, and seal the chunks again so that all look sound.

    The sign bit of every 16-bit word is flipped: other numbers in every format, none of them infinite. Returns the
    number of chunks.
    """
    count = 0
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = bytearray(file.read_bytes())
        if not data.startswith(chunk.MAGIC):
            continue
        view = memoryview(data)
        header = chunk.parse(view)
        chunk.verify(view, header)
        assert header.codec == "raw", "write the tier without a codec"
        np.frombuffer(data, np.uint8, offset=chunk.HEADER_BYTES)[1::2] ^= 0x80
        parts = tuple(part._replace(checksum=0) for part in header.parts)
        chunk.seal(view, replace(header, parts=parts, flags=header.flags & ~chunk.SEALED))
        file.write_bytes(data)
        count += 1
    return count
