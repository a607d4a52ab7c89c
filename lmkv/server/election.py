"""Who is the service: one process a socket, chosen by locks, which the kernel gives back however a process ends.

Who starts holds a lock on the socket's folder until somebody listens; the service holds ``<socket>.lock``, with its
process id in it, while it lives. So a starter that finds the second lock taken knows: the service listens, or is ending
and worth waiting for.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress

from lmkv.errors import ConfigError, Unavailable

# An engine's process may be tied to a core that its threads keep busy; the service is not to share that fate.
START = (
    "import os, runpy; os.sched_setaffinity(0, range(os.cpu_count() or 1)); runpy.run_module('lmkv', None, '__main__')"
)
LONGEST_PATH = 107  # sun_path of unix(7), less its zero
BACKLOG = 128


def socket_path(path: str) -> str:
    """``path``, or where the service of this user is by default; absolute, in a folder only we can enter.

    Makes that folder. ConfigError: it is somebody else's or open to others, or the path is too long.
    """
    if not path:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        path = f"{runtime}/lmkv/server.sock" if runtime else f"/tmp/lmkv-{os.geteuid()}/server.sock"  # noqa: S108
    path = os.path.abspath(path)
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ConfigError("socket", f"{path!r} is longer than the {LONGEST_PATH} bytes a socket's path can have")
    folder = os.path.dirname(path)
    os.makedirs(folder, 0o700, exist_ok=True)
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ConfigError("socket", f"{folder} must be a folder of yours that nobody else can enter: chmod 700")
    return path


def dial(path: str, deadline: float) -> socket.socket:
    """A connection to whoever listens. OSError: nobody, or not before ``deadline`` (time.monotonic)."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def listen(path: str) -> tuple[socket.socket, int] | None:
    """Become the service: its listening socket and its lock. None: another process is, and listens."""
    starting = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(starting, fcntl.LOCK_EX)
        lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _listens(path):
                os.close(lock)
                return None
            fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(BACKLOG)
        return listener, lock
    finally:
        os.close(starting)


def _listens(path: str) -> bool:
    try:
        dial(path, time.monotonic() + 1).close()
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:
        pass  # its queue is full: it is busy, or stopped
    return True


def spawn(path: str, settings: str, deadline: float) -> None:
    """Start a service in a session of its own and wait until one listens. settings: a Config as JSON.

    Unavailable: none does before ``deadline`` (time.monotonic). ConfigError: it was refused.
    """
    ready, says = os.pipe()
    try:
        try:
            command = [sys.executable, "-c", START, "server", "--socket", path, "--settings", settings]
            log = os.open(path + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(log, "wb") as errors:
                child = subprocess.Popen(  # noqa: S603
                    [*command, "--ready", str(says)],
                    stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                    pass_fds=[says], start_new_session=True, cwd="/",
                )  # fmt: skip
        finally:
            os.close(says)
        threading.Thread(target=child.wait, name="lmkv-server-reaper", daemon=True).start()
        poll = select.poll()
        poll.register(ready, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise Unavailable(f"the host service did not start in time; see {path}.log")
        key, _, message = os.read(ready, 4096).decode(errors="replace").partition("\n")
        if message:
            raise ConfigError(key, message)
        if key != "listening":
            raise Unavailable(f"the host service did not start; see {path}.log")
    finally:
        os.close(ready)
