"""The `lmkv://` backend on real servers: the contract, several servers, options, engines."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_servers import PAGE, WAIT, Proxy, Server, both, load, owner, store
from deadlines import within
from host_clients import until
from memory import CHUNK, Memory, spec

from lmkv import ConfigError, Engine, backends
from lmkv.backends.base import Backend, Read, Result, Status
from lmkv.backends.server import ServerBackend
from lmkv.errors import BackendError
from lmkv.testing.backend_tests import BackendTests, buffer, key_of, listed, settled

TOKENS = np.arange(1, 10 * CHUNK + 5, dtype=np.int32)
Start = Callable[..., Server]


class TestContract(BackendTests):
    @pytest.fixture
    def backend(self, opaque: Server) -> Iterator[Backend]:
        made = opaque.client()
        yield made
        made.close()
        with closing(opaque.client()) as again:
            again.delete(list(listed(again)))


def test_keys_are_spread_over_the_servers_and_each_is_on_one(pair: tuple[Server, Server]) -> None:
    with closing(both(*pair)) as client, closing(pair[0].client()) as one, closing(pair[1].client()) as two:
        data = {number: store(client, number) for number in range(60)}
        keys = list(map(key_of, data))
        assert client.contains(keys) == [3 * PAGE] * 60
        held = [one.contains(keys), two.contains(keys)]
        assert all((a is None) != (b is None) for a, b in zip(*held, strict=True))
        assert min(sum(size is not None for size in sizes) for sizes in held) > 15
        into = [buffer(4 * PAGE) for _ in keys]
        results = client.read([Read(key, each) for key, each in zip(keys, into, strict=True)])
        assert results == [Result(Status.OK, 3 * PAGE)] * 60
        assert [each[: 3 * PAGE] for each in into] == list(data.values())
        assert settled(client) == dict.fromkeys(keys, 3 * PAGE)
        assert client.delete([*keys, key_of(99)]) == [True] * 60 + [False]


def test_all_parts_of_a_chunk_are_on_one_server_and_a_new_server_only_takes() -> None:
    names = [f"10.0.0.{n}:7000" for n in range(4)]
    three, four = (ServerBackend("lmkv://" + ",".join(some)) for some in (names[:3], names[::-1]))
    with closing(three), closing(four):
        keys = [key_of(number) for number in range(3000)]
        parts = [key._replace(group=2, shard=7, depth=9) for key in keys]
        assert three._places(keys) == three._places(parts)
        before = [names[place] for place in three._places(keys)]
        after = [names[3 - place] for place in four._places(keys)]
        moved = {now for was, now in zip(before, after, strict=True) if was != now}
        assert moved == {names[3]}
        shares = Counter(after)
        assert max(shares.values()) < 1.25 * min(shares.values())


def test_one_server_down_leaves_the_others_keys(start: Start) -> None:
    one, two = start(), start()
    with closing(both(one, two)) as client:
        data = {number: store(client, number) for number in range(20)}
        two.kill()
        for number in range(20):
            if owner(client, number) == 0:
                assert client.contains([key_of(number)]) == [3 * PAGE]
                assert load(client, key_of(number)) == data[number]
            else:
                assert client.contains([key_of(number)]) == [None]
                assert load(client, key_of(number)).status is Status.ERROR  # type: ignore[union-attr]
        keys = [key_of(number) for number in range(20)]
        assert set(client.contains(keys)) == {3 * PAGE, None}
        assert {each.status for each in client.read([Read(key, buffer(3 * PAGE)) for key in keys])} == {
            Status.OK, Status.ERROR,
        }  # fmt: skip
        health = client.health()
        assert not health.ok
        assert two.address in health.detail
        assert one.address not in health.detail
        with pytest.raises(BackendError, match="cannot list"):
            listed(client)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("lmkv://", "write HOST:PORT"),
        ("lmkv://host", "write HOST:PORT"),
        ("lmkv://host:70000", "write HOST:PORT"),
        ("lmkv://::1:70", "brackets"),
        ("lmkv://a:1,a:1", "no server twice"),
        ("lmkv://secret@a:1", "token_file= or token_env="),
        ("lmkv://a:1?token=x", "no option 'token'; did you mean"),
        ("lmkv://a:1?timeout=soon", "timeout='soon' is not a time"),
        ("lmkv://a:1?timeout=0", "is not a time"),
        ("lmkv://a:1?lookup_timeout=inf", "is not a time"),
        ("lmkv://a:1?tls=maybe", "must be 0 or 1"),
        ("lmkv://a:1?ca=/x", "need tls=1"),
        ("lmkv://a:1?tls=1&ca=/nowhere", "cannot use ca='/nowhere'"),
        ("lmkv://a:1?token_file=/nowhere", "cannot read the token"),
        ("lmkv://a:1?token_env=LMKV_TEST_NO_SUCH", "is not set in the environment"),
        ("lmkv://a:1?token_env=A&token_file=B", "not both"),
    ],
)
def test_wrong_options_are_refused_at_once(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        backends.open(url)
    assert message in str(caught.value)
    assert caught.value.key == "tiers.url"


def test_the_url_opens_the_same_backend_and_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_TOKEN", "very secret")
    url = "lmkv://a:1,[::1]:2?timeout=2s&lookup_timeout=0.3s&token_env=CACHE_TOKEN&tls=1"
    with closing(backends.open(url)) as made:
        assert made.url == url
        assert (made.shared, made.remote) == (True, True)
    with closing(backends.open("lmkv://a:1?timeout=10000ms&tls=0")) as made:
        assert made.url == "lmkv://a:1"


def test_a_forked_child_shares_no_connection_with_its_parent(pair: tuple[Server, Server]) -> None:
    with closing(both(*pair)) as client:
        data = {number: store(client, number) for number in range(8)}
        pid = os.fork()
        if pid == 0:
            good = all(load(client, key_of(number)) == data[number] for number in data for _ in range(20))
            os._exit(0 if good else 1)
        for _ in range(20):
            for number, want in data.items():
                assert load(client, key_of(number)) == want
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.delete(list(map(key_of, data))) == [True] * 8


def engine(memory: Memory, *servers: Server, **options: Any) -> Engine:
    place = "lmkv://" + ",".join(server.address for server in servers)
    tier = place + "?" + "&".join(f"{name}={value}" for name, value in options.items())
    return Engine(
        memory.spec, weights="test", layout=memory.pages.layout, cpu_budget="4MiB", cpu_touch=False, tiers=[tier]
    )  # fmt: skip


def test_another_engine_retrieves_exactly_what_one_stored(pair: tuple[Server, Server]) -> None:
    ours, theirs = Memory(spec(), pages=128), Memory(spec(), pages=128, seed=9)
    ids, others = ours.ids(160, seed=1), theirs.ids(160, seed=2)
    with engine(ours, *pair) as a:
        assert a.store(TOKENS, ours.pages, ids).stored == 10
        assert a.flush(WAIT).safe
    with engine(theirs, *pair) as b:
        assert b.lookup(TOKENS).tokens == 160
        found = b.retrieve(TOKENS, theirs.pages, others)
        assert (found.tokens, found.tiers) == (160, {"lmkv": 160})
        for got, want in zip(theirs.read(others), ours.read(ids), strict=True):
            np.testing.assert_array_equal(got, want)


def test_a_chunk_damaged_on_the_way_is_a_miss_of_the_engine(start: Start) -> None:
    server = start()
    memory = Memory(spec(), pages=128)
    proxy = Proxy(server, flip=PAGE + 2000)
    with closing(proxy):
        with engine(memory, server) as a:
            a.store(TOKENS[: 2 * CHUNK], memory.pages, memory.ids(2 * CHUNK))
            assert a.flush(WAIT).safe
        url = f"lmkv://{proxy.address}?readers=1"
        with Engine(memory.spec, weights="test", layout=memory.pages.layout, cpu_budget="4MiB", tiers=[url]) as b:
            assert b.lookup(TOKENS[: 2 * CHUNK]).tokens == 2 * CHUNK
            found = b.retrieve(TOKENS[: 2 * CHUNK], memory.pages, memory.ids(2 * CHUNK, seed=5))
            assert found.tokens < 2 * CHUNK
            assert b.stats()["miss.checksum"] == 1


def test_an_engine_without_its_server_only_misses(start: Start) -> None:
    server = start()
    memory = Memory(spec(), pages=128)
    with engine(memory, server, timeout="1s", lookup_timeout="0.5s") as a:
        assert a.store(TOKENS, memory.pages, memory.ids(160)).stored == 10
        assert a.flush(WAIT).safe
        a.clear(TOKENS, tier="cpu")
        server.kill()
        found = within(1, lambda: a.retrieve(TOKENS, memory.pages, memory.ids(160)))
        assert found.tokens == 0
        server.start()

        def again() -> bool:
            a.store(TOKENS, memory.pages, memory.ids(160))
            return a.retrieve(TOKENS, memory.pages, memory.ids(160)).tokens == 160 and a.flush(WAIT).safe

        until(again)  # once its breaker tries, and finds that the server is another
        with closing(server.client()) as client:
            until(lambda: len(listed(client)) == 10)
