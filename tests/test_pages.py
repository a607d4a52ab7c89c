"""Pages: views of an engine's memory, and gather and scatter against numpy."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_cases import (
    LAYOUTS,
    Case,
    HostMachine,
    aliasing_case,
    aligned,
    check_case,
    drawn_cases,
    fixed_cases,
    hf_case,
    recurrent_case,
    vllm_case,
)

from lmkv import chunk
from lmkv.errors import BadInput
from lmkv.pages import GroupView, PagedKV, Plane
from lmkv.spec import Kind, KVSpec, LayerGroup

NONE = np.zeros(0, np.int64)


def placed(case: Case, threads: int = 1) -> tuple[PagedKV, np.ndarray]:
    """A case in random host memory."""
    machine = HostMachine(threads)
    memory, base = machine.place(np.random.default_rng(7).integers(0, 256, case.nbytes, np.uint8))
    return machine.paged(case, base), memory


def slots_for(case: Case, count: int, group: int = 0, fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Containers and their addresses."""
    nbytes = chunk.container_bytes(case.spec, group)
    slots = aligned(count * nbytes, 4096).reshape(count, nbytes)
    slots[:] = fill
    return slots, slots.ctypes.data + nbytes * np.arange(count)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", fixed_cases(), ids=lambda case: case.name)
def test_every_byte_is_what_numpy_says(case: Case, threads: int) -> None:
    for seed in range(4):
        check_case(HostMachine(threads), case, seed)


@settings(max_examples=120, deadline=None)
@given(case=drawn_cases(), seed=st.integers(0, 2**32 - 1), threads=st.sampled_from([1, 2]))
def test_random_memory_is_copied_as_numpy_says(case: Case, seed: int, threads: int) -> None:
    check_case(HostMachine(threads), case, seed)


@pytest.mark.parametrize("field", ["page_stride", "offset", "strides"])
def test_a_wrong_number_would_be_noticed(field: str) -> None:
    """Control: the comparison fails when a plane is described wrongly by one step."""
    case = vllm_case("LBNHC", padding=64, heads=2, pages=6, pages_per_chunk=4)

    class Mistaken(HostMachine):
        def paged(self, case: Case, base: int) -> PagedKV:
            wrong = {
                "page_stride": lambda box: box.page_stride - 16,
                "offset": lambda box: box.offset + 2,
                "strides": lambda box: (box.strides[0], box.strides[1] + 16, box.strides[2]),
            }[field]
            layers = tuple(tuple(replace(box, **{field: wrong(box)}) for box in layer) for layer in case.groups[0])
            return super().paged(replace(case, groups=(layers,)), base)

    check_case(HostMachine(), case, 3)
    with pytest.raises(AssertionError):
        check_case(Mistaken(), case, 3)


@pytest.mark.parametrize("order", ["physical", "logical"])
def test_equal_layout_texts_mean_interchangeable_payloads(order: str) -> None:
    cases = [vllm_case(layout, order=order, padding=16 * i) for i, layout in enumerate(LAYOUTS)]
    content = np.random.default_rng(1).integers(0, 256, (3, 3, 2, 4, 32), np.uint8)
    ids, starts, first = np.array([5, 2, 9]), np.array([0, 3]), np.array([0])
    payloads: dict[str, set[bytes]] = {}
    for case in cases:
        paged, memory = placed(case)
        for (nth, layer), (k, page) in itertools.product(enumerate(case.groups[0]), enumerate(ids)):
            layer[0].page(memory, page, "logical")[...] = content[nth, k].reshape(2, 4, 16, 2)
        slots, addresses = slots_for(case, 1)
        paged.gather(0, addresses, ids, starts, first)
        payloads.setdefault(paged.layout, set()).add(slots.tobytes())
    assert len(payloads) == (1 if order == "logical" else 2)
    assert all(len(same) == 1 for same in payloads.values())
    assert len(set().union(*payloads.values())) == len(payloads)


