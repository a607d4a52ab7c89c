"""CUDA on the CPU, as much of it as ``lmkv.cuda`` uses, for machines without a GPU.

``copy_pages.cu`` is compiled as C++ and run block by block, thread by thread; a module stands in
for CuPy. Streams are lazy: work runs when somebody waits for an event behind it, so that a copy
which forgot to wait, or freed what it still needs, shows. "Device" addresses are host addresses.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SHIM = """
#include <cstdint>
#define __global__
#define __device__
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
static long long stored, misaligned;
template <typename T> T __ldcs(const T* from) {
    misaligned += reinterpret_cast<std::uintptr_t>(from) % sizeof(T) != 0;
    return *from;
}
template <typename T> void __stcs(T* to, T value) {
    misaligned += reinterpret_cast<std::uintptr_t>(to) % sizeof(T) != 0;
    stored += sizeof(T);
    *to = value;
}
#include "copy_pages.cu"
// Bytes stored by all threads, -1 when a vector was not aligned to its size.
extern "C" long long run(unsigned blocks, unsigned threads, const Plane* planes, int64 plane_count,
                         const Page* pages, int64 page_count, int64 tiles, int64 gather) {
    gridDim.x = blocks, blockDim.x = threads, stored = misaligned = 0;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            copy_pages(planes, plane_count, pages, page_count, tiles, gather);
    return misaligned ? -1 : stored;
}
"""


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def build(source: Path, folder: Path) -> Callable[..., int]:
    """The kernel of ``source`` as a function (blocks, threads, *its arguments) -> bytes stored."""
    shim, library = folder / "shim.cpp", folder / "kernel.so"
    shim.write_text(SHIM)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", f"-I{source.parent}"]
    subprocess.run([compiler(), *flags, str(shim), "-o", str(library)], check=True)
    run = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_longlong
    run.argtypes = [ctypes.c_uint] * 2 + [ctypes.c_void_p, ctypes.c_longlong] * 2
    run.argtypes += [ctypes.c_longlong] * 2
    return run


class Stream:
    def __init__(self, runtime: Runtime, non_blocking: bool = False) -> None:
        self._runtime = runtime
        self.non_blocking = non_blocking
        self.ptr = runtime.new_handle(self)
        self.queue: list[Callable[[], None]] = []

    def __enter__(self) -> Stream:
        self._runtime.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.current.pop()

    def record(self, event: Event) -> Event:
        event.behind = (self, len(self.queue) + self._runtime.ran.get(self.ptr, 0))
        return event

    def run(self, until: int) -> None:
        while self.queue and self._runtime.ran.get(self.ptr, 0) < until:
            self._runtime.ran[self.ptr] = self._runtime.ran.get(self.ptr, 0) + 1
            self.queue.pop(0)()

    def synchronize(self) -> None:
        self.run(1 << 62)


class Event:
    def __init__(self, runtime: Runtime, block: bool = False, disable_timing: bool = False) -> None:
        self.sleeps = block
        self.behind: tuple[Stream, int] | None = None  # how many of a stream's works
        self.failed = False
        self.ptr = runtime.new_handle(self)

    def synchronize(self) -> None:
        if self.failed:
            raise RuntimeError("cudaErrorIllegalAddress")
        if self.behind:
            self.behind[0].run(self.behind[1])


class Runtime:
    """``cupy.cuda.runtime``."""

    cudaDevAttrCanUseHostPointerForRegisteredMem = 91

    def __init__(self) -> None:
        self.handles: dict[int, Any] = {}
        self.current: list[Stream] = []
        self.ran: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.host_addresses_usable = 1

    def new_handle(self, thing: Any) -> int:
        self.handles[len(self.handles) + 1] = thing
        return len(self.handles)

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        assert attribute == 91
        return self.host_addresses_usable

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        assert flags == 3
        assert address not in self.registered
        self.registered[address] = nbytes

    def hostUnregister(self, address: int) -> None:
        del self.registered[address]

    def eventQuery(self, handle: int) -> int:
        event = self.handles[handle]
        if event.failed:
            return 700
        stream, until = event.behind
        return 0 if self.ran.get(stream.ptr, 0) >= until else 600

    def streamWaitEvent(self, stream: int, event: int) -> None:
        self.handles[stream].queue.append(self.handles[event].synchronize)


class DevicePointer:
    def __init__(self, address: int) -> None:
        self.ptr = address

    def copy_from_host_async(self, source: int, nbytes: int, stream: Stream) -> None:
        stream.queue.append(lambda: ctypes.memmove(self.ptr, source, nbytes))


class DeviceArray:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.data = DevicePointer(array.ctypes.data)


RECYCLED = 0x7F7F7F7F7F7F7F7F


class PinnedPool:
    """Buffers whose bytes all turn to 0x7F as soon as their owner lets go of them."""

    def __init__(self) -> None:
        self.memory: list[np.ndarray] = []

    def alloc(self, nbytes: int) -> Any:
        memory = np.zeros(nbytes, np.uint8)
        self.memory.append(memory)

        class Pinned(np.ndarray):
            ptr = memory.ctypes.data

            def __del__(self) -> None:
                memory[:] = 0x7F

        return memory.view(Pinned)


def fake_cupy(kernel: Callable[..., int], checks: list[int]) -> types.ModuleType:
    """A module with CuPy's names. ``checks`` collects what every kernel run returned."""
    runtime = Runtime()
    default = Stream(runtime)
    runtime.current.append(default)

    class Device:
        def __init__(self, number: int | None = None) -> None:
            self.id = number or 0

        def __enter__(self) -> Device:
            return self

        def __exit__(self, *_: object) -> None: ...

    def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        assert all(isinstance(each, (DeviceArray, np.int64)) for each in arguments)
        raw = [a.data.ptr if isinstance(a, DeviceArray) else int(a) for a in arguments]
        arrays = [a.array for a in arguments if isinstance(a, DeviceArray)]

        def work() -> None:
            assert not any((array == RECYCLED).any() for array in arrays), "uploaded too late"
            checks.append(kernel(grid[0], block[0], *raw))

        runtime.current[-1].queue.append(work)

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            assert 'extern "C" __global__ void copy_pages' in code

        def get_function(self, name: str) -> Callable[..., None]:
            assert name == "copy_pages"
            return launch

    kept: list[DeviceArray] = []  # CuPy's pool gives memory back in stream order

    def empty(size: int, dtype: type) -> DeviceArray:
        kept.append(DeviceArray(np.zeros(size, dtype)))
        return kept[-1]

    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    cupy.cuda, cupy.RawModule, cupy.empty = cuda, RawModule, empty
    cupy.asarray = lambda array: DeviceArray(array.copy())
    cuda.runtime, cuda.Device = runtime, Device
    cuda.Stream = lambda **options: Stream(runtime, **options)
    cuda.Event = lambda **options: Event(runtime, **options)
    cuda.get_current_stream = lambda: runtime.current[-1]
    cuda.alloc_pinned_memory = PinnedPool().alloc
    return cupy
