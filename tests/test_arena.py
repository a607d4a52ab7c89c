"""The arena: no two holders share bytes, sums are exact, memory comes back."""

from __future__ import annotations

import fcntl
import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv import _native
from lmkv.arena import HUGE, SEALS, Arena, slab_bytes
from lmkv.errors import ConfigError

BUDGET = 40 * 4096


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5 * 4096), st.booleans()), max_size=60), st.booleans())
def test_slots_never_overlap_and_the_sum_is_exact(steps: list[tuple[int, bool]], shared: bool) -> None:
    arena = Arena(BUDGET, 10 * 4096, [4096, 3 * 4096], huge=False, touch=False, shared=shared)
    held = []
    for nbytes, free in steps:
        if free and held:
            arena.release(held.pop(nbytes % len(held)))
            continue
        slot = arena.alloc(nbytes)
        if slot is None:
            continue
        assert slot.nbytes >= nbytes
        slot.view()[:] = bytes([len(held) % 256]) * slot.nbytes
        held.append(slot)
        spans = sorted((s.address, s.address + s.nbytes) for s in held)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert arena.used == sum(s.nbytes for s in held) <= BUDGET
    for slot in held:
        arena.release(slot)
    assert arena.used == 0
    assert arena.alloc(10 * 4096) is not None, "empty slabs serve another class again"
    arena.close()


def test_a_slot_returns_only_when_its_last_holder_lets_go() -> None:
    arena = Arena(4096, 4096, [4096], huge=False, touch=False)
    slot = arena.alloc(4096)
    assert slot is not None
    generation = slot.generation
    arena.hold(slot)
    arena.release(slot)
    assert arena.alloc(4096) is None
    arena.release(slot)
    again = arena.alloc(4096)
    assert again is slot
    assert again.generation == generation + 1


def test_a_shared_arena_is_seen_by_whoever_maps_its_file_and_keeps_its_size() -> None:
    arena = Arena(4 << 20, 1 << 20, [8192], touch=False, shared=True)
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) == SEALS
    for size in (0, 8 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    there = _native.Slab(arena.capacity, False, arena.fd)
    slots = [arena.alloc(8192) for _ in range(300)]
    for i, slot in enumerate(slots):
        slot.view()[:] = bytes([i % 256]) * 8192
    for i, slot in enumerate(slots):
        assert bytes(_native.memory(there.address + slot.address - arena.base, 8192)) == bytes([i % 256]) * 8192
    arena.close()
    arena.close()
    assert slots[7].view()[5] == 7, "the mapping stays while a slot is held"
    for slot in slots:
        arena.release(slot)
    offset = slots[7].address - arena.base
    assert _native.memory(there.address + offset, 8192)[5] == 7, "and other mappings outlive it"
    there.close()


@pytest.mark.parametrize("shared", [False, True])
def test_touching_does_not_change_bytes(shared: bool) -> None:
    arena = Arena(8 << 20, 2 << 20, [4096], touch=False, shared=shared)
    slots = [arena.alloc(4096) for _ in range(64)]
    for i, slot in enumerate(slots):
        slot.view()[:] = bytes([i]) * 4096
    arena._touch()
    assert arena.warmed.is_set()
    for i, slot in enumerate(slots):
        assert bytes(slot.view()) == bytes([i]) * 4096


@pytest.mark.parametrize("slot", [4096, 12288, (32 << 20) + 4096, 100 << 20])
def test_slabs_hold_whole_slots_with_little_waste(slot: int) -> None:
    size = slab_bytes(slot, 64 << 20)
    assert size % HUGE == 0
    assert size >= 64 << 20
    assert size % slot / size < 0.04


def test_a_budget_below_one_chunk_is_refused_with_the_amount() -> None:
    with pytest.raises(ConfigError, match="needs at least 1048576"):
        Arena(4096, 4096, [1 << 20], touch=False)


@pytest.mark.parametrize("shared", [False, True])
def test_a_budget_the_system_refuses_is_a_config_error(shared: bool) -> None:
    with pytest.raises(ConfigError, match="refused"):
        Arena(1 << 62, 1 << 61, [4096], touch=False, shared=shared)


def test_added_sizes_have_slots_of_exactly_their_size() -> None:
    arena = Arena(BUDGET, 20 * 4096, [4096], touch=False)
    assert arena.size_class(8 * 4096) > 8 * 4096
    arena.add_exact([8 * 4096])
    assert arena.size_class(8 * 4096) == 8 * 4096
