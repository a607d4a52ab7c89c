"""L1: an engine's KV pages as strided memory, and the copies between pages and chunk containers.

Whoever registers memory describes it as planes (address, strides, shape), and one copy plan per group follows: vLLM's
six layouts, padded pages, groups that alias one region, recurrent states and HF's [batch, heads, tokens, dim] alike.

Payload of a container: the layers of each part, in a layer the chunk's pages, in a page its planes, all in order; in a
plane the box row-major, its axes ordered ``physical`` (by falling stride, as they lie) or ``logical`` (as declared).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmkv import chunk
from lmkv._native import CopyPlan, copy_pages
from lmkv.errors import BadInput
from lmkv.spec import KVSpec

Ints = NDArray[np.int64]
Order = Literal["physical", "logical"]


@dataclass(frozen=True)
class Plane:
    """One layer's pages, or only their K or their V.

    Page ``p`` of ``pages`` lies at ``address + p * page_stride``: the box ``shape``, in elements of ``itemsize`` bytes,
    with byte ``strides``. Bytes between the boxes are never touched. BadInput: elements overlap, a size is below 1.
    """

    address: int
    pages: int
    page_stride: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def __post_init__(self) -> None:
        sizes = (self.address, self.pages, self.itemsize, *self.shape)
        if min(sizes) < 1 or len(self.shape) != len(self.strides):
            raise BadInput(f"a plane needs an address, positive sizes and a stride for each axis: {self}")
        extent = self.itemsize
        for stride, count in sorted(zip((self.page_stride, *self.strides), (self.pages, *self.shape), strict=True)):
            if count > 1 and stride < extent:
                raise BadInput(f"elements overlap (an expanded or flipped array?): {self}")
            extent += stride * (count - 1)

    @property
    def page_bytes(self) -> int:
        """Payload bytes of one page: the box without its padding."""
        return math.prod(self.shape) * self.itemsize

    @classmethod
    def of(cls, array: Any, page_axis: int | None = 0, page_tokens: int = 0, token_axis: int | None = None) -> Plane:
        """The pages of a torch, numpy or CuPy array (known by duck type); no data is copied.

        ``page_axis`` counts the pages; the other axes, in their order, are the box: ``of(kv)`` for vLLM's [block, head,
        token, content]. With ``token_axis`` whole pages of ``page_tokens`` are cut from one sequence, the page axis
        being None or of size 1: ``of(keys[b], None, 16, token_axis=1)`` for HF's [batch, heads, tokens, dim].
        """
        address, shape, strides, itemsize = _describe(array)
        if any(not -len(shape) <= (axis or 0) < len(shape) for axis in (page_axis, token_axis)):
            raise BadInput(f"axes {page_axis}, {token_axis} of an array of {len(shape)} dimensions")
        pages, page_stride = (1, 0) if page_axis is None else (shape[page_axis], strides[page_axis])
        if token_axis is not None:
            if pages != 1 or not page_tokens or page_tokens < 1:
                raise BadInput("a token axis needs page_tokens, and one sequence: pass array[b]")
            pages, page_stride = shape[token_axis] // page_tokens, strides[token_axis] * page_tokens
            shape[token_axis] = page_tokens
        elif page_axis is None:
            raise BadInput("an array has a page axis, or a token axis to cut pages from")
        if page_axis is not None:
            del shape[page_axis], strides[page_axis]
        return cls(address, pages, page_stride, tuple(shape), tuple(strides), itemsize)


class GroupView(NamedTuple):
    """The planes of each layer of a group, in the group's layer order: one plane when K and V are fused (or MLA, or a
    recurrent state), two when they lie apart."""

    layers: tuple[tuple[Plane, ...], ...]


class PageTable(NamedTuple):
    """One group's copy plan as numbers. ``rows``: int64 [n, 11], see ``_native.CopyPlan``; ``page_tokens``: tokens a
    page stands for (a whole chunk when recurrent)."""

    rows: Ints
    payload_bytes: int
    pages: int
    pages_per_chunk: int
    page_tokens: int
    layout: str


class Pieces(NamedTuple):
    """Runs of neighbouring pages, none across a chunk border. Piece ``i`` is ``page_ids[starts[i]:starts[i + 1]]`` at
    positions ``first[i], first[i] + 1, ...`` of chunk number ``chunks[i]``, counted from token 0."""

    chunks: Ints
    page_ids: Ints
    starts: Ints
    first: Ints


class Copy:
    """A copy that was started; this one, of the CPU, was over before the call returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Block until the copy is over."""

    def hold(self, stream: Any) -> None:
        """Let the later work of an engine's CUDA stream wait for the copy."""


