"""The contract of `lmkv.backends.base` as tests that any backend can inherit; docs/backends.md shows how."""

# ruff: noqa: S101

from __future__ import annotations

import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np

from lmkv.backends.base import ALIGNMENT, Backend, Read, Result, Status, Write
from lmkv.keys import ChunkKey

OK = Result(Status.OK, ALIGNMENT)


def key_of(number: int) -> ChunkKey:
    """A key like a real one's; equal numbers give equal keys."""
    digest = np.random.default_rng(number).bytes(32)
    return ChunkKey(b"lmkv-test-scope.", bytes(8), digest, digest[::-4], number % 97, 0, 0)


def container(number: int, nbytes: int = ALIGNMENT) -> memoryview:
    """Bytes that depend on ``number``, in page-aligned memory."""
    data = buffer(nbytes)
    data[:] = np.random.default_rng(number).bytes(nbytes)
    return data


def buffer(nbytes: int) -> memoryview:
    """Zeros in page-aligned memory."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


def fetch(backend: Backend, key: ChunkKey, capacity: int = 1 << 20) -> memoryview | Status:
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


def settled(backend: Backend) -> dict[ChunkKey, int]:
    """The same while nothing else is going on: `usage` and `contains` must agree."""
    stored = listed(backend)
    assert backend.usage()[:2] == (sum(stored.values()), len(stored))
    assert backend.contains(list(stored)) == list(stored.values())
    return stored


class BackendTests:
    """Inherit, and give a fixture ``backend``: open, empty, closed by the fixture afterwards.

    capacity_bytes: what it can hold. The tests store no more at a time (of two sizes at most), and leave out larger
    objects. reopen: for a persistent backend, close it and open its store again.
    """

    capacity_bytes: int = 32 << 20

    def reopen(self, backend: Backend) -> Backend | None:  # noqa: ARG002
        return None

    def test_any_size_at_any_address_comes_back(self, backend: Backend) -> None:
        sizes = (1, 2, 3, 16, 255, 256, 257, 1024, 1025, 2049)
        for pages, shift in [(pages, 0) for pages in sizes] + [(2, shift) for shift in (1, 8, 512, 4095)]:
            key, nbytes = key_of(pages + shift), pages * ALIGNMENT
            if nbytes <= self.capacity_bytes:
                data, into = buffer(nbytes + shift)[shift:], buffer(nbytes + 2 * ALIGNMENT)[shift:]
                data[:] = container(pages, nbytes)
                assert backend.write([Write(key, data.toreadonly())]) == [Result(Status.OK, nbytes)]
                assert backend.contains([key]) == [nbytes]
                assert backend.read([Read(key, into)]) == [Result(Status.OK, nbytes)]
                assert into[:nbytes] == data
                assert backend.delete([key]) == [True]

    def test_nothing_is_there_at_first(self, backend: Backend) -> None:
        assert (backend.contains([key_of(1)]), backend.delete([key_of(1)])) == ([None], [False])
        assert (fetch(backend, key_of(1)), settled(backend)) == (Status.MISSING, {})
        assert (backend.contains([]), backend.delete([]), backend.read([]), backend.write([])) == ([], [], [], [])

    def test_items_of_a_batch_end_on_their_own(self, backend: Backend) -> None:
        good, bad = container(1, 2 * ALIGNMENT), container(2, ALIGNMENT + 1)
        results = backend.write([Write(key_of(2), bad), Write(key_of(1), good), Write(key_of(3), good[:0])])
        assert [each.status for each in results] == [Status.ERROR, Status.OK, Status.ERROR]
        assert backend.contains([key_of(3), key_of(1), key_of(2)]) == [None, good.nbytes, None]
        into = [buffer(pages * ALIGNMENT) for pages in (2, 1, 4)]
        results = backend.read([Read(key_of(2), into[0]), Read(key_of(1), into[1]), Read(key_of(1), into[2])])
        assert [each.status for each in results] == [Status.MISSING, Status.ERROR, Status.OK]
        assert (results[1].detail, results[2].nbytes) == ("short buffer", good.nbytes)
        assert into[2][: good.nbytes] == good

    def test_a_key_twice_and_writing_again(self, backend: Backend) -> None:
        old, new, key = put(backend, 1, 2 * ALIGNMENT), container(2, 4 * ALIGNMENT), key_of(1)
        assert backend.write([Write(key, new)] * 2) == [Result(Status.OK, new.nbytes)] * 2
        stored = fetch(backend, key)
        assert isinstance(stored, memoryview)
        assert stored in (old, new)
        assert settled(backend) == {key: stored.nbytes}
        into = [buffer(stored.nbytes), buffer(stored.nbytes)]
        assert backend.read([Read(key, each) for each in into]) == [Result(Status.OK, stored.nbytes)] * 2
        assert into == [stored, stored]
        assert backend.contains([key] * 2) == [stored.nbytes] * 2
        assert backend.delete([key] * 2) == [True, False]

    def test_each_field_of_a_key_counts(self, backend: Backend) -> None:
        one = key_of(1)
        keys = [one, one._replace(scope=bytes(16)), one._replace(tenant=b"tenant-2"), one._replace(digest=bytes(32))]
        keys += [one._replace(parent=bytes(8)), one._replace(depth=2**32 - 1)]
        keys += [one._replace(group=1), one._replace(shard=2)]
        for number, key in enumerate(keys):
            assert backend.contains([key]) == [None]
            assert backend.write([Write(key, container(number))]) == [OK]
        assert [fetch(backend, key) for key in keys] == [container(number) for number in range(8)]
        assert settled(backend) == dict.fromkeys(keys, ALIGNMENT)

    def test_scan_finds_what_is_stored(self, backend: Backend) -> None:
        began = time.time()
        sizes = {key_of(n): put(backend, n, (1 + n % 2) * ALIGNMENT).nbytes for n in range(100)}
        gone = list(sizes)[::5]
        assert backend.delete(gone) == [True] * len(gone)
        assert settled(backend) == {key: nbytes for key, nbytes in sizes.items() if key not in gone}
        created = [each.created for batch in backend.scan() for each in batch]
        assert began - 2 < min(created) <= max(created) < time.time() + 2

    def test_threads_see_whole_objects_and_usage_stays_exact(self, backend: Backend) -> None:
        keys, versions = [key_of(n) for n in range(4)], [container(n, (16 + 48 * n) * ALIGNMENT) for n in range(2)]
        whole: list[object] = [*versions, Status.MISSING]

        def work(seed: int) -> None:
            for action, key, version in np.random.default_rng(seed).integers((16, 4, 2), size=(80, 3)):
                if action < 6:
                    assert backend.write([Write(keys[key], versions[version])])[0].status is Status.OK
                elif action < 12:
                    assert fetch(backend, keys[key]) in whole
                elif action < 15:
                    backend.delete([keys[key]])
                else:
                    assert set(listed(backend)) <= set(keys)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        assert set(settled(backend)) <= set(keys)

    def test_closed_is_quiet(self, backend: Backend) -> None:
        assert (backend.health().ok, type(backend.shared), backend.url in repr(backend)) == (True, bool, True)
        data = put(backend, 1)
        backend.close()
        backend.close()
        assert (backend.contains([key_of(1)]), backend.delete([key_of(1)])) == ([None], [False])
        assert backend.write([Write(key_of(2), data)])[0].status is fetch(backend, key_of(1)) is Status.ERROR
        assert (listed(backend), backend.health().ok) == ({}, False)
        assert backend.usage().used >= 0

    def test_what_is_stored_outlives_the_process(self, backend: Backend) -> None:
        data = {key_of(n): put(backend, n, (1 + n % 2) * ALIGNMENT) for n in range(20)}
        url, again = backend.url, self.reopen(backend)
        if again is None:
            import pytest

            pytest.skip("not persistent")
        with closing(again):
            assert again.url == url
            assert again.contains([key_of(3)]) == [2 * ALIGNMENT]  # also before a scan
            assert settled(again) == {key: each.nbytes for key, each in data.items()}
            assert {key: fetch(again, key) for key in data} == data
