"""Store and retrieve in host memory against memcpy: layouts, threads, small pages, head rows.

    python bench/host.py --tokens 4096 --runs 7 --threads 1 2

One line a case: medians of GB/s, and the median [lowest, highest] of the ratios run by run. Every
retrieve is compared with what was stored.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from lmkv.cli.bench import LAYOUTS, Bench
from lmkv.cli.doctor import scratch
from lmkv.cli.measure import Runs
from lmkv.cli.output import progress, table
from lmkv.pages import Order
from lmkv.spec import SHAPES, Kind, KVSpec, LayerGroup

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


def measure(case: Case, tokens: int, threads: int, runs: int) -> list[str]:
    """Cells of one case."""
    bench = Bench(case.spec, case.layout, "cpu", tokens, threads, case.order)
    with scratch(bench.engine):
        bench.run()
        bench.runs = Runs()
        for _ in range(runs):
            bench.run()
    found = {each["step"]: each for each in bench.runs.figures()}
    cells = [case.name, str(threads), f"{found['memcpy']['median']:.2f}"]
    for step in ("store", "retrieve"):
        ratios = sorted(bench.runs.ratios(step))
        spread = f"{found[step]['ratio']:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        cells += [f"{found[step]['median']:.2f}", spread]
    return cells


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
    with progress() as bar:
        rows = [
            measure(case, options.tokens, threads, options.runs)
            for case, threads in bar.track(todo, description="host")
        ]
    table(("layout", "threads", "memcpy", "store", "of memcpy", "retrieve", "of memcpy"), rows)


if __name__ == "__main__":
    main()
