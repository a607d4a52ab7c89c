"""The contract of `lmkv.backends.base` as tests that any backend can inherit.

>>> class TestMine(BackendTests):
...     @pytest.fixture
...     def backend(self, tmp_path):
...         with closing(MyBackend(f"mine://{tmp_path}")) as backend:
...             yield backend
"""

# ruff: noqa: S101

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice

import numpy as np

from lmkv.backends.base import ALIGNMENT, Backend, Read, Result, Status, Write
from lmkv.keys import ChunkKey

MIB = 1 << 20


def key_of(number: int) -> ChunkKey:
    """A key like a real one's; equal numbers give equal keys."""
    digest = np.random.default_rng(number).bytes(32)
    return ChunkKey(b"lmkv-test-scope.", bytes(8), digest, digest[::-4], number % 97, 0, 0)


def container(number: int, nbytes: int) -> memoryview:
    """``nbytes`` bytes that depend on ``number``, in page-aligned memory."""
    data = buffer(nbytes)
    data[:] = np.random.default_rng(number).bytes(nbytes)
    return data


def buffer(nbytes: int) -> memoryview:
    """Zeros in page-aligned memory."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


def fetch(backend: Backend, key: ChunkKey, capacity: int = MIB) -> memoryview | Status:
    """What is stored, or how the read ended."""
    into = buffer(capacity)
    (result,) = backend.read([Read(key, into)])
    return into[: result.nbytes] if result.status is Status.OK else result.status


def put(backend: Backend, number: int, nbytes: int = ALIGNMENT) -> memoryview:
    """Store ``container(number, nbytes)`` under ``key_of(number)``."""
    data = container(number, nbytes)
    assert backend.write([Write(key_of(number), data)]) == [Result(Status.OK, nbytes)]
    return data


def listed(backend: Backend) -> dict[ChunkKey, int]:
    """All that `scan` finds; fails when it finds something twice."""
    found = [each for batch in backend.scan() for each in batch]
    assert len({each.key for each in found}) == len(found)
    return {each.key: each.nbytes for each in found}


def together(*jobs: Callable[[], None]) -> None:
    """Run all at once; the first failure is raised."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for running in [pool.submit(job) for job in jobs]:
            running.result()


