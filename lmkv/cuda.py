"""L1 on a GPU: the copies of :mod:`lmkv.pages` by a CUDA kernel.

The kernel (``copy_pages.cu``) reads and writes the containers over PCIe itself: one pass where staging and
``cudaMemcpyAsync`` need two and memory of the engine. It costs a few SMs while it runs, which ``blocks`` bounds. CuPy,
imported inside functions, compiles it with NVRTC on first use: no wheel depends on a CUDA or torch build.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmkv.errors import BadInput, LmkvError
from lmkv.pages import Copy, GroupView, Ints, Order, PagedKV, PageTable
from lmkv.spec import KVSpec

THREADS = 256
IN_FLIGHT = 4  # kInFlight of the kernel
BLOCKS = 32  # * 256 * 4 * 16 B = 512 KiB in flight; PCIe 5 x16 needs 64 GB/s * 2 us = 128 KiB


def kernel_source(name: str = "copy_pages.cu") -> str:
    """A kernel's text: beside this file in a wheel, in ``csrc/cuda`` in a checkout."""
    here = Path(__file__).resolve().parent
    for path in (here / "_cuda" / name, here.parent / "csrc" / "cuda" / name):
        if path.is_file():
            return path.read_text()
    raise LmkvError(f"{name} is missing: neither in {here / '_cuda'} nor in csrc/cuda")