class PagedKV:
    """An engine's pages for every group of a spec, and the copies between them and containers.

    ``threads`` share the pages of one call; ``keep`` is kept alive, since a plane is only an address. ``layout`` is the
    payload order as text, for a Scope: equal texts, equal payload bytes, provided that the axes, which are numbered as
    declared, mean the same. BadInput: planes and spec disagree.
    """

    def __init__(
        self, spec: KVSpec, groups: Sequence[GroupView], order: Order = "physical", threads: int = 1, keep: Any = None
    ) -> None:
        if order not in ("physical", "logical") or threads < 1:
            raise BadInput(f"order {order!r} is not physical or logical, or {threads} threads < 1")
        if len(groups) != len(spec.groups):
            raise BadInput(f"the spec has {len(spec.groups)} groups, {len(groups)} were described")
        self.tables = tuple(build_table(spec, g, view, order) for g, view in enumerate(groups))
        self.layout = " ".join(table.layout for table in self.tables)
        self._threads, self._keep = threads, keep
        self._plans = [CopyPlan(table.rows, table.payload_bytes) for table in self.tables]

    def pages(self, group: int) -> int:
        """How many pages the engine has for a group; ids run from 0."""
        return self._table(group).pages

    def check_ids(self, group: int, page_ids: Any, first_token: int, tokens: int, absent: int | None = None) -> Ints:
        """Page ids of tokens ``[first_token, first_token + tokens)``, which must be whole pages, as int64, or BadInput.

        A recurrent group has one page a chunk, the state at its end. -1: a page the caller does not have (``absent``).
        """
        table, ids, stop = self._table(group), _integers("page ids", page_ids), first_token + tokens
        unit = table.page_tokens
        if min(first_token, tokens) < 0 or first_token % unit or tokens % unit:
            raise BadInput(f"group {group}: tokens [{first_token}, {stop}) are not whole pages of {unit} tokens")
        if len(ids) != tokens // unit:
            raise BadInput(f"group {group}: {tokens // unit} page ids are needed, not {len(ids)}")
        present = ids != absent
        _check_range(ids[present], table.pages, group)
        return np.where(present, ids, -1)

    def pieces(self, group: int, page_ids: Ints, first_token: int = 0) -> Pieces:
        """Cut ids from :meth:`check_ids`, the first one at ``first_token``, into runs to copy, around absent ones."""
        table = self._table(group)
        taken = np.flatnonzero(page_ids >= 0)
        at = first_token // table.page_tokens + taken
        begins = np.flatnonzero((np.diff(at, prepend=-2) > 1) | (at % table.pages_per_chunk == 0))
        chunks, first = np.divmod(at[begins], table.pages_per_chunk)
        return Pieces(chunks, page_ids[taken], np.append(begins, len(taken)), first)

    def gather(self, group: int, containers: Any, page_ids: Any, starts: Any, first: Any, after: Any = None) -> Copy:
        """Copy pages ``page_ids[starts[i]:starts[i + 1]]`` to positions ``first[i], ...`` of the container at address
        ``containers[i]``; its other bytes stay. ``after``: the CUDA event behind the step that wrote the pages.

        Integer arrays: containers [n], page_ids [m], starts [n + 1], first [n]. BadInput: nothing was copied.
        """
        return self._copy(True, group, self._checked(True, group, containers, page_ids, starts, first), after)

    def scatter(self, group: int, containers: Any, page_ids: Any, starts: Any, first: Any, after: Any = None) -> Copy:
        """Copy containers into pages, :meth:`gather` reversed. No page may be named twice."""
        return self._copy(False, group, self._checked(False, group, containers, page_ids, starts, first), after)

    def _copy(self, gather: bool, group: int, arrays: tuple[Ints, Ints, Ints, Ints], after: Any) -> Copy:
        if after is not None:
            raise BadInput("pages in host memory are copied at once: there is no event to wait for")
        if len(arrays[1]):
            copy_pages(self._plans[group], gather, *arrays, self._threads)
        return Copy()

    def _checked(self, gather: bool, group: int, *arrays: Any) -> tuple[Ints, Ints, Ints, Ints]:
        """A copy's containers, page ids, starts and first positions as int64 arrays, all in bounds."""
        table = self._table(group)
        names = ("containers", "page ids", "starts", "first")
        slots, ids, starts, first = (_integers(*each) for each in zip(names, arrays, strict=True))
        if len(starts) != len(slots) + 1 or len(first) != len(slots) or (slots <= 0).any():
            raise BadInput("n containers need n addresses, n + 1 starts and n first positions")
        counts = np.diff(starts)
        if starts[0] != 0 or starts[-1] != len(ids) or (counts < 0).any():
            raise BadInput(f"starts must rise from 0 to the number of page ids, {len(ids)}")
        if ((first < 0) | (first > table.pages_per_chunk - counts)).any():
            raise BadInput(f"group {group}: a chunk has {table.pages_per_chunk} page positions")
        _check_range(ids, table.pages, group)
        if not gather and len(ids) and np.bincount(ids).max() > 1:
            raise BadInput(f"group {group}: a scatter names one page twice")
        return slots, ids, starts, first

    def _table(self, group: int) -> PageTable:
        if not 0 <= group < len(self.tables):
            raise BadInput(f"no group {group}: there are {len(self.tables)}")
        return self.tables[group]


