"""The S3 backend against moto. The next file has its failures, tests/rgw a real store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from deadlines import within
from s3_servers import Answer, Moto, Scripted, boto, bucket, keys_in_environment, opened

from lmkv import backends
from lmkv.backends import s3
from lmkv.backends.base import Backend, Result, Status, Write
from lmkv.backends.existence import Accounts, Existence
from lmkv.backends.s3 import S3Backend
from lmkv.backends.s3_options import Credentials
from lmkv.errors import ConfigError
from lmkv.testing import BackendTests, container, key_of
from lmkv.testing.backend_tests import OK, buffer, fetch, listed, put, settled

PAGE = 4096
MIB = 1 << 20


def in_bucket(backend: S3Backend, server: Moto, number: int, data: bytes | None) -> None:
    """Put an object behind the backend's back, or with None delete it."""
    place = {"Bucket": backend.url.split("/")[2], "Key": backend._name(key_of(number))}
    client = boto(server.endpoint)
    client.delete_object(**place) if data is None else client.put_object(**place, Body=data)


class TestMoto(BackendTests):
    @pytest.fixture
    def backend(self, store: S3Backend) -> Backend:
        return store

    def reopen(self, backend: Backend) -> Backend:
        backend.close()
        return backends.open(backend.url)


@pytest.mark.parametrize(
    "behaviour",
    [
        BackendTests.test_a_key_twice_and_writing_again,
        BackendTests.test_threads_see_whole_objects_and_usage_stays_exact,
    ],
)
def test_the_same_where_a_write_has_to_look_first(store: S3Backend, behaviour: Callable[..., None]) -> None:
    store._conditional = False
    behaviour(BackendTests(), store)


# Where it is and how it is reached.


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "s3://b!",
        "s3://key:secret@bucket",
        "s3://bucket:9000/kv",
        "s3://bucket/../kv",
        "s3://bucket/a b",
        "s3://bucket/kv#part",
        "s3://bucket?endpoint=ftp://host",
        "s3://bucket?endpoint=host:9000",
        "s3://bucket?endpoint=http://key:secret@host",
        "s3://bucket?endpoint=http://host/path",
        "s3://bucket?endpoint=http://host:port",
        "s3://bucket?timeout=0",
        "s3://bucket?timeout=soon",
        "s3://bucket?lookup_timeout=-1s",
        "s3://bucket?negative=x",
        "s3://bucket?concurrency=0",
        "s3://bucket?concurrency=1.5",
        "s3://bucket?multipart=4KiB",
        "s3://bucket?multipart=50%",
        "s3://bucket?path_style=maybe",
        "s3://bucket?anonymous=2",
        "s3://bucket?secret=x",
    ],
)
def test_what_cannot_work_is_refused_at_start(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        backends.open(url)
    assert raised.value.key == "tiers.url"
    assert "secret@" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket//a/b/?timeout=10000ms&negative=5", "s3://bucket/a/b"),
        ("s3://b.ucket/a?endpoint=http://[::1]:9000/", "s3://b.ucket/a?endpoint=http://%5B::1%5D:9000"),
        ("s3://bucket?endpoint=https://host&path_style=0", "s3://bucket?endpoint=https://host&path_style=0"),
        ("s3://bucket?anonymous=on&multipart=8MiB&region=eu", "s3://bucket?region=eu&multipart=8MiB&anonymous=1"),
    ],
)
def test_a_url_opens_the_same_again(url: str, shown: str) -> None:
    for each in (url, shown):
        with closing(opened(each)) as backend:
            assert backend.url == shown
            assert backend.shared
            assert backend.remote


def test_no_credentials_at_all_are_refused_at_start(monkeypatch: pytest.MonkeyPatch, scripted: Scripted) -> None:
    keys_in_environment(monkeypatch, key="")
    with pytest.raises(ConfigError, match="set AWS_ACCESS_KEY_ID and"):
        backends.open("s3://bucket")
    with closing(opened(f"s3://bucket?endpoint={scripted.endpoint}&anonymous=1")) as backend:
        put(backend, 1)
    assert not any("authorization" in each for each in scripted.headers)


