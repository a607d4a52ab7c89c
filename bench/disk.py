"""Store and retrieve through a disk tier against fio: pairs in turn, the same file size, block size and depth.

    python bench/disk.py /path/on/the/disk --sizes 4MiB 32MiB --files 16 --pairs 7

Both sides: fresh files of the chunk's size, O_DIRECT, blocks of 4 MiB, four in flight, huge-page
buffers; fio with registered buffers and without scrambling what it writes. Which side goes first
alternates. A store is timed until its files are renamed, a retrieve from a host memory that was
emptied; both count everything an engine waits for: page copies, checksums, index. Every retrieve is
compared with what was stored. Where fio is missing the reference is one O_DIRECT file after another.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from lmkv.cli.output import emit, track
from lmkv.spec import SHAPES, KVSpec
from lmkv.units import parse_bytes
from lmkv_bench import Bench

TOKEN_BYTES = 131072  # of llama-3.1-8b


def measure(nbytes: int, folder: str, files: int, pairs: int, threads: int) -> list[dict[str, Any]]:
    """The rows of one chunk size."""
    chunk = nbytes // TOKEN_BYTES
    spec = KVSpec.from_hf_config(SHAPES["llama-3.1-8b"], chunk, 16)
    bench = Bench(spec, "LBNHC", f"disk://{folder}?direct=on", files * chunk, threads)
    runs = bench.measure(track(range(pairs + 1), f"{nbytes >> 20} MiB"))
    figures, rows = {each["step"]: each for each in runs.figures()}, []
    for step in ("store", "retrieve"):
        mine, ratios = figures[step], sorted(runs.ratios(step))
        row = {"files": f"{nbytes >> 20} MiB", "step": step, "beside": mine["of"]}
        row |= {"its GB/s": figures[mine["of"]]["median"], "ours GB/s": mine["median"], "ratio": mine["ratio"]}
        rows.append(row | {"lowest, highest": f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a folder on the disk")
    parser.add_argument("--sizes", type=parse_bytes, nargs="+", default=[4 << 20, 32 << 20])
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="threads that copy pages")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sizes = options.sizes
        emit([row for n in sizes for row in measure(n, folder, options.files, options.pairs, options.threads)])


if __name__ == "__main__":
    main()
