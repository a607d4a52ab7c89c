"""A cache server over loopback TCP against two plain sockets that move the same buffers.

    python bench/server.py --size 32MiB --count 8 --rounds 7

Ours: `lmkv server` in a process of its own and the lmkv:// backend here, one connection, one container a call. Theirs:
a process and this one with a socket each, `sendall` and `recv_into`, the system's buffer sizes. Each round measures
every step once, side by side. With checksums, the server checks what is put and the client what it gets, and "seal and
put" also computes them, as for a chunk that has not left host memory before; without, containers are not sealed, so
that nobody checks them. CPU: seconds of this process for each GB. Every get is compared with what was put.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from lmkv import chunk
from lmkv.backends.base import Read, Status, Write
from lmkv.backends.server import ServerBackend
from lmkv.cli.output import emit, track
from lmkv.errors import BadInput
from lmkv.keys import ChunkKey
from lmkv.units import parse_bytes

PLAIN = """
import mmap, socket, sys
count, size = int(sys.argv[1]), int(sys.argv[2])
views = [memoryview(mmap.mmap(-1, size)) for _ in range(count)]
for view in views:
    view[:] = bytes([1]) * size
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while command := sock.recv(2):
    view = views[command[1]]
    if command[:1] == b"g":
        sock.sendall(view)
    else:
        at = 0
        while at < size:
            at += sock.recv_into(view[at:])
        sock.sendall(b"k")
