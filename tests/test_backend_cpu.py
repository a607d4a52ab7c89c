"""Host memory passes the conformance suite that every backend passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmkv import backends
from lmkv.arena import Arena
from lmkv.backends.base import Read, Status, Write
from lmkv.backends.cpu import CpuBackend
from lmkv.errors import ConfigError
from lmkv.testing import BackendTests, container, key_of


class TestCpu(BackendTests):
    @pytest.fixture
    def backend(self) -> Iterator[backends.Backend]:
        opened = backends.open("cpu://?budget=128MiB")
        yield opened
        opened.close()


def test_a_held_slot_keeps_its_bytes_after_the_key_is_gone() -> None:
    backend = CpuBackend(arena=Arena(8192, 4096, [4096], touch=False))
    data = container(1, 4096)
    backend.write([Write(key_of(1), memoryview(data))])
    slot = backend.hold(key_of(1))
    assert slot is not None
    assert backend.pop(key_of(1))
    assert not backend.pop(key_of(1))
    backend.write([Write(key_of(2), memoryview(container(2, 4096)))])
    assert bytes(slot.view(4096)) == bytes(data)
    backend.arena.release(slot)
    assert backend.write([Write(key_of(3), memoryview(data))])[0].status is Status.OK


def test_full_is_a_result() -> None:
    backend = CpuBackend(arena=Arena(4096, 4096, [4096], touch=False))
    data = memoryview(container(1, 4096))
    assert [r.status for r in backend.write([Write(key_of(i), data) for i in (1, 2)])] == [Status.OK, Status.FULL]
    big = memoryview(container(1, 8192))
    assert backend.write([Write(key_of(3), big)])[0].status is Status.FULL
    assert backend.read([Read(key_of(2), memoryview(bytearray(4096)))])[0].status is Status.MISSING


@pytest.mark.parametrize("url", ["cpu://here", "cpu://?budgte=1MiB", "cpu://?budget=none"])
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        backends.open(url)
