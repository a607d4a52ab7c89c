"""Engine memory of every kind lmkv knows, and numpy's answer to what a copy must do with it.

A :class:`Case` is one flat stretch of bytes and where the planes lie in it, so that the same case
is placed in host memory, in device memory, or in the CUDA emulation. The answers are computed from
the layout's letters with numpy views, not from anything in ``lmkv.pages``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from lmkv import chunk, cuda
from lmkv.pages import GroupView, PagedKV, Plane
from lmkv.spec import Kind, KVSpec, LayerGroup

LAYOUTS = ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "LHBNC", "BHLNC")
DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}


@dataclass(frozen=True)
class Box:
    """A plane relative to the start of the memory, and its axes in the order they are stored in."""

    offset: int
    pages: int
    page_stride: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    stored: tuple[int, ...]

    def plane(self, base: int) -> Plane:
        return Plane(base + self.offset, self.pages, self.page_stride, self.shape, self.strides, self.itemsize)

    def page(self, memory: np.ndarray, page: int, order: str) -> np.ndarray:
        """A writable view of a page's bytes in payload order."""
        axes = self.stored if order == "physical" else tuple(range(len(self.shape)))
        return as_strided(
            memory[self.offset + page * self.page_stride :],
            (*(self.shape[a] for a in axes), self.itemsize),
            (*(self.strides[a] for a in axes), 1),
        )


Boxes = tuple[tuple[Box, ...], ...]


@dataclass(frozen=True)
class Case:
    name: str
    spec: KVSpec
    groups: tuple[Boxes, ...]
    nbytes: int
    order: str = "physical"

    def views(self, base: int) -> list[GroupView]:
        return [GroupView(tuple(tuple(box.plane(base) for box in layer) for layer in layers)) for layers in self.groups]

    def pages(self, group: int) -> int:
        return self.groups[group][0][0].pages


@dataclass(frozen=True)
class Request:
    """Chunk ``i`` uses ``page_ids[starts[i]:starts[i + 1]]`` at positions from ``first[i]``."""

    group: int
    page_ids: np.ndarray
    starts: np.ndarray
    first: np.ndarray


def transfer(case: Case, request: Request, memory: np.ndarray, slots: np.ndarray, gather: bool) -> None:
    """Do in numpy, in place, what gather or scatter must do. slots: uint8 [n, container bytes]."""
    group = request.group
    per_page = case.spec.groups[group].layer_page_bytes
    for i, slot in enumerate(slots):
        for part in chunk.layout(case.spec, group):
            for nth in range(part.layers):
                start = part.offset + nth * case.spec.pages(group) * per_page
                for k, page in enumerate(request.page_ids[request.starts[i] : request.starts[i + 1]]):
                    at = start + (int(request.first[i]) + k) * per_page
                    for box in case.groups[group][part.first_layer + nth]:
                        there = box.page(memory, int(page), case.order)
                        here = slot[at : at + there.size].reshape(there.shape)
                        if gather:
                            here[...] = there
                        else:
                            there[...] = here
                        at += there.size


def vllm_boxes(
    layout: str, base: int, layers: int, pages: int, heads: int, tokens: int, content: int, itemsize: int, padding: int
) -> tuple[list[Box], int]:
    """One box a layer in memory of vLLM's layout, and where that memory ends. ``padding`` bytes are
    left behind whatever the layout keeps together inside a page."""
    sizes = {"L": layers, "B": pages, "H": heads, "N": tokens, "C": content}
    strides, step, padded = {}, itemsize, False
    for letter in reversed(layout):
        if letter in "LB" and not padded:
            step, padded = step + padding, True
        strides[letter] = step
        step *= sizes[letter]
    inner = [letter for letter in layout if letter in "HNC"]
    stored = tuple("HNC".index(letter) for letter in inner)
    shape, by_axis = (heads, tokens, content), tuple(strides[letter] for letter in "HNC")
    boxes = [
        Box(base + nth * strides["L"], pages, strides["B"], shape, by_axis, itemsize, stored) for nth in range(layers)
    ]
    return boxes, base + step


