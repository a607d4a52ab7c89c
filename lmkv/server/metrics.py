"""The service's counters for Prometheus: an HTTP server of its own that answers every request with all of them.

Names come from the counters' own: ``miss.checksum`` is ``lmkv_misses_total{reason="checksum"}``. docs/server.md lists
them.
"""

from __future__ import annotations

import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from lmkv.errors import ConfigError
from lmkv.server.tcp import split_address
from lmkv.stats import NAMES

if TYPE_CHECKING:
    from prometheus_client.core import Metric

KEY = "server.metrics"
PATIENCE = 5.0  # seconds for a request
MAX_REQUESTS = 16  # at once

# Counters that have a reason, a status or a tier in their names: how they read, what they are called, what they mean.
_FAMILIES = tuple(
    (re.compile(pattern), name, text)
    for pattern, name, text in (
        (r"miss\.(?P<reason>.+)", "misses", "Reads from lower tiers that gave nothing, by reason"),
        (r"remote\.get\.(?P<status>\w+)", "remote_gets", "Containers asked for by other machines, by how it ended"),
        (r"remote\.put\.(?P<status>\w+)", "remote_puts", "Containers sent by other machines, by how it ended"),
        (r"remote\.pin\.(?P<status>\w+)", "remote_pins", "Pins that other machines asked for, by how it ended"),
        (r"(?P<tier>[^.]+)\.write\.(?P<outcome>.+)", "tier_writes", "Containers to write to a tier, by how it ended"),
        (r"(?P<tier>[^.]+)\.(?P<call>\w+)\.failed", "tier_failures", "Deletes and scans of a tier that failed"),
        (r"(?P<tier>[^.]+)\.evicted_chunks", "tier_evicted_chunks", "Chunks evicted from a tier below host memory"),
        (r"(?P<tier>[^.]+)\.resets", "tier_resets", "Times that a tier's server was lost or began anew"),
    )
)
_MEANINGS = {
    "remote.get_bytes": "Bytes sent to other machines",
    "remote.put_bytes": "Bytes stored by other machines",
    "remote.pins_expired": "Pins that reached their time",
    "remote.pins_dropped": "Pins that held more than their share, and ended",
    "evicted_chunks": "Chunks evicted from host memory",
    "tenant_evicted_chunks": "Chunks that a tenant above its budget lost",
}
_OF_A_TIER = {
    "bytes": "Bytes held",
    "objects": "Containers held",
    "budget": "Most bytes it may hold",
    "queued_bytes": "Bytes that wait to be written",
    "leased_bytes": "Bytes of host memory under lease",
    "leases": "Leases",
    "reservations": "Slots that engines of this host are filling",
}


def exporter(address: str, read: Callable[[], Mapping[str, Any]]) -> Exporter:
    """Serve what ``read`` says at ``HOST:PORT``, or ``PORT`` of loopback. ConfigError."""
    host, port = split_address(f"127.0.0.1:{address}" if address.isdecimal() else address, KEY)
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ImportError:
        raise ConfigError(KEY, "needs prometheus-client: pip install lmkv[metrics]") from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(read))
    kind = _Server6 if ":" in host else _Server
    try:
        server = make_server(host, port, make_wsgi_app(registry), kind, handler_class=_Handler)
    except OSError as error:
        raise ConfigError(KEY, f"cannot listen at {address}: {error}") from None
    return Exporter(server)


class Exporter:
    """Answers until `close`."""

    def __init__(self, server: WSGIServer) -> None:
        self._server = server
        host, port = server.server_address[:2]
        self.url = f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}/metrics"
        self._thread = threading.Thread(target=server.serve_forever, name="lmkv-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *args: Any) -> None:
        self._turns = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(*args)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks its own name up
        self.server_name, self.server_port = "lmkv", self.server_address[1]
        self.setup_environ()

    def verify_request(self, *_: Any) -> bool:
        return self._turns.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._turns.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asks badly or leaves is not worth a line."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


class _Collector:
    """Families made anew from the service's figures at each request."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        found = self._read()
        yield from _counters({name: value for name, value in found.items() if type(value) is int})
        yield from _gauges(found)


def _counters(counts: Mapping[str, int]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    families: dict[str, CounterMetricFamily] = {}
    for name, value in sorted(counts.items()):
        if name == "filling_bytes":
            continue
        family, text, labels = _named(name)
        if family not in families:
            families[family] = CounterMetricFamily(f"lmkv_{family}", text, labels=list(labels))
        families[family].add_metric(list(labels.values()), value)
    yield from families.values()


def _named(name: str) -> tuple[str, str, dict[str, str]]:
    """Of a counter: its family, what that means, and the labels."""
    if name not in NAMES and name not in _MEANINGS:
        for pattern, family, text in _FAMILIES:
            if match := pattern.fullmatch(name):
                return family, text, match.groupdict()
    return re.sub(r"\W", "_", name), _MEANINGS.get(name, name.replace("_", " ").capitalize()), {}


def _gauges(found: Mapping[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

    tiers: Mapping[str, Mapping[str, Any]] = found.get("tiers", {})
    for name, text in _OF_A_TIER.items():
        gauge = GaugeMetricFamily(f"lmkv_tier_{name}", f"{text}, by tier", labels=["tier"])
        for tier, values in tiers.items():
            if values.get(name) is not None:
                gauge.add_metric([tier], values[name])
        yield gauge
    speed = GaugeMetricFamily(
        "lmkv_tier_bytes_per_second", "Measured speed of one reader or writer of a tier", labels=["tier", "direction"]
    )
    for tier, values in tiers.items():
        for direction, rate in values.get("gb_per_s", {}).items():
            speed.add_metric([tier, direction], rate * 1e9)
    yield speed
    pins: Mapping[str, int] = found.get("pins", {})
    for name, text, value in (
        ("clients", "Clients that are connected", len(found.get("clients", ()))),
        ("filling_bytes", "Bytes of slots that other machines are filling", found.get("filling_bytes", 0)),
        ("pinned_chunks", "Chunks pinned by other machines", pins.get("chunks", 0)),
        ("pinned_bytes", "Bytes that pins of other machines hold", pins.get("held_bytes", 0)),
        ("pinned_limit_bytes", "Most bytes that such pins may hold", pins.get("limit_bytes", 0)),
    ):
        yield GaugeMetricFamily(f"lmkv_{name}", text, value=value)
    yield InfoMetricFamily("lmkv_server", "This start of the server", value={"generation": found["server"]})
