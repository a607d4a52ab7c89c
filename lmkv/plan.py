"""Lookup: the longest prefix that every layer group and every shard can restore.

Growing groups (full attention, MLA) need all their chunks. Window groups need the pages inside the last window at the
boundary, recurrent groups one state at the boundary itself. So the walk goes forward over the growing groups and then
back to the largest boundary at which every other group is complete: a fixed point, since cutting for one group can
uncover a gap in another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from lmkv.index import Entry, part_bit
from lmkv.keys import ChunkKeys
from lmkv.spec import Kind, KVSpec

if TYPE_CHECKING:
    from lmkv.storage import StorageManager


@dataclass(frozen=True)
class Trailing:
    """What one window or recurrent group needs at a boundary: its last ``len(pages)`` chunks, last chunk first.

    pages[d]: mask of the pages needed of the chunk ``d`` before the last.
    """

    group: int
    bits: int
    pages: tuple[int, ...]

    def has(self, entry: Entry | None, back: int) -> bool:
        """The chunk ``back`` before the boundary's last one holds every page the group needs of it."""
        if entry is None or entry.any & self.bits != self.bits:
            return False
        if not entry.pages:
            return True
        need = self.pages[back]
        return all(need & ~mask == 0 for bit, mask in entry.pages.items() if bit & self.bits)

    def last_boundary(self, entries: Sequence[Entry | None], end: int) -> int:
        """The largest boundary at or below ``end`` chunks whose trailing chunks are all there."""
        run = 0
        for i in range(end - 1, -1, -1):
            if self.has(entries[i], end - 1 - i):
                run += 1
                if run == len(self.pages) or i == 0:
                    return end
            else:
                end, run = i, 0
        return 0


@dataclass(frozen=True)
class Need:
    """A spec's restoration rule in the index's terms."""

    growing: int
    trailing: tuple[Trailing, ...]

    @classmethod
    def of(cls, spec: KVSpec) -> Need:
        """The rule of ``spec`` with all its shards."""
        growing, trailing = 0, []
        for g, group in enumerate(spec.groups):
            bits = sum(part_bit(g, shard) for shard in range(spec.shards))
            if group.kind in (Kind.FULL, Kind.MLA):
                growing |= bits
            else:
                pages = tuple(spec.page_mask(g, back) for back in range(spec.window_chunks(g) or 0))
                if pages:
                    trailing.append(Trailing(g, bits, pages))
        return cls(growing, tuple(trailing))

    def boundary(self, entries: Sequence[Entry | None], end: int) -> int:
        """The largest legal number of chunks at or below ``end``."""
        while end:
            legal = end
            for each in self.trailing:
                legal = each.last_boundary(entries, legal)
            if legal == end:
                break
            end = legal
        return end


@dataclass(frozen=True)
class Plan:
    """What a lookup found: ``tokens`` restorable tokens over ``entries`` (one a chunk), and why it ended there.

    An entry is None where no group needs the chunk (all its layers have slid past it).
    """

    keys: ChunkKeys
    need: Need
    entries: tuple[Entry | None, ...]
    reason: str
    names: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the hit, a multiple of the chunk."""
        return len(self.entries) * self.keys.chunk_tokens

    @property
    def chunks(self) -> tuple[str, ...]:
        """Per chunk, the slowest tier that some part must come from; '' where nothing is needed of it any more."""
        return tuple(
            "" if entry is None else self.names[place] for entry, place in zip(self.entries, self.places, strict=True)
        )

    @property
    def places(self) -> bytes:
        """`chunks` as the tiers' numbers, 0 where nothing is needed."""
        return bytes(map(_place, self.entries))

    @property
    def tiers(self) -> dict[str, int]:
        """Hit tokens by tier."""
        found: dict[str, int] = {}
        for name in self.chunks:
            found[name] = found.get(name, 0) + self.keys.chunk_tokens
        return found

    def cut(self, chunks: int, reason: str) -> Plan:
        """The plan with at most ``chunks`` chunks, at a boundary legal for every group."""
        end = self.need.boundary(self.entries, chunks)
        return replace(self, entries=self.entries[:end], reason=reason)

    def same_chunks(self, other: Plan) -> bool:
        """Both plans promise the same chunks."""
        return self.entries == other.entries


_ANY, _EXPIRES = attrgetter("any"), attrgetter("expires")


def _place(entry: Entry | None) -> int:
    if entry is None or entry.masks[0] == entry.any:
        return 0
    have = 0
    for place, mask in enumerate(entry.masks):
        have |= mask
        if not entry.any & ~have:
            return place
    return 0


def _usable(found: Sequence[Entry | None], growing: int, now: float) -> int:
    """How many from the first on are there, with all parts that grow, and not expired."""
    plain = None not in found and not any(map(_EXPIRES, found))
    if plain and all(mask & growing == growing for mask in set(map(_ANY, found))):
        return len(found)
    for count, entry in enumerate(found):
        if entry is None or entry.any & growing != growing or (entry.expires and entry.expires <= now):
            return count
    return len(found)


def lookup(storage: StorageManager, scope: bytes, keys: ChunkKeys, need: Need) -> Plan:
    """The longest restorable prefix of ``keys``; changes nothing but what probing a tier adds to the index."""
    entries: list[Entry | None] = []
    reason = "end of prompt" if keys.chunks else "shorter than a chunk"
    growing, now = need.growing, time.time()
    probes = 2  # one, and one more where that one shows a server to have begun anew
    while len(entries) < keys.chunks:
        found = list(map(storage.index.find(scope), keys.after(len(entries))))
        usable = _usable(found, growing, now)
        entries += found[:usable]
        if usable == len(found):
            continue
        entry = found[usable]
        if probes > 0:
            more = storage.probe(scope, keys, len(entries), need)
            void = any(each is not None and each.any & growing != growing for each in entries)
            probes -= 1 if void else 2
            entries = [] if void else entries
            if more or void:
                continue
        if entry is not None and entry.expires and entry.expires <= now:
            storage.expire([entry])
            reason, entry = "expired", None
        elif growing:
            reason = "not stored" if entry is None else "part missing"
        if growing:
            break
        entries.append(None)
    end = need.boundary(entries, len(entries))
    if end < len(entries):
        reason = "window or state missing"
    return Plan(keys, need, tuple(entries[:end]), reason, storage.names)
