"""One measured case: a model shape, a page layout, one tier, through the Engine.

Every run measures each step once, in turn with its reference: libc's memcpy over as many bytes, fio with the same file
size, block size and depth. So a ratio compares neighbours in time.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import numpy as np

from lmkv import _native
from lmkv.chunk import PAGE, container_bytes
from lmkv.config import Config
from lmkv.engine import Engine
from lmkv.errors import BadInput, ConfigError, nearest
from lmkv.keys import ChunkKeys
from lmkv.pages import GroupView, Order, PagedKV, Plane
from lmkv.spec import ITEM_BYTES, KVSpec, LayerGroup
from lmkv_bench.measure import DISK, Memcpy, Runs, disk

LAYOUTS = ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "LHBNC", "BHLNC", "HF")


@contextmanager
def scratch(engine: Engine) -> Iterator[Engine]:
    """An engine whose scope is removed at the end, empty folders too."""
    with engine:
        try:
            yield engine
        finally:
            engine.clear(scope=True)
            for tier in engine.storage.tiers:
                for _ in tier.backend.scan():
                    pass


class Memory:
    """An engine's pages of ``tokens`` tokens in one layout, in random order, all bytes set: at random, or with
    ``numbers`` as caches are, bfloat16 around a mean of each channel. axes: of a stored page, for codecs."""

    def __init__(
        self, spec: KVSpec, layout: str, tokens: int, threads: int, order: Order = "physical", numbers: bool = False
    ) -> None:
        if layout not in LAYOUTS:
            raise ConfigError("--layout", f"unknown layout {layout!r}{nearest(layout, LAYOUTS)}")
        self.arrays: list[np.ndarray[Any, Any]] = []
        self._numbers = numbers
        heads_first = "H" in layout and layout.find("H") < layout.find("N")
        order_in = "head token kv dim" if heads_first else "token head kv dim"
        self.axes = "kv head token dim" if layout == "HF" else order_in
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
        room = np.empty(math.prod(shape) * item + PAGE, np.uint8)
        flat = room[-room.ctypes.data % PAGE :][: math.prod(shape) * item]  # engines align their pages, numpy does not
        array = flat.view(f"u{item}").reshape(shape)
        noise = _kv(shape[-1]) if self._numbers else np.frombuffer(np.random.default_rng(0).bytes(1_000_003), np.uint8)
        for at in range(0, flat.size, noise.size):
            flat[at : at + noise.size] = noise[: flat.size - at]
        self.arrays.append(array)
        return array

    def checksums(self) -> list[int]:
        """Of every buffer, to see that the same bytes came back."""
        return [_native.xxh3_64(array.reshape(-1).data.cast("B")) for array in self.arrays]

    def clear(self) -> None:
        """Zero the pages."""
        for array in self.arrays:
            array.fill(0)


def _kv(channels: int) -> np.ndarray[Any, Any]:
    """Some megabytes of bfloat16 rows of ``channels``, each channel normal around a mean and with a spread of its own,
    as bytes."""
    rng = np.random.default_rng(0)
    mean, spread = rng.normal(0, 2, channels), np.exp(rng.normal(0, 0.5, channels))
    rows = rng.normal(mean, spread, (max(1, (4 << 20) // channels), channels)).astype("<f4")
    return np.ascontiguousarray(rows.view("<u2")[:, 1::2]).view(np.uint8).reshape(-1)


class Bench:
    """One model shape, one layout, one tier. codec: settings of the tier (codec, level, profile) that make it one of
    encoded chunks. ConfigError: ``tokens`` is no multiple of the chunk."""

    def __init__(
        self, spec: KVSpec, layout: str, tier: str, tokens: int, threads: int, order: Order = "physical",
        codec: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if tokens % spec.chunk_tokens:
            raise ConfigError("--tokens", f"{tokens} is not a multiple of the chunk, {spec.chunk_tokens}")
        self.spec, self.tier, self.runs = spec, "" if tier == "cpu" else tier, Runs()
        self.codec = codec
        self.memory = Memory(spec, layout, tokens, threads, order, numbers=bool(codec))
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
            cpu_budget=(5 if self.tier else 2) * self.stored + (1 << 28),
            tiers=[{"url": self.tier, "max_write_delay": 600, **(codec or {})}] if self.tier else [],
        )  # fmt: skip
        name = f"lmkv bench {os.getpid()} {time.time_ns()}"
        axes = [self.memory.axes if group.head_dim_v else "" for group in spec.groups]
        self.engine = Engine(spec, weights=name, layout=self.memory.pages.layout, axes=axes, config=config)

    def measure(self, rounds: Iterable[int]) -> Runs:
        """Every step once a round; the first round, number 0, only warms up. Leaves nothing in the tier."""
        with scratch(self.engine):
            for number in rounds:
                self._run(number)
                if number == 0:
                    self.runs = Runs()
        return self.runs

    def _run(self, number: int) -> None:
        """Every step, each beside its reference."""
        runs, tokens, engine = self.runs, self.tokens, self.engine
        engine.clear(scope=True)
        runs.rate("memcpy", self.stored, self.memcpy)
        self._beside(number, "write", "store", self.stored, self._store)
        if self.tier:
            engine.clear(tokens, tier="cpu")
        before = self.memory.checksums()
        self.memory.clear()
        self._beside(number, "read", "retrieve", self.restored, self._retrieve)
        same = self.restored == self.stored and all(tier.codec.exact for tier in self.engine.storage.tiers)
        if same and self.memory.checksums() != before:
            raise BadInput("other bytes came back than were stored")
        if self.codec:
            self._sizes()
        listed, other, text = tokens.tolist(), tokens[::-1].copy(), tokens.tobytes()
        runs.time("SHA-256 of the tokens", lambda: hashlib.sha256(text).digest())
        runs.time("hash, array", lambda: self._hash(tokens), "SHA-256 of the tokens")
        runs.time("hash, list", lambda: self._hash(listed), "SHA-256 of the tokens")
        runs.time("lookup, all hit", lambda: engine.lookup(tokens))
        runs.time("lookup, miss at once", lambda: engine.lookup(other))

    def _sizes(self) -> None:
        """What the tier's codec made of the chunks."""
        (used,) = (engine_tier["bytes"] for name, engine_tier in self.engine.storage.usage().items() if name != "cpu")
        self.runs.note("size", 8 * ITEM_BYTES[self.spec.groups[0].dtype] * used / self.stored, "bits/value")

    def _hash(self, tokens: Any) -> None:
        ChunkKeys.from_tokens(tokens, self.spec.chunk_tokens).upto(len(tokens))

    def _store(self) -> None:
        handle = self.engine.store(self.tokens, self.memory.pages, self.memory.ids).result()
        if handle.dropped or any(set(each) != {"written"} for each in handle.tiers.values()):
            raise BadInput(f"{handle}: {handle.tiers}")

    def _retrieve(self) -> None:
        found = self.engine.retrieve(self.tokens, self.memory.pages, self.memory.ids)
        if found.tokens != len(self.tokens):
            raise BadInput(f"only {found.tokens} tokens came back: {found.reason}")

    def _beside(self, number: int, operation: str, step: str, nbytes: int, call: Callable[[], None]) -> None:
        """Time a step and, on a disk, its reference, which goes first every other round."""
        reference = f"{DISK} {operation}" if self.tier.startswith("disk://") and not self.codec else "memcpy"
        steps: list[Callable[[], None]] = [lambda: self.runs.rate(step, nbytes, call, reference)]
        if reference != "memcpy":
            folder = unquote(self.tier[len("disk://") :].partition("?")[0].partition(",")[0])
            steps.insert(number % 2, lambda: self.runs.note(reference, disk(folder, operation, *self.files)))
        for each in steps:
            each()
