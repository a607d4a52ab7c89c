"""The CUDA kernel and its Python side, without a GPU: compiled by nvcc, run in an emulation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_cuda import DeviceArray, build, compiler, fake_cupy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page_cases import Case, HostMachine, PinnedMachine, aligned, check_case, drawn_cases, fixed_cases, vllm_case

from lmkv import chunk, cuda
from lmkv.errors import BadInput, LmkvError

SOURCE = Path(__file__).parents[1] / "csrc" / "cuda" / "copy_pages.cu"
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ or clang++ to emulate with")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("source", sorted(SOURCE.parent.glob("*.cu")), ids=lambda source: source.stem)
def test_nvcc_compiles_each_kernel_without_spills(source: Path, architecture: str, tmp_path: Path) -> None:
    command = ["nvcc", "-cubin", f"-arch={architecture}", "-std=c++17", "-Werror=all-warnings"]
    command += ["-Xptxas", "-v", str(source), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


def test_the_kernel_source_is_found() -> None:
    assert cuda.kernel_source() == SOURCE.read_text()
    assert f"kInFlight = {cuda.IN_FLIGHT};" in cuda.kernel_source()


def test_a_wheel_has_the_kernel_source_beside_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "lmkv" / "_cuda" / "copy_pages.cu"
    monkeypatch.setattr(cuda, "__file__", str(tmp_path / "lmkv" / "cuda.py"))
    with pytest.raises(LmkvError, match="is missing"):
        cuda.kernel_source()
    installed.parent.mkdir(parents=True)
    installed.write_text("kernel")
    assert cuda.kernel_source() == "kernel"


class Emulated(PinnedMachine):
    """Engine memory and pinned containers as CudaPagedKV sees them, on the emulated device."""

    def __init__(self, cupy: Any, checks: list[int], blocks: int = cuda.BLOCKS) -> None:
        super().__init__(blocks)
        self.cupy, self.checks = cupy, checks


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    return build(SOURCE, tmp_path_factory.mktemp("kernel"))


@pytest.fixture
def machine(kernel: Callable[..., int]) -> Iterator[Emulated]:
    with pytest.MonkeyPatch.context() as patch:
        yield emulate(patch, kernel)


def emulate(patch: pytest.MonkeyPatch, kernel: Callable[..., int], blocks: int = cuda.BLOCKS) -> Emulated:
    checks: list[int] = []
    cupy = fake_cupy(kernel, checks)
    patch.setitem(sys.modules, "cupy", cupy)
    patch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    return Emulated(cupy, checks, blocks)


def copied(case: Case, pages: int, group: int = 0) -> int:
    """Payload bytes of so many pages."""
    which = case.spec.groups[group]
    return pages * len(which.layers) * which.layer_page_bytes


@needs_compiler
@pytest.mark.parametrize("case", fixed_cases(), ids=lambda case: case.name)
def test_every_byte_is_what_numpy_says(case: Case, machine: Emulated) -> None:
    for seed in range(3):
        check_case(machine, case, seed)
    assert -1 not in machine.checks, "a vector was not aligned to its size"


@needs_compiler
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=drawn_cases(), seed=st.integers(0, 2**32 - 1), blocks=st.sampled_from([1, 3, 32, 1000]))
def test_random_memory_and_grids(case: Case, seed: int, blocks: int, kernel: Callable[..., int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        machine = emulate(patch, kernel, blocks)
        check_case(machine, case, seed)
        assert -1 not in machine.checks


@needs_compiler
def test_a_wrong_kernel_would_be_noticed(tmp_path: Path) -> None:
    """Control: one stride mistaken for another in the kernel fails the comparison."""
    text = SOURCE.read_text()
    assert text.count("b * plane.payload_stride1") == 1
    wrong = tmp_path / "copy_pages.cu"
    wrong.write_text(text.replace("b * plane.payload_stride1", "b * plane.payload_stride0"))
    case = vllm_case("LBNHC", order="logical")
    with pytest.MonkeyPatch.context() as patch:
        machine = emulate(patch, build(wrong, tmp_path))
        with pytest.raises(AssertionError):
            check_case(machine, case, 1)


class Placed:
    """A case in emulated device memory with two pinned containers."""

    def __init__(self, machine: Emulated, case: Case) -> None:
        self.case, self.machine = case, machine
        rng = np.random.default_rng(5)
        self.memory, base = machine.place(rng.integers(0, 256, case.nbytes, np.uint8))
        self.paged = machine.paged(case, base)
        nbytes = chunk.container_bytes(case.spec, 0)
        self.slots = machine.containers(2, nbytes)
        self.addresses = self.slots.ctypes.data + nbytes * np.arange(2)
        self.arguments = (0, self.addresses, [5, 1, 3, 8], [0, 3, 4], [0, 2])


@needs_compiler
class TestCopies:
    def test_a_copy_is_done_when_its_event_is(self, machine: Emulated) -> None:
        placed = Placed(machine, vllm_case("LBNHC"))
        copy = placed.paged.gather(*placed.arguments)
        assert not copy.done()
        assert not placed.slots.any()
        copy.wait()
        assert copy.done()
        assert placed.slots.any()
        assert machine.checks == [copied(placed.case, 4)]

    def test_each_direction_has_a_stream_that_does_not_wait_for_the_default_one(self, machine: Emulated) -> None:
        placed = Placed(machine, vllm_case("LBNHC"))
        save = placed.paged.gather(*placed.arguments)
        load = placed.paged.scatter(*placed.arguments)
        load.wait()
        assert not save.done()
        streams = [s for s in machine.cupy.cuda.runtime.handles.values() if hasattr(s, "queue")]
        assert [s.non_blocking for s in streams] == [False, True, True]

    @pytest.mark.parametrize("kind", ["cupy", "torch", "handle"])
    def test_a_gather_waits_for_the_step_that_writes_its_pages(self, machine: Emulated, kind: str) -> None:
        placed = Placed(machine, vllm_case("LBNHC"))
        engine = machine.cupy.cuda.Stream()
        engine.queue.append(lambda: placed.memory.fill(0xAB))
        step = engine.record(machine.cupy.cuda.Event())
        after = {"cupy": step, "torch": TorchEvent(step.ptr), "handle": step.ptr}[kind]
        placed.paged.gather(*placed.arguments).wait()
        early = placed.slots.copy()
        placed.paged.gather(*placed.arguments, after=after).wait()
        payload = placed.slots[:, 4096:][placed.slots[:, 4096:] != early[:, 4096:]]
        assert payload.size > 0.9 * copied(placed.case, 4)
        assert (payload == 0xAB).all()

    @pytest.mark.parametrize("kind", ["cupy", "torch", "handle"])
    def test_an_engine_stream_held_by_a_copy_runs_after_it(self, machine: Emulated, kind: str) -> None:
        placed = Placed(machine, vllm_case("LBNHC"))
        engine = machine.cupy.cuda.Stream()
        stream = {"cupy": engine, "torch": TorchStream(engine.ptr), "handle": engine.ptr}[kind]
        copy = placed.paged.gather(*placed.arguments)
        copy.hold(stream)
        engine.queue.append(lambda: placed.memory.fill(0))  # the page's next owner
        engine.synchronize()
        assert copy.done()
        assert placed.slots.any()
        assert not placed.memory.any()

    def test_a_copy_nobody_keeps_still_finds_its_arguments(self, machine: Emulated) -> None:
        placed = Placed(machine, vllm_case("LBNHC"))
        expected = Placed(machine, vllm_case("LBNHC"))
        expected.paged.gather(*expected.arguments).wait()
        placed.paged.gather(*placed.arguments)
        placed.paged.close()
        np.testing.assert_array_equal(placed.slots, expected.slots)

    def test_finished_copies_are_forgotten(self, machine: Emulated) -> None:
        placed = Placed(machine, vllm_case("LBNHC"))
        for _ in range(5):
            placed.paged.gather(*placed.arguments).wait()
        assert [len(flight) for flight in placed.paged._flight] == [0, 1]

    def test_a_failed_copy_raises_where_it_is_asked_for(self, machine: Emulated) -> None:
        placed = Placed(machine, vllm_case("LBNHC"))
        copy = placed.paged.gather(*placed.arguments)
        copy.event.failed = True
        for ask in (copy.done, copy.wait):
            with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
                ask()

    def test_nothing_to_copy_is_done_at_once(self, machine: Emulated) -> None:
        placed = Placed(machine, vllm_case("LBNHC"))
        copy = placed.paged.scatter(0, placed.addresses, [], [0, 0, 0], [0, 0])
        assert copy.done()
        copy.hold(machine.cupy.cuda.Stream())
        assert machine.checks == []

    def test_what_would_break_the_cuda_context_is_refused(self, machine: Emulated) -> None:
        placed = Placed(machine, vllm_case("LBNHC"))
        stray = aligned(placed.slots.nbytes, 4096).ctypes.data
        last = int(placed.addresses[1])
        for addresses in ([stray, last], [last, last + 4096], [last - 8, last]):
            with pytest.raises(BadInput, match="not in pinned memory"):
                placed.paged.gather(0, addresses, *placed.arguments[2:])
        for change in ({"page_ids": [5, 1, 3, 12]}, {"first": [1, 2]}):
            names = ("group", "containers", "page_ids", "starts", "first")
            with pytest.raises(BadInput):
                placed.paged.gather(**(dict(zip(names, placed.arguments, strict=True)) | change))
        machine.pinned.remove(int(placed.slots.ctypes.data))
        with pytest.raises(BadInput, match="not in pinned memory"):
            placed.paged.gather(*placed.arguments)
        with pytest.raises(BadInput, match="never recorded"):
            placed.paged.gather(*placed.arguments, after=TorchEvent(0))
        with pytest.raises(BadInput, match="CUDA handle"):
            placed.paged.gather(*placed.arguments, after="now")
        machine.blocks = 0
        with pytest.raises(BadInput, match="blocks"):
            machine.paged(placed.case, 4096)
        assert machine.checks == []


class TorchEvent:
    def __init__(self, handle: int) -> None:
        self.cuda_event = handle


class TorchStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


@needs_compiler
class TestPinnedMemory:
    @given(
        slabs=st.lists(st.integers(1, 5), min_size=1, max_size=4), start=st.integers(-2, 30), length=st.integers(1, 6)
    )
    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_covers_what_lies_in_one_slab(self, slabs: list[int], start: int, length: int, machine: Emulated) -> None:
        pinned, units, at = cuda.PinnedMemory(), {}, 1
        for number, size in enumerate(slabs):
            pinned.add(at * 4096, size * 4096)
            units |= dict.fromkeys(range(at, at + size), number)
            at += size + number % 2  # some touch, some do not
        owners = {units.get(unit) for unit in range(start, start + length)}
        inside = len(owners) == 1 and None not in owners
        assert pinned.covers(np.array([4096, start * 4096]), length * 4096) == (inside and length <= slabs[0])
        pinned.close()
        assert not pinned.covers(np.array([4096]), 1)

    def test_everything_is_unregistered(self, machine: Emulated) -> None:
        registered = machine.cupy.cuda.runtime.registered
        machine.pinned.add(1 << 20, 8192)
        machine.pinned.add(1 << 21, 4096)
        assert registered == {1 << 20: 8192, 1 << 21: 4096}
        machine.pinned.remove(1 << 20)
        machine.pinned.remove(1 << 20)
        assert registered == {1 << 21: 4096}
        machine.pinned.close()
        assert registered == {}

    def test_a_device_that_cannot_reach_host_addresses(self, machine: Emulated) -> None:
        machine.cupy.cuda.runtime.host_addresses_usable = 0
        with pytest.raises(LmkvError, match="host's addresses"):
            cuda.PinnedMemory()


class TestKernelArguments:
    def table(self, **changes: Any) -> Any:
        case = vllm_case("LBNHC", **changes)
        return HostMachine().paged(case, 1 << 20).tables[0]

    def test_vectors_are_as_wide_as_every_number_allows(self) -> None:
        assert cuda.kernel_planes(self.table())[0][:, 11].tolist() == [16, 16, 16]
        assert cuda.kernel_planes(self.table(padding=4))[0][:, 11].tolist() == [4, 4, 4]
        assert cuda.kernel_planes(self.table(base=68))[0][:, 11].tolist() == [4, 4, 4]
        assert cuda.kernel_planes(self.table(base=66))[0][:, 11].tolist() == [1, 1, 1]
        halves = cuda.kernel_planes(self.table(split="halves", dim=2))[0]
        assert halves[:, 11].tolist() == [4] * 6
        assert halves.dtype == np.int64
        assert halves.flags.c_contiguous

    def test_tiles_cover_the_largest_page(self) -> None:
        assert cuda.kernel_planes(self.table())[1] == 1
        table = self.table(heads=8, tokens=16, dim=68)  # 34,816 bytes are 2,176 vectors
        assert cuda.kernel_planes(table)[1] == 3
        rows = table.rows.copy()
        rows[0, 4] = 1 << 35
        with pytest.raises(BadInput, match="32-bit"):
            cuda.kernel_planes(table._replace(rows=rows))

    def test_pages_carry_container_and_position(self) -> None:
        array = np.array
        pages = cuda.kernel_pages(array([4096, 8192]), array([7, 3, 9]), array([0, 1, 3]), array([2, 0]))
        assert pages.tolist() == [[4096, 2, 7], [8192, 0, 3], [8192, 1, 9]]
        assert DeviceArray(pages).array.dtype == np.int64
