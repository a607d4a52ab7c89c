"""How the commands print: tables or JSON on stdout, progress bars on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import rich.progress
import typer
from pydantic import ByteSize
from rich import print_json
from rich.console import Console
from rich.table import Table
from rich.text import Text

T = TypeVar("T")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def emit(rows: Sequence[Mapping[str, Any]], json: bool = False) -> None:
    """Print rows, which have the same keys, as JSON or as a table (240 columns wide when piped)."""
    if json:
        print_json(data=rows, default=str)
        return
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0] if rows else ():
        number = all(isinstance(row[name], int | float) for row in rows)
        grid.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        cells = (f"{x:.2f}" if isinstance(x, float) else "" if x is None else str(x) for x in row.values())
        grid.add_row(*map(Text, cells))
    Console(width=None if sys.stdout.isatty() else 240).print(grid)


def track(items: Iterable[T], description: str) -> Iterable[T]:
    """``items`` under a progress bar, which is gone at the end; without one where stderr is no terminal."""
    console = Console(stderr=True)
    hidden = not console.is_terminal
    return rich.progress.track(items, description, console=console, transient=True, disable=hidden)


def human(nbytes: float) -> str:
    """``1.5GiB``."""
    return ByteSize(nbytes).human_readable()