def test_token_major_payload_from_head_major_memory_and_back() -> None:
    case = hf_case("logical", token_major=True)
    paged, memory = placed(case)
    assert paged.tables[0].rows[0, 4] == 256  # one head's row of a token a run
    slots, addresses = slots_for(case, 1)
    paged.gather(0, addresses, [3, 1], [0, 2], [0])
    payload = slots[0, 4096:].view(np.float32)[: 2 * 2 * 2 * 8 * 3 * 64]
    tokens = payload.reshape(2, 2, 2, 8, 3, 64)  # layer, page, K|V, token, head, dim
    heads = memory.view(np.float32).reshape(2, 2, 2, 3, 53, 64)  # layer, K|V, sequence, ...
    for layer, (k, page), kv in itertools.product(range(2), enumerate([3, 1]), range(2)):
        wanted = heads[layer, kv, 1, :, page * 8 : page * 8 + 8].swapaxes(0, 1)
        np.testing.assert_array_equal(tokens[layer, k, kv], wanted)
    before = memory.copy()
    for page in (3, 1):
        heads[:, :, 1, :, page * 8 : page * 8 + 8] = 0
    paged.scatter(0, addresses, [3, 1], [0, 2], [0])
    np.testing.assert_array_equal(memory, before)


class TestPlaneOf:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_vllm_views_of_one_allocation(self, layout: str) -> None:
        torch = pytest.importorskip("torch")
        sizes = {"L": 3, "B": 12, "H": 2, "N": 4, "C": 16}
        flat = torch.zeros([sizes[letter] for letter in layout], dtype=torch.bfloat16)
        logical = flat.permute(*(layout.index(letter) for letter in "LBHNC"))
        case = vllm_case(layout, base=0)
        expected = case.views(flat.data_ptr())[0].layers
        assert tuple((Plane.of(logical[nth]),) for nth in range(3)) == expected

    def test_two_hf_sequences(self) -> None:
        torch = pytest.importorskip("torch")
        keys = torch.zeros(2, 3, 53, 64)
        for sequence in range(2):
            case = hf_case(sequence=sequence)
            assert Plane.of(keys[sequence], None, 8, token_axis=1) == case.views(keys.data_ptr())[0].layers[0][0]
            batch_of_one = keys[sequence : sequence + 1]
            cut = Plane.of(batch_of_one, 0, 8, token_axis=-2)
            assert cut == Plane.of(keys[sequence], None, 8, token_axis=1)
        with pytest.raises(BadInput, match=r"array\[b\]"):
            Plane.of(keys, 0, 8, token_axis=2)

    def test_kernel_blocks_regroup_into_pages(self) -> None:
        blocks = np.zeros((24, 4, 2, 16), np.uint16)  # kernel blocks of 4 tokens, 4 to a page
        plane = Plane.of(blocks.reshape(6, 4, 4, 2, 16))
        assert (plane.pages, plane.page_stride, plane.shape) == (6, 1024, (4, 4, 2, 16))
        assert plane.page_bytes == 1024

    def test_numpy_and_cuda_arrays_are_known_by_their_interfaces(self) -> None:
        class OnDevice:
            """What CuPy's arrays offer."""

            def __init__(self, array: np.ndarray) -> None:
                self.shape, self.strides = array.shape, array.strides
                self.itemsize = array.itemsize
                self.__cuda_array_interface__ = dict(array.__array_interface__)

        array = np.zeros((5, 2, 4, 8), np.float16)[:, :, :, :6]
        assert Plane.of(array) == Plane.of(OnDevice(array))
        assert Plane.of(array).strides == (64, 16, 2)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Plane.of(np.zeros((4, 2), np.uint8), None), "token axis"),
            (lambda: Plane.of(np.zeros((4, 2), np.uint8), 2), "axes 2"),
            (lambda: Plane.of(np.zeros((4, 2), np.uint8), 0, 2, token_axis=-3), "axes 0, -3"),
            (lambda: Plane.of(np.zeros((1, 8), np.uint8), 0, None, token_axis=1), "page_tokens"),
            (lambda: Plane.of(np.zeros((1, 8), np.uint8), 0, 9, token_axis=1), "positive sizes"),
            (lambda: Plane.of(np.zeros((0, 8), np.uint8)), "positive sizes"),
            (lambda: Plane.of(np.zeros((4, 0), np.uint8)), "positive sizes"),
            (lambda: Plane.of(np.broadcast_to(np.zeros(8, np.uint8), (4, 8)).copy()[::-1]), "overlap"),
            (lambda: Plane.of(np.broadcast_to(np.zeros(8, np.uint8), (4, 8))), "read-only"),
            (lambda: Plane(64, 4, 8, (4,), (4,), 4), "overlap"),
            (lambda: Plane(64, 4, 0, (4,), (4,), 4), "overlap"),
            (lambda: Plane(0, 1, 0, (4,), (4,), 4), "an address"),
            (lambda: Plane(64, 1, 0, (4, 2), (4,), 4), "a stride for each axis"),
            (lambda: Plane.of([[1, 2]]), "list is not"),
        ],
    )
    def test_what_is_no_plane_is_refused(self, make: Any, message: str) -> None:
        with pytest.raises(BadInput, match=message):
            make()


