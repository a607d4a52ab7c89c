"""The index against a plain model: which chunks are where, exact sums, leaves only."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv.eviction import Lru
from lmkv.index import Index, part_bit, parts_of
from lmkv.keys import ChunkKey

TIERS = 2


def key(path: tuple[int, ...], group: int = 0, shard: int = 0) -> ChunkKey:
    """A key whose digest spells its path in the tree."""

    def digest(p: tuple[int, ...]) -> bytes:
        return bytes([len(p), *p]).ljust(32, b"\0")

    return ChunkKey(b"s" * 16, b"t" * 8, digest(path), digest(path[:-1])[:8], len(path) - 1, group, shard)


paths = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index(TIERS, Lru())
        self.model: dict[tuple[tuple[int, ...], int, int, int], int] = {}

    @rule(path=paths, tier=st.integers(0, 1), group=st.integers(0, 1), shard=st.integers(0, 1), size=st.integers(1, 9))
    def add(self, path: tuple[int, ...], tier: int, group: int, shard: int, size: int) -> None:
        self.index.add(key(path, group, shard), tier, size)
        self.model[path, tier, group, shard] = size

    @rule(path=paths, tier=st.integers(0, 1), part=st.none() | st.tuples(st.integers(0, 1), st.integers(0, 1)))
    def remove(self, path: tuple[int, ...], tier: int, part: tuple[int, int] | None) -> None:
        entry = self.index.get(key(path))
        gone = [k for k in self.model if k[:2] == (path, tier) and part in (None, k[2:])]
        want = sum(self.model.pop(k) for k in gone)
        got = self.index.remove(entry, tier, part and part_bit(*part)) if entry else 0
        assert got == want

    @rule(path=paths)
    def touch(self, path: tuple[int, ...]) -> None:
        found = [self.index.get(key(path[: n + 1])) for n in range(len(path))]
        self.index.touch(entry for entry in found if entry)

    @precondition(lambda self: self.model)
    @rule(tier=st.integers(0, 1), count=st.integers(1, 4))
    def evict(self, tier: int, count: int) -> None:
        for entry in self.index.victims(tier, lambda _: False):
            path = tuple(entry.digest[1 : 1 + entry.digest[0]])
            children = [k for k in self.model if k[1] == tier and k[0][:-1] == path]
            assert not children, "a victim had children in its tier"
            here = {p for p, t, _, _ in self.model if t == tier}
            leaves = [p for p in here if not any(other[:-1] == p for other in here)]
            oldest = min(self.index.get(key(p)).stamp for p in leaves)  # type: ignore[union-attr]
            assert entry.stamp == oldest
            self.index.remove(entry, tier)
            for k in [k for k in self.model if k[:2] == (path, tier)]:
                del self.model[k]
            count -= 1
            if not count:
                break

    @invariant()
    def sums_are_exact(self) -> None:
        for tier in range(TIERS):
            sizes = [size for k, size in self.model.items() if k[1] == tier]
            assert self.index.used[tier] == sum(sizes)
            assert self.index.objects[tier] == len(sizes)
        assert {tuple(e.digest[1 : 1 + e.digest[0]]) for e in self.index.entries()} == {k[0] for k in self.model}


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 63))))
def test_masks_list_their_parts(parts: set[tuple[int, int]]) -> None:
    assert set(parts_of(sum(part_bit(*part) for part in parts))) == parts


def test_pinned_and_leased_leaves_stay_ranked_but_are_passed_over() -> None:
    index = Index(1, Lru())
    a, b, c = (index.add(key((i,)), 0, 1) for i in range(3))
    a.pins, b.leases = 1, 1
    assert list(index.victims(0, lambda _: False)) == [c]
    a.pins = 0
    assert next(iter(index.victims(0, lambda _: False))) is a


def test_what_a_scan_found_ranks_below_what_was_used_here_older_first() -> None:
    index = Index(1, Lru())
    used = index.add(key((0,)), 0, 1)
    late = index.add(key((1,)), 0, 1, created=2000)
    early = index.add(key((2,)), 0, 1, created=1000)
    order = []
    for entry in index.victims(0, lambda _: False):
        order.append(entry)
        index.remove(entry, 0)
    assert order == [early, late, used]
