"""`lmkv server --listen`: who is let in, what is stored, and its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cache_servers import PAGE, WAIT, Server, ended, free_port, greeted, load, put, soon, stats, store, whole
from host_clients import NBYTES, Place, keys, payload, until
from host_clients import load as host_load
from host_clients import store as host_store

from lmkv import Config, ConfigError, chunk
from lmkv.backends.base import Read, Result, Status, Write
from lmkv.backends.server import ServerBackend
from lmkv.server import data, service
from lmkv.testing.backend_tests import buffer, key_of, settled

Start = Callable[..., Server]


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_other_machines_are_not_let_in_unasked(address: str) -> None:
    command = [sys.executable, "-m", "lmkv", "server", "--listen", address]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"lmkv: server.listen: {address}: other machines could come in unasked")
    assert "server.token_file or server.tls_cert" in done.stderr


def test_only_who_knows_a_token_comes_in(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokens").write_text("# for the first rack\none\n\ntwo\n")
    (tmp_path / "mine").write_text("two\n")
    (tmp_path / "wrong").write_text("three\n")
    server = start("--token-file", f"{tmp_path}/tokens")
    monkeypatch.setenv("CACHE_TOKEN", "one")
    for options in ({"token_file": f"{tmp_path}/mine"}, {"token_env": "CACHE_TOKEN"}):
        with closing(server.client(**options)) as good:
            store(good, 1)
    for options in ({"token_file": f"{tmp_path}/wrong"}, {}):
        with closing(server.client(**options)) as bad:
            assert bad.contains([key_of(1)]) == [None]
            assert load(bad, key_of(1)) == Result(Status.ERROR, detail="refused (token)")
            assert bad.health().detail == f"{server.address}: refused (token)"
    with closing(server.client(token_file=f"{tmp_path}/wrong")) as late:
        assert late.contains([key_of(1)]) == [None]
        (tmp_path / "wrong").write_text("one\n")
        assert late.contains([key_of(1)]) == [3 * PAGE], "a token may be exchanged while clients run"


def test_another_version_is_refused_by_name(shared: Server) -> None:
    stream, reply = greeted(shared, version=9)
    assert reply == data.Refused("version", f"the server speaks version {data.VERSION}, not 9")
    assert ended(stream.sock)
    stream.close()


def certificates(folder: Path) -> None:
    """An authority, and of it a server's certificate for 127.0.0.1 and a client's."""
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout"]
    commands = [[*new, "ca.key", "-x509", "-subj", "/CN=test ca", "-days", "2", "-out", "ca.pem"]]
    for name in ("server", "client"):
        commands.append([*new, f"{name}.key", "-subj", f"/CN={name}", "-out", f"{name}.csr"])
        sign = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "ext"]
        commands.append(["openssl", "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *sign])
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
    for command in commands:
        subprocess.run(command, check=True, capture_output=True, cwd=folder)


def test_tls_with_client_certificates_and_tokens(start: Start, tmp_path: Path) -> None:
    certificates(tmp_path)
    (tmp_path / "token").write_text("one\n")
    files = {name: f"{tmp_path}/{name}" for name in os.listdir(tmp_path)}
    server = start(
        "--tls-cert", files["server.pem"], "--tls-key", files["server.key"], "--tls-client-ca", files["ca.pem"],
        "--token-file", files["token"],
    )  # fmt: skip
    good = {"tls": 1, "ca": files["ca.pem"], "cert": files["client.pem"], "key": files["client.key"]}
    good["token_file"] = files["token"]
    with closing(server.client(**good)) as client:
        stored = store(client, 1, 9 << 20)
        small = store(client, 2)
        assert load(client, key_of(1), 10 << 20) == stored
        assert load(client, key_of(2)) == small
        assert settled(client) == {key_of(1): 9 << 20, key_of(2): 3 * PAGE}
        server.kill()
        server.start()
        assert client.contains([key_of(1)]) == [None]
        assert load(client, key_of(1)) == Result(Status.MISSING), "a kept connection that ended is replaced"
    for left_out in ("token_file", "cert", "ca", "tls"):
        drop = {"cert": ("cert", "key"), "tls": ("tls", "ca", "cert", "key")}.get(left_out, (left_out,))
        some = {name: value for name, value in good.items() if name not in drop}
        with closing(server.client(**some)) as client:
            assert load(client, key_of(1)).status is Status.ERROR, left_out  # type: ignore[union-attr]
    with closing(server.client(**good)) as client:
        assert client.health() == (True, "ok")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server_listen": "nowhere"}, "server.listen: 'nowhere': write HOST:PORT"),
        ({"server_listen": "127.0.0.1:1x"}, "server.listen: '127.0.0.1:1x': write HOST:PORT"),
        ({"server_listen": "203.0.113.9:7000", "server_tls_cert": "/nowhere"}, "server.tls_cert: cannot use /nowhere"),
        ({"server_token_file": "/nowhere"}, "server.token_file: cannot read it"),
        ({"server_tls_key": "/nowhere"}, "server.tls_cert: is needed"),
        ({"tiers": "disk:///tmp/x?codec=zstd"}, "tiers.0.codec: must be raw"),
        ({"tiers": "disk:///tmp/x", "server_verify": False}, "server.verify: must be on"),
        ({"server_max_connections": 0}, "server.max_connections: '0'"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        service.main(None, Config.load(env={}, **{"server_listen": "127.0.0.1:0", **settings}))
    assert str(caught.value).startswith(message)


def test_it_listens_at_several_addresses_and_is_found_by_name(start: Start) -> None:
    second = free_port()
    server = start("--listen", f"127.0.0.1:{second}", "--listen", "[::1]:0")
    six = re.search(r"\[::1\]:\d+", server.log.read_text())
    assert six
    with closing(server.client()) as client:
        data = store(client, 1)
    for place in (f"127.0.0.1:{second}", six[0], f"localhost:{second}"):
        with closing(ServerBackend(f"lmkv://{place}")) as client:
            assert load(client, key_of(1)) == data
    with closing(ServerBackend("lmkv://no-such-host.invalid:1", lookup_timeout=0.5)) as client:
        assert client.contains([key_of(1)]) == [None]


def test_an_address_in_use_is_refused_at_start(shared: Server) -> None:
    command = [sys.executable, "-m", "lmkv", "server", "--listen", shared.address]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "server.listen: cannot listen at" in done.stderr) == (1, True)


def test_only_whole_containers_are_stored(client: ServerBackend) -> None:
    good, nbytes = whole(1, 8 * PAGE), 8 * PAGE
    other_key, cut, unsealed, flipped = (memoryview(bytearray(good)) for _ in range(4))
    header = chunk.parse(good)
    unsealed[10] &= ~chunk.SEALED & 0xFF
    chunk.write_header(unsealed, chunk.Header(**{**vars(header), "flags": 0}))
    flipped[-1] ^= 1
    zeros = memoryview(bytearray(nbytes))
    writes = [
        Write(key_of(2), other_key), Write(key_of(1), cut[: 7 * PAGE]), Write(key_of(1), unsealed),
        Write(key_of(1), flipped), Write(key_of(1), zeros),
        Write(key_of(1), whole(1, expires=int(time.time()) - 1)), Write(key_of(1), good),
    ]  # fmt: skip
    results = client.write(writes)
    reasons = ["identity", "bounds", "unsealed", "checksum", "magic", "expired", ""]
    assert [each.detail.partition(":")[0] for each in results] == reasons
    assert [each.status for each in results] == [*[Status.ERROR] * 5, Status.FULL, Status.OK]
    assert settled(client) == {key_of(1): nbytes}
    assert load(client, key_of(1)) == good


def test_a_list_tells_when_each_was_made(client: ServerBackend) -> None:
    began = time.time()
    old = whole(1)
    header = chunk.parse(old)
    chunk.write_header(old, chunk.Header(**{**vars(header), "created": 1_700_000_000}))
    client.write([Write(key_of(1), old), Write(key_of(2), whole(2))])
    created = {each.key: each.created for batch in client.scan() for each in batch}
    assert created[key_of(1)] == 1_700_000_000
    assert began - 2 < created[key_of(2)] < time.time() + 2


def test_a_long_list_comes_in_pages(client: ServerBackend) -> None:
    parts = [key_of(1)._replace(shard=shard) for shard in range(3)]
    writes = [Write(key, whole(1, 2 * PAGE, shard=key.shard)) for key in parts]
    writes += [Write(key_of(number), whole(number, 2 * PAGE)) for number in range(2, 2050)]
    assert {each.status for each in client.write(writes)} == {Status.OK}
    pages = list(client.scan())
    assert [len(page) for page in pages] == [1024, 1024, 3]
    assert {each.key: each.nbytes for page in pages for each in page} == {each.key: 2 * PAGE for each in writes}


def test_what_expires_is_gone_in_time(client: ServerBackend) -> None:
    data = whole(1, expires=int(time.time()) + 2)
    assert client.write([Write(key_of(1), data)]) == [Result(Status.OK, len(data))]
    assert client.contains([key_of(1)]) == [len(data)]
    until(lambda: client.contains([key_of(1)]) == [None])
    assert load(client, key_of(1)) == Result(Status.MISSING)
    assert client.write([Write(key_of(1), whole(1))]) == [Result(Status.OK, len(data))]


def test_one_that_is_slow_to_fill_a_key_does_not_keep_others_from_it(shared: Server, client: ServerBackend) -> None:
    stream, _ = greeted(shared)
    with closing(stream):
        half = whole(1)
        put(stream, 1, half[: 2 * PAGE], len(half))
        until(lambda: stats(shared)["filling_bytes"] == len(half))
        data = store(client, 1)
        stream.send_buffers([half[2 * PAGE :]], soon())
        assert data.nbytes == len(half)
        assert stream.recv_bytes(16, soon())[0] == 0, "there already, and as good"
    assert settled(client) == {key_of(1): len(data)}


def test_engines_of_the_host_and_other_machines_have_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    port = free_port()
    place = Place(server_listen=f"127.0.0.1:{port}", cpu_budget="16MiB", cpu_slab="1MiB")
    with closing(place):
        host = place.host()
        assert host_store(host, keys(10)) == 10
        with closing(ServerBackend(f"lmkv://127.0.0.1:{port}")) as client:
            into = [buffer(NBYTES) for _ in range(10)]
            results = client.read([Read(key, each) for key, each in zip(keys(10), into, strict=True)])
            assert results == [Result(Status.OK, NBYTES)] * 10
            for key, each in zip(keys(10), into, strict=True):
                chunk.verify(each, chunk.parse(each, key))
            moved = [(key, chunk.Header(**{**vars(chunk.parse(each)), "key": key, "flags": 0}))
                     for key, each in zip(keys(10, prompt=1), into, strict=True)]  # fmt: skip
            for (key, header), each in zip(moved, into, strict=True):
                each[PAGE:] = payload(key)
                chunk.seal(each, header)
            assert client.write([Write(key, each) for (key, _), each in zip(moved, into, strict=True)]) == [
                Result(Status.OK, NBYTES)
            ] * 10  # fmt: skip
            assert host_load(host, keys(10, prompt=1)) == (10, "", {0})
            assert client.delete(keys(10)) == [True] * 10
            assert host_load(host, keys(10)) == (0, "not stored", set())
            (key, header), plain = moved[0], into[0]
            plain[PAGE:] = bytes(NBYTES - PAGE)
            part = header.parts[0]._replace(stored=PAGE, checksum=0)
            encoded = chunk.Header(**{**vars(header), "codec": "zstd", "parts": (part,), "total_bytes": part.stop})
            chunk.seal(plain, encoded)
            (refused,) = client.write([Write(key, plain[: part.stop])])
            assert "engines of the server's host share its memory" in refused.detail


def test_it_ends_after_the_requests_under_way_and_with_everything_written(start: Start, tmp_path: Path) -> None:
    server = start(tiers=f"disk://{tmp_path}/store?budget=256MiB", cpu_budget="256MiB", close_timeout="60s")
    idle, _ = greeted(server)
    busy, _ = greeted(server)
    with closing(server.client()) as client:
        for number in range(8):
            store(client, number, 4 << 20)
        body = whole(100, 1 << 20)
        put(busy, 100, body[: 1 << 19], 1 << 20)
        until(lambda: stats(server)["filling_bytes"] == 1 << 20)
        server.signal(signal.SIGTERM)
        assert ended(idle.sock)
        with pytest.raises(OSError):  # noqa: PT011
            socket.create_connection(("127.0.0.1", server.port))
        busy.send_buffers([body[1 << 19 :]], soon())
        assert busy.recv_bytes(16, soon())[0] == 0
        assert ended(busy.sock)
        assert server.process.wait(WAIT) == 0
        busy.close()
        idle.close()
        server.start()
        assert load(client, key_of(100)) == body
        assert client.contains([key_of(number) for number in range(8)]) == [4 << 20] * 8


def test_it_does_not_wait_for_ever_for_a_client(start: Start) -> None:
    server = start(close_timeout="0.5s", server_message_timeout="60s")
    stream, _ = greeted(server)
    with closing(stream):
        put(stream, 1, whole(1)[:PAGE], 3 * PAGE)
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 5