def halves(box: Box) -> tuple[Box, Box]:
    """K and V of a fused plane as two planes."""
    shape = (*box.shape[:-1], box.shape[-1] // 2)
    rest = (box.pages, box.page_stride, shape, box.strides, box.itemsize, box.stored)
    return Box(box.offset, *rest), Box(box.offset + shape[-1] * box.itemsize, *rest)


def vllm_case(
    layout: str,
    *,
    order: str = "physical",
    layers: int = 3,
    pages: int = 12,
    heads: int = 2,
    tokens: int = 4,
    dim: int = 8,
    itemsize: int = 2,
    padding: int = 0,
    split: str = "fused",
    kind: Kind = Kind.FULL,
    pages_per_chunk: int = 3,
    base: int = 64,
) -> Case:
    """split: K and V "fused" in one plane, "halves" of one allocation, or "apart" in two."""
    window = 2 * tokens if kind is Kind.SLIDING else 0
    group = LayerGroup(kind, tuple(range(layers)), tokens, heads, dim, dtype=DTYPES[itemsize], window=window)
    widths = {"apart": (dim, dim)}.get(split, (dim if kind is Kind.MLA else 2 * dim,))
    planes, end = [], base
    for width in widths:
        boxes, end = vllm_boxes(layout, end, layers, pages, heads, tokens, width, itemsize, padding)
        planes.append(boxes)
    by_layer: Boxes = tuple(zip(*planes, strict=True))
    if split == "halves":
        by_layer = tuple(halves(layer[0]) for layer in by_layer)
    name = f"{layout}-{order}-{split}-{kind.value}-H{heads}-i{itemsize}-pad{padding}"
    spec = KVSpec((group,), tokens * pages_per_chunk)
    return Case(name, spec, (by_layer,), end + 64, order)


def recurrent_case(padding: int = 40) -> Case:
    """Two layers' states, padded, one page a chunk."""
    group = LayerGroup(Kind.RECURRENT, (0, 3), 16, state_bytes=1000)
    boxes = tuple(
        (Box(32 + nth * 10 * (1000 + padding), 10, 1000 + padding, (1, 1, 1000), (7, 7, 1), 1, (0, 1, 2)),)
        for nth in range(2)
    )
    return Case("recurrent", KVSpec((group,), 32), (boxes,), 64 + 20 * (1000 + padding))


def aliasing_case() -> Case:
    """Window, full and recurrent group in one region: a page belongs to one of them at a time."""
    page, pages = 2 * 4 * 16 * 2, 12
    sliding = LayerGroup(Kind.SLIDING, (0, 1), 4, 2, 8, window=9)
    full = LayerGroup(Kind.FULL, (2, 3), 4, 2, 8)
    state = LayerGroup(Kind.RECURRENT, (4, 5), 4, state_bytes=200)
    groups = []
    for shape, strides, itemsize in [((2, 4, 16), (128, 32, 2), 2), ((2, 4, 16), (32, 64, 2), 2), ((200,), (1,), 1)]:
        stored = tuple(sorted(range(len(shape)), key=lambda axis: -strides[axis]))
        groups.append(
            tuple((Box(16 + nth * page * pages, pages, page, shape, strides, itemsize, stored),) for nth in range(2))
        )
    return Case("aliasing", KVSpec((sliding, full, state), 16), tuple(groups), 32 + 2 * page * pages)


def hf_case(order: str = "physical", token_major: bool = False, sequence: int = 1) -> Case:
    """K and V [2 sequences, heads, tokens, dim], of which one is paged; 53 tokens: the last 5 are
    in no page. One head's row of a token is 256 bytes. token_major: declared [tokens, heads, dim].
    """
    heads, tokens, dim, itemsize, unit, layers = 3, 53, 64, 4, 8, 2
    row = dim * itemsize
    sequence_bytes = heads * tokens * row
    shape, strides = (heads, unit, dim), (tokens * row, row, itemsize)
    if token_major:
        shape, strides = (unit, heads, dim), (row, tokens * row, itemsize)
    stored = (1, 0, 2) if token_major else (0, 1, 2)
    boxes = tuple(
        tuple(
            Box(
                (2 * nth + kv) * 2 * sequence_bytes + sequence * sequence_bytes,
                tokens // unit,
                unit * row,
                shape,
                strides,
                itemsize,
                stored,
            )
            for kv in range(2)
        )
        for nth in range(layers)
    )
    group = LayerGroup(Kind.FULL, (0, 1), unit, heads, dim, dtype="float32")
    name = f"hf-{order}-{'token' if token_major else 'head'}-major-{sequence}"
    return Case(name, KVSpec((group,), 2 * unit), (boxes,), layers * 4 * sequence_bytes, order)


def scattered_case() -> Case:
    """Four axes none of which follows another: more than one row of the copy plan per plane."""
    shape, stored = (3, 2, 5, 4), (1, 2, 0, 3)
    strides = (16, 1024, 128, 2)  # axis 3 is whole: 4 elements of 2 bytes in steps of 16
    boxes = ((Box(48, 6, 4096, shape, strides, 2, stored),),)
    group = LayerGroup(Kind.MLA, (0,), 5, 1, 24)
    return Case("scattered-logical", KVSpec((group,), 10), (boxes,), 6 * 4096 + 64, "logical")


def fixed_cases() -> list[Case]:
    """Every kind of memory once; about forty cases."""
    cases = [vllm_case(layout, order=o) for layout in LAYOUTS for o in ("physical", "logical")]
    for layout in LAYOUTS:
        cases += [
            vllm_case(layout, padding=24),
            vllm_case(layout, split="halves", itemsize=1, dim=16),
            vllm_case(layout, split="apart", padding=48, itemsize=4),
            vllm_case(layout, kind=Kind.MLA, heads=1, dim=9, pages=9, layers=1),
        ]
    cases += [vllm_case("LBNHC", kind=Kind.SLIDING), recurrent_case(), aliasing_case()]
    cases += [hf_case("physical"), hf_case("logical"), hf_case("logical", token_major=True)]
    cases += [hf_case("physical", sequence=0), scattered_case()]
    # Four parts in the container, and enough bytes for the copies that go around the caches.
    large = {"layers": 16, "heads": 8, "tokens": 16, "dim": 64, "pages": 24, "pages_per_chunk": 8}
    cases.append(vllm_case("LBNHC", **large))
    return cases


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """vLLM memory of random sizes, orders and padding."""
    kind = draw(st.sampled_from([Kind.FULL, Kind.MLA, Kind.SLIDING]))
    split = "fused" if kind is Kind.MLA else draw(st.sampled_from(["fused", "halves", "apart"]))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    return vllm_case(
        draw(st.sampled_from(LAYOUTS)),
        order=draw(st.sampled_from(["physical", "logical"])),
        layers=draw(st.integers(1, 4)),
        pages=draw(st.integers(1, 10)),
        heads=1 if kind is Kind.MLA else draw(st.integers(1, 4)),
        tokens=draw(st.sampled_from([1, 2, 3, 16])),
        dim=draw(st.sampled_from([1, 3, 8, 16])),
        itemsize=itemsize,
        padding=itemsize * draw(st.integers(0, 20)),
        split=split,
        kind=kind,
        pages_per_chunk=draw(st.integers(1, 5)),
        base=draw(st.integers(0, 4)) * 16 + draw(st.sampled_from([0, itemsize])),
    )


def make_requests(case: Case, rng: np.random.Generator) -> list[Request]:
    """For each group pages in random order for up to three chunks, each a random range of
    positions. Groups take disjoint pages, as an engine hands them out."""
    order = rng.permutation(case.pages(0))
    requests = []
    for group, own in enumerate(np.array_split(order, len(case.groups))):
        per_chunk = case.spec.pages(group)
        counts, firsts = [], []
        for _ in range(int(rng.integers(1, 4))):
            count = int(rng.integers(0, min(per_chunk, len(own) - sum(counts)) + 1))
            counts.append(count)
            firsts.append(int(rng.integers(0, per_chunk - count + 1)))
        ids = own[: sum(counts)].astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        requests.append(Request(group, ids, starts, np.array(firsts, np.int64)))
    return requests


class HostMachine:
    """Where a case's memory and its containers live: here, plain numpy."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def place(self, memory: np.ndarray) -> tuple[Any, int]:
        """Copy ``memory`` to where an engine has it: a handle and its address, 64-byte aligned."""
        placed = aligned(memory.size, 64)
        placed[:] = memory
        return placed, placed.ctypes.data

    def fetch(self, handle: Any) -> np.ndarray:
        return handle.copy()

    def containers(self, count: int, nbytes: int) -> np.ndarray:
        """Host memory [count, nbytes] that copies can reach."""
        return aligned(count * nbytes, 4096).reshape(count, nbytes)

    def release(self) -> None:
        """The containers handed out are not used any more."""

    def paged(self, case: Case, base: int) -> PagedKV:
        return PagedKV(case.spec, case.views(base), case.order, threads=self.threads)


class PinnedMachine(HostMachine):
    """Containers in memory that CUDA has registered, real or emulated."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.pinned = cuda.PinnedMemory()
        self.slots: list[np.ndarray] = []  # registered memory must not be freed

    def containers(self, count: int, nbytes: int) -> np.ndarray:
        slots = super().containers(count, nbytes)
        self.pinned.add(slots.ctypes.data, slots.nbytes)
        self.slots.append(slots)
        return slots

    def release(self) -> None:
        self.pinned.close()
        self.slots.clear()

    def paged(self, case: Case, base: int) -> cuda.CudaPagedKV:
        return cuda.CudaPagedKV(case.spec, case.views(base), self.pinned, case.order, blocks=self.blocks)


def aligned(nbytes: int, alignment: int) -> np.ndarray:
    raw = np.zeros(nbytes + alignment, np.uint8)
    return raw[-raw.ctypes.data % alignment :][:nbytes]


def check_case(machine: Any, case: Case, seed: int) -> None:
    """Gather into canary-filled containers, scatter into canary-filled memory: every byte of both
    must be what numpy says, which includes the bytes that must not change."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, case.nbytes, np.uint8)
    canary = rng.integers(0, 256, case.nbytes, np.uint8)
    requests = make_requests(case, rng)
    handle, base = machine.place(source)
    fresh_handle, fresh_base = machine.place(canary)
    paged, fresh = machine.paged(case, base), machine.paged(case, fresh_base)
    expected_memory = canary.copy()
    for request in requests:
        nbytes = chunk.container_bytes(case.spec, request.group)
        slots = machine.containers(len(request.first), nbytes)
        slots[:] = rng.integers(0, 256, slots.shape, np.uint8)
        expected = slots.copy()
        transfer(case, request, source, expected, gather=True)
        addresses = slots.ctypes.data + nbytes * np.arange(len(slots))
        arguments = (request.group, addresses, request.page_ids, request.starts, request.first)
        paged.gather(*arguments).wait()
        np.testing.assert_array_equal(slots, expected)
        fresh.scatter(*arguments).wait()
        np.testing.assert_array_equal(slots, expected)
        transfer(case, request, expected_memory, slots, gather=False)
        for page in request.page_ids:
            for layer in case.groups[request.group]:
                for box in layer:
                    wanted = box.page(source, int(page), case.order)
                    assert (box.page(expected_memory, int(page), case.order) == wanted).all()
    np.testing.assert_array_equal(machine.fetch(fresh_handle), expected_memory)
    np.testing.assert_array_equal(machine.fetch(handle), source)
    machine.release()
