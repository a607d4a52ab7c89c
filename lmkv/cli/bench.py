"""``lmkv bench``: the command; what it measures is in `lmkv_bench`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich import print_json

from lmkv.cli.output import Json, emit, human, track
from lmkv.errors import ConfigError, nearest
from lmkv.spec import SHAPES, KVSpec
from lmkv_bench import LAYOUTS, Bench


def bench(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "llama-3.1-8b",
    layout: Annotated[str, typer.Option(help=f"Of the pages: {', '.join(LAYOUTS)}.")] = "LBNHC",
    tier: Annotated[str, typer.Option(help="cpu, or a lower tier's URL: disk:///path.")] = "cpu",
    tokens: Annotated[int, typer.Option(min=256, help="Tokens stored and restored, in chunks of 256.")] = 4096,
    threads: Annotated[int, typer.Option(min=1, help="Threads that copy.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Measurements; one more goes before them.")] = 5,
    codec: Annotated[str, typer.Option(help="Of the lower tier; without one, of a folder in memory.")] = "",
    level: Annotated[int | None, typer.Option(help="Of the codec.")] = None,
    profile: Annotated[str, typer.Option(metavar="FILE_OR_ID", help="Of the codec.")] = "",
    json: Json = False,
) -> None:
    """How fast store, retrieve, lookup and hash are here, beside memcpy, disk and SHA-256."""
    if model not in SHAPES:
        raise ConfigError("--model", f"unknown shape {model!r}{nearest(model, SHAPES)}")
    spec = KVSpec.from_hf_config(SHAPES[model], 256, 16)
    with ExitStack() as stack:
        encoding: dict[str, Any] | None = None
        if codec:
            # Threads encode and decode here: what is measured is the codec.
            encoding = {"codec": codec, "level": level, "profile": profile, "writers": threads, "readers": threads}
            if tier == "cpu":
                memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108
                tier = f"disk://{stack.enter_context(TemporaryDirectory(dir=memory, prefix='lmkv-bench-'))}"
        case = Bench(spec, layout, tier, tokens, threads, codec=encoding)
        title = " ".join(filter(None, (model, layout, codec, tier)))
        figures = case.measure(track(range(runs + 1), title)).figures()
    if json:
        settings = {"model": model, "layout": layout, "tier": tier, "tokens": tokens, "threads": threads}
        settings |= {"codec": codec} if codec else {}
        print_json(data={**settings, "runs": runs, "bytes": case.stored, "figures": figures})
    else:
        print(f"{title}: {tokens} tokens, {human(case.stored)}, {runs} runs")
        emit(figures)
