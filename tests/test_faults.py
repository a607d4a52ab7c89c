from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmkv.backends.base import Read, Result, Status, Write
from lmkv.backends.disk import DiskBackend
from lmkv.errors import BackendError
from lmkv.testing import BackendTests, Fault, FaultyBackend, Gate, container, key_of
from lmkv.testing.backend_tests import buffer, fetch, put

LATE = Result(Status.TIMEOUT, detail="scripted")


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyBackend]:
    backend = FaultyBackend(DiskBackend(f"disk://{tmp_path}"))
    yield backend
    backend.close()


class TestWithoutFaults(BackendTests):
    """Nothing scripted, nothing changed."""

    @pytest.fixture
    def backend(self, faulty: FaultyBackend) -> FaultyBackend:
        return faulty


def test_scripted_calls_then_the_rest(faulty: FaultyBackend) -> None:
    data = put(faulty, 1)
    faulty.script("read", None, Fault(result=LATE))
    faulty.always("read", Fault(result=Result(Status.MISSING)))
    assert fetch(faulty, key_of(1)) == data
    assert fetch(faulty, key_of(1)) is Status.TIMEOUT
    assert fetch(faulty, key_of(1)) is Status.MISSING
    faulty.always("read", None)
    assert fetch(faulty, key_of(1)) == data
    assert faulty.calls == {"write": 1, "read": 4}


def test_only_some_keys_fail(faulty: FaultyBackend) -> None:
    faulty.script("write", Fault(result=LATE, only=lambda key: key == key_of(1)))
    writes = [Write(key_of(n), container(n, 4096)) for n in range(3)]
    ok = Result(Status.OK, 4096)
    assert faulty.write(writes) == [ok, LATE, ok]
    keys = [key_of(n) for n in range(3)]
    assert faulty.contains(keys) == [4096, None, 4096]
    faulty.script("contains", Fault(result=LATE, only=lambda key: key == key_of(2)))
    assert faulty.contains(keys) == [4096, None, None]
    faulty.script("delete", Fault(result=LATE))
    assert faulty.delete(keys) == [False] * 3
    assert faulty.delete(keys) == [True, False, True]


def test_flipped_and_cut_reads(faulty: FaultyBackend) -> None:
    data = put(faulty, 1, 8192)
    faulty.script("read", Fault(flip=4100), Fault(truncate=4096))
    flipped = fetch(faulty, key_of(1))
    assert isinstance(flipped, memoryview)
    assert [i for i in range(8192) if flipped[i] != data[i]] == [4100]
    assert fetch(faulty, key_of(1)) == data[:4096]
    assert fetch(faulty, key_of(1)) == data


def test_flipped_and_cut_writes_claim_success(faulty: FaultyBackend) -> None:
    data = container(1, 8192)
    before = bytes(data)
    faulty.script("write", Fault(flip=0), Fault(truncate=4096))
    ok = [Result(Status.OK, 8192)]
    assert faulty.write([Write(key_of(1), data)]) == ok
    assert fetch(faulty, key_of(1)) == memoryview(bytes([data[0] ^ 0xFF]) + before[1:])
    assert faulty.write([Write(key_of(2), data)]) == ok
    assert fetch(faulty, key_of(2)) == memoryview(before)[:4096]
    assert data == before


def test_a_gate_holds_one_call_while_others_pass(faulty: FaultyBackend) -> None:
    data, gate = put(faulty, 1), Gate()
    faulty.script("read", Fault(gate=gate))
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(fetch, faulty, key_of(1))
        assert gate.reached.wait(30)
        assert fetch(faulty, key_of(1)) == data
        assert not held.done()
        gate.open()
        assert held.result(30) == data


def test_exceptions_scan_and_health(faulty: FaultyBackend) -> None:
    put(faulty, 1)
    faulty.script("read", Fault(raises=OSError("gone")))
    with pytest.raises(OSError, match="gone"):
        faulty.read([Read(key_of(1), buffer(4096))])
    faulty.script("scan", Fault(result=Result(Status.ERROR, detail="no list")))
    with pytest.raises(BackendError, match="no list"):
        list(faulty.scan())
    assert len(list(faulty.scan())) == 1
    faulty.script("health", Fault(result=LATE))
    assert faulty.health() == (False, "scripted")
    assert faulty.health().ok