"""


class Took(NamedTuple):
    wall: float
    cpu: float


class Plain:
    """The other side of a plain socket, in a process of its own."""

    def __init__(self, count: int, size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PLAIN, str(count), str(size)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.sock = socket.create_connection(("127.0.0.1", int(self.process.stdout.readline())))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get(self, number: int, into: memoryview) -> None:
        self.sock.sendall(b"g" + bytes([number]))
        at = 0
        while at < len(into):
            at += self.sock.recv_into(into[at:])

    def put(self, number: int, view: memoryview) -> None:
        self.sock.sendall(b"p" + bytes([number]))
        self.sock.sendall(view)
        self.sock.recv(1)

    def close(self) -> None:
        self.sock.close()
        self.process.wait()


@contextmanager
def serve(budget: int, slab: int, verify: bool) -> Iterator[str]:
    """A cache server; its address."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")}
    env |= {"LMKV_CPU_BUDGET": str(budget), "LMKV_CPU_SLAB": str(slab), "LMKV_SERVER_VERIFY": str(int(verify))}
    command = [sys.executable, "-m", "lmkv", "server", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        yield process.stderr.readline().rpartition(" serves ")[2].strip()
    finally:
        process.terminate()
        process.wait()


class Case:
    """Buffers, keys and both sides."""

    def __init__(self, address: str, size: int, count: int, checked: bool) -> None:
        self.size, self.count, self.checked = size, count, checked
        self.client = ServerBackend(f"lmkv://{address}", timeout=60)
        self.plain = Plain(count, size)
        self.keys = [ChunkKey(b"bench server----", bytes(8), os.urandom(32), bytes(8), n, 0, 0) for n in range(count)]
        self.views = [memoryview(mmap.mmap(-1, size)) for _ in range(count)]
        self.into = [memoryview(mmap.mmap(-1, size)) for _ in range(count)]
        self.headers = [self._fill(key, view) for key, view in zip(self.keys, self.views, strict=True)]
        for view in self.into:
            view[:] = bytes(size)

    def _fill(self, key: ChunkKey, view: memoryview) -> chunk.Header:
        view[:] = np.random.default_rng(key.depth).bytes(self.size)
        step = max(chunk.PAGE, (self.size // 32 + chunk.PAGE - 1) // chunk.PAGE * chunk.PAGE)
        ends = [*range(chunk.PAGE, self.size, step), self.size]
        parts = [chunk.Part(n, 1, 0, at, end - at, end - at, 0) for n, (at, end) in enumerate(pairwise(ends))]
        header = chunk.Header(key, 0, 16, 16, 1, 0, tuple(parts), self.size)
        (chunk.seal if self.checked else chunk.write_header)(view, header)
        return header

    def seal_and_put(self, n: int) -> None:
        chunk.seal(self.views[n], self.headers[n])
        self.put(n)

    def put(self, n: int) -> None:
        (result,) = self.client.write([Write(self.keys[n], self.views[n])])
        if result.status is not Status.OK:
            raise BadInput(f"put: {result}")

    def get(self, n: int) -> None:
        (result,) = self.client.read([Read(self.keys[n], self.into[n])])
        if result.status is not Status.OK:
            raise BadInput(f"get: {result}")
        if self.checked and not result.verified:
            chunk.verify(self.into[n], chunk.parse(self.into[n]), self.keys[n])

    def round(self, first: bool) -> dict[str, Took]:
        steps: list[tuple[str, Callable[[int], None]]] = [
            ("plain put", lambda n: self.plain.put(n, self.views[n])),
            ("put", self.put),
            ("plain get", lambda n: self.plain.get(n, self.into[n])),
            ("get", self.get),
        ]
        if first:
            steps = [steps[1], steps[0], steps[3], steps[2]]
        took = {name: self._time(call) for name, call in steps if "put" in name}
        if self.checked:
            self.client.delete(self.keys)
            took["seal and put"] = self._time(self.seal_and_put)
        for view in self.into:
            view[: chunk.PAGE] = bytes(chunk.PAGE)
        took |= {name: self._time(call) for name, call in steps if "get" in name}
        for key, view, into in zip(self.keys, self.views, self.into, strict=True):
            (result,) = self.client.read([Read(key, into)])
            if result.status is not Status.OK or view != into:
                raise BadInput("other bytes came back than were put")
        self.client.delete(self.keys)
        return took

    def _time(self, call: Callable[[int], None]) -> Took:
        wall, cpu = time.perf_counter(), time.process_time()
        for number in range(self.count):
            call(number)
        return Took(time.perf_counter() - wall, time.process_time() - cpu)

    def close(self) -> None:
        self.client.close()
        self.plain.close()


def rows(rounds: Sequence[dict[str, Took]], nbytes: int, checked: bool) -> Iterator[dict[str, Any]]:
    """One line a step: medians, and of the ratios round by round the median [lowest, highest]."""
    found: dict[str, list[Took]] = defaultdict(list)
    for each in rounds:
        for name, took in each.items():
            found[name].append(took)
    for step in ("get", "put", "seal and put")[: 3 if checked else 2]:
        ours, plain = found[step], found[f"plain {step[-3:]}"]
        speed = sorted(p.wall / o.wall for o, p in zip(ours, plain, strict=True))
        cpu = statistics.median(o.cpu / p.cpu for o, p in zip(ours, plain, strict=True))
        yield {
            "step": step,
            "checksums": "yes" if checked else "no",
            "plain GB/s": round(statistics.median(nbytes / each.wall for each in plain) / 1e9, 2),
            "ours GB/s": round(statistics.median(nbytes / each.wall for each in ours) / 1e9, 2),
            "ratio": f"{statistics.median(speed):.2f} [{speed[0]:.2f}, {speed[-1]:.2f}]",
            "plain CPU s/GB": round(statistics.median(each.cpu for each in plain) / nbytes * 1e9, 3),
            "ours CPU s/GB": round(statistics.median(each.cpu for each in ours) / nbytes * 1e9, 3),
            "CPU ratio": round(cpu, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_bytes, default=32 << 20)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    size, count = options.size, options.count
    found: list[dict[str, Any]] = []
    for checked in (True, False):
        slab = max(64 << 20, size)
        with serve(2 * max(size * count, slab) + (256 << 20), slab, checked) as address:
            case = Case(address, size, count, checked)
            try:
                rounds = [case.round(bool(n % 2)) for n in track(range(options.rounds + 1), "server")]
            finally:
                case.close()
        found += rows(rounds[1:], size * count, checked)
    emit(found)


if __name__ == "__main__":
    main()
