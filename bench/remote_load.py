"""Many clients on one cache server, with faults: no wrong bytes, nothing kept, and what they got through.

    python bench/remote_load.py --clients 64 --seconds 600

Each client is a thread with connections of its own; they put, get, look up and delete the same containers of 1 to 32
MiB at random. Beside them one client after the other leaves in the middle of a put, the server is stopped for a second
now and then, and once it is killed and started again. In the end the server must hold no reservation, no lease and no
more descriptors than at the start. Exit 1 for a wrong byte, a call beyond its time, or something kept.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from cache_servers import Server, stats, whole  # noqa: E402

from lmkv.backends.base import Read, Result, Status, Write  # noqa: E402
from lmkv.cli.output import emit  # noqa: E402
from lmkv.server import data  # noqa: E402
from lmkv.server import protocol as wire  # noqa: E402
from lmkv.testing.backend_tests import buffer, key_of  # noqa: E402

MIB = 1 << 20
SIZES = (1, 2, 4, 8, 16, 32)
OBJECTS = 24
TIMEOUT = 10.0


class Load:
    """The containers, the server, and what happened."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.objects = [whole(n, SIZES[n % len(SIZES)] * MIB) for n in range(OBJECTS)]
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.ended: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {"get": [], "put": [], "contains": [], "delete": []}
        self.nbytes: Counter[str] = Counter()
        self.wrong: list[str] = []

    def client(self, seed: int) -> None:
        """One client until all is over."""
        rng, into = random.Random(seed), buffer(max(SIZES) * MIB)
        client = self.server.client(timeout=TIMEOUT)
        while not self.over.is_set():
            number, action = (
                rng.randrange(OBJECTS),
                rng.choices(("get", "put", "contains", "delete"), (50, 30, 15, 5))[0],
            )
            began = time.monotonic()
            result = Result(Status.OK)
            if action == "get":
                (result,) = client.read([Read(key_of(number), into)])
                if result.status is Status.OK and not np.array_equal(into[: result.nbytes], self.objects[number]):
                    self.wrong.append(f"object {number}: {result.nbytes} bytes, not what was put")
            elif action == "put":
                (result,) = client.write([Write(key_of(number), self.objects[number])])
            elif action == "contains":
                client.contains([key_of(n) for n in range(OBJECTS)])
            else:
                client.delete([key_of(number)])
            took = time.monotonic() - began
            with self.lock:
                self.seconds[action].append(took)
                self.nbytes[action] += result.nbytes
                self.ended[f"{action} {result.status.value}"] += 1
                if took > TIMEOUT + 0.5:
                    self.wrong.append(f"{action} took {took:.1f} s")
        client.close()

    def rude(self) -> None:
        """Clients that leave in the middle of a put."""
        while not self.over.wait(0.2):
            number = self.random.randrange(OBJECTS)
            body = self.objects[number]
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.port), 5) as sock:
                sock.sendall(wire.frame(data.Hello(data.VERSION, "rude", "")))
                sock.sendall(wire.frame(data.Put(wire.pack_keys([key_of(number)]), [len(body)])))
                sock.sendall(body[: self.random.randrange(len(body))])

    def faults(self, seconds: float) -> None:
        """Stops, and one kill."""
        killed, began = False, time.monotonic()
        while not self.over.wait(seconds / 12):
            if not killed and time.monotonic() - began > seconds / 2:
                killed = True
                self.server.kill()
                self.server.start()
            else:
                self.server.signal(signal.SIGSTOP)
                time.sleep(1)
                self.server.signal(signal.SIGCONT)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def run(clients: int, seconds: float, seed: int, folder: Path) -> int:
    server = Server(folder, cpu_budget="512MiB", cpu_slab="64MiB", tiers=f"disk://{folder / 'disk'}?budget=2GiB")
    load = Load(server, seed)
    threads = [threading.Thread(target=load.client, args=(seed + n,)) for n in range(clients)]
    threads += [threading.Thread(target=load.rude), threading.Thread(target=load.faults, args=(seconds,))]
    fresh = descriptors(server.process.pid)
    began = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    load.over.set()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    rows = [
        {
            "call": name, "calls": len(each), "GB/s": f"{load.nbytes[name] / took / 1e9:.3f}",
            "p50 ms": f"{1e3 * np.percentile(each, 50):.1f}", "p99 ms": f"{1e3 * np.percentile(each, 99):.1f}",
            "longest ms": f"{1e3 * max(each):.0f}",
        }
        for name, each in load.seconds.items() if each
    ]  # fmt: skip
    emit(rows, False)
    print(dict(load.ended))
    deadline = time.monotonic() + 40
    kept = fresh + 3  # files of the disk that are open by now
    while (left := descriptors(server.process.pid)) > kept and time.monotonic() < deadline:
        time.sleep(0.5)
    found = stats(server)
    held = found["tiers"]["cpu"]["reservations"], found["tiers"]["cpu"]["leases"], found["filling_bytes"]
    print(f"descriptors {fresh} before, {left} after; {held} held; {server.rss() / MIB:.0f} MiB resident")
    if left > kept or any(held):
        load.wrong.append("the server kept something")
    server.close()
    for line in load.wrong[:20]:
        print(line)
    return int(bool(load.wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.setswitchinterval(0.0005)  # all clients share an interpreter
    with tempfile.TemporaryDirectory(prefix="lmkv-") as folder:
        sys.exit(run(options.clients, options.seconds, options.seed, Path(folder)))


if __name__ == "__main__":
    main()
