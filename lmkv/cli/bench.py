"""``lmkv bench``: store, retrieve, lookup and hash, beside what this machine's memory and disk do.

Every run measures each step once, in turn with its reference: libc's memcpy over as many bytes, fio
with the same file size, block size and depth. So a ratio compares neighbours in time.
"""

from __future__ import annotations

import ctypes
import hashlib
import json as jsonlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any
from urllib.parse import unquote

import numpy as np
import typer

from lmkv import _native
from lmkv.chunk import container_bytes
from lmkv.cli.config import Json
from lmkv.cli.output import human, print_json, progress, table
from lmkv.config import Config, nearest
from lmkv.engine import Engine
from lmkv.errors import BadInput, ConfigError
from lmkv.keys import ChunkKeys
from lmkv.pages import GroupView, Order, PagedKV, Plane
from lmkv.spec import ITEM_BYTES, SHAPES, KVSpec, LayerGroup

LAYOUTS = ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "LHBNC", "BHLNC", "HF")
EXTENT = 4 << 20
DEPTH = 4
_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Runs:
    """Figures by step, one a run: GB/s or microseconds."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[str, str, list[float]]] = {}

    def note(self, name: str, value: float, unit: str = "GB/s", of: str = "") -> None:
        """One more figure of a step; ``of`` is the step that it is compared with."""
        self._steps.setdefault(name, (unit, of, []))[2].append(value)

    def rate(self, name: str, nbytes: int, call: Callable[[], object], of: str = "") -> None:
        """Time a call that moves ``nbytes``."""
        self.note(name, nbytes / seconds(call) / 1e9, of=of)

    def time(self, name: str, call: Callable[[], object], of: str = "") -> None:
        """Time a call in microseconds."""
        self.note(name, seconds(call) * 1e6, "us", of)

    def figures(self) -> list[dict[str, Any]]:
        """Each step's figures; ``ratio``: the median of the ratios to the other step, run by run."""
        found = []
        for name, (unit, of, values) in self._steps.items():
            each: dict[str, Any] = {"step": name, "unit": unit, "min": min(values)}
            each |= {"median": statistics.median(values), "max": max(values), "ratio": None}
            if of:
                pairs = zip(values, self._steps[of][2], strict=True)
                each |= {
                    "ratio": statistics.median(mine / other for mine, other in pairs),
                    "of": of,
                }
            found.append(each)
        return found

    def show(self) -> None:
        """Print them as a table."""
        names = ("step", "unit", "min", "median", "max", "ratio", "of")
        rows = [[each.get(name) for name in names] for each in self.figures()]
        shown = [
            ["" if x is None else f"{x:.2f}" if isinstance(x, float) else x for x in row]
            for row in rows
        ]
        table(names, shown)


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Memory:
    """An engine's pages of ``tokens`` tokens in one layout, in random order, all bytes set."""

    def __init__(
        self, spec: KVSpec, layout: str, tokens: int, threads: int, order: Order = "physical"
    ) -> None:
        if layout not in LAYOUTS:
            raise ConfigError("--layout", f"unknown layout {layout!r}{nearest(layout, LAYOUTS)}")
        self.arrays: list[np.ndarray[Any, Any]] = []
        views = [self._view(group, layout, tokens) for group in spec.groups]
        self.pages = PagedKV(spec, views, order, threads=threads)
        shuffle = np.random.default_rng(0).permutation
        self.ids = [shuffle(self.pages.pages(g)) for g in range(len(spec.groups))]

    def _view(self, group: LayerGroup, layout: str, tokens: int) -> GroupView:
        item = ITEM_BYTES[group.dtype]
        width = group.layer_token_bytes // group.kv_heads // item
        sizes = {"L": len(group.layers), "B": tokens // group.page_tokens, "C": width}
        sizes |= {"N": group.page_tokens, "H": group.kv_heads}
        if layout != "HF":
            array = self._array([sizes[axis] for axis in layout], item)
            layers = array.transpose([layout.index(axis) for axis in "LBHNC"])
            return GroupView(tuple((Plane.of(layer),) for layer in layers))
        halves = 2 if group.head_dim_v else 1
        array = self._array([sizes["L"], halves, sizes["H"], tokens, width // halves], item)
        planes = [[Plane.of(x, None, sizes["N"], token_axis=1) for x in layer] for layer in array]
        return GroupView(tuple(map(tuple, planes)))

    def _array(self, shape: Sequence[int], item: int) -> np.ndarray[Any, Any]:
        array = np.empty(shape, f"u{item}")
        flat = array.reshape(-1).view(np.uint8)
        noise = np.frombuffer(np.random.default_rng(0).bytes(1_000_003), np.uint8)
        for at in range(0, flat.size, noise.size):
            flat[at : at + noise.size] = noise[: flat.size - at]
        self.arrays.append(array)
        return array

    def checksums(self) -> list[int]:
        """Of every buffer, to see that the same bytes came back."""
        return [_native.xxh3_64(memoryview(array).cast("B")) for array in self.arrays]

    def clear(self) -> None:
        """Zero the pages."""
        for array in self.arrays:
            array.fill(0)


class Memcpy:
    """libc's memcpy over a working set of ``nbytes``, in pieces, on ``threads`` threads."""

    def __init__(self, nbytes: int, piece: int, threads: int) -> None:
        self.source, self.target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        self._pieces = [(at, min(piece, nbytes - at)) for at in range(0, nbytes, piece)]
        self._pool = ThreadPoolExecutor(threads)

    def __call__(self) -> None:
        list(self._pool.map(self._copy, self._pieces))

    def _copy(self, piece: tuple[int, int]) -> None:
        at, nbytes = piece
        _memcpy(self.target.ctypes.data + at, self.source.ctypes.data + at, nbytes)


def fio(folder: str, operation: str, count: int, nbytes: int) -> float | None:
    """GB/s of fio: ``count`` fresh files of ``nbytes``, O_DIRECT, blocks of 4 MiB, four in flight.

    Huge-page buffers (glibc's malloc is told so; they double the figure), registered with io_uring;
    buffers are written as they are. None when fio is not installed; BadInput with its complaint.
    """
    if not shutil.which("fio"):
        return None
    with tempfile.TemporaryDirectory(dir=folder, prefix="lmkv-fio-") as place:
        command = [
            "fio", "--name=f", f"--directory={place}", f"--rw={operation}", "--direct=1",
            f"--bs={min(EXTENT, nbytes)}", f"--filesize={nbytes}", f"--nrfiles={count}",
            f"--size={count * nbytes}", "--ioengine=io_uring", "--fixedbufs=1",
            f"--iodepth={DEPTH}", "--scramble_buffers=0", "--fallocate=none",
            "--output-format=json",
        ]  # fmt: skip
        env = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603
        _, brace, report = done.stdout.partition("{")
        if done.returncode or not brace:
            raise BadInput(f"fio: {' '.join((done.stderr or done.stdout).split())[:300]}")
        return float(jsonlib.loads(brace + report)["jobs"][0][operation]["bw_bytes"]) / 1e9


def disk(folder: str, operation: str, count: int, nbytes: int) -> tuple[str, float]:
    """The disk's own figure: by fio where it is installed, else one file after another by us."""
    if rate := fio(folder, operation, count, nbytes):
        return f"fio {operation}", rate
    slab, spent = _native.Slab(nbytes), dict.fromkeys(("write", "read"), 0.0)
    slab.touch(0, nbytes)
    with tempfile.TemporaryDirectory(dir=folder, prefix="lmkv-bench-") as place:
        for file in (f"{place}/{number}" for number in range(count)):
            write = partial(
                _native.write_file, f"{file}.tmp", file, slab.address, nbytes, True, False
            )
            spent["write"] += seconds(write)
            spent["read"] += seconds(partial(_native.read_file, file, slab.address, nbytes, True))
    return f"O_DIRECT {operation}", count * nbytes / spent[operation] / 1e9


class Bench:
    """One model shape, one layout, one tier; ``run`` measures every step once."""

    def __init__(self, spec: KVSpec, layout: str, tier: str, tokens: int, threads: int) -> None:
        self.spec, self.tier, self.runs = spec, "" if tier == "cpu" else tier, Runs()
        self.memory = Memory(spec, layout, tokens, threads)
        self.tokens = np.random.default_rng(1).integers(0, 100_000, tokens).astype(np.int32)
        chunks, groups = tokens // spec.chunk_tokens, range(len(spec.groups))
        needed = [len(spec.needed_chunks(g, chunks)) for g in groups]
        self.stored = chunks * sum(map(spec.chunk_bytes, groups))
        self.restored = sum(n * spec.chunk_bytes(g) for g, n in enumerate(needed))
        largest = max(container_bytes(spec, g) for g in groups)
        self.files = max(1, self.stored // largest), largest
        self.memcpy = Memcpy(self.stored, largest, threads)
        config = Config.load(
            env={}, chunk_tokens=spec.chunk_tokens, copy_threads=threads, operation_timeout=600,
            cpu_budget=2 * self.stored + (1 << 28),
            tiers=[{"url": self.tier, "max_write_delay": 600}] if self.tier else [],
        )  # fmt: skip
        name = f"lmkv bench {os.getpid()} {time.time_ns()}"
        self.engine = Engine(spec, weights=name, layout=self.memory.pages.layout, config=config)

    def run(self) -> None:
        """Every step, each beside its reference."""
        runs, tokens, engine = self.runs, self.tokens, self.engine
        engine.clear(scope=True)
        if not self.tier:
            runs.rate("memcpy", self.stored, self.memcpy)
        runs.rate("store", self.stored, self._store, self._disk("write") or "memcpy")
        if self.tier:
            engine.clear(tokens, tier="cpu")
        reference = self._disk("read") or "memcpy"
        before = self.memory.checksums()
        self.memory.clear()
        runs.rate("retrieve", self.restored, self._retrieve, reference)
        if self.restored == self.stored and self.memory.checksums() != before:
            raise BadInput("other bytes came back than were stored")
        listed, other, text = tokens.tolist(), tokens[::-1].copy(), tokens.tobytes()
        runs.time("SHA-256 of the tokens", lambda: hashlib.sha256(text).digest())
        runs.time("hash, array", lambda: self._hash(tokens), "SHA-256 of the tokens")
        runs.time("hash, list", lambda: self._hash(listed), "SHA-256 of the tokens")
        runs.time("lookup, all hit", lambda: engine.lookup(tokens))
        runs.time("lookup, miss at once", lambda: engine.lookup(other))

    def _hash(self, tokens: Any) -> None:
        ChunkKeys.from_tokens(tokens, self.spec.chunk_tokens).upto(len(tokens))

    def _store(self) -> None:
        handle = self.engine.store(self.tokens, self.memory.pages, self.memory.ids).result()
        lost = handle.dropped or [
            each for each in handle.tiers.values() if set(each) != {"written"}
        ]
        if lost:
            raise BadInput(f"{handle}: {handle.tiers}")

    def _retrieve(self) -> None:
        found = self.engine.retrieve(self.tokens, self.memory.pages, self.memory.ids)
        if found.tokens != len(self.tokens):
            raise BadInput(f"only {found.tokens} tokens came back: {found.reason}")

    def _disk(self, operation: str) -> str:
        """Measure the tier's disk; the figure's name, empty where there is no disk."""
        if not self.tier.startswith("disk://"):
            return ""
        folder = unquote(self.tier[len("disk://") :].partition("?")[0].partition(",")[0])
        name, rate = disk(folder, operation, *self.files)
        self.runs.note(name, "GB/s", rate)
        return name


def bench(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "llama-3.1-8b",
    layout: Annotated[str, typer.Option(help=f"Of the pages: {', '.join(LAYOUTS)}.")] = "LBNHC",
    tier: Annotated[str, typer.Option(help="cpu, or a lower tier's URL: disk:///path.")] = "cpu",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens stored and restored.")] = 4096,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens a chunk.")] = 256,
    page: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="Threads that copy.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Measurements; one more goes before them.")] = 5,
    json: Json = False,
) -> None:
    """How fast store, retrieve, lookup and hash are here, beside memcpy, disk and SHA-256."""
    if model not in SHAPES:
        raise ConfigError("--model", f"unknown shape {model!r}{nearest(model, SHAPES)}")
    spec = KVSpec.from_hf_config(SHAPES[model], chunk, page)
    if tokens % chunk:
        raise ConfigError("--tokens", f"{tokens} is not a multiple of --chunk {chunk}")
    case = Bench(spec, layout, tier, tokens, threads)
    with case.engine, progress() as bar:
        for number in bar.track(range(runs + 1), description=f"{model} {layout} {tier}"):
            case.run()
            if number == 0:
                case.runs = Runs()
        case.engine.clear(scope=True)
    if json:
        settings = {
            "model": model,
            "layout": layout,
            "tier": tier,
            "tokens": tokens,
            "chunk": chunk,
        }
        settings |= {"page": page, "threads": threads, "runs": runs, "bytes": case.stored}
        print_json(settings | {"figures": case.runs.figures()})
    else:
        print(f"{model} {layout}, {tier}: {tokens} tokens, {human(case.stored)}, {runs} runs")
        case.runs.show()
