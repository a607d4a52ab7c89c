"""The S3 backend against Ceph RGW: a distributed store with signatures that count."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

pytest.importorskip("obstore", reason="needs obstore and boto3")

from s3_servers import KEY, Rgw, boto, bucket, keys_in_environment, opened

from lmkv import backends
from lmkv.backends.base import Backend, Read, Result, Status, Write
from lmkv.backends.s3 import S3Backend
from lmkv.testing import BackendTests, container, key_of
from lmkv.testing.backend_tests import buffer, fetch, put, settled

PAGE = 4096
MIB = 1 << 20
pytestmark = pytest.mark.rgw


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys_in_environment(monkeypatch)


@pytest.fixture
def backend(rgw: Rgw) -> Iterator[Backend]:
    with closing(opened(bucket(rgw))) as backend:
        yield backend


class TestRgw(BackendTests):
    def reopen(self, backend: Backend) -> Backend:
        backend.close()
        return backends.open(backend.url)


def test_it_honours_conditional_puts_ranges_and_parts(backend: S3Backend) -> None:
    data, key = put(backend, 1, 70 * MIB), key_of(1)
    assert fetch(backend, key, 70 * MIB) == data
    into = buffer(3 * MIB)
    assert backend.read_range(key, 41 * MIB + 1, into) == Result(Status.OK, 3 * MIB)
    assert into == data[41 * MIB + 1 : 44 * MIB + 1]
    put(backend, 2)
    assert backend.write([Write(key_of(2), container(3))]) == [Result(Status.OK, PAGE)]
    assert fetch(backend, key_of(2)) == container(2)
    assert backend.health().ok
    assert backend.health().detail.endswith("conditional puts: honoured")
    assert settled(backend) == {key: 70 * MIB, key_of(2): PAGE}


def test_more_than_one_page_is_listed(backend: S3Backend) -> None:
    data = container(1)
    results = backend.write([Write(key_of(number), data) for number in range(1100)])
    assert {each.status for each in results} == {Status.OK}
    assert len(settled(backend)) == 1100
    pages = [len(page) for page in backend.scan()]
    assert sum(pages) == 1100
    assert max(pages) <= 1000
    assert backend.delete(list(map(key_of, range(1100)))) == [True] * 1100
    assert settled(backend) == {}


def test_a_wrong_secret_is_refused(monkeypatch: pytest.MonkeyPatch, backend: S3Backend) -> None:
    put(backend, 1)
    keys_in_environment(monkeypatch, KEY, "wrong")
    with closing(opened(backend.url)) as other:
        assert other.contains([key_of(1)]) == [None]
        (read,) = other.read([Read(key_of(1), buffer(PAGE))])
        (write,) = other.write([Write(key_of(2), container(2))])
        assert (read.status, write.status) == (Status.ERROR, Status.ERROR)
        assert read.detail == write.detail == "access denied (403 SignatureDoesNotMatch)"
        assert not other.health().ok
    assert settled(backend) == {key_of(1): PAGE}


def test_who_may_only_read_reads(monkeypatch: pytest.MonkeyPatch, rgw: Rgw, backend: S3Backend) -> None:
    put(backend, 1)
    rgw.add_user("reader", "READERACCESS")
    name = backend.url.split("/")[2]
    places = [f"arn:aws:s3:::{name}", f"arn:aws:s3:::{name}/*"]
    rule = {"Effect": "Allow", "Principal": {"AWS": ["arn:aws:iam:::user/reader"]}, "Resource": places}
    rule["Action"] = ["s3:GetObject", "s3:ListBucket"]
    boto(rgw.endpoint).put_bucket_policy(Bucket=name, Policy=json.dumps({"Version": "2012-10-17", "Statement": [rule]}))
    keys_in_environment(monkeypatch, "READERACCESS")
    with closing(opened(backend.url)) as reader:
        assert reader.contains([key_of(1), key_of(2)]) == [PAGE, None]
        assert fetch(reader, key_of(1)) == container(1)
        assert fetch(reader, key_of(2)) is Status.MISSING
        assert reader.write([Write(key_of(2), container(2))])[0].status is Status.READ_ONLY
        assert reader.delete([key_of(1)]) == [False]
        assert settled(reader) == {key_of(1): PAGE}


def test_over_the_quota_is_full(monkeypatch: pytest.MonkeyPatch, rgw: Rgw) -> None:
    rgw.add_user("small", "SMALLACCESS")
    rgw.admin("quota", "set", "--quota-scope=user", "--uid=small", f"--max-size={MIB}")
    rgw.admin("quota", "enable", "--quota-scope=user", "--uid=small")
    keys_in_environment(monkeypatch, "SMALLACCESS")
    boto(rgw.endpoint, "SMALLACCESS").create_bucket(Bucket="small")
    with closing(opened(f"s3://small?endpoint={rgw.endpoint}")) as backend:
        put(backend, 1)
        assert backend.write([Write(key_of(2), container(2, 4 * MIB))])[0].status is Status.FULL
        assert fetch(backend, key_of(1)) == container(1)
        assert settled(backend) == {key_of(1): PAGE}


def test_a_stopped_osd_holds_nobody_longer_than_the_deadline(rgw: Rgw, backend: S3Backend) -> None:
    put(backend, 1, MIB)
    with closing(opened(f"{backend.url}&timeout=1s&lookup_timeout=500ms")) as hasty:
        assert fetch(hasty, key_of(1)) == container(1, MIB)
        osd = rgw.daemons["ceph-osd"]
        osd.send_signal(signal.SIGSTOP)
        try:
            for call, limit, expected in (
                (lambda: fetch(hasty, key_of(1)), 1, Status.TIMEOUT),
                (lambda: hasty.write([Write(key_of(2), container(2))])[0].status, 1, Status.TIMEOUT),
                (lambda: hasty.contains([key_of(3)]), 0.5, [None]),
                (lambda: hasty.health().ok, 1, False),
            ):
                began = time.monotonic()
                assert call() == expected
                assert time.monotonic() - began < limit + 0.5
        finally:
            osd.send_signal(signal.SIGCONT)
        assert fetch(backend, key_of(1)) == container(1, MIB)
        assert fetch(hasty, key_of(1)) == container(1, MIB)


def test_a_gateway_killed_in_the_middle_of_a_read_and_back(rgw: Rgw, backend: S3Backend) -> None:
    data, into = put(backend, 1, 64 * MIB), buffer(64 * MIB)
    ends: list[Result] = []
    reader = threading.Thread(target=lambda: ends.extend(backend.read([Read(key_of(1), into)])))
    reader.start()
    deadline = time.monotonic() + 10
    while into[:8] != data[:8] and time.monotonic() < deadline:
        pass
    rgw.signal(signal.SIGKILL)
    reader.join(20)
    assert [each.status for each in ends] == [Status.ERROR]
    assert backend.write([Write(key_of(2), container(2))])[0].status is Status.ERROR
    rgw.restart()
    assert fetch(backend, key_of(1), 64 * MIB) == data
    assert fetch(backend, key_of(2)) is Status.MISSING
