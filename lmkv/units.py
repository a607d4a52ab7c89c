"""Amounts as people write them: sizes (8GiB, 500MB, 25%), times (30s, 7d); the memory there is."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_AMOUNT = re.compile(r"(?i)\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e-?[0-9]+)?)\s*([a-z%]*)\s*")
_BYTES = {"b": 1} | {
    f"{letter}{i}b": (1024 if i else 1000) ** power for power, letter in enumerate("kmgt", 1) for i in ("", "i")
}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SMALLEST = 4096


@dataclass(frozen=True)
class Size:
    """Memory or disk: ``nbytes``, or else a ``fraction`` in (0, 1] of a total known later."""

    nbytes: int = 0
    fraction: float = 0.0

    @classmethod
    def parse(cls, value: object) -> Size:
        """From ``8589934592``, ``"8GiB"`` (1024), ``"500MB"`` (1000), ``0.25`` or ``"25%"``.

        ValueError: not an amount, not positive, a fraction above 1, or below 4096 bytes (which is
        most often a forgotten unit).
        """
        if isinstance(value, Size):
            return value
        match = None
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            match = _AMOUNT.fullmatch(str(value))
        if not match:
            raise ValueError("is not a size: write 8GiB, 500MB, a number of bytes, 0.25 or 25%")
        number, unit = match[1], match[2].lower()
        if unit == "%" or (not unit and not number.isdigit()):
            fraction = float(number) / (100 if unit else 1)
            if not 0 < fraction <= 1:
                raise ValueError("is no fraction in (0, 1]: write 0.25 or 25%, or 8GiB")
            return cls(fraction=fraction)
        if unit and unit not in _BYTES:
            raise ValueError("has an unknown unit: write KiB, MiB, GiB, TiB, or KB, MB, GB, TB")
        scale = _BYTES[unit or "b"]
        if not (float(number) * scale < 2**63):
            raise ValueError("is above 2^63 bytes")
        nbytes = int(number) * scale if number.isdigit() else round(float(number) * scale)
        if nbytes < SMALLEST:
            raise ValueError(f"is below {SMALLEST} bytes: write a size with a unit, such as 8GiB")
        return cls(nbytes=nbytes)

    def resolve(self, total: int) -> int:
        """Bytes, given what a fraction refers to; bytes stay what they are, also above it."""
        return self.nbytes or int(total * self.fraction)

    def __str__(self) -> str:
        if self.fraction:
            return repr(self.fraction)
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self.nbytes % _BYTES[unit.lower()] == 0:
                return f"{self.nbytes // _BYTES[unit.lower()]}{unit}"
        return str(self.nbytes)


def parse_bytes(value: object) -> int:
    """A size that must not be a fraction. ValueError as for ``Size.parse``."""
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
    """Seconds from a string with a unit (``30s``, ``7d``); anything else as it is."""
    match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if not match or not match[2]:
        return parse_number(value)
    if match[2].lower() not in _SECONDS:
        raise ValueError("has an unknown unit: write seconds, or a number with ms, s, m, h or d")
    return float(match[1]) * _SECONDS[match[2].lower()]


def memory_limit(root: str | Path = "/") -> int:
    """Bytes this process may use: the machine's memory, or less where a cgroup (v2, v1) says so."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    base = Path(root)
    try:
        lines = (base / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        mount = base / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = Path(group.lstrip("/"))
        for level in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # not visible in this namespace, or "max"
                limits.append(int((mount / level / file).read_text()))
    return min(limits)
