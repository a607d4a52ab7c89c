"""Large containers are checked while they come; what is not right is left for the storage to find."""

from contextlib import closing
from dataclasses import replace

import pytest
from cache_servers import PAGE, Proxy, Server, store, whole

from lmkv import chunk
from lmkv.backends.base import Read, Result, Status, Write
from lmkv.backends.server import ServerBackend
from lmkv.errors import BadContainer
from lmkv.testing.backend_tests import buffer, key_of

NBYTES = 8 << 20


def read(client: ServerBackend, number: int) -> tuple[Result, memoryview]:
    into = buffer(NBYTES)
    (result,) = client.read([Read(key_of(number), into)])
    return result, into


def test_a_right_one_need_not_be_checked_again(opaque: Server) -> None:
    with closing(opaque.client()) as client:
        sent = store(client, 1, NBYTES)
        result, got = read(client, 1)
    assert (result, got) == (Result(Status.OK, NBYTES, verified=True), sent)
    chunk.verify(got, chunk.parse(got), key_of(1))


@pytest.mark.parametrize("flip", [2000, PAGE + 100, 3 << 20, NBYTES - 1])
def test_a_damaged_one_is_not_passed_as_right(opaque: Server, flip: int) -> None:
    with closing(opaque.client()) as client:
        sent = store(client, 2, NBYTES)
    # on this connection the header of the answer and the welcome come before the container
    for shift in (0, 64, 128, 192):
        proxy = Proxy(opaque, flip=flip + shift)
        with closing(proxy), closing(ServerBackend(f"lmkv://{proxy.address}")) as client:
            result, got = read(client, 2)
        if result.status is not Status.OK:  # the head of the answer was hit, or the container's end left out
            continue
        assert result.verified == (got == sent)
        if not result.verified:
            with pytest.raises(BadContainer):
                chunk.verify(got, chunk.parse(got), key_of(2))
            return
    pytest.fail("no try hit the container")


def test_another_chunks_container_is_not_passed_as_right(opaque: Server) -> None:
    with closing(opaque.client()) as client:
        assert client.write([Write(key_of(3), whole(4, NBYTES))])[0].status is Status.OK
        result, _ = read(client, 3)
    assert result == Result(Status.OK, NBYTES)


def test_an_unsealed_one_is_not_passed_as_right(opaque: Server) -> None:
    sealed = whole(5, NBYTES)
    header = chunk.parse(sealed)
    bare = buffer(NBYTES)
    bare[:] = sealed
    parts = tuple(part._replace(checksum=0) for part in header.parts)
    chunk.write_header(bare, replace(header, parts=parts, flags=header.flags & ~chunk.SEALED))
    with closing(opaque.client()) as client:
        assert client.write([Write(key_of(5), bare)])[0].status is Status.OK
        result, got = read(client, 5)
    assert (result, got) == (Result(Status.OK, NBYTES), bare)
