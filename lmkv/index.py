"""The index: one entry a chunk, with all its parts over groups, shards and tiers.

Entries form the prefix tree (design: the index knows the tree). A *part* is the container of one (group, shard) of a
chunk and is one bit of a mask. Per tier the index keeps which parts are there, their bytes, and how many children
each chunk has, so that only leaves are offered for eviction. All writes happen under the storage lock; `find` and
the masks may be read without it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from lmkv.eviction import Policy
from lmkv.keys import ChunkKey

MAX_SHARDS = 64
MAX_TIERS = 64
FOUND = 1 << 48


def part_bit(group: int, shard: int) -> int:
    """The mask bit of a chunk's container for ``group`` and ``shard``."""
    return 1 << (group * MAX_SHARDS + shard)


def parts_of(mask: int) -> Iterator[tuple[int, int]]:
    """(group, shard) of every bit of a mask."""
    while mask:
        low = mask & -mask
        yield divmod(low.bit_length() - 1, MAX_SHARDS)
        mask ^= low


@lru_cache(maxsize=4096)  # the same few tuples for all entries
def _set(masks: tuple[int, ...], tier: int, mask: int) -> tuple[int, ...]:
    return (*masks[:tier], mask, *masks[tier + 1 :])


class Entry:
    """A chunk: its place in the tree, where its parts are, and who needs them.

    masks[tier]: parts present; any: their union; sizes: stored bytes, see `size`;
    pages[bit]: page mask of a part that holds only some pages; lossy: parts in host memory that are not the exact
    bytes; expires: unix seconds, 0 = never.
    """

    __slots__ = (
        "alive", "any", "depth", "digest", "expires", "hits", "leases", "lossy", "masks",
        "pages", "parent", "pins", "queued", "scope", "sizes", "stamp", "tenant",
    )  # fmt: skip

    def __init__(self, key: ChunkKey, tiers: int) -> None:
        self.scope, self.tenant, self.digest = key.scope, key.tenant, key.digest
        self.parent, self.depth = key.parent, key.depth
        self.masks = (0,) * tiers
        self.any = self.lossy = 0
        self.sizes: dict[int, int] = {}  # ints only, so that the collector of garbage need not look at them
        self.pages: dict[int, int] | None = None
        self.stamp = 0
        self.hits = self.pins = self.leases = 0
        self.queued = 0
        self.expires = 0
        self.alive = True

    def key(self, group: int, shard: int) -> ChunkKey:
        """The storage key of one part."""
        return ChunkKey(self.scope, self.tenant, self.digest, self.parent, self.depth, group, shard)

    def size(self, tier: int, bit: int) -> int:
        """Bytes of one part in ``tier``, 0 when it is not there."""
        return self.sizes.get(bit * MAX_TIERS + tier, 0)

    def host_bytes(self) -> int:
        """Bytes of all parts in host memory."""
        return sum(nbytes for place, nbytes in self.sizes.items() if place % MAX_TIERS == 0)

    def keys(self, tier: int) -> list[ChunkKey]:
        """The storage keys of every part held in ``tier``."""
        return [self.key(group, shard) for group, shard in parts_of(self.masks[tier])]


class Watch:
    """Hears of every change of the index, under the storage lock: override what is of interest, and be quick."""

    def changed(self, entry: Entry, tier: int, mask: int, present: bool) -> None:
        """The parts of ``mask`` came to ``tier``, or left it."""

    def cleared(self, scope: bytes) -> None:
        """All chunks of a scope were removed; `changed` was not called for them."""


@dataclass
class _Scope:
    entries: dict[bytes, Entry] = field(default_factory=dict)
    by_parent_id: dict[bytes, Entry] = field(default_factory=dict)
    children: list[dict[bytes, int]] = field(default_factory=list)


