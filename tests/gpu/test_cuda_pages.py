"""The parity tests of tests/test_pages.py with pages in device memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_cases import Case, PinnedMachine, aligned, check_case, drawn_cases, fixed_cases, vllm_case

from lmkv import chunk, cuda
from lmkv.errors import BadInput
from lmkv.pages import Plane


class Gpu(PinnedMachine):
    """Engine memory on the device, containers in host memory that CUDA has registered."""

    def __init__(self, blocks: int = cuda.BLOCKS) -> None:
        super().__init__(blocks)
        import cupy

        self.cupy: Any = cupy

    def place(self, memory: np.ndarray) -> tuple[Any, int]:
        placed = self.cupy.asarray(memory)
        self.cupy.cuda.get_current_stream().synchronize()
        return placed, int(placed.data.ptr)

    def fetch(self, handle: Any) -> np.ndarray:
        return self.cupy.asnumpy(handle)


@pytest.fixture
def machine() -> Iterator[Gpu]:
    gpu = Gpu()
    yield gpu
    gpu.release()


@pytest.mark.parametrize("case", fixed_cases(), ids=lambda case: case.name)
def test_every_byte_is_what_numpy_says(case: Case, machine: Gpu) -> None:
    for seed in range(3):
        check_case(machine, case, seed)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=drawn_cases(), seed=st.integers(0, 2**32 - 1), blocks=st.sampled_from([1, 3, 32, 1000]))
def test_random_memory_and_grids(case: Case, seed: int, blocks: int, machine: Gpu) -> None:
    machine.blocks = blocks
    check_case(machine, case, seed)


def test_a_gather_waits_for_the_step_and_the_step_for_the_gather(machine: Gpu) -> None:
    """An engine stream writes the pages, a gather reads them, the stream then reuses them."""
    cupy = machine.cupy
    case = vllm_case("LBNHC", layers=8, pages=256, heads=8, tokens=16, dim=64, pages_per_chunk=16)
    memory, base = machine.place(np.zeros(case.nbytes, np.uint8))
    paged = machine.paged(case, base)
    slots = machine.containers(16, chunk.container_bytes(case.spec, 0))
    addresses = slots.ctypes.data + slots.shape[1] * np.arange(16)
    arguments = (0, addresses, np.arange(256), np.arange(17) * 16, np.zeros(16, np.int64))
    engine = cupy.cuda.Stream(non_blocking=True)
    for step in range(1, 6):
        with engine:
            for value in range(20):  # the pages hold `step` only once all of these have run
                memory.fill(100 + value)
            memory.fill(step)
            written = engine.record(cupy.cuda.Event())
        copy = paged.gather(*arguments, after=written)
        copy.hold(engine)
        with engine:
            memory.fill(0)
        copy.wait()
        assert copy.done()
        for part in chunk.layout(case.spec, 0):
            assert (slots[:, part.offset : part.offset + part.raw] == step).all()
    paged.close()


def test_planes_of_cupy_and_torch_arrays(machine: Gpu) -> None:
    array = machine.cupy.zeros((5, 2, 4, 8), "float16")[:, :, :, :6]
    plane = Plane.of(array)
    assert plane == Plane(int(array.data.ptr), 5, 128, (2, 4, 6), (64, 16, 2), 2)
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        tensor = torch.zeros(5, 2, 4, 8, dtype=torch.bfloat16, device="cuda")
        assert Plane.of(tensor).address == tensor.data_ptr()


def test_a_torch_event_and_stream_order_copies(machine: Gpu) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    case = vllm_case("LBHNC")
    memory = torch.zeros(case.nbytes, dtype=torch.uint8, device="cuda")
    paged = machine.paged(case, memory.data_ptr())
    slots = machine.containers(1, chunk.container_bytes(case.spec, 0))
    engine = torch.cuda.Stream()
    with torch.cuda.stream(engine):
        memory.fill_(7)
        step = torch.cuda.Event()
        step.record()
    copy = paged.gather(0, [slots.ctypes.data], [2, 4, 1], [0, 3], [0], after=step)
    copy.hold(engine)
    with torch.cuda.stream(engine):
        memory.fill_(0)
    copy.wait()
    part = chunk.layout(case.spec, 0)[0]
    assert (slots[0, part.offset : part.offset + part.raw] == 7).all()
    with pytest.raises(BadInput, match="never recorded"):
        paged.gather(0, [slots.ctypes.data], [2], [0, 1], [0], after=torch.cuda.Event())


def test_memory_that_is_not_pinned_is_refused(machine: Gpu) -> None:
    case = vllm_case("LBNHC")
    _, base = machine.place(np.zeros(case.nbytes, np.uint8))
    paged = machine.paged(case, base)
    stray = aligned(chunk.container_bytes(case.spec, 0), 4096)
    with pytest.raises(BadInput, match="not in pinned memory"):
        paged.gather(0, [stray.ctypes.data], [1], [0, 1], [0])