def kernel_planes(table: PageTable) -> tuple[Ints, int]:
    """The kernel's plane array, int64 [n, 12] = the plan's rows and the vector width of each, and how many tiles a page
    of the largest plane takes."""
    rows = table.rows
    unit = np.gcd.reduce(np.delete(rows, (5, 8), axis=1), axis=1)  # of all but the counts n0, n1
    width = np.where(unit % 16 == 0, 16, np.where(unit % 4 == 0, 4, 1))
    largest = int((rows[:, 4] * rows[:, 5] * rows[:, 8] // width).max())
    if largest >= 1 << 31:
        raise BadInput(f"a page of {largest} vectors is too large for the kernel's 32-bit indices")
    return np.column_stack([rows, width]), -(-largest // (THREADS * IN_FLIGHT))


def kernel_pages(slots: Ints, page_ids: Ints, starts: Ints, first: Ints) -> Ints:
    """The kernel's page array, int64 [m, 3]: container address, chunk position, page id."""
    chunk = np.repeat(np.arange(len(slots)), np.diff(starts))
    position = np.arange(len(page_ids)) - starts[chunk] + first[chunk]
    return np.column_stack([slots[chunk], position, page_ids])


class PinnedMemory:
    """Host memory that CUDA has registered, so that a kernel may use its addresses. Thread-safe.

    Registering locks pages, and faults in those never touched: do it slab by slab, in the background. LmkvError: the
    device cannot use host addresses. CuPy's CUDARuntimeError: CUDA refuses a range.
    """

    def __init__(self, device: int | None = None) -> None:
        from cupy.cuda import Device, runtime

        self._device = Device(device)
        number, usable = self._device.id, runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        if not runtime.deviceGetAttribute(usable, number):
            raise LmkvError(f"CUDA device {number} cannot use the host's addresses")
        self._runtime: Any = runtime
        self._ranges: Ints = np.zeros((0, 2), np.int64)  # begin and end of each, rising; replaced, never changed
        self._lock = threading.Lock()

    def add(self, address: int, nbytes: int) -> None:
        """Register ``[address, address + nbytes)``: whole slabs, none twice."""
        with self._lock, self._device:
            self._runtime.hostRegister(address, nbytes, 1 | 2)  # cudaHostRegisterPortable | cudaHostRegisterMapped
            at = np.searchsorted(self._ranges[:, 0], address)
            self._ranges = np.insert(self._ranges, at, (address, address + nbytes), axis=0)

    def remove(self, address: int) -> None:
        """Unregister what :meth:`add` registered at ``address``; no copy may be in flight there."""
        with self._lock:
            others = self._ranges[self._ranges[:, 0] != address]
            if len(others) < len(self._ranges):
                self._ranges = others
                self._runtime.hostUnregister(address)

    def close(self) -> None:
        """Unregister everything. Copies must be over; the memory itself stays the caller's."""
        for address in self._ranges[:, 0].tolist():
            self.remove(address)

    def covers(self, addresses: Ints, nbytes: int) -> bool:
        """Whether every ``[address, address + nbytes)`` lies inside one registered range."""
        ranges = self._ranges
        at = np.searchsorted(ranges[:, 0], addresses, side="right") - 1
        return bool((at >= 0).all() and (addresses + nbytes <= ranges[at, 1]).all())


class CudaCopy(Copy):
    """A copy on our stream; ``event`` is the CuPy event behind it. A failed one raises CuPy's CUDARuntimeError."""

    def __init__(self, event: Any, runtime: Any, keep: tuple[Any, ...]) -> None:
        self.event, self._runtime, self._keep = event, runtime, keep

    def done(self) -> bool:
        status = self._runtime.eventQuery(self.event.ptr)
        if status not in (0, 600):  # cudaErrorNotReady
            self.event.synchronize()
        return bool(status == 0)

    def wait(self) -> None:
        self.event.synchronize()

    def hold(self, stream: Any) -> None:
        """``stream``: CuPy's, torch's, or a raw handle."""
        self._runtime.streamWaitEvent(_handle(stream, "ptr", "cuda_stream"), self.event.ptr)


class CudaPagedKV(PagedKV):
    """:class:`lmkv.pages.PagedKV` for planes in device memory. Thread-safe. Close before dropping.

    Copies are asynchronous: pages and containers, which ``pinned`` must cover, stay as they are until one is done.
    ``device``: a CUDA ordinal, by default the current one. ``after``: an event of CuPy or torch, or a raw handle.
    Gathers and scatters have a non-blocking stream each, so that a load does not queue behind a save.
    """

    def __init__(
        self, spec: KVSpec, groups: Sequence[GroupView], pinned: PinnedMemory, order: Order = "physical",
        keep: Any = None, device: int | None = None, blocks: int = BLOCKS,
    ) -> None:  # fmt: skip
        import cupy

        super().__init__(spec, groups, order, keep=keep)
        if blocks < 1:
            raise BadInput(f"blocks must be at least 1, not {blocks}")
        self._cupy: Any = cupy
        self._pinned, self._blocks, self._device = pinned, blocks, cupy.cuda.Device(device)
        self._lock, self._flight = threading.Lock(), (deque[CudaCopy](), deque[CudaCopy]())
        with self._device:
            self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in self._flight]
            self._kernel = cupy.RawModule(code=kernel_source(), options=("--std=c++17",)).get_function("copy_pages")
            self._planes = [(cupy.asarray(rows), len(rows), tiles) for rows, tiles in map(kernel_planes, self.tables)]
            cupy.cuda.get_current_stream().synchronize()  # of the upload, for which our streams do not wait

    def close(self) -> None:
        """Wait for every copy that was started."""
        with self._lock:
            for flight in self._flight:
                while flight:
                    flight.popleft().wait()

    def _copy(self, gather: bool, group: int, arrays: tuple[Ints, Ints, Ints, Ints], after: Any) -> Copy:
        event = None if after is None else _handle(after, "ptr", "cuda_event")
        if event == 0:
            raise BadInput("the event to wait for was never recorded")
        pages, slots = kernel_pages(*arrays), arrays[0]
        if not len(pages):
            return Copy()
        # An address the device cannot reach would end the CUDA context, and the engine with it.
        if (slots % 16).any() or not self._pinned.covers(slots, self.tables[group].payload_bytes):
            raise BadInput(f"group {group}: a container is not in pinned memory")
        planes, plane_count, tiles = self._planes[group]
        cuda, stream, flight = self._cupy.cuda, self._streams[gather], self._flight[gather]
        with self._lock, self._device, stream:
            while flight and flight[0].done():
                flight.popleft()
            # Uploading from pageable memory would block; both buffers live until the event.
            staging = cuda.alloc_pinned_memory(pages.nbytes)
            np.frombuffer(staging, np.int64, pages.size)[:] = pages.ravel()
            uploaded = self._cupy.empty(pages.size, np.int64)
            uploaded.data.copy_from_host_async(staging.ptr, pages.nbytes, stream)
            if event:
                cuda.runtime.streamWaitEvent(stream.ptr, event)
            grid = min(self._blocks, plane_count * len(pages) * tiles)
            numbers = [np.int64(number) for number in (len(pages), tiles, gather)]
            self._kernel((grid,), (THREADS,), (planes, np.int64(plane_count), uploaded, *numbers))
            event_behind = stream.record(cuda.Event(block=True, disable_timing=True))
            flight.append(CudaCopy(event_behind, cuda.runtime, (staging, uploaded)))
            return flight[-1]


def _handle(thing: Any, *names: str) -> int:
    """A CUDA handle: an int, or the attribute that CuPy or torch keeps it in."""
    found = next((getattr(thing, name) for name in names if hasattr(thing, name)), thing)
    if not isinstance(found, int):
        raise BadInput(f"{type(thing).__name__} is not a CUDA handle of CuPy or torch")
    return found