class BackendTests:
    """Inherit, and give a fixture ``backend``: open, empty, closed by the fixture afterwards.

    capacity_bytes: what it can hold. The tests store no more at a time (of two sizes at most), and
    leave out larger objects. reopen: for a persistent backend, close it and open its store again.
    """

    capacity_bytes: int = 32 * MIB

    def reopen(self, backend: Backend) -> Backend | None:  # noqa: ARG002
        return None

    def test_any_size_comes_back(self, backend: Backend) -> None:
        for number, pages in enumerate((1, 2, 3, 16, 255, 256, 257, 1024, 1025, 2049)):
            nbytes = pages * ALIGNMENT
            if nbytes <= self.capacity_bytes:
                data = put(backend, number, nbytes)
                assert backend.contains([key_of(number)]) == [nbytes]
                assert fetch(backend, key_of(number), nbytes) == data
                assert backend.delete([key_of(number)]) == [True]

    def test_buffers_at_any_address_work(self, backend: Backend) -> None:
        for shift in (1, 8, 512, 4095):
            data, into = buffer(3 * ALIGNMENT)[shift:], buffer(3 * ALIGNMENT)[shift:]
            data[: 2 * ALIGNMENT] = container(shift, 2 * ALIGNMENT)
            write = Write(key_of(shift), data[: 2 * ALIGNMENT])
            assert backend.write([write]) == [Result(Status.OK, 2 * ALIGNMENT)]
            assert backend.read([Read(write.key, into)]) == [Result(Status.OK, 2 * ALIGNMENT)]
            assert into[: 2 * ALIGNMENT] == write.data

    def test_read_only_data_can_be_written(self, backend: Backend) -> None:
        data = memoryview(bytes(container(1, ALIGNMENT)))
        assert backend.write([Write(key_of(1), data)])[0].status is Status.OK
        assert fetch(backend, key_of(1)) == data

    def test_nothing_is_there_at_first(self, backend: Backend) -> None:
        assert backend.contains([key_of(1)]) == [None]
        assert fetch(backend, key_of(1)) is Status.MISSING
        assert backend.delete([key_of(1)]) == [False]
        assert listed(backend) == {}
        assert backend.usage()[:2] == (0, 0)

    def test_empty_batches(self, backend: Backend) -> None:
        assert backend.contains([]) == backend.delete([]) == []
        assert backend.read([]) == backend.write([]) == []

    def test_items_of_a_batch_end_on_their_own(self, backend: Backend) -> None:
        good, bad = container(1, 2 * ALIGNMENT), container(2, ALIGNMENT + 1)
        writes = [Write(key_of(2), bad), Write(key_of(1), good), Write(key_of(3), good[:0])]
        statuses = [result.status for result in backend.write(writes)]
        assert statuses == [Status.ERROR, Status.OK, Status.ERROR]
        assert backend.contains([key_of(3), key_of(1), key_of(2)]) == [None, good.nbytes, None]
        into = [buffer(2 * ALIGNMENT), buffer(ALIGNMENT), buffer(4 * ALIGNMENT)]
        keys = [key_of(2), key_of(1), key_of(1)]
        results = backend.read([Read(*each) for each in zip(keys, into, strict=True)])
        assert [each.status for each in results] == [Status.MISSING, Status.ERROR, Status.OK]
        assert results[1].detail == "short buffer"
        assert results[2].nbytes == good.nbytes
        assert into[2][: good.nbytes] == good

    def test_a_key_twice_in_one_batch(self, backend: Backend) -> None:
        data, into = container(1, ALIGNMENT), [buffer(ALIGNMENT), buffer(ALIGNMENT)]
        ok = Result(Status.OK, ALIGNMENT)
        assert backend.write([Write(key_of(1), data)] * 2) == [ok, ok]
        assert backend.usage()[:2] == (ALIGNMENT, 1)
        assert backend.read([Read(key_of(1), each) for each in into]) == [ok, ok]
        assert into == [data, data]
        assert backend.contains([key_of(1)] * 2) == [ALIGNMENT] * 2
        assert backend.delete([key_of(1)] * 2) == [True, False]

    def test_writing_again_replaces_or_keeps(self, backend: Backend) -> None:
        old, new = put(backend, 1, 2 * ALIGNMENT), container(2, 4 * ALIGNMENT)
        assert backend.write([Write(key_of(1), new)])[0].status is Status.OK
        stored = fetch(backend, key_of(1))
        assert isinstance(stored, memoryview)
        assert stored in (old, new)
        assert backend.contains([key_of(1)]) == [len(stored)]
        assert backend.usage()[:2] == (len(stored), 1)

    def test_each_field_of_a_key_counts(self, backend: Backend) -> None:
        one = key_of(1)
        other = [one._replace(scope=bytes(16)), one._replace(tenant=b"tenant-2")]
        other += [one._replace(digest=bytes(32)), one._replace(parent=bytes(8))]
        other += [one._replace(depth=2**32 - 1), one._replace(group=1), one._replace(shard=2)]
        put(backend, 1)
        for number, key in enumerate(other, 2):
            assert backend.contains([key]) == [None]
            backend.write([Write(key, container(number, ALIGNMENT))])
        for number, key in enumerate([one, *other], 1):
            assert fetch(backend, key) == container(number, ALIGNMENT)
        assert set(listed(backend)) == {one, *other}

    def test_scan_finds_what_is_stored(self, backend: Backend) -> None:
        began = time.time()
        sizes = {key_of(n): (1 + n % 2) * ALIGNMENT for n in range(100)}
        for number, nbytes in enumerate(sizes.values()):
            put(backend, number, nbytes)
        gone = list(sizes)[::5]
        assert backend.delete(gone) == [True] * len(gone)
        for key in gone:
            del sizes[key]
        assert listed(backend) == sizes
        assert backend.usage()[:2] == (sum(sizes.values()), len(sizes))
        created = [each.created for batch in backend.scan() for each in batch]
        assert began - 2 < min(created) <= max(created) < time.time() + 2

    def test_readers_beside_writers_see_whole_objects(self, backend: Backend) -> None:
        versions = [buffer(16 * ALIGNMENT), buffer(64 * ALIGNMENT)]
        versions[0][:], versions[1][:] = b"a" * versions[0].nbytes, b"b" * versions[1].nbytes
        seen: list[memoryview | Status] = []

        def write() -> None:
            for data in islice(cycle(versions), 30):
                assert backend.write([Write(key_of(1), data)])[0].status is Status.OK

        def read() -> None:
            seen.extend(fetch(backend, key_of(1), 64 * ALIGNMENT) for _ in range(60))

        def delete() -> None:
            for _ in range(30):
                backend.delete([key_of(1)])

        together(write, write, read, read, delete)
        whole: list[object] = [*versions, Status.MISSING]
        assert all(each in whole for each in seen)
        stored = listed(backend)
        assert backend.usage()[:2] == (sum(stored.values()), len(stored))

    def test_usage_is_exact_after_a_storm(self, backend: Backend) -> None:
        def storm() -> None:
            for number in range(120):
                data = container(number, (1 + number % 2) * ALIGNMENT)
                backend.write([Write(key_of(number % 16), data)])
                backend.delete([key_of(number % 7)])

        def scan() -> None:
            for _ in range(10):
                assert set(listed(backend)) <= {key_of(number) for number in range(16)}

        together(storm, storm, scan)
        stored = listed(backend)
        assert backend.usage()[:2] == (sum(stored.values()), len(stored))
        for key, nbytes in stored.items():
            assert backend.contains([key]) == [nbytes]

    def test_health_and_url(self, backend: Backend) -> None:
        assert backend.health().ok
        assert backend.url in repr(backend)
        assert isinstance(backend.shared, bool)

    def test_closed_is_quiet(self, backend: Backend) -> None:
        data = put(backend, 1)
        backend.close()
        backend.close()
        assert backend.contains([key_of(1)]) == [None]
        assert backend.delete([key_of(1)]) == [False]
        assert fetch(backend, key_of(1)) is Status.ERROR
        assert backend.write([Write(key_of(2), data)])[0].status is Status.ERROR
        assert listed(backend) == {}
        assert not backend.health().ok
        assert backend.usage().used >= 0

    def test_what_is_stored_outlives_the_process(self, backend: Backend) -> None:
        data = {n: put(backend, n, (1 + n % 2) * ALIGNMENT) for n in range(20)}
        url, again = backend.url, self.reopen(backend)
        if again is None:
            import pytest

            pytest.skip("not persistent")
        try:
            assert again.url == url
            assert again.contains([key_of(3)]) == [data[3].nbytes]  # also before a scan
            assert listed(again) == {key_of(n): each.nbytes for n, each in data.items()}
            assert again.usage()[:2] == (sum(each.nbytes for each in data.values()), 20)
            for number, each in data.items():
                assert fetch(again, key_of(number)) == each
        finally:
            again.close()
