"""Cache servers that tests share, and servers of a test alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cache_servers import Server

from lmkv.backends.server import ServerBackend
from lmkv.testing.backend_tests import listed

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def opaque(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server that stores anything, for the contract's tests."""
    server = Server(tmp_path_factory.mktemp("opaque"), cpu_budget="256MiB", server_verify="0")
    yield server
    server.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two healthy servers that store whole containers."""
    folder = tmp_path_factory.mktemp("pair")
    servers = Server(folder), Server(folder)
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is impatient with its clients."""
    server = Server(tmp_path_factory.mktemp("shared"), server_message_timeout="0.5s", server_tenant_budget="32MiB")
    yield server
    server.close()


@pytest.fixture
def client(shared: Server) -> Iterator[ServerBackend]:
    made = shared.client()
    yield made
    made.delete(list(listed(made)))
    made.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers of this test alone."""
    servers: list[Server] = []

    def begin(*options: str, **settings: object) -> Server:
        servers.append(Server(tmp_path, *options, **settings))  # type: ignore[arg-type]
        return servers[-1]

    yield begin
    for server in servers:
        server.close()