class TestAbsentPages:
    def test_pages_slid_out_of_a_window_are_left_out(self) -> None:
        case = vllm_case("LBNHC", kind=Kind.SLIDING, pages_per_chunk=4)
        paged, _ = placed(case)
        ids = paged.check_ids(0, [0, 0, 0, 7, 0, 5, 6, 2], 16, 32, absent=0)
        assert ids.tolist() == [-1, -1, -1, 7, -1, 5, 6, 2]
        pieces = paged.pieces(0, ids, 16)
        assert pieces.chunks.tolist() == [1, 2]
        assert pieces.page_ids.tolist() == [7, 5, 6, 2]
        assert pieces.starts.tolist() == [0, 1, 4]
        assert pieces.first.tolist() == [3, 1]
        slots, addresses = slots_for(case, 2, fill=0xEE)
        paged.gather(0, addresses[pieces.chunks - 1], *pieces[1:])
        whole, whole_addresses = slots_for(case, 2)
        paged.gather(0, whole_addresses, [1, 1, 1, 7, 1, 5, 6, 2], [0, 4, 8], [0, 0])
        per_page = case.spec.groups[0].layer_page_bytes
        pages = slots[:, 4096 : 4096 + 3 * 4 * per_page].reshape(2, 3, 4, per_page)
        expected = whole[:, 4096 : 4096 + 3 * 4 * per_page].reshape(2, 3, 4, per_page)
        np.testing.assert_array_equal(pages[0, :, 3], expected[0, :, 3])
        np.testing.assert_array_equal(pages[1, :, 1:], expected[1, :, 1:])
        assert (pages[0, :, :3] == 0xEE).all()
        assert (pages[1, :, 0] == 0xEE).all()

    @given(present=st.lists(st.booleans(), max_size=40), start=st.integers(0, 9))
    @settings(deadline=None)
    def test_pieces_name_every_present_page_once(self, present: list[bool], start: int) -> None:
        paged, _ = placed(vllm_case("LBNHC", pages=64, layers=1, pages_per_chunk=3))
        ids = np.where(present, np.arange(len(present)), -1).astype(np.int64)
        chunks, taken, starts, first = paged.pieces(0, ids, start * 4)
        named = {}
        for i, number in enumerate(chunks):
            run = taken[starts[i] : starts[i + 1]]
            assert len(run)
            assert first[i] + len(run) <= 3
            named |= {int(number) * 3 + int(first[i]) + k: int(page) for k, page in enumerate(run)}
        assert named == {start + i: i for i, there in enumerate(present) if there}
        joined = [(b, e) for b, e in itertools.pairwise(sorted(named)) if e == b + 1 and e % 3]
        assert len(chunks) == len(named) - len(joined)

    def test_a_recurrent_group_has_one_page_a_chunk(self) -> None:
        paged, _ = placed(recurrent_case())
        ids = paged.check_ids(0, [0, 0, 4], 32, 96, absent=0)
        assert paged.pieces(0, ids, 32)[0].tolist() == [3]
        with pytest.raises(BadInput, match="whole pages of 32"):
            paged.check_ids(0, [4], 16, 32)


