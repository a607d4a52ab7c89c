"""Amounts as people write them: sizes (8GiB, 500MB, 25%), times (30s, 7d); the memory there is."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

_AMOUNT = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:e-?\d{1,3})?)\s*([a-z%]*)\s*", re.IGNORECASE | re.ASCII)
_BYTES = {"": 1, "b": 1} | {f"{c}b": 1000**n for n, c in enumerate("kmgt", 1)}
_BYTES |= {f"{c}ib": 1024**n for n, c in enumerate("kmgt", 1)}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Size:
    """Memory or disk: ``nbytes``, or else a ``fraction`` in (0, 1] of a total known later."""

    nbytes: int = 0
    fraction: float = 0.0

    @classmethod
    def parse(cls, value: object) -> Size:
        """From ``8589934592``, ``"8GiB"`` (1024), ``"500MB"`` (1000), ``0.25`` or ``"25%"``; else ValueError.

        Also for what is below 4096 bytes, which is most often a forgotten unit.
        """
        if isinstance(value, Size):
            return value
        number = isinstance(value, int | float | str) and not isinstance(value, bool)
        if match := _AMOUNT.fullmatch(str(value)) if number else None:
            amount, unit = Decimal(match[1]), match[2].lower()
            if unit == "%" or (not unit and not match[1].isdigit()):
                fraction = float(amount) / (100 if unit else 1)
                if 0 < fraction <= 1:
                    return cls(fraction=fraction)
            elif unit in _BYTES and 4096 <= amount * _BYTES[unit] < 2**63:
                return cls(nbytes=int(amount * _BYTES[unit]))
        raise ValueError("is not a size: write 8GiB, 500MB, a number of bytes (4096 or more), 0.25 or 25%")

    def resolve(self, total: int) -> int:
        """Bytes, given what a fraction refers to."""
        return self.nbytes or int(total * self.fraction)

    def __str__(self) -> str:
        if self.fraction:
            return repr(self.fraction)
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self.nbytes % _BYTES[unit.lower()] == 0:
                return f"{self.nbytes // _BYTES[unit.lower()]}{unit}"
        return str(self.nbytes)


def parse_bytes(value: object) -> int:
    """A size that is no fraction. ValueError as for ``Size.parse``."""
    size = Size.parse(value)
    if size.fraction:
        raise ValueError("is a fraction: write bytes, such as 64MiB")
    return size.nbytes


def parse_number(value: object) -> object:
    """``value`` unless it is a truth value, which Python would take for 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("is a truth value: write a number")
    return value


def parse_seconds(value: object) -> object:
    """Seconds from a string with a unit (``30s``, ``7d``); anything else as it is, for pydantic to judge."""
    match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if match and match[2].lower() in _SECONDS:
        return float(match[1]) * _SECONDS[match[2].lower()]
    return parse_number(value)


def memory_limit(root: str | Path = "/") -> int:
    """Bytes this process may use: the machine's memory, or less where a cgroup (v2, v1) says so."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    cgroups = Path(root, "proc/self/cgroup")
    for line in cgroups.read_text().splitlines() if cgroups.exists() else []:
        _, controllers, group = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            mount, file = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
            for level in ((folder := Path(group.lstrip("/"))), *folder.parents):
                with suppress(OSError, ValueError):  # not visible in this namespace, or "max"
                    limits.append(int(Path(root, "sys/fs/cgroup", mount, level, file).read_text()))
    return min(limits)
