"""Store and retrieve in host memory against memcpy: layouts, threads, small pages, head rows.

    python bench/host.py --tokens 4096 --runs 7 --threads 1 2

One line a case: medians of GB/s, and the median [lowest, highest] of the ratios run by run. Every
retrieve is compared with what was stored.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from lmkv.cli.output import emit, track
from lmkv.pages import Order
from lmkv.spec import SHAPES, Kind, KVSpec, LayerGroup
from lmkv_bench import LAYOUTS, Bench

# As many bytes a token as llama-3.1-8b; K and V of one head of one token are 256 bytes.
NARROW_HEADS = LayerGroup(Kind.FULL, tuple(range(32)), 16, kv_heads=16, head_dim=64)


class Case(NamedTuple):
    name: str
    spec: KVSpec
    layout: str
    order: Order = "physical"


def cases(chunk: int) -> list[Case]:
    """Every layout with pages of 64 KiB a layer, then the awkward ones."""
    llama = SHAPES["llama-3.1-8b"]
    usual = KVSpec.from_hf_config(llama, chunk, 16)
    tiny = KVSpec.from_hf_config(llama, chunk, 1)
    narrow = KVSpec((NARROW_HEADS,), chunk)
    return [Case(layout, usual, layout) for layout in LAYOUTS] + [
        Case("LBNHC, pages of 4 KiB", tiny, "LBNHC"),
        Case("LBNHC to head-major, rows of 512 B", usual, "LBNHC", "logical"),
        Case("LBNHC to head-major, rows of 256 B", narrow, "LBNHC", "logical"),
    ]


def measure(case: Case, tokens: int, threads: int, runs: int) -> dict[str, Any]:
    """The row of one case."""
    bench = Bench(case.spec, case.layout, "cpu", tokens, threads, case.order).measure(range(runs + 1))
    found = {each["step"]: each for each in bench.figures()}
    row = {"layout": case.name, "threads": threads, "memcpy": found["memcpy"]["median"]}
    for step in ("store", "retrieve"):
        ratios = sorted(bench.ratios(step))
        spread = f"{found[step]['ratio']:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        row |= {step: found[step]["median"], f"{step} of memcpy": spread}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="cases whose name begins with this")
    options = parser.parse_args()
    todo = [
        (case, threads)
        for case in cases(options.chunk)
        if case.name.startswith(options.only)
        for threads in options.threads
    ]
    emit([measure(case, options.tokens, threads, options.runs) for case, threads in track(todo, "host")])


if __name__ == "__main__":
    main()