class TestBadInput:
    @pytest.mark.parametrize(
        ("ids", "first", "tokens", "message"),
        [
            ([1, 2], 0, 12, "3 page ids are needed, not 2"),
            ([1, 2, 3, 4], 0, 12, "3 page ids are needed, not 4"),
            ([1, 12], 0, 8, "page 12 is not one of the engine's 0 to 11"),
            ([1, -1], 0, 8, "page -1 is not"),
            ([1, 2], 2, 8, "not whole pages"),
            ([1, 2], 0, 7, "not whole pages"),
            ([1], -4, 4, "not whole pages"),
            ([1], 4, -4, "not whole pages"),
            ([1.0, 2.0], 0, 8, "float64"),
            ([True, False], 0, 8, "bool"),
            (["1", "2"], 0, 8, "integers"),
            ([[1, 2]], 0, 8, "2 dimensions"),
            ([[1, 2], [3]], 0, 8, "integers"),
            ([None, 1], 0, 8, "object"),
            (3, 0, 4, "0 dimensions"),
        ],
    )
    def test_page_ids(self, ids: Any, first: int, tokens: int, message: str) -> None:
        paged, _ = placed(vllm_case("LBNHC"))
        with pytest.raises(BadInput, match=message):
            paged.check_ids(0, ids, first, tokens)

    def test_good_page_ids_become_int64(self) -> None:
        paged, _ = placed(vllm_case("LBNHC"))
        for ids in ([3, 1], (3, 1), np.array([3, 1], np.int32), np.array([3, 1], np.uint64)):
            checked = paged.check_ids(0, ids, 4, 8)
            assert checked.dtype == np.int64
            assert checked.tolist() == [3, 1]
        assert paged.check_ids(0, [], 8, 0).tolist() == []

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"group": 1}, "no group 1"),
            ({"group": -1}, "no group -1"),
            ({"page_ids": [1, 2, 3, 12]}, "page 12"),
            ({"page_ids": [1, 2, 3, -1]}, "page -1"),
            ({"page_ids": [1, 2, 3]}, "starts must rise"),
            ({"starts": [1, 3, 4]}, "starts must rise"),
            ({"starts": [0, 5, 4]}, "starts must rise"),
            ({"starts": [0, 4]}, "n \\+ 1 starts"),
            ({"first": [0]}, "first positions"),
            ({"first": [0, 3]}, "3 page positions"),
            ({"first": [-1, 0]}, "3 page positions"),
            ({"first": [0, 2**63 - 1]}, "3 page positions"),
            ({"containers": [0, 4096]}, "addresses"),
            ({"containers": [4096.0, 8192.0]}, "containers must be"),
            ({"after": object()}, "no event"),
        ],
    )
    @pytest.mark.parametrize("gather", [True, False])
    def test_a_bad_copy_changes_nothing(self, change: dict[str, Any], message: str, gather: bool) -> None:
        case = vllm_case("LBNHC")
        paged, memory = placed(case)
        slots, addresses = slots_for(case, 2, fill=0xEE)
        before = memory.copy()
        good = {"page_ids": [1, 2, 3, 5], "starts": [0, 3, 4], "first": [0, 2]}
        arguments = {"group": 0, "containers": addresses, **good} | change
        with pytest.raises(BadInput, match=message):
            (paged.gather if gather else paged.scatter)(**arguments)
        assert (slots == 0xEE).all()
        assert (memory == before).all()

    def test_a_scatter_that_names_a_page_twice(self) -> None:
        case = vllm_case("LBNHC")
        paged, memory = placed(case)
        slots, addresses = slots_for(case, 2)
        before = memory.copy()
        with pytest.raises(BadInput, match="twice"):
            paged.scatter(0, addresses, [4, 1, 4], [0, 2, 3], [0, 0])
        assert (memory == before).all()
        paged.gather(0, addresses, [4, 1, 4], [0, 2, 3], [0, 0])
        assert slots.any()

    def test_nothing_to_copy_is_no_error(self) -> None:
        case = vllm_case("LBNHC")
        paged, _ = placed(case)
        assert paged.gather(0, NONE, NONE, [0], NONE).done()
        assert paged.scatter(0, [4096], [], [0, 0], [0]).done()

    def test_planes_that_are_not_the_spec(self) -> None:
        case = vllm_case("LBNHC")
        view = case.views(4096)[0]
        spec = case.spec
        with pytest.raises(BadInput, match="1 groups, 2 were"):
            PagedKV(spec, [view, view])
        with pytest.raises(BadInput, match="has 3 layers, not 2"):
            PagedKV(spec, [GroupView(view.layers[:2])])
        doubled = GroupView(tuple(layer * 2 for layer in view.layers))
        with pytest.raises(BadInput, match=r"layer 0: .* 512 bytes, the spec says 256"):
            PagedKV(spec, [doubled])
        fewer = GroupView((*view.layers[:2], (replace(view.layers[2][0], pages=11),)))
        with pytest.raises(BadInput, match=r"differ in their number of pages, \[11, 12\]"):
            PagedKV(spec, [fewer])
        with pytest.raises(BadInput, match="order"):
            PagedKV(spec, [view], "random")  # type: ignore[arg-type]
        with pytest.raises(BadInput, match="threads"):
            PagedKV(spec, [view], threads=0)

    def test_a_plane_too_scattered_for_the_plan(self) -> None:
        shape = (17, 17, 17, 17, 2)
        order = (3, 2, 1, 0, 4)
        strides, step = [0] * 5, 1
        for axis in reversed(order):
            strides[axis], step = step, step * shape[axis]
        plane = Plane(4096, 1, 0, shape, tuple(strides), 1)
        group = LayerGroup(Kind.RECURRENT, (0,), 16, state_bytes=step)
        with pytest.raises(BadInput, match="too scattered"):
            PagedKV(KVSpec((group,), 16), [GroupView(((plane,),))], "logical")
        PagedKV(KVSpec((group,), 16), [GroupView(((plane,),))], "physical")


