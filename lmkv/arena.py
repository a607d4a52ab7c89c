"""Host memory in slabs and slots.

Memory that was never written costs about nine times a warm copy, so the arena maps its whole budget at start, touches
it in the background, and never gives it back: a *slab* is lent to a size class on demand and returned when its last
slot is freed. A *slot* holds one chunk container. Slots are counted references: the index holds one, every copy in
flight holds one, and the bytes are reused only when the last holder lets go.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lmkv import _native
from lmkv.errors import ConfigError

PAGE = 4096
HUGE = 2 << 20


def round_up(value: int, unit: int) -> int:
    """Smallest multiple of ``unit`` at or above ``value``."""
    return -(-value // unit) * unit


def slab_bytes(slot: int, target: int) -> int:
    """Bytes of a slab that holds whole slots of ``slot`` bytes and is at least ``target``, huge-page aligned."""
    return round_up(max(1, -(-target // slot)) * slot, HUGE)


class Slot:
    """One container's memory. ``generation`` changes whenever the bytes get a new owner."""

    __slots__ = ("address", "generation", "holders", "nbytes", "slab")

    def __init__(self, address: int, nbytes: int, slab: _Slab) -> None:
        self.address = address
        self.nbytes = nbytes
        self.slab = slab
        self.generation = 0
        self.holders = 0

    def view(self, nbytes: int | None = None) -> memoryview:
        """The first ``nbytes`` (default: all) as a writable buffer; valid while the slot is held."""
        return _native.memory(self.address, self.nbytes if nbytes is None else nbytes)


class _Slab:
    """One mapping and, while lent, its slots of one size class."""

    def __init__(self, nbytes: int, huge: bool) -> None:
        self.memory = _native.Slab(nbytes, huge)
        self.nbytes = nbytes
        self.warm = False
        self.slot_bytes = 0
        self.slots: list[Slot] = []
        self.free: list[Slot] = []

    def lend(self, slot_bytes: int) -> None:
        if slot_bytes != self.slot_bytes:
            base, count = self.memory.address, self.nbytes // slot_bytes
            self.slots = [Slot(base + i * slot_bytes, slot_bytes, self) for i in range(count)]
            self.slot_bytes = slot_bytes
        self.free = self.slots[::-1]


class Arena:
    """A budget of host memory handed out as slots.

    budget: bytes the arena may map; slab: bytes of one slab (see :func:`slab_bytes`);
    exact: container sizes that get a size class of their own, other sizes share geometric classes (factor 1.25).
    Raises ConfigError when not even one slab fits, or the system refuses the memory.
    """

    def __init__(
        self, budget: int, slab: int, exact: Sequence[int] = (), *, huge: bool = True, touch: bool = True
    ) -> None:
        self.budget = budget
        self._exact = frozenset(round_up(size, PAGE) for size in exact)
        largest = max(self._exact, default=PAGE)
        if budget < largest:
            raise ConfigError("cpu.budget", f"{budget} bytes cannot hold one chunk; needs at least {largest}")
        self.slab_bytes = slab = max(largest, min(slab, budget // PAGE * PAGE))
        try:
            self._idle = [_Slab(slab, huge) for _ in range(budget // slab)]
            rest = (budget % slab) // PAGE * PAGE
            if rest >= largest and self._idle:
                self._idle.append(_Slab(rest, huge))
        except MemoryError as error:
            raise ConfigError("cpu.budget", f"the system refused {budget} bytes: {error}") from error
        self._slabs = list(self._idle)
        self.capacity = sum(each.nbytes for each in self._slabs)
        self.used = 0
        self._lent: dict[int, list[_Slab]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.warmed = threading.Event()
        self._toucher = threading.Thread(target=self._touch, name="lmkv-touch", daemon=True)
        if touch:
            self._toucher.start()
        else:
            self.warmed.set()

    def _touch(self) -> None:
        for slab in self._slabs:
            for start in range(0, slab.nbytes, 64 << 20):
                if self._stop.is_set():
                    return
                slab.memory.touch(start, min(start + (64 << 20), slab.nbytes))
            slab.warm = True
        self.warmed.set()

    def regions(self) -> list[tuple[int, int]]:
        """(address, bytes) of every slab, for pinning; they stay mapped until `close`."""
        return [(slab.memory.address, slab.nbytes) for slab in self._slabs]

    def size_class(self, nbytes: int) -> int:
        """Bytes of the slot that a container of ``nbytes`` gets."""
        nbytes = round_up(nbytes, PAGE)
        if nbytes in self._exact:
            return nbytes
        size = PAGE
        while size < nbytes:
            size = round_up(size + size // 4, PAGE)
        return min(size, max(self.slab_bytes, nbytes))

    def alloc(self, nbytes: int) -> Slot | None:
        """A slot of at least ``nbytes`` held once by the caller, or None when no memory is free."""
        size = self.size_class(nbytes)
        with self._lock:
            slabs = self._lent.setdefault(size, [])
            if not slabs and not self._lend(size, slabs):
                return None
            slab = slabs[-1]
            slot = slab.free.pop()
            if not slab.free:
                slabs.pop()
            slot.generation += 1
            slot.holders = 1
            self.used += size
            return slot

    def _lend(self, size: int, slabs: list[_Slab]) -> bool:
        """Give an idle slab to a class, a touched one if there is one."""
        fits = [i for i, slab in enumerate(self._idle) if slab.nbytes >= size]
        if not fits:
            return False
        slab = self._idle.pop(next((i for i in fits if self._idle[i].warm), fits[0]))
        slab.lend(size)
        slabs.append(slab)
        return True

    def hold(self, slot: Slot) -> None:
        """One more holder; the caller must already know the slot to be held."""
        with self._lock:
            slot.holders += 1

    def release(self, slot: Slot) -> None:
        """One holder less; the last one frees the slot."""
        with self._lock:
            slot.holders -= 1
            if slot.holders:
                return
            slab, size = slot.slab, slot.nbytes
            self.used -= size
            slabs = self._lent.setdefault(size, [])
            if not slab.free:
                slabs.append(slab)
            slab.free.append(slot)
            if len(slab.free) == len(slab.slots):
                slabs.remove(slab)
                if self._stop.is_set():
                    slab.memory.close()
                else:
                    self._idle.append(slab)

    def close(self) -> None:
        """Unmap every slab none of whose slots is held; memory that a stuck read may still write stays mapped."""
        self._stop.set()
        if self._toucher.is_alive():
            self._toucher.join()
        with self._lock:
            for slab in self._idle:
                slab.memory.close()
            self._idle = []
            self._lent = {}
