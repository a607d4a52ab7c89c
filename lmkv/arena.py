"""Host memory in slabs and slots.

Memory that was never written costs about nine times a warm copy, so the arena maps its whole budget at start, touches
it in the background, and never gives it back: a *slab* is lent to a size class on demand and returned when its last
slot is freed. A *slot* holds one chunk container. Slots are counted references: the index holds one, every copy in
flight holds one, and the bytes are reused only when the last holder lets go.

A *shared* arena lies in one memory file without a name, sealed so that nobody can change its size: whoever is given
the descriptor maps the same bytes, and a slot is told by its offset.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable, Sequence

from lmkv import _native
from lmkv.errors import ConfigError

PAGE = 4096
HUGE = 2 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


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
    """``nbytes`` from ``start`` on of a mapping and, while lent, its slots of one size class."""

    def __init__(self, memory: _native.Slab, start: int, nbytes: int) -> None:
        self.memory = memory
        self.start = start
        self.nbytes = nbytes
        self.warm = False
        self.slot_bytes = 0
        self.slots: list[Slot] = []
        self.free: list[Slot] = []

    def lend(self, slot_bytes: int) -> None:
        if slot_bytes != self.slot_bytes:
            base, count = self.memory.address + self.start, self.nbytes // slot_bytes
            self.slots = [Slot(base + i * slot_bytes, slot_bytes, self) for i in range(count)]
            self.slot_bytes = slot_bytes
        self.free = self.slots[::-1]


class Arena:
    """A budget of host memory handed out as slots.

    budget: bytes the arena may map; slab: bytes of one slab (see :func:`slab_bytes`);
    exact: container sizes that get a size class of their own, other sizes share geometric classes (factor 1.25).
    shared: memory that other processes can map, by ``fd``. Raises ConfigError when not even one slab fits, or the
    system refuses the memory.
    """

    def __init__(
        self,
        budget: int,
        slab: int,
        exact: Sequence[int] = (),
        *,
        huge: bool = True,
        touch: bool = True,
        shared: bool = False,
    ) -> None:
        self.budget = budget
        self.shared, self.fd = shared, -1
        self._exact = frozenset(round_up(size, PAGE) for size in exact)
        largest = max(self._exact, default=PAGE)
        if budget < largest:
            raise ConfigError("cpu.budget", f"{budget} bytes cannot hold one chunk; needs at least {largest}")
        self.slab_bytes = slab = max(largest, min(slab, budget // PAGE * PAGE))
        pieces = [slab] * (budget // slab)
        if (rest := budget % slab // PAGE * PAGE) >= largest:
            pieces.append(rest)
        self.capacity = sum(pieces)
        try:
            if shared:
                self.fd = _memory_file(self.capacity)
                memory = _native.Slab(self.capacity, huge, self.fd)
                self._idle = [_Slab(memory, i * slab, nbytes) for i, nbytes in enumerate(pieces)]
            else:
                self._idle = [_Slab(_native.Slab(nbytes, huge), 0, nbytes) for nbytes in pieces]
        except (MemoryError, OSError, OverflowError) as error:
            self._close_file()
            raise ConfigError("cpu.budget", f"the system refused {budget} bytes: {error}") from error
        self._slabs = list(self._idle)
        self._mapped = len(self._slabs)
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
                slab.memory.touch(slab.start + start, slab.start + min(start + (64 << 20), slab.nbytes))
            slab.warm = True
        self.warmed.set()

    def regions(self) -> list[tuple[int, int]]:
        """(address, bytes) of every slab, for pinning; they stay mapped until `close`."""
        return [(slab.memory.address + slab.start, slab.nbytes) for slab in self._slabs]

    @property
    def base(self) -> int:
        """Where a shared arena's file is mapped here: a slot's offset in it is ``address - base``."""
        return self._slabs[0].memory.address

    def add_exact(self, sizes: Iterable[int]) -> bool:
        """Give more container sizes a size class of their own. False: one has no room, or there is no slab a class."""
        exact = self._exact | {round_up(size, PAGE) for size in sizes}
        if max(exact) > self.slab_bytes or len(exact) > len(self._slabs):
            return False
        self._exact = exact
        return True

    def is_exact(self, nbytes: int) -> bool:
        """Containers of ``nbytes`` have a size class of their own."""
        return nbytes in self._exact

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
                if self._stop.is_set():
                    self._unmap(slab)
                else:
                    slabs.remove(slab)
                    self._idle.append(slab)

    def close(self) -> None:
        """Unmap every slab none of whose slots is held; memory that a stuck read may still write stays mapped."""
        self._stop.set()
        if self._toucher.is_alive():
            self._toucher.join()
        with self._lock:
            for slab in self._idle:
                self._unmap(slab)
            self._idle = []
            self._lent = {}
            self._close_file()

    def _unmap(self, slab: _Slab) -> None:
        self._mapped -= 1
        if not (self.shared and self._mapped):
            slab.memory.close()

    def _close_file(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _memory_file(nbytes: int) -> int:
    """A sealed memory file of exactly ``nbytes``; it lives while somebody maps it or has it open."""
    fd = os.memfd_create("lmkv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
