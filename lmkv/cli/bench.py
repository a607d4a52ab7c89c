"""``lmkv bench``: the command; what it measures is in `lmkv_bench`."""

from __future__ import annotations

from typing import Annotated

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
    json: Json = False,
) -> None:
    """How fast store, retrieve, lookup and hash are here, beside memcpy, disk and SHA-256."""
    if model not in SHAPES:
        raise ConfigError("--model", f"unknown shape {model!r}{nearest(model, SHAPES)}")
    spec = KVSpec.from_hf_config(SHAPES[model], 256, 16)
    case = Bench(spec, layout, tier, tokens, threads)
    title = f"{model} {layout} {tier}"
    figures = case.measure(track(range(runs + 1), title)).figures()
    if json:
        settings = {"model": model, "layout": layout, "tier": tier, "tokens": tokens, "threads": threads}
        print_json(data={**settings, "runs": runs, "bytes": case.stored, "figures": figures})
    else:
        print(f"{title}: {tokens} tokens, {human(case.stored)}, {runs} runs")
        emit(figures)
