"""Servers of a test alone, and those that a module's tests share."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from redis_servers import Server, hosts, redis_binary, start_cluster, valkey_binary

from lmkv.backends.redis import RedisBackend

PAGE = 4096
Start = Callable[..., Server]
Open = Callable[..., RedisBackend]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a Valkey with more flags."""
    with ExitStack() as stack:

        def start(*flags: str, **options: Any) -> Server:
            server = Server(valkey_binary(), tmp_path / os.urandom(4).hex(), *flags, **options)
            stack.callback(server.kill)
            return server

        yield start


@pytest.fixture
def connect() -> Iterator[Open]:
    """Opens a backend of a server, or of a port."""
    with ExitStack() as stack:

        def connect(server: Server | int, scheme: str = "valkey", **options: Any) -> RedisBackend:
            port = server if isinstance(server, int) else server.port
            backend = RedisBackend(f"{scheme}://127.0.0.1:{port}", **options)
            return stack.enter_context(closing(backend))

        yield connect


@pytest.fixture(scope="module")
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Server]]]:
    """One Valkey, one Redis if there is one, and a cluster of three."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        servers = {"valkey": [Server(valkey_binary(), folder / "valkey")]}
        servers["cluster"] = start_cluster(valkey_binary(), folder / "cluster")
        if binary := redis_binary():
            servers["redis"] = [Server(binary, folder / "redis")]
        for each in (each for group in servers.values() for each in group):
            stack.callback(each.kill)
        yield servers


@pytest.fixture
def masters(shared_servers: dict[str, list[Server]]) -> list[Server]:
    """Three empty masters of a cluster."""
    for each in shared_servers["cluster"]:
        each.ask("FLUSHALL")
    return shared_servers["cluster"]


@pytest.fixture
def cluster(masters: list[Server]) -> Iterator[RedisBackend]:
    with closing(RedisBackend(f"redis://{hosts(masters)}", lookup_timeout=5)) as backend:
        yield backend
