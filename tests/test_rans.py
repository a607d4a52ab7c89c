"""The native entropy coder against the plain Python one, bit by bit, at every vector level; and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import rans_reference as reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkv import _native as native

GOLDEN = Path(__file__).parent / "data" / "rans_v1.txt"
EVERY_LEVEL = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Case(NamedTuple):
    symbols: np.ndarray[Any, np.dtype[np.uint8]]
    tables: np.ndarray[Any, np.dtype[np.uint16]]
    freqs: np.ndarray[Any, np.dtype[np.uint16]]
    bits: int

    def encode(self, streams: int = 0, room: int | None = None) -> bytes:
        out = bytearray(2 * self.symbols.size + 4000 if room is None else room)
        used = native.rans_encode(self.symbols, self.tables, self.freqs, self.bits, out, streams)
        return bytes(out[:used])

    def decode(self, stream: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
        symbols = np.full_like(self.symbols, 0xEE)
        native.rans_decode(stream, self.tables, self.freqs, self.bits, symbols)
        return symbols

    def plainly(self, streams: int) -> bytes:
        rows = [row.tobytes() for row in self.symbols]
        return reference.encode(rows, self.tables.tolist(), self.freqs.tolist(), self.bits, streams)

    def plainly_decoded(self, stream: bytes) -> list[bytes] | None:
        shape = self.symbols.shape
        return reference.decode(stream, self.tables.tolist(), self.freqs.tolist(), self.bits, *shape)


def a_case(rows: int, cols: int, alphabet: int, bits: int, skew: float, seed: int, zeros: bool = False) -> Case:
    """Symbols drawn from three random tables. skew: 0.05 gives nearly constant rows, 10 nearly flat ones."""
    rng = np.random.default_rng(seed)
    freqs = np.zeros((3, alphabet), np.uint16)
    for table in freqs:
        some = rng.random(alphabet) < 0.5 if zeros else np.ones(alphabet, bool)
        some[rng.integers(alphabet)] = True
        share = rng.dirichlet(np.full(alphabet, skew)) * some
        table[:] = some + np.floor(share / max(share.sum(), 1e-9) * ((1 << bits) - some.sum()))
        table[some.argmax()] += (1 << bits) - int(table.sum(dtype=np.int64))
    tables = rng.integers(0, 3, rows).astype(np.uint16)
    symbols = np.array([rng.choice(alphabet, cols, p=freqs[t] / (1 << bits)) for t in tables], np.uint8)
    return Case(symbols, tables, freqs, bits)


cases = st.builds(
    a_case,
    rows=st.integers(1, 9),
    cols=st.sampled_from([1, 5, 31, 32, 33, 64, 100, 256]),
    alphabet=st.sampled_from([1, 2, 11, 15, 16, 17, 40, 256]),
    bits=st.integers(8, 12),
    skew=st.sampled_from([0.05, 0.5, 10.0]),
    seed=st.integers(0, 2**32 - 1),
    zeros=st.booleans(),
)


@EVERY_LEVEL
@given(case=cases, streams=st.integers(1, 4))
def test_streams_are_those_of_the_format(case: Case, streams: int, level: str) -> None:
    streams = min(streams, len(case.symbols))
    stream = case.encode(streams)
    assert stream == case.plainly(streams)
    assert (case.decode(stream) == case.symbols).all()
    assert case.plainly_decoded(stream) == [row.tobytes() for row in case.symbols]


@EVERY_LEVEL
@given(case=cases, data=st.data())
def test_a_damaged_stream_is_refused_or_decodes_as_the_format_says(case: Case, data: st.DataObject, level: str) -> None:
    stream = bytearray(case.encode())
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "insert"]))
    at = data.draw(st.integers(0, len(stream) - 1))
    if kind == "flip":
        stream[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del stream[at:]
    else:
        stream[len(stream) if kind == "longer" else at :] += bytes(data.draw(st.integers(1, 4)))
    expected = case.plainly_decoded(bytes(stream))
    if expected is None:
        with pytest.raises(ValueError, match="rANS"):
            case.decode(bytes(stream))
    else:
        assert [row.tobytes() for row in case.decode(bytes(stream))] == expected


@pytest.mark.parametrize("alphabet", [16, 40])
def test_every_cut_and_every_flipped_byte(alphabet: int, level: str) -> None:
    case = a_case(6, 70, alphabet, 10, 0.7, 3)
    stream = case.encode(2)
    for length in range(len(stream)):
        with pytest.raises(ValueError, match="rANS"):
            case.decode(stream[:length])
    refused = 0
    for at in range(len(stream)):
        bad = bytearray(stream)
        bad[at] ^= 0x55
        try:
            case.decode(bytes(bad))
        except ValueError:
            refused += 1
    assert refused == len(stream)  # final states give nearly every change away, and all of these


def test_large_streams_are_the_same_at_every_level(level: str) -> None:
    case = a_case(700, 256, 16, 10, 0.5, 1)
    stream = case.encode()
    assert stream[1] == 2  # streams
    assert (case.decode(stream) == case.symbols).all()
    native.limit_simd("portable")
    assert case.encode() == stream


def test_room(level: str) -> None:
    case = a_case(5, 96, 16, 12, 0.5, 2)
    stream = case.encode()
    assert case.encode(room=len(stream)) == stream
    for room in range(len(stream)):
        assert case.encode(room=room) == b""


def test_size_is_near_the_entropy() -> None:
    case = a_case(400, 256, 16, 12, 1.0, 4)
    share = np.take_along_axis(case.freqs[case.tables] / 4096, case.symbols.astype(np.int64), 1)
    assert len(case.encode(1)) == pytest.approx(-np.log2(share).sum() / 8 + 134 - 64, rel=2e-3)


def test_what_cannot_be_coded_is_refused(level: str) -> None:
    case = a_case(3, 64, 16, 10, 1.0, 5)
    none = case.freqs.copy()
    none[case.tables[1], case.symbols[1, 40]] = 0
    none[case.tables[1], 15 if case.symbols[1, 40] != 15 else 0] += 1024 - none[case.tables[1]].sum(dtype=np.int64)
    beyond = case.symbols.copy()
    beyond[1, 3] = 33
    wrong_sum = case.freqs.copy()
    wrong_sum[0, 0] += 1
    for change, why in [
        ({"freqs": none}, "no frequency"),
        ({"symbols": beyond}, "no frequency"),
        ({"freqs": wrong_sum}, "sum"),
        ({"tables": np.array([0, 1, 3], np.uint16)}, "table number"),
        ({"tables": np.array([0, 1], np.uint16)}, "each row"),
        ({"bits": 7}, "bits"),
        ({"bits": 13}, "bits"),
        ({"symbols": np.zeros((3, 0), np.uint8)}, "a symbol"),
    ]:
        with pytest.raises(ValueError, match=why):
            case._replace(**change).encode()
    with pytest.raises(ValueError, match="streams"):
        a_case(20, 1, 2, 8, 1.0, 0).encode(17)
    with pytest.raises(TypeError):
        case._replace(symbols=case.symbols.astype(np.int32)).encode()


def golden() -> Iterator[tuple[str, Case, int, bytes]]:
    """Streams kept as text: a name, bits, streams; tables; freqs; symbols in hex; the stream in hex."""
    for block in GOLDEN.read_text().split("\n\n")[1:]:
        title, tables, freqs, symbols, stream = block.strip().split("\n", 4)
        name, bits, streams = title.split()
        rows = [bytes.fromhex(row) for row in symbols.split()]
        case = Case(
            np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1),
            np.array(tables.split(), np.uint16),
            np.array([row.split() for row in freqs.split(";")], np.uint16),
            int(bits),
        )
        yield name, case, int(streams), bytes.fromhex(stream)


@pytest.mark.parametrize("name", ["small", "plain", "ragged"])
def test_golden_streams(name: str, level: str) -> None:
    case, streams, stream = {each[0]: each[1:] for each in golden()}[name]
    assert case.encode(streams) == stream
    assert (case.decode(stream) == case.symbols).all()
    assert case.plainly(streams) == stream
