"""The S3 backend in trouble: moto killed and stopped, and a server that misbehaves on cue."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import closing

import pytest
from deadlines import within
from s3_servers import Answer, Moto, Scripted, boto, bucket, opened

from lmkv.backends.base import Backend, Read, Result, Status, Write
from lmkv.backends.s3 import S3Backend
from lmkv.errors import BackendError
from lmkv.testing import container, key_of
from lmkv.testing.backend_tests import buffer, fetch, put

PAGE = 4096
MIB = 1 << 20


def status_of_write(backend: Backend, number: int, nbytes: int = PAGE) -> Status:
    return backend.write([Write(key_of(number), container(number, nbytes))])[0].status


def all_calls(backend: Backend, number: int, nbytes: int = PAGE) -> list[Status | bool | int | None]:
    """How a lookup, a read, a write, a delete and a health check of an object end."""
    (known,) = backend.contains([key_of(number)])
    (read,) = backend.read([Read(key_of(number), buffer(nbytes))])
    (write,) = backend.write([Write(key_of(number), container(number, nbytes))])
    (deleted,) = backend.delete([key_of(number)])
    return [known, read.status, write.status, deleted, backend.health().ok]


def test_down_at_start_is_a_miss_until_it_is_up(own_moto: Moto) -> None:
    with closing(opened(f"s3://bucket/kv?endpoint={own_moto.endpoint}&timeout=3s&negative=0s")) as backend:
        began = time.monotonic()
        assert all_calls(backend, 1) == [None, Status.ERROR, Status.ERROR, False, False]
        assert time.monotonic() - began < 10
        assert backend.read([Read(key_of(1), buffer(PAGE))])[0].detail == "connection refused"
        with pytest.raises(BackendError, match="connection refused"):
            list(backend.scan())
        own_moto.start()
        assert status_of_write(backend, 1) is Status.ERROR, "there is no such bucket"
        boto(own_moto.endpoint).create_bucket(Bucket="bucket")
        assert all_calls(backend, 1) == [None, Status.MISSING, Status.OK, True, True]


def test_killed_in_the_middle_of_a_read_and_back_empty(own_moto: Moto) -> None:
    own_moto.start()
    with closing(opened(bucket(own_moto, "&timeout=20s"))) as backend:
        data, into = put(backend, 1, 32 * MIB), buffer(32 * MIB)
        ends: list[Result] = []
        reader = threading.Thread(target=lambda: ends.extend(backend.read([Read(key_of(1), into)])))
        reader.start()
        deadline = time.monotonic() + 20
        while into[:8] != data[:8] and time.monotonic() < deadline:
            pass
        own_moto.signal(signal.SIGKILL)
        reader.join(20)
        assert [end.status for end in ends] == [Status.ERROR]
        own_moto.start()
        assert fetch(backend, key_of(1)) is Status.ERROR, "no bucket"
        boto(own_moto.endpoint).create_bucket(Bucket=backend.url.split("/")[2])
        assert fetch(backend, key_of(1)) is Status.MISSING
        assert put(backend, 1) == fetch(backend, key_of(1))


def test_stopped_every_call_ends_in_time_and_hits_return(own_moto: Moto) -> None:
    own_moto.start()
    with closing(opened(bucket(own_moto, "&timeout=1s&lookup_timeout=500ms&positive=0s"))) as backend:
        put(backend, 1, MIB)
        large = Write(key_of(2), container(2, 32 * MIB))
        own_moto.signal(signal.SIGSTOP)
        for call, limit, expected in (
            (lambda: backend.contains([key_of(1)]), 0.5, [None]),
            (lambda: fetch(backend, key_of(1)), 1, Status.TIMEOUT),
            (lambda: backend.write([large])[0].status, 1, Status.TIMEOUT),
            (lambda: backend.delete([key_of(1)]), 1, [False]),
            (lambda: backend.health().ok, 1, False),
        ):
            assert within(limit, call, at_least=limit - 0.1) == expected
        own_moto.signal(signal.SIGCONT)
        deadline = time.monotonic() + 20
        while (found := fetch(backend, key_of(1))) is Status.TIMEOUT and time.monotonic() < deadline:
            pass  # it works off what came meanwhile
        assert found == container(1, MIB)


def test_a_write_that_was_given_up_lets_go_of_its_buffer(scripted: Scripted, faked: S3Backend) -> None:
    gate, data = threading.Event(), bytearray(MIB)
    scripted.script = lambda method, name: Answer(200, wait=gate)
    with memoryview(data) as view:
        (result,) = faked.write([Write(key_of(2), view)])
    assert result.status is Status.TIMEOUT
    data.append(0)  # BufferError while anything refers to it
    gate.set()


def test_closing_ends_what_is_under_way(scripted: Scripted, faked: S3Backend) -> None:
    gate, ends = threading.Event(), list[Result]()
    scripted.script = lambda method, name: Answer(200, wait=gate)
    reader = threading.Thread(target=lambda: ends.extend(faked.read([Read(key_of(1), buffer(PAGE))])))
    reader.start()
    deadline = time.monotonic() + 5
    while not scripted.requests and time.monotonic() < deadline:
        pass
    within(0.5, lambda: (faked.close(), reader.join(5)))
    assert ends == [Result(Status.ERROR, detail="closed")]
    gate.set()


@pytest.mark.parametrize(
    ("answer", "read", "write", "detail"),
    [
        (Answer(403, "SignatureDoesNotMatch"), Status.ERROR, Status.ERROR, "access denied (403 SignatureDoesNotMatch)"),
        (Answer(403, "AccessDenied"), Status.ERROR, Status.READ_ONLY, "access denied (403 AccessDenied)"),
        (Answer(403, "QuotaExceeded"), Status.ERROR, Status.FULL, "403 QuotaExceeded"),
        (Answer(507, "InsufficientStorage"), Status.ERROR, Status.FULL, "507 InsufficientStorage"),
        (Answer(400, "EntityTooLarge"), Status.ERROR, Status.FULL, "400 EntityTooLarge"),
        (Answer(404, "NoSuchBucket"), Status.ERROR, Status.ERROR, "no such bucket"),
        (Answer(301, "PermanentRedirect"), Status.ERROR, Status.ERROR, "redirected: wrong region or endpoint"),
        (Answer(503, "SlowDown"), Status.ERROR, Status.ERROR, "503 SlowDown"),
    ],
)
def test_what_the_stores_errors_are(
    scripted: Scripted, faked: S3Backend, answer: Answer, read: Status, write: Status, detail: str
) -> None:
    assert fetch(faked, key_of(1)) == container(1)
    scripted.script = lambda method, name: answer
    assert fetch(faked, key_of(1)) is read
    assert faked.write([Write(key_of(2), container(2))]) == [Result(write, detail=detail)]
    assert faked.contains([key_of(2)]) == [None]
    assert faked.delete([key_of(1)]) == [False]
    with pytest.raises(BackendError, match="cannot list"):
        list(faked.scan())
    scripted.script = lambda method, name: None
    assert fetch(faked, key_of(1)) == container(1), "nothing was deleted, and it works again"
    assert faked.usage()[:2] == (PAGE, 1)


def test_a_storm_of_503_is_waited_out_within_the_deadline(scripted: Scripted, faked: S3Backend) -> None:
    answers = iter([Answer(503, "SlowDown")] * 2)
    scripted.script = lambda method, name: next(answers, None)
    assert fetch(faked, key_of(1)) == container(1)
    gate = threading.Event()
    storm = [Answer(503, "SlowDown"), Answer(503, "SlowDown", wait=gate)]
    scripted.script = lambda method, name: storm[min(len(scripted.requests), 4) // 4]
    scripted.requests.clear()
    assert within(1, lambda: fetch(faked, key_of(1))) is Status.TIMEOUT
    gate.set()


def test_a_body_that_breaks_off_is_fetched_from_there_on(scripted: Scripted, faked: S3Backend) -> None:
    nbytes = 8 * MIB
    data = bytes(put(faked, 2, nbytes))

    def script(method: str, name: str) -> Answer | None:
        if method != "GET":
            return None
        wanted = scripted.headers[-1].get("range")
        if wanted is None:
            return Answer(200, body=data[: 5 * MIB], length=nbytes)
        begin, end = map(int, wanted.removeprefix("bytes=").split("-"))
        return Answer(206, body=data[begin : end + 1], range=f"bytes {begin}-{end}/{nbytes}")

    scripted.script = script
    assert fetch(faked, key_of(2), nbytes) == data
    assert scripted.headers[-1]["range"] == f"bytes={5 * MIB}-{nbytes - 1}"


def test_wrong_bodies_are_never_a_hit(scripted: Scripted, faked: S3Backend) -> None:
    put(faked, 2, 8 * MIB)
    body: Answer | None = None
    scripted.script = lambda method, name: body if method == "GET" else None
    for number, nbytes in ((1, PAGE), (2, 8 * MIB)):
        for sent in (0, 1, nbytes - 1):
            body = Answer(200, body=bytes(sent), length=nbytes)
            assert fetch(faked, key_of(number), 8 * MIB) is Status.ERROR
        body = Answer(200, body=bytes(nbytes + PAGE))
        assert faked.read([Read(key_of(number), buffer(nbytes))]) == [Result(Status.ERROR, detail="short buffer")]
        body = Answer(200, body=bytes(nbytes - 1))
        assert fetch(faked, key_of(number), 8 * MIB) is Status.CORRUPT
        body = None
        assert fetch(faked, key_of(number), 8 * MIB) == container(number, nbytes)
