"""S3 servers for tests, on loopback: moto, Ceph RGW, and one that does what a test tells it to."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import boto3
import botocore.config
import pytest

from lmkv import backends
from lmkv.backends.s3 import S3Backend

_numbers = itertools.count()
KEY, SECRET = "lmkvtestaccess", "lmkvtestsecret0123456789"
RGW_PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph")
STARTING = 60.0  # seconds, on a busy machine


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@lru_cache
def boto(endpoint: str, key: str = KEY, secret: str = SECRET) -> Any:
    """A client to look behind the backend's back with."""
    config = botocore.config.Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
    session = boto3.Session(key, secret, region_name="us-east-1")
    return session.client("s3", endpoint_url=endpoint, config=config)


def bucket(server: Server, options: str = "") -> str:
    """The URL of a new bucket with a folder."""
    name = f"lmkv-{next(_numbers)}"
    boto(server.endpoint).create_bucket(Bucket=name)
    return f"s3://{name}/kv?endpoint={server.endpoint}{options}"


def opened(url: str) -> S3Backend:
    backend = backends.open(url)
    assert isinstance(backend, S3Backend)
    return backend


def keys_in_environment(patch: pytest.MonkeyPatch, key: str = KEY, secret: str = SECRET) -> None:
    """The only credentials that boto3's chain finds."""
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        patch.setenv(name, "/nonexistent")
    if key:
        patch.setenv("AWS_ACCESS_KEY_ID", key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", secret)


def wait_for(ready: Callable[[], object], what: str, process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + STARTING
    while True:
        with suppress(Exception):
            if ready():
                return
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"{what} ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not start")
        time.sleep(0.05)


class Server:
    """One process that listens on a port of its own, and keeps it when it is started again."""

    def __init__(self) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def listening(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 1):
            return True

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Moto(Server):
    """Empty whenever it starts. Accepts any key."""

    def start(self) -> None:
        code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{self.port}'])"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([sys.executable, "-c", code], **quiet)
        wait_for(self.listening, "moto", self.process)


class Rgw(Server):
    """Ceph's object gateway with one monitor and one OSD that keeps everything in memory."""

    @staticmethod
    def missing() -> list[str]:
        return [each for each in RGW_PROGRAMS if shutil.which(each) is None]

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self.daemons = folder, dict[str, subprocess.Popen[bytes]]()

    def start(self) -> None:
        self._configure()
        self._call("monmaptool", "--create", "--fsid", self._cluster, "--addv", "a", f"[v1:{self._mon}]", "map")
        self._call("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(self._folder / "map"))
        self._daemon("ceph-mon", "-i", "a")
        wait_for(lambda: self._call("ceph", "--connect-timeout", "5", "mon", "stat"), "ceph-mon")
        osd = str(uuid.uuid4())
        self._call("ceph", "osd", "new", osd)
        self._call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._daemon("ceph-osd", "-i", "0")
        self._start_gateway()
        self.add_user("lmkv", KEY)

    def _start_gateway(self) -> None:
        self._daemon("radosgw", f"--rgw-frontends=beast endpoint=127.0.0.1:{self.port}")
        self.process = self.daemons["radosgw"]
        wait_for(self.listening, "radosgw", self.process)

    def add_user(self, name: str, key: str) -> None:
        """With the usual secret."""
        keys = (f"--access-key={key}", f"--secret={SECRET}")
        self.admin("user", "create", f"--uid={name}", f"--display-name={name}", *keys)

    def admin(self, *arguments: str) -> str:
        """Run radosgw-admin."""
        return self._call("radosgw-admin", *arguments)

    def restart(self) -> None:
        """The gateway alone; what it stored is in the OSD."""
        self._start_gateway()

    def _configure(self) -> None:
        self._mon, self._cluster = f"127.0.0.1:{free_port()}", str(uuid.uuid4())
        settings = {
            "fsid": self._cluster,
            "auth_cluster_required": "none",
            "auth_service_required": "none",
            "auth_client_required": "none",
            "mon_host": f"v1:{self._mon}",
            "public_addr": "127.0.0.1",
            "cluster_addr": "127.0.0.1",
            "ms_bind_msgr2": "false",
            "mon_data": f"{self._folder}/mon",
            "mon_allow_pool_size_one": "true",
            "mon_warn_on_pool_no_redundancy": "false",
            "osd_data": f"{self._folder}/osd",
            "osd_objectstore": "memstore",
            "memstore_device_bytes": "1073741824",
            "osd_pool_default_size": "1",
            "osd_pool_default_min_size": "1",
            "osd_pool_default_pg_num": "4",
            "osd_crush_chooseleaf_type": "0",
            "run_dir": f"{self._folder}/run",
            "admin_socket": f"{self._folder}/run/$name.asok",
            "pid_file": f"{self._folder}/run/$name.pid",
            "log_file": f"{self._folder}/$name.log",
            "rgw_data": f"{self._folder}/rgw",
            "rgw_enable_usage_log": "false",
        }
        for each in ("mon", "osd", "run", "rgw"):
            (self._folder / each).mkdir()
        text = "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
        (self._folder / "ceph.conf").write_text(text)

    def _command(self, program: str, *arguments: str) -> list[str]:
        return [program, "-c", str(self._folder / "ceph.conf"), *arguments]

    def _call(self, program: str, *arguments: str) -> str:
        command = self._command(program, *arguments)
        done = subprocess.run(command, capture_output=True, cwd=self._folder, timeout=STARTING, check=False)
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr.decode()[-500:]}")
        return done.stdout.decode() or "done"

    def _daemon(self, program: str, *arguments: str) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.daemons[program] = subprocess.Popen(self._command(program, "-f", *arguments), cwd=self._folder, **quiet)

    def stop(self) -> None:
        for process in reversed(self.daemons.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


class Scripted:
    """Keeps objects in a dict and speaks as much S3 as the backend needs, unless ``script`` answers a request itself.

    script: from the method and the object's name to an `Answer`, or None for the usual one. ``requests`` are all that
    came, in order. conditional: whether If-None-Match is honoured.
    """

    def __init__(self, conditional: bool = True) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []  # of the same
        self.script: Callable[[str, str], Answer | None] = lambda method, name: None
        self.conditional = conditional
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def count(self, method: str) -> int:
        return sum(each == method for each, _ in self.requests)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class Answer(NamedTuple):
    """A status, an S3 error code or a body; ``length`` is what Content-Length says instead of the truth."""

    status: int
    code: str = ""
    body: bytes = b""
    length: int | None = None
    wait: threading.Event | None = None  # before answering
    range: str = ""  # what Content-Range says


def _handler(scripted: Scripted) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

        def _serve(self) -> None:
            name = unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]
            scripted.requests.append((self.command, name))
            scripted.headers.append({key.lower(): value for key, value in self.headers.items()})
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = scripted.script(self.command, name) or self._usual(name, body)
            if answer.wait is not None:
                answer.wait.wait(60)
            content = answer.body or (f"<Error><Code>{answer.code}</Code></Error>".encode() if answer.code else b"")
            with suppress(OSError):
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(content) if answer.length is None else answer.length))
                self.send_header("Last-Modified", "Mon, 30 Nov 2026 12:00:00 GMT")
                self.send_header("ETag", '"etag"')
                if answer.range:
                    self.send_header("Content-Range", answer.range)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)
                self.close_connection = answer.length is not None

        do_GET = do_HEAD = do_PUT = do_DELETE = _serve

        def _usual(self, name: str, body: bytes) -> Answer:
            if self.command == "PUT":
                refused = scripted.conditional and "If-None-Match" in self.headers and name in scripted.objects
                if not refused:
                    scripted.objects[name] = body
                return Answer(412, "PreconditionFailed") if refused else Answer(200)
            if self.command == "DELETE":
                scripted.objects.pop(name, None)
                return Answer(204)
            stored = scripted.objects.get(name)
            return Answer(404, "NoSuchKey") if stored is None else Answer(200, body=stored)

    return Handler
