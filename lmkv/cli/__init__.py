"""The ``lmkv`` command: one file a family of commands, and one clear line for an error.

Exit codes: 0 fine, 1 refused or something is bad, 2 the command line was wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from lmkv import __version__
from lmkv.cli import bench, cache, codec, config, doctor, server
from lmkv.errors import LmkvError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(config.app, name="config")
app.add_typer(cache.app, name="cache")
app.add_typer(codec.app, name="codec")
app.command()(doctor.doctor)
app.command()(bench.bench)
app.command()(server.server)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """KV cache for LLM inference: configuration, checks, and what is on disk."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line (``sys.argv`` when None) and exit."""
    try:
        app(arguments)
    except (LmkvError, OSError, MemoryError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"lmkv: {text}", file=sys.stderr)
        sys.exit(1)
