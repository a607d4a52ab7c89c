"""What can go wrong with a remote store, for each of them: begin it, see a request through it, end it.

`opened` has them by name. Each is a context over a `Case`: entered, the fault is there or about to strike; left, it
is over. docs/remote.md has the table that `bench/remote_faults.py` measures with them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import remote_stores
from cache_servers import WAIT, Proxy
from memory import Memory
from remote_engines import fill, new_memory, refill
from remote_stores import Cache, Scripted, Store, Valkey, ending, running

SLOW = 10.0
SMALL = 18  # containers that the server of the fault "full" has room for, of which a prompt is 12


@dataclass
class Case:
    """One store and one fault. url: of the tier for the client. lost: after the fault the store is empty."""

    store: Store | Scripted
    url: str
    direct: str  # the same without proxy, and never refused: for whoever fills it
    memory: Memory = field(default_factory=new_memory)
    right: np.ndarray = field(default_factory=lambda: np.empty(0))
    lost: bool = False
    heals: bool = False  # damaged objects go as they are read
    full: bool = False  # and takes no more
    known: bool = True  # the client is there before the fault, and has looked

    def fill(self) -> None:
        self.right = fill(self.memory, self.direct)

    def refill(self) -> None:
        refill(self.memory, self.direct, self.right)


Fault = Callable[[Case], AbstractContextManager[None]]
Opened = tuple[Case, Fault]


@contextmanager
def down(case: Case) -> Iterator[None]:
    case.store.down()
    yield
    case.store.up()


@contextmanager
def stopped(case: Case) -> Iterator[None]:
    case.store.signal(signal.SIGSTOP)
    yield
    case.store.signal(signal.SIGCONT)


@contextmanager
def restarted(case: Case) -> Iterator[None]:
    case.store.down()
    case.store.up()
    yield


@contextmanager
def flipped(case: Case) -> Iterator[None]:
    assert case.store.flip()
    yield


@contextmanager
def killed(case: Case, proxy: Proxy) -> Iterator[None]:
    """In the middle of the next read."""

    def kill() -> None:
        assert proxy.held.wait(WAIT)
        case.store.down()
        proxy.release()

    proxy.hold = 40_000 if isinstance(case.store, remote_stores.S3) else 400_000
    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join(WAIT)
    assert proxy.held.is_set()
    proxy.hold = -1
    case.store.up()


@contextmanager
def slow(case: Case, proxy: Proxy) -> Iterator[None]:
    proxy.delay = SLOW
    yield
    proxy.delay = 0.0
    proxy.release()


@contextmanager
def short(case: Case, proxy: Proxy) -> Iterator[None]:
    """Every connection ends in the middle of the first body."""
    proxy.cut = 50_000
    yield
    proxy.cut = -1


@contextmanager
def wrong(case: Case, write: Callable[[str], Any]) -> Iterator[None]:
    write("wrong")
    yield
    write("right")


@contextmanager
def full(case: Case, limit: Callable[[bool], Any]) -> Iterator[None]:
    limit(True)
    yield
    limit(False)


NAMES = (
    "down at start", "killed in a read", "stopped", "slow by 10 s", "restarted empty", "full", "wrong credentials",
    "one bit flipped", "short body",
)  # fmt: skip
_DIRECT: dict[str, Fault] = {
    "down at start": down, "stopped": stopped, "restarted empty": restarted, "one bit flipped": flipped,
}  # fmt: skip
_PROXIED: dict[str, Callable[[Case, Proxy], AbstractContextManager[None]]] = {
    "killed in a read": killed, "slow by 10 s": slow, "short body": short,
}  # fmt: skip


@contextmanager
def opened(fault: str, name: str, folder: Path, **options: str) -> Iterator[Opened]:
    """A filled store of this name, and the fault. options: of the tier. s3 wants a key in the environment."""
    with ExitStack() as stack:
        if fault == "full":
            found = _full(name, folder, stack)
        elif fault == "wrong credentials":
            found = _wrong(name, folder, stack)
        else:
            if fault in ("restarted empty", "killed in a read") and name == "lmkv":
                store: Store = stack.enter_context(ending(Cache(folder, disk=False)))
            else:
                store = stack.enter_context(running(name, folder))
            found = Case(store, store.url, store.url), _DIRECT.get(fault, stopped)
            found[0].lost = fault in ("restarted empty", "down at start", "killed in a read") and not store.keeps
            if fault in _PROXIED:
                proxy = stack.enter_context(closing(Proxy(store)))
                found[0].url = store.through(proxy.address)
                strike = _PROXIED[fault]
                found = found[0], lambda case: strike(case, proxy)
        case = found[0]
        case.heals, case.full = fault == "one bit flipped", fault == "full"
        case.lost |= case.full and name == "lmkv"  # which makes room for the newest
        case.known = fault not in ("down at start", "wrong credentials")
        case.url = remote_stores.with_options(case.url, **options)
        case.direct = remote_stores.with_options(case.direct, timeout="20s", lookup_timeout="5s")
        case.fill()
        yield found


def _full(name: str, folder: Path, stack: ExitStack) -> Opened:
    store: Store | Scripted
    if name == "lmkv":
        store = Cache(folder, disk=False, cpu_budget="3MiB", cpu_slab="1MiB")

        def limit(on: bool) -> None:
            """It always is."""

    elif name == "valkey":
        server = Valkey(folder)
        store = server

        def limit(on: bool) -> None:
            info = server.server.ask("INFO", "memory")
            assert isinstance(info, bytes)
            used = int(info.partition(b"used_memory:")[2].split()[0])
            server.server.ask("CONFIG", "SET", "maxmemory", str(used + (1 << 18) if on else 512 << 20))

    else:
        scripted = Scripted()
        store = scripted

        def limit(on: bool) -> None:
            scripted.refuse("PUT", *((507, "InsufficientStorage") if on else ()))

    stack.enter_context(ending(store))
    return Case(store, store.url, store.url), lambda case: full(case, limit)


def _wrong(name: str, folder: Path, stack: ExitStack) -> Opened:
    secret = folder / "secret"
    secret.write_text("right\n")
    (folder / "server").write_text("right\n")
    store: Store | Scripted
    if name == "s3":
        scripted = Scripted()
        stack.enter_context(ending(scripted))

        def sign(word: str) -> None:
            scripted.refuse("", *((403, "SignatureDoesNotMatch") if word == "wrong" else ()))

        return Case(scripted, scripted.url, scripted.url), lambda case: wrong(case, sign)
    if name == "lmkv":
        store, query = Cache(folder, "--token-file", f"{folder}/server", disk=False), "token_file"
    else:
        server = Valkey(folder)
        server.server.ask("CONFIG", "SET", "requirepass", "right")
        store, query = server, "password_file"
    stack.enter_context(ending(store))
    return (
        Case(store, f"{store.url}?{query}={secret}", f"{store.url}?{query}={folder}/server"),
        lambda case: wrong(case, lambda word: secret.write_text(f"{word}\n")),
    )