def build_table(spec: KVSpec, group: int, view: GroupView, order: Order) -> PageTable:
    """The copy plan of one group; BadInput when the planes are not what the spec says."""
    which = spec.groups[group]
    if len(view.layers) != len(which.layers):
        raise BadInput(f"group {group} has {len(which.layers)} layers, not {len(view.layers)}")
    pages = {plane.pages for planes in view.layers for plane in planes}
    if len(pages) != 1:
        raise BadInput(f"group {group}: planes differ in their number of pages, {sorted(pages)}")
    per_chunk, page_bytes = spec.pages(group), which.layer_page_bytes
    rows: list[list[int]] = []
    for part in chunk.layout(spec, group):
        for nth, planes in enumerate(view.layers[part.first_layer :][: part.layers]):
            if (found := sum(plane.page_bytes for plane in planes)) != page_bytes:
                where = f"group {group}, layer {part.first_layer + nth}"
                raise BadInput(f"{where}: the planes of a page have {found} bytes, the spec says {page_bytes}")
            offset = part.offset + nth * per_chunk * page_bytes
            for plane in planes:
                rows += _rows(plane, order, offset, page_bytes)
                offset += plane.page_bytes
    texts = ("+".join(_text(plane, order) for plane in planes) for planes in view.layers)
    layout = f"g{group}[{','.join(f'{len(list(same))}*{text}' for text, same in groupby(texts))}]"
    size = chunk.container_bytes(spec, group)
    return PageTable(np.array(rows, np.int64), size, pages.pop(), per_chunk, spec.chunk_tokens // per_chunk, layout)


def _axes(plane: Plane, order: Order) -> list[int]:
    """Axes in payload order, without those of size 1: their strides mean nothing."""
    axes = [axis for axis, size in enumerate(plane.shape) if size > 1]
    return axes if order == "logical" else sorted(axes, key=lambda axis: -plane.strides[axis])


def _text(plane: Plane, order: Order) -> str:
    """Axis numbers and sizes in payload order, then the item size: ``1.16x0.8x2.128/2``."""
    return "x".join(f"{axis}.{plane.shape[axis]}" for axis in _axes(plane, order)) + f"/{plane.itemsize}"


def _rows(plane: Plane, order: Order, offset: int, page_bytes: int) -> list[list[int]]:
    """Rows of the copy plan for one plane: neighbouring axes that are contiguous on both sides are merged; two that
    stay fit into a row, a further one is written out, smallest first."""
    dims = [(plane.itemsize, 1, 1)]  # size, stride, payload stride: the run of bytes, and what is around it
    payload_stride = plane.itemsize
    for axis in reversed(_axes(plane, order)):
        size, stride, inner = plane.shape[axis], plane.strides[axis], dims[-1]
        if stride == inner[0] * inner[1]:
            dims[-1] = (inner[0] * size, *inner[1:])
        else:
            dims.append((size, stride, payload_stride))
        payload_stride *= size
    (run, _, _), *outer = dims
    corners = [(plane.address, offset)]
    while len(outer) > 2:
        size, stride, step = outer.pop(outer.index(min(outer)))
        if len(corners) * size > 256:
            raise BadInput(f"too scattered to copy: {plane}")
        corners = [(base + i * stride, at + i * step) for base, at in corners for i in range(size)]
    loops = [number for dim in reversed([*outer, (1, 0, 0), (1, 0, 0)][:2]) for number in dim]
    return [[base, at, plane.page_stride, page_bytes, run, *loops] for base, at in corners]


def _describe(array: Any) -> tuple[int, list[int], list[int], int]:
    """Address, shape, byte strides and item size of an array."""
    if hasattr(array, "data_ptr"):
        itemsize = int(array.element_size())
        return array.data_ptr(), list(array.shape), [stride * itemsize for stride in array.stride()], itemsize
    interface = getattr(array, "__array_interface__", None) or getattr(array, "__cuda_array_interface__", None)
    if not interface:
        raise BadInput(f"{type(array).__name__} is not a torch, numpy or CuPy array")
    if interface["data"][1]:
        raise BadInput("an engine's pages must be writable, this array is read-only")
    return interface["data"][0], list(array.shape), list(array.strides), array.itemsize


def _integers(what: str, values: Any) -> Ints:
    with suppress(TypeError, ValueError):
        array = np.asarray(values)
        if array.shape == (0,) or (array.ndim == 1 and array.dtype.kind in "iu"):
            return np.ascontiguousarray(array, np.int64)
        values = f"{array.ndim} dimensions of {array.dtype}"
    raise BadInput(f"{what} must be a one-dimensional array of integers, not {values!r:.99}")


def _check_range(ids: Ints, pages: int, group: int) -> None:
    wrong = ids[(ids < 0) | (ids >= pages)]
    if len(wrong):
        raise BadInput(f"group {group}: page {wrong[0]} is not one of the engine's 0 to {pages - 1}")