def test_layout_says_axes_in_payload_order() -> None:
    assert placed(vllm_case("LBNHC"))[0].layout == "g0[3*1.4x0.2x2.16/2]"
    assert placed(vllm_case("BHLNC", split="halves"))[0].layout == ("g0[3*0.2x1.4x2.8/2+0.2x1.4x2.8/2]")
    assert placed(aliasing_case())[0].layout == ("g0[2*0.2x1.4x2.16/2] g1[2*1.4x0.2x2.16/2] g2[2*0.200/1]")


def test_axes_of_size_one_do_not_change_the_layout() -> None:
    one_head = vllm_case("LBNHC", kind=Kind.MLA, heads=1)
    assert placed(one_head)[0].layout == placed(vllm_case("BHLNC", kind=Kind.MLA, heads=1))[0].layout


def test_contiguous_pages_are_one_run() -> None:
    for layout in ("LBNHC", "LBHNC", "BLHNC", "BLNHC"):
        paged, _ = placed(vllm_case(layout, padding=32))
        assert paged.tables[0].rows[:, 4:].tolist() == [[256, 1, 0, 0, 1, 0, 0]] * 3
    paged, _ = placed(vllm_case("BHLNC"))
    assert paged.tables[0].rows[0, 4:].tolist() == [128, 1, 0, 0, 2, 384, 128]


def test_pages_counts_them_and_the_owner_is_kept_alive() -> None:
    case = vllm_case("LBNHC")
    memory = np.zeros(case.nbytes, np.uint8)
    owner = weakref.ref(memory)
    paged = PagedKV(case.spec, case.views(memory.ctypes.data), keep=memory)
    assert paged.pages(0) == 12
    del memory
    gc.collect()
    assert owner() is not None
    del paged
    gc.collect()
    assert owner() is None