def test_a_profile_with_a_token_signs_and_is_read_again(
    monkeypatch: pytest.MonkeyPatch, scripted: Scripted, tmp_path: Path
) -> None:
    def keys(name: str) -> None:
        lines = ["[here]", f"aws_access_key_id = {name}", "aws_secret_access_key = s", f"aws_session_token = t-{name}"]
        (tmp_path / "credentials").write_text("\n".join(lines))

    keys_in_environment(monkeypatch, key="")
    keys("FIRST")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "here")
    with closing(opened(f"s3://bucket?endpoint={scripted.endpoint}&region=mars-1")) as backend:
        put(backend, 1)
    assert "Credential=FIRST/" in scripted.headers[-1]["authorization"]
    assert "/mars-1/s3/aws4_request" in scripted.headers[-1]["authorization"]
    assert scripted.headers[-1]["x-amz-security-token"] == "t-FIRST"
    credentials = Credentials()
    keys("SECOND")
    found = credentials()
    assert (found["access_key_id"], found["token"]) == ("SECOND", "t-SECOND")
    left = found["expires_at"].timestamp() - time.time()
    assert credentials.refresh_threshold.total_seconds() < left < 600
    (tmp_path / "credentials").unlink()
    assert credentials()["access_key_id"] == "SECOND", "no worse than it was"


def test_what_the_environment_says_wrongly_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "rot13")
    with pytest.raises(ConfigError, match="rot13"):
        backends.open("s3://bucket")


def test_virtual_hosts_have_the_buckets_name() -> None:
    with closing(opened("s3://bucket/kv?endpoint=http://host.test:9000&path_style=0")) as backend:
        assert backend._store.config["endpoint"] == "http://bucket.host.test:9000"
    with closing(opened("s3://bucket/kv")) as backend:
        assert backend._store.config["virtual_hosted_style_request"] in (True, "true")


