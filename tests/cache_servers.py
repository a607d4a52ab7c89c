"""Cache servers for tests: real processes on loopback, and containers whose every byte follows from their number."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lmkv import chunk
from lmkv.backends.base import Read, Result, Status, Write
from lmkv.backends.server import ServerBackend
from lmkv.chunk import Header, Part
from lmkv.keys import ChunkKey
from lmkv.server import data
from lmkv.server import protocol as wire
from lmkv.server.stream import Stream
from lmkv.testing.backend_tests import buffer, key_of

WAIT = 20.0
PAGE = 4096
_LISTENS = re.compile(rb"serves .*?(127\.0\.0\.1:\d+)")


class Server:
    """``lmkv server --listen`` as a process. port 0: any; a restart takes the same again."""

    def __init__(self, folder: Path, *options: str, port: int = 0, **settings: object) -> None:
        self.folder, self.options = folder, options
        self.settings = {"cpu_budget": "64MiB", "cpu_slab": "16MiB", "cpu_touch": "0", "close_timeout": "3s"}
        self.settings |= {name: str(value) for name, value in settings.items()}
        self.log = folder / f"server-{os.urandom(4).hex()}.log"
        self.port = port
        self.start()

    def start(self) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")}
        env |= {f"LMKV_{name.upper()}": value for name, value in self.settings.items()}
        listen = ["--listen", f"127.0.0.1:{self.port}"]
        with open(self.log, "ab") as log:
            began = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lmkv", "server", *listen, *self.options], env=env, stderr=log
            )  # fmt: skip
        deadline = time.monotonic() + WAIT
        while not (found := _LISTENS.search(self.log.read_bytes()[began:])):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            os.sched_yield()
        self.port = int(found[1].rpartition(b":")[2])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def client(self, **options: object) -> ServerBackend:
        return ServerBackend(f"lmkv://{self.address}", **options)  # type: ignore[arg-type]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT)

    def end(self) -> int:
        """Ask it to end as a service manager does; its exit code."""
        self.process.terminate()
        return self.process.wait(3 * WAIT)  # writes under way, on a disk that others keep busy

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.kill()

    def rss(self) -> int:
        """Bytes of memory that is its own: the arena's pages count as they are touched."""
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
        fields: Mapping[str, str] = dict(line.split(":", 1) for line in lines[1:])
        return int(fields["Rss"].split()[0]) * 1024


def whole(number: int, nbytes: int = 3 * PAGE, expires: int = 0, codec: str = "raw", **key: object) -> memoryview:
    """A sealed container for ``key_of(number)``, in parts of at most 1 MiB."""
    view = buffer(nbytes)
    view[PAGE:] = np.random.default_rng(number).bytes(nbytes - PAGE)
    parts, at = [], PAGE
    while at < nbytes:
        size = min(max(1 << 20, (nbytes // 64 + PAGE - 1) // PAGE * PAGE), nbytes - at)
        parts.append(Part(len(parts), 1, 0, at, size, size, 0))
        at += size
    name = key_of(number)._replace(**key)
    header = Header(
        name, name.depth * 16, 16, 16, 1, 7, tuple(parts), nbytes, codec=codec, created=int(time.time()),
        expires=expires,
    )  # fmt: skip
    chunk.seal(view, header)
    return view


def store(client: ServerBackend, number: int, nbytes: int = 3 * PAGE) -> memoryview:
    data = whole(number, nbytes)
    assert client.write([Write(key_of(number), data)]) == [Result(Status.OK, nbytes)]
    return data


def load(client: ServerBackend, key: ChunkKey, capacity: int = 1 << 20) -> memoryview | Result:
    into = buffer(capacity)
    (result,) = client.read([Read(key, into)])
    return into[: result.nbytes] if result.status is Status.OK else result


class Listening(Protocol):
    port: int


class Proxy:
    """Passes bytes between clients and a server. flip: the byte at this place of what goes ``towards`` the server or
    the client is inverted, counted on each connection. hold: after so many bytes the rest waits for `release`. cut:
    after so many the connection ends. delay: seconds that every piece is late."""

    def __init__(
        self, server: Listening, towards: str = "client", flip: int = -1, hold: int = -1, cut: int = -1,
        delay: float = 0.0,
    ) -> None:  # fmt: skip
        self.server, self.towards, self.flip, self.hold = server, towards, flip, hold
        self.cut, self.delay = cut, delay
        self.held, self._go = threading.Event(), threading.Event()
        self.release = self._go.set
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)  # what is held stays with the server
                try:
                    far.connect(("127.0.0.1", self.server.port))
                except ConnectionRefusedError:
                    near.close()
                    far.close()
                    continue
                self._open += [near, far]
                for source, target, to in ((near, far, "server"), (far, near, "client")):
                    threading.Thread(target=self._pass, args=(source, target, to), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, to: str) -> None:
        passed = 0
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if to == self.towards:
                    if passed <= self.flip < passed + len(data):
                        data[self.flip - passed] ^= 0xFF
                    if 0 <= self.hold <= passed + len(data):
                        self.held.set()
                        self._go.wait(WAIT)
                    if self.delay:
                        self._go.wait(self.delay)
                    if 0 <= self.cut <= passed + len(data):
                        target.sendall(data[: self.cut - passed])
                        break
                passed += len(data)
                target.sendall(data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.release()
        for sock in self._open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def free_port() -> int:
    """One that nobody listens at just now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def run(calls: Sequence[Callable[[], None]]) -> None:
    """All at once; fails if one does."""
    failed: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not failed, failed


def both(*servers: Server, **options: object) -> ServerBackend:
    """A client of several servers."""
    return ServerBackend("lmkv://" + ",".join(server.address for server in servers), **options)  # type: ignore[arg-type]


def owner(client: ServerBackend, number: int) -> int:
    """The place of the server that has a key."""
    return client._places([key_of(number)])[0]


def soon() -> float:
    """A deadline."""
    return time.monotonic() + WAIT


def greeted(server: Server, token: str = "", version: int = data.VERSION) -> tuple[Stream[data.Reply], data.Reply]:
    """A connection of a client that says what it likes."""
    stream = Stream[data.Reply](socket.create_connection(("127.0.0.1", server.port)), data.Reply)
    stream.send(data.Hello(version, "test", token), soon())
    return stream, stream.recv(soon())


def put(stream: Stream[data.Reply], number: int, body: memoryview | bytes, nbytes: int) -> None:
    """Say that a container of ``nbytes`` comes, and send ``body``."""
    message = data.Put(wire.pack_keys([key_of(number)]), [nbytes])
    stream.send_buffers([wire.frame(message), body], soon())


def ended(sock: socket.socket) -> bool:
    """The other side has closed the connection, whatever it said before."""
    sock.settimeout(WAIT)
    with suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


def stats(server: Server) -> dict[str, Any]:
    """The server's own figures."""
    stream, _ = greeted(server)
    with closing(stream):
        stream.send(data.GetStats(), soon())
        reply = stream.recv(soon())
        assert isinstance(reply, data.Stats)
        return reply.values
