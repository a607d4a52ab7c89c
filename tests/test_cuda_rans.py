"""The GPU's entropy decoder without a GPU: compiled by nvcc, and run on the CPU with a thread a lane."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from emulated_cuda import compiler
from test_rans import Case, a_case

from lmkv.codec.cuda_rans import entries_of, streams_of

SOURCE = Path(__file__).parents[1] / "csrc" / "cuda" / "rans.cu"
SHIM = """
#include <atomic>
#include <barrier>
#include <thread>
#include <vector>
#define __global__
#define __device__
struct Dim { unsigned x; };
static thread_local Dim threadIdx;
static Dim blockIdx, blockDim, gridDim;
static std::barrier lanes(32);
static unsigned values[32];
static std::atomic<unsigned> votes;
static unsigned __shfl_sync(unsigned, unsigned value, int from) {
    values[threadIdx.x] = value;
    lanes.arrive_and_wait();
    value = values[from];
    lanes.arrive_and_wait();
    return value;
}
static unsigned __ballot_sync(unsigned, bool vote) {
    if (vote) votes |= 1u << threadIdx.x;
    lanes.arrive_and_wait();
    const unsigned all = votes;
    lanes.arrive_and_wait();
    votes = 0;
    lanes.arrive_and_wait();
    return all;
}
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
#include "rans.cu"
extern "C" void run(const unsigned char* src, const Stream* streams, int64 count, const unsigned short* tables,
                    const unsigned* entries, unsigned bits, unsigned cols, unsigned char* symbols, unsigned* bad) {
    gridDim.x = 1, blockDim.x = 32, blockIdx.x = 0;
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 32; ++i)
        threads.emplace_back([=] {
            threadIdx.x = i;
            rans_decode(src, streams, count, tables, entries, bits, cols, symbols, bad);
        });
    for (auto& each : threads) each.join();
}
"""

Decode = Callable[[Case, bytes], "np.ndarray | None"]


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Decode:
    """The kernel; None for a stream that it finds damaged."""
    if compiler() is None:
        pytest.skip("no g++ or clang++ to emulate with")
    folder = tmp_path_factory.mktemp("rans")
    (folder / "shim.cpp").write_text(SHIM)
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", f"-I{SOURCE.parent}"]
    library = folder / "rans.so"
    subprocess.run([compiler(), *flags, str(folder / "shim.cpp"), "-o", str(library)], check=True)
    run = ctypes.CDLL(str(library)).run
    run.restype = None

    def decoded(case: Case, stream: bytes) -> np.ndarray | None:
        rows, cols = case.symbols.shape
        streams, entries = streams_of(memoryview(stream), rows), entries_of(case.freqs, case.bits)
        symbols, bad = np.full((rows, cols), 0xEE, np.uint8), np.full(len(streams), 7, np.uint32)
        pointer = [ctypes.c_void_p(each.ctypes.data) for each in (streams, case.tables, entries, symbols, bad)]
        run(
            stream, pointer[0], ctypes.c_longlong(len(streams)), pointer[1], pointer[2], case.bits, cols, pointer[3],
            pointer[4],
        )  # fmt: skip
        assert set(bad.tolist()) <= {0, 1}
        return None if bad.any() else symbols

    return decoded


@pytest.mark.parametrize(("alphabet", "bits", "cols"), [(16, 10, 64), (16, 12, 33), (5, 8, 70), (1, 9, 1)])
def test_symbols_are_those_of_the_cpu(alphabet: int, bits: int, cols: int, decode: Decode) -> None:
    case = a_case(5, cols, alphabet, bits, 0.7, alphabet)
    for streams in (1, 3):
        found = decode(case, case.encode(streams))
        assert found is not None
        np.testing.assert_array_equal(found, case.symbols)


def test_damaged_streams_are_refused(decode: Decode) -> None:
    case = a_case(4, 64, 16, 10, 0.7, 9)
    stream = case.encode(2)
    for length in (0, 1, 5, 10, len(stream) - 1):
        with pytest.raises(ValueError, match="rANS"):
            streams_of(memoryview(stream[:length]), 4)
    with pytest.raises(ValueError, match="rANS"):
        streams_of(memoryview(stream + b"\0"), 4)
    for at in range(10, len(stream), 9):
        bad = bytearray(stream)
        bad[at] ^= 0x55
        assert decode(case, bytes(bad)) is None
