"""The GPU's entropy decoder: the CPU's symbols, and how fast."""

from __future__ import annotations

import numpy as np
import pytest
from test_rans import a_case

from lmkv.codec import cuda_rans


@pytest.mark.parametrize(("alphabet", "bits", "cols"), [(16, 10, 256), (16, 12, 100), (5, 8, 33), (1, 9, 1)])
def test_symbols_are_those_of_the_cpu(alphabet: int, bits: int, cols: int) -> None:
    case = a_case(192, cols, alphabet, bits, 0.7, 1)
    for streams in (1, 2, 16):
        stream = memoryview(case.encode(streams))
        found = cuda_rans.rans_decode(stream, case.tables, case.freqs, case.bits, *case.symbols.shape)
        np.testing.assert_array_equal(found.get(), case.symbols)


def test_damaged_streams_are_refused() -> None:
    case = a_case(64, 64, 16, 10, 0.7, 9)
    stream = case.encode(2)
    for at in range(10, len(stream), 97):
        bad = bytearray(stream)
        bad[at] ^= 0x55
        with pytest.raises(ValueError, match="rANS"):
            cuda_rans.rans_decode(memoryview(bad), case.tables, case.freqs, case.bits, 64, 64)


def test_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """4,096 streams of 192 rows of 256 symbols at once, against a device copy of the bfloat16 they stand for."""
    import cupy

    case, many = a_case(192, 256, 16, 10, 0.7, 1), 4096
    stream = memoryview(case.encode(1))
    streams = np.repeat(cuda_rans.streams_of(stream, 192), many, axis=0)
    streams[:, 2] = np.arange(many) * 192
    symbols = cupy.empty((many * 192, 256), np.uint8)
    arguments = (
        cupy.asarray(np.frombuffer(stream, np.uint8)), cupy.asarray(streams), np.int64(many),
        cupy.asarray(np.tile(case.tables, many)), cupy.asarray(cuda_rans.entries_of(case.freqs, 10)), np.uint32(10),
        np.uint32(256), symbols, cupy.empty(many, np.uint32),
    )  # fmt: skip
    kernel = cuda_rans._kernel(cupy.cuda.runtime.getDevice())
    source, target = cupy.zeros(2 * symbols.size, np.uint8), cupy.empty(2 * symbols.size, np.uint8)

    def seconds(work) -> float:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        times = []
        for _ in range(7):
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        return sorted(times)[3]

    blocks = many * cuda_rans.LANES // cuda_rans.THREADS
    decoding = seconds(lambda: kernel((blocks,), (cuda_rans.THREADS,), arguments))
    copying = seconds(lambda: target.data.copy_from_device(source.data, source.nbytes))
    np.testing.assert_array_equal(symbols[-192:].get(), case.symbols)
    with capsys.disabled():
        gigabytes = 2 * symbols.size / 1e9
        print(f"\nrANS decode {gigabytes / decoding:.0f} GB/s of bfloat16, device copy {gigabytes / copying:.0f} GB/s")
