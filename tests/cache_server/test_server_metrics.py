"""Counters of a real server as Prometheus reads them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest
from cache_servers import PAGE, WAIT, Server, free_port, load, stats, store
from host_clients import Place, keys, until
from host_clients import store as host_store
from prometheus_client.parser import text_string_to_metric_families

from lmkv import stats as names
from lmkv.backends.base import Status
from lmkv.testing.backend_tests import key_of

Start = Callable[..., Server]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(port: int, host: str = "127.0.0.1") -> Samples:
    """Every sample; each family is there once, with a text and a type."""
    with urlopen(f"http://{host}:{port}/metrics", timeout=WAIT) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain")
        text = reply.read().decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation and family.type in ("counter", "gauge", "info") for family in families)
    assert all(family.name.startswith("lmkv_") for family in families)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, tuple(sorted(labels.items()))))


def test_what_get_stats_says_is_served(start: Start, tmp_path: Path) -> None:
    port = free_port()
    server = start("--metrics", str(port), tiers=f"disk://{tmp_path}/store?budget=64MiB")
    before = scrape(port)
    assert all(value(before, f"lmkv_{name}_total") == 0 for name in names.NAMES), "from the start"
    with closing(server.client()) as client:
        for number in range(3):
            store(client, number)
        load(client, key_of(1))
        load(client, key_of(9))
        assert client.pin("me", [key_of(0), key_of(9)], 60) == [Status.OK, Status.MISSING]
        until(lambda: stats(server).get("disk.write.written") == 3)
        until(lambda: value(scrape(port), "lmkv_clients") == 1)
        found, said = scrape(port), stats(server)
        for name, labels, expected in (
            ("remote_gets_total", {"status": "ok"}, said["remote.get.ok"]),
            ("remote_gets_total", {"status": "missing"}, 1),
            ("remote_puts_total", {"status": "ok"}, 3),
            ("remote_put_bytes_total", {}, 9 * PAGE),
            ("remote_get_bytes_total", {}, 3 * PAGE),
            ("remote_pins_total", {"status": "ok"}, 1),
            ("remote_pins_total", {"status": "missing"}, 1),
            ("stored_bytes_total", {}, said["stored_bytes"]),
            ("tier_writes_total", {"tier": "disk", "outcome": "written"}, 3),
            ("tier_bytes", {"tier": "cpu"}, 9 * PAGE),
            ("tier_bytes", {"tier": "disk"}, 9 * PAGE),
            ("tier_objects", {"tier": "disk"}, 3),
            ("tier_budget", {"tier": "disk"}, 64 << 20),
            ("tier_leases", {"tier": "cpu"}, 0),
            ("tier_leases", {"tier": "disk"}, None),
            ("pinned_chunks", {}, 1),
            ("pinned_bytes", {}, 3 * PAGE),
            ("filling_bytes", {}, 0),
            ("server_info", {"generation": said["server"]}, 1),
        ):
            assert value(found, f"lmkv_{name}", **labels) == expected, (name, labels)
        assert value(found, "lmkv_tier_bytes_per_second", tier="disk", direction="write")


def test_every_counter_of_get_stats_has_a_sample(start: Start) -> None:
    port = free_port()
    server = start("--metrics", f"127.0.0.1:{port}")
    with closing(server.client()) as client:
        store(client, 1)
        counts = {name: count for name, count in stats(server).items() if type(count) is int}
        found = scrape(port)
        assert sum(name.endswith("_total") for name, _ in found) >= len(counts) - 1  # filling_bytes is none


def test_a_client_that_is_slow_or_talks_nonsense_stops_nobody_for_long(start: Start) -> None:
    port = free_port()
    server = start("--metrics", str(port))
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    with closing(socket.create_connection(("127.0.0.1", port))) as rude:
        rude.sendall(b"\xff" * 1000 + b"\r\n\r\n")
    until(lambda: _answers(port))
    for each in idle:
        each.close()
    with closing(server.client()) as client:
        store(client, 1)
    assert server.end() == 0


def _answers(port: int) -> bool:
    try:
        return bool(scrape(port))
    except OSError:
        return False


def test_a_host_service_has_them_too_and_a_restart_takes_the_port_again() -> None:
    port = free_port()
    for _ in range(2):
        place = Place(server_metrics=f"localhost:{port}")
        with closing(place):
            assert host_store(place.host(), keys(3)) == 3
            assert value(scrape(port), "lmkv_stored_chunks_total") == 3


@pytest.mark.parametrize(
    ("address", "message"),
    [("nowhere", "write HOST:PORT"), ("127.0.0.1:x", "write HOST:PORT"), ("203.0.113.9:9", "cannot listen at")],
)
def test_what_is_no_place_is_refused_at_start(address: str, message: str) -> None:
    command = [sys.executable, "-m", "lmkv", "server", "--listen", "127.0.0.1:0", "--metrics", address]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.startswith("lmkv: server.metrics: ")) == (1, True)
    assert message in done.stderr


def test_where_they_are_is_in_the_log(start: Start) -> None:
    server = start("--metrics", "[::1]:0")
    until(lambda: re.search(r"metrics at http://\[::1\]:\d+/metrics", server.log.read_text()) is not None)
    found = re.search(r"metrics at http://\[::1\]:(\d+)/metrics", server.log.read_text())
    assert found
    assert value(scrape(int(found[1]), "[::1]"), "lmkv_lookups_total") == 0
