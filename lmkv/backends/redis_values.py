"""How containers lie in the values of a Redis.

    <prefix><key>                           container, unix time in ms (u64 little-endian)
    <prefix>part/{<prefix><key>}/<id>/<n>   n-th piece, from 1, of a container that is too large for one value

The first piece of such a container is stored under its key after all others, and ends with the container's size (u64),
the 8 bytes that <id> has in hex, and the time. Every write has its own id, so the pieces of two never meet; the braces
keep them on one server of a cluster.
"""

from __future__ import annotations

import secrets
import struct
import time
from typing import NamedTuple

from lmkv.backends.base import ALIGNMENT
from lmkv.backends.resp import Reply

PIECE = 64 << 20  # bytes of a container in one value; readers go by what they find
PIECES = 1 << 12  # of one container, at most
_STAMP, _SPLIT = struct.Struct("<Q"), struct.Struct("<Q8sQ")
TAIL = _SPLIT.size  # bytes at the end of a value that say what it is
STAMP = _STAMP.size


class Split(NamedTuple):
    """Where the pieces of a container are: its size, the first's, and what the others' names begin with."""

    nbytes: int
    first: int
    names: bytes

    def pieces(self) -> list[tuple[bytes, int, int]]:
        """Name, start and stop of each but the first."""
        starts = range(self.first, self.nbytes, self.first)
        stops = (min(start + self.first, self.nbytes) for start in starts)
        return [(b"%b/%d" % (self.names, i), *span) for i, span in enumerate(zip(starts, stops, strict=True), 1)]


def stamp() -> bytes:
    """What is stored behind a container: the time."""
    return _STAMP.pack(int(time.time() * 1000))


def written_at(tail: bytes) -> float:
    """Unix seconds, of a value that ends so."""
    return int.from_bytes(tail[-STAMP:], "little") / 1000


def whole(length: Reply) -> int:
    """Bytes of the container in one value of that length, 0 if there is none."""
    nbytes = length - STAMP if isinstance(length, int) else 0
    return nbytes if nbytes > 0 and nbytes % ALIGNMENT == 0 else 0


def may_be_split(length: Reply) -> bool:
    """A value of that length may be the first of several pieces; its end says more."""
    return isinstance(length, int) and length > TAIL and length % ALIGNMENT == TAIL


def split(prefix: bytes, name: bytes, nbytes: int, first: int) -> tuple[Split, bytes]:
    """Pieces for a new container, and what is stored behind the first of them."""
    token = secrets.token_bytes(8)
    return Split(nbytes, first, _names(prefix, name, token)), _SPLIT.pack(nbytes, token, int(time.time() * 1000))


def parse(prefix: bytes, name: bytes, length: Reply, tail: Reply) -> Split | None:
    """The pieces of which a value, of that length and with that end, is the first; None: it is none."""
    if not isinstance(length, int) or not may_be_split(length) or not isinstance(tail, bytes) or len(tail) != TAIL:
        return None
    first, (nbytes, token, _) = length - TAIL, _SPLIT.unpack(tail)
    good = first < nbytes <= first * PIECES and nbytes % ALIGNMENT == 0
    return Split(nbytes, first, _names(prefix, name, token)) if good else None


def _names(prefix: bytes, name: bytes, token: bytes) -> bytes:
    return b"%bpart/{%b}/%b" % (prefix, name, token.hex().encode())
