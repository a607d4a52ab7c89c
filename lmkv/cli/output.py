"""How the commands print: plain tables, JSON, progress bars on stderr, sizes and ages."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 240


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under headings; numbers to the right, and not cut to 80 columns when piped."""
    cells = [[str(cell) for cell in row] for row in rows]
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for nth, name in enumerate(columns):
        number = all(row[nth].isdigit() for row in cells)
        grid.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in cells:
        grid.add_row(*map(Text, row))
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(grid)


def print_json(value: Any) -> None:
    """One JSON document; what JSON does not know is printed as text."""
    print(json.dumps(value, indent=2, default=str))


def progress() -> Progress:
    """A bar on stderr, gone when it is done; nothing at all when stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    show = console.is_terminal
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not show)


def human(nbytes: float) -> str:
    """``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def age(created: float) -> str:
    """Time since a moment in unix seconds, in its largest unit: ``3h``."""
    seconds = max(0.0, time.time() - created)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"
