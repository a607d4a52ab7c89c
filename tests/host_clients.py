"""Clients of the host service for tests: containers whose every byte follows from their key, and processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from memory import CHUNK, spec

from lmkv import Config, Unavailable, chunk
from lmkv.keys import ChunkKey, ChunkKeys
from lmkv.plan import Need
from lmkv.server.client import Host, Query
from lmkv.server.link import Reserved

SPEC = spec()
NBYTES = chunk.container_bytes(SPEC, 0)
NEED = Need.of(SPEC)
SCOPE = b"scope of a test "
WAIT = 20.0


def keys(count: int, prompt: int = 0, first: int = 0, shard: int = 0) -> list[ChunkKey]:
    """Keys of the chunks [first, first + count) of a prompt."""
    digests = [i.to_bytes(4, "big") + bytes([prompt + 1]) * 28 for i in range(first + count)]
    chain = ChunkKeys.from_digests(digests, CHUNK)
    return [chain.key(i, SCOPE, 0, shard) for i in range(first, first + count)]


def payload(key: ChunkKey) -> bytes:
    """What is stored for a key."""
    seed = int.from_bytes(key.digest[:8], "big") + key.shard
    return np.random.default_rng(seed).bytes(NBYTES - chunk.PAGE)


def fill(key: ChunkKey, slot: Reserved) -> None:
    """Write a key's whole container into its slot."""
    header, view = chunk.new_header(SPEC, key), slot.view()
    view[chunk.PAGE :] = payload(key)
    chunk.write_header(view, header)


def query(prompt: int = 0, count: int = 10, owner: str = "me", lease: float = 0.0) -> Query:
    return Query(owner, SCOPE, b"".join(key.digest for key in keys(count, prompt)), CHUNK, NEED, lease)


def store(host: Host, wanted: Sequence[ChunkKey], timeout: float = 10.0) -> int:
    """Reserve, fill and commit; how many were published."""
    got = host.reserve("store", [(key, NBYTES) for key in wanted], timeout)
    mine = [(key, slot) for key, slot in zip(wanted, got, strict=True) if isinstance(slot, Reserved)]
    for key, slot in mine:
        fill(key, slot)
    return sum(host.commit([slot for _, slot in mine]))


def load(host: Host, wanted: Sequence[ChunkKey], timeout: float = 10.0) -> tuple[int, str, set[int]]:
    """Fetch and check every byte; (containers, why not more, tiers they came from)."""
    got, tiers = 0, set()
    for run in host.fetch(wanted, [NBYTES] * len(wanted), timeout):
        if isinstance(run, str):
            return got, run, tiers
        for key, each in zip(wanted[got:], run, strict=False):
            header = chunk.parse(each.view(), key)
            assert header.total_bytes == NBYTES
            assert bytes(each.view()[chunk.PAGE :]) == payload(key)
            tiers.add(each.tier)
        got += len(run)
    return got, "", tiers


def until(what: Callable[[], Any], timeout: float = WAIT) -> Any:
    """The first true answer of ``what``, a question to another process that tells of no event to wait for."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with suppress(Unavailable):
            if answer := what():
                return answer
    raise AssertionError("it did not happen in time")


def stop(pid: int) -> None:
    """SIGSTOP, which does not reach all threads at once; there is no event for it either."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: set(_states(pid)) == {"T"})


def _states(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # ended meanwhile
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]


def available(host: Host) -> None:
    """Wait until a host has found a service again."""
    with host._changed:
        assert host._changed.wait_for(lambda: host.available, WAIT), host._why


class Place:
    """A socket, a disk tier, and the service's process."""

    def __init__(self, **settings: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lmkv-"))
        self.socket = str(self.folder / "s")
        self.settings = settings
        self.hosts: list[Host] = []
        self.children: list[Child] = []

    def config(self, **settings: Any) -> Config:
        base = {"cpu_budget": "4MiB", "cpu_slab": "256KiB", "cpu_touch": False, "linger": 0.5, "close_timeout": 2.0}
        disk = {"tiers": [f"disk://{self.folder}/disk?budget=64MiB"]}
        return Config.load(env={}, **{**base, **disk, **self.settings, **settings})

    def host(self, register: bool = True, **options: Any) -> Host:
        options.setdefault("config", self.config())
        host = Host(self.socket, **options)
        self.hosts.append(host)
        if register:
            host.register([NBYTES], WAIT)
        return host

    def child(self, target: Callable[..., None], *arguments: Any, register: bool = True) -> Child:
        self.children.append(Child(self, target, *arguments, register=register))
        return self.children[-1]

    @property
    def pid(self) -> int:
        """Of the service."""
        return int((Path(self.socket + ".lock")).read_text())

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        for child in self.children:
            child.close()
        for host in self.hosts:
            host.close()
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):
            pidfd = os.pidfd_open(self.pid)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


class Child:
    """A client process that runs ``target(host, says, *arguments)``; its host is registered already."""

    def __init__(self, place: Place, target: Callable[..., None], *arguments: Any, register: bool = True) -> None:
        self.hears, says = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["host_clients"])
        arguments = (place.socket, place.config(), register, target, says, arguments)
        self.process = context.Process(target=_run, args=arguments, daemon=True)
        self.process.start()
        says.close()

    def recv(self) -> Any:
        assert self.hears.poll(WAIT), "the child says nothing"
        return self.hears.recv()

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.hears.close()


def _run(
    socket: str, config: Config, register: bool, target: Callable[..., None], says: Connection, arguments: Sequence[Any]
) -> None:
    host = Host(socket, config=config)
    if register:
        host.register([NBYTES], WAIT)
    target(host, says, *arguments)
    says.close()
    host.close()