class Index:
    """All chunks of all scopes over ``tiers`` tiers (0 is host memory), ranked by ``policy`` in each tier."""

    def __init__(self, tiers: int, policy: Policy) -> None:
        self.tiers = tiers
        self.policy = policy
        self.watch = Watch()
        self.scopes: dict[bytes, _Scope] = {}
        self.used = [0] * tiers
        self.objects = [0] * tiers
        self._clock = itertools.count(1)
        self._order = itertools.count()
        self._leaves: list[list[tuple[float, int, Entry]]] = [[] for _ in range(tiers)]

    def find(self, scope: bytes) -> Callable[[bytes], Entry | None]:
        """A function from digest to entry within ``scope``."""
        found = self.scopes.get(scope) or _Scope()
        return found.entries.get

    def get(self, key: ChunkKey) -> Entry | None:
        """The entry of a key's chunk."""
        return self.find(key.scope)(key.digest)

    def add(
        self, key: ChunkKey, tier: int, nbytes: int, *, pages: int = 0, expires: int = 0, created: int = 0
    ) -> Entry:
        """Note that ``tier`` holds ``key``'s part with ``nbytes``. Adding what is there corrects its size.

        pages: page mask of a part that lacks some pages (0: whole). created: unix seconds of a part found by a scan;
        what this process never touched ranks below what it did, older first.
        """
        scope = self.scopes.get(key.scope)
        if scope is None:
            scope = self.scopes[key.scope] = _Scope(children=[{} for _ in range(self.tiers)])
        entry = scope.entries.get(key.digest)
        if entry is None:
            entry = Entry(key, self.tiers)
            entry.stamp = created - FOUND if created else next(self._clock)
            scope.entries[key.digest] = scope.by_parent_id[key.digest[:8]] = entry
        bit = part_bit(key.group, key.shard)
        if not entry.masks[tier]:
            children = scope.children[tier]
            children[entry.parent] = children.get(entry.parent, 0) + 1
            if entry.digest[:8] not in children:
                self._offer(tier, entry)
        if not entry.masks[tier] & bit:
            self.objects[tier] += 1
            self.watch.changed(entry, tier, bit, True)
        entry.masks = _set(entry.masks, tier, entry.masks[tier] | bit)
        entry.any |= bit
        entry.expires = expires or entry.expires
        if pages:
            entry.pages = {**(entry.pages or {}), bit: pages}
        self.used[tier] += nbytes - entry.size(tier, bit)
        entry.sizes[bit * MAX_TIERS + tier] = nbytes
        return entry

    def remove(self, entry: Entry, tier: int, bit: int | None = None) -> int:
        """Forget one part, or all (``bit`` None), of a chunk in ``tier``; returns the bytes that were noted for it."""
        gone = entry.masks[tier] & (entry.masks[tier] if bit is None else bit)
        if not gone:
            return 0
        entry.lossy &= -1 if tier else ~gone
        freed = 0
        for group, shard in parts_of(gone):
            freed += entry.sizes.pop(part_bit(group, shard) * MAX_TIERS + tier)
            self.objects[tier] -= 1
        self.used[tier] -= freed
        self.watch.changed(entry, tier, gone, False)
        entry.masks = _set(entry.masks, tier, entry.masks[tier] ^ gone)
        entry.any = 0
        for mask in entry.masks:
            entry.any |= mask
        if not entry.masks[tier]:
            self._drop_child(tier, entry)
        if not entry.any:
            self._forget(entry)
        return freed

    def _drop_child(self, tier: int, entry: Entry) -> None:
        scope = self.scopes[entry.scope]
        left = scope.children[tier][entry.parent] - 1
        if left:
            scope.children[tier][entry.parent] = left
            return
        del scope.children[tier][entry.parent]
        parent = scope.by_parent_id.get(entry.parent)
        if parent is not None and parent.masks[tier]:
            self._offer(tier, parent)

    def _forget(self, entry: Entry) -> None:
        entry.alive = False
        scope = self.scopes[entry.scope]
        del scope.entries[entry.digest]
        if scope.by_parent_id.get(entry.digest[:8]) is entry:
            del scope.by_parent_id[entry.digest[:8]]
        if not scope.entries:
            del self.scopes[entry.scope]

    def touch(self, entries: Iterable[Entry]) -> None:
        """Stamp a prefix as used now: pass entries in prefix order, they are stamped from suffix to prefix."""
        for entry in reversed(list(entries)):
            entry.stamp = next(self._clock)
            entry.hits += 1

    def is_leaf(self, entry: Entry, tier: int) -> bool:
        """No child of the entry is in ``tier``."""
        return not self.scopes[entry.scope].children[tier].get(entry.digest[:8])

    def _offer(self, tier: int, entry: Entry) -> None:
        if not entry.queued & (1 << tier):
            entry.queued |= 1 << tier
            heapq.heappush(self._leaves[tier], (self.policy.rank(entry), next(self._order), entry))

    def victims(self, tier: int, busy: Callable[[Entry], bool]) -> Iterator[Entry]:
        """Evictable leaves of ``tier`` in the policy's order; the caller removes each before asking for the next.

        Pinned and leased entries, and those for which ``busy`` is true, are passed over and stay ranked.
        """
        heap, aside = self._leaves[tier], []
        try:
            while heap:
                noted, order, entry = heapq.heappop(heap)
                if not entry.masks[tier] or not entry.alive or not self.is_leaf(entry, tier):
                    entry.queued &= ~(1 << tier)
                    continue
                rank = self.policy.rank(entry)
                if rank > noted:
                    heapq.heappush(heap, (rank, order, entry))
                    continue
                aside.append((rank, order, entry))
                if not (entry.pins or entry.leases or busy(entry)):
                    yield entry
        finally:
            for item in aside:
                entry = item[2]
                if entry.alive and entry.masks[tier]:
                    heapq.heappush(heap, item)
                else:
                    entry.queued &= ~(1 << tier)

    def entries(self) -> Iterator[Entry]:
        """Every entry; do not change the index while iterating."""
        for scope in self.scopes.values():
            yield from scope.entries.values()