def test_a_child_of_a_fork_answers_and_opens_none(store: S3Backend) -> None:
    put(store, 1)
    pid = os.fork()
    if not pid:
        try:
            quiet = (store.contains([key_of(1)]), fetch(store, key_of(1)), store.health().ok, list(store.scan()))
            store.close()
            with pytest.raises(ConfigError, match="spawn"):
                backends.open(store.url)
            os._exit(0 if quiet == ([None], Status.ERROR, False, []) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert fetch(store, key_of(1)) == container(1)


# Objects.


def test_an_object_is_the_container_under_its_keys_name(store: S3Backend, moto: Moto) -> None:
    data, key = put(store, 1, 3 * PAGE), key_of(1)
    name = f"kv/{key.scope.hex()}/{key}"
    client, place = boto(moto.endpoint), store.url.split("/")[2]
    assert client.get_object(Bucket=place, Key=name)["Body"].read() == data
    for other in (f"kv/{key}", f"kv/{bytes(16).hex()}/{key}", "kv/readme", f"{name}/x", f"else/{name}"):
        client.put_object(Bucket=place, Key=other, Body=bytes(PAGE))
    assert settled(store) == {key: 3 * PAGE}


def test_without_a_prefix_the_bucket_is_the_tier(moto: Moto) -> None:
    with closing(opened(bucket(moto).replace("/kv?", "?"))) as backend:
        assert backend._options.prefix == ""
        put(backend, 1)
        assert settled(backend) == {key_of(1): PAGE}
        assert backend.delete([key_of(1)]) == [True]
        assert settled(backend) == {}


@pytest.mark.parametrize("nbytes", [0, 1, PAGE + 1])
def test_a_size_that_no_container_has_is_corrupt_and_can_be_deleted(store: S3Backend, moto: Moto, nbytes: int) -> None:
    in_bucket(store, moto, 1, bytes(nbytes))
    assert store.contains([key_of(1)]) == [None]
    assert fetch(store, key_of(1)) is Status.CORRUPT
    assert listed(store) == {}
    assert store.delete([key_of(1)]) == [True]
    assert put(store, 1) == fetch(store, key_of(1))


def test_a_part_is_read_without_the_rest(store: S3Backend) -> None:
    data, key = put(store, 1, 8 * MIB), key_of(1)
    for offset, nbytes in ((0, 1), (MIB + 3, 5 * MIB), (8 * MIB - PAGE, PAGE)):
        into = buffer(nbytes)
        assert store.read_range(key, offset, into) == Result(Status.OK, nbytes)
        assert into == data[offset : offset + nbytes]
    assert store.read_range(key, 8 * MIB - 1, buffer(2)).status is Status.ERROR
    assert store.read_range(key, 8 * MIB, buffer(1)).status is Status.ERROR
    assert store.read_range(key_of(2), 0, buffer(1)).status is Status.MISSING


def test_a_large_container_goes_up_in_parts_and_what_is_there_is_kept(store: S3Backend, moto: Moto) -> None:
    data, key = put(store, 1, 70 * MIB), key_of(1)
    name = {"Bucket": store.url.split("/")[2], "Key": store._name(key)}
    assert boto(moto.endpoint).head_object(**name)["ETag"].endswith('-5"')
    assert fetch(store, key, 70 * MIB) == data
    assert store.write([Write(key, buffer(65 * MIB))])[0].status is Status.OK
    assert settled(store) == {key: 70 * MIB}


def test_scan_is_lazy_and_counts_beside_writes_and_deletes(
    monkeypatch: pytest.MonkeyPatch, store: S3Backend, moto: Moto
) -> None:
    monkeypatch.setattr(s3, "PAGE", 4)
    for number in range(12):
        put(store, number)
    in_bucket(store, moto, 100, bytes(2 * PAGE))
    pages = store.scan()
    first = next(pages)
    assert len(first) == 4
    rest = sorted(set(map(key_of, range(12))) - {each.key for each in first}, key=str)
    assert store.delete([first[0].key, rest[-1]]) == [True, True]
    put(store, 13)
    assert sum(map(len, pages)) >= 7
    assert store.usage()[:2] == (13 * PAGE, 12)
    assert len(settled(store)) == 12
    given_up = store.scan()
    next(given_up)
    given_up.close()
    assert store.usage()[:2] == (13 * PAGE, 12)


# Conditional puts.


@pytest.mark.parametrize("conditional", [True, False])
def test_whether_conditional_puts_are_honoured_is_found_out_once(conditional: bool) -> None:
    server = Scripted(conditional)
    with closing(opened(f"s3://bucket?endpoint={server.endpoint}")) as backend:
        put(backend, 1)
        assert server.count("PUT") == 3, "two for the probe"
        assert list(server.objects) == [backend._name(key_of(1))], "the probe leaves nothing behind"
        server.requests.clear()
        assert backend.write([Write(key_of(1), container(2))]) == [OK]
        assert fetch(backend, key_of(1)) == container(1), "what was there is kept"
        assert server.count("PUT") == int(conditional), "where a put would replace it, none is sent"
        assert ("honoured" if conditional else "ignored") in backend.health().detail
        assert backend.usage()[:2] == (PAGE, 1)
    server.stop()


def test_a_store_without_conditional_puts_takes_plain_ones(scripted: Scripted) -> None:
    def script(method: str, name: str) -> Answer | None:
        return Answer(501, "NotImplemented") if method == "PUT" and "if-none-match" in scripted.headers[-1] else None

    scripted.script = script
    with closing(opened(f"s3://bucket?endpoint={scripted.endpoint}")) as backend:
        put(backend, 1)
        assert fetch(backend, key_of(1)) == container(1)


# Lookups.


def test_a_batch_of_lookups_asks_for_each_unknown_object_once(scripted: Scripted, faked: S3Backend) -> None:
    wanted = list(map(key_of, range(128)))
    assert faked.contains(wanted * 2) == ([None, PAGE] + [None] * 126) * 2
    assert sorted(set(scripted.requests)) == sorted(scripted.requests)
    assert scripted.count("HEAD") == len(scripted.requests) == 127, "all but what it wrote itself"
    assert faked.contains(wanted) == [None, PAGE] + [None] * 126
    assert len(scripted.requests) == 127, "nothing is asked twice"


def test_what_others_do_is_noticed_when_the_word_is_old_or_a_read_fails(store: S3Backend, moto: Moto) -> None:
    now = 0.0
    store._known.clock = lambda: now
    assert store.contains([key_of(1)]) == [None]
    in_bucket(store, moto, 1, bytes(PAGE))
    now = 4.9
    assert store.contains([key_of(1)]) == [None]
    now = 5.1
    assert store.contains([key_of(1)]) == [PAGE]
    in_bucket(store, moto, 1, None)
    now = 65.0
    assert store.contains([key_of(1)]) == [PAGE]
    now = 65.2
    assert store.contains([key_of(1)]) == [None]
    put(store, 2)
    in_bucket(store, moto, 2, None)
    now = 65.3
    assert store.contains([key_of(2)]) == [PAGE]
    assert fetch(store, key_of(2)) is Status.MISSING
    assert store.contains([key_of(2)]) == [None]


def test_lookups_that_do_not_answer_are_unknown_and_the_others_stand(scripted: Scripted, faked: S3Backend) -> None:
    put(faked, 3)
    faked._known = Existence(60, 5)
    gate = threading.Event()
    scripted.script = lambda method, name: Answer(200, wait=gate) if name == faked._name(key_of(2)) else None
    found = within(0.5, lambda: faked.contains([key_of(1), key_of(2), key_of(3)]), at_least=0.4)
    assert found == [PAGE, None, PAGE]
    gate.set()
    scripted.script = lambda method, name: None
    scripted.objects[faked._name(key_of(2))] = bytes(PAGE)
    assert faked.contains([key_of(2)]) == [PAGE], "no answer is not remembered as no object"


def test_existence_and_accounts_keep_to_what_was_done_last() -> None:
    now = 10.0
    known = Existence(60, 5, capacity=2, clock=lambda: now)
    known.did(key_of(1), PAGE)
    known.heard(key_of(1), 0, asked=9.0)
    assert known.get(key_of(1)) == PAGE, "the question is older than the deed"
    known.doubt(key_of(1))
    known.heard(key_of(1), 0, asked=9.0)
    assert known.get(key_of(1)) is None
    known.heard(key_of(1), 0, asked=11.0)
    assert known.get(key_of(1)) == 0
    known.did(key_of(2), PAGE)
    known.did(key_of(3), PAGE)
    assert [known.get(key_of(number)) for number in (1, 2, 3)] == [None, PAGE, PAGE]

    accounts = Accounts()
    accounts.changed("b", 0, 1)
    listing, dropped = accounts.listing(), accounts.listing()
    listing.add([("b", 1), ("foreign", 10)])
    accounts.changed("b", 1, 0)  # behind
    accounts.changed("a", 0, 2)  # behind, not seen
    accounts.changed("x", 0, 4)  # ahead, will be seen
    accounts.changed("y", 8, 0)  # ahead, and gone before
    accounts.changed("z", 0, 16)
    accounts.changed("z", 16, 0)  # ahead, came and went, and is in the page that was under way
    listing.add([("x", 4), ("z", 16)])
    listing.finish()
    dropped.drop()
    assert (accounts.used, accounts.objects) == (16, 3)
    accounts.changed("a", 2, 0)
    assert (accounts.used, accounts.objects) == (14, 2)
