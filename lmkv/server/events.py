"""What came to and left each tier of a scope, for those who ask: a bounded ring of changes per scope.

A part that several shards make up counts when shard 0's does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from itertools import islice

from lmkv.index import Entry, Watch, parts_of

SCOPES = 64
CHANGES = 1 << 16

Change = tuple[str, int, bytes, int]  # stored, removed or cleared; tier number; digest; group


class _Ring:
    def __init__(self) -> None:
        self.next = 1
        self.changes: deque[Change] = deque(maxlen=CHANGES)

    def add(self, change: Change) -> None:
        self.next += 1
        self.changes.append(change)


class Rings(Watch):
    """Watches an index; scopes nobody asked for cost nothing, of more than 64 the longest unasked is forgotten."""

    def __init__(self) -> None:
        self._rings: OrderedDict[bytes, _Ring] = OrderedDict()
        self._lock = threading.Lock()

    def changed(self, entry: Entry, tier: int, mask: int, present: bool) -> None:
        if entry.scope in self._rings:
            with self._lock:
                ring = self._rings.get(entry.scope)
                for group, shard in parts_of(mask) if ring else ():
                    if ring and shard == 0:
                        ring.add(("stored" if present else "removed", tier, entry.digest, group))

    def cleared(self, scope: bytes) -> None:
        with self._lock:
            if ring := self._rings.get(scope):
                ring.add(("cleared", 0, b"", 0))

    def since(self, scope: bytes, cursor: int) -> tuple[int, bool, list[Change]]:
        """(cursor for the next call, whether changes were lost, changes from ``cursor`` on); 0 subscribes."""
        with self._lock:
            ring = self._rings.setdefault(scope, _Ring())
            self._rings.move_to_end(scope)
            if len(self._rings) > SCOPES:
                self._rings.popitem(last=False)
            first = ring.next - len(ring.changes)
            lost = bool(cursor) and not first <= cursor <= ring.next
            skip = 0 if lost else (cursor or ring.next) - first
            return ring.next, lost, list(islice(ring.changes, skip, None))
