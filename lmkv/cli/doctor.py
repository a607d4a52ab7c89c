"""``lmkv doctor``: what this machine offers, and whether each tier gives back what it took."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import typer

from lmkv import _native
from lmkv.cli.config import ConfigFile, check_names
from lmkv.cli.output import human
from lmkv.config import Config, TierConfig, memory_limit
from lmkv.engine import Engine
from lmkv.errors import LmkvError
from lmkv.pages import GroupView, PagedKV, Plane
from lmkv.spec import Kind, KVSpec, LayerGroup

CHUNKS = 4
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SPEC = KVSpec((LayerGroup(Kind.FULL, (0, 1), 16, kv_heads=2, head_dim=64),), chunk_tokens=64)
FIXES = {
    "failed (full)": "free some space, or lower the tier's budget",
    "failed (read_only)": "give this user write access, or mount it writable",
    "failed (timeout)": "the medium hangs: look at the mount and the kernel's log",
}


class CheckError(Exception):
    """What was found, and what to do about it."""


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


def machine(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """Verdict (OK, NOTE, FAIL), what, finding and fix for processor, memory, huge pages, GPU."""
    cpu = _native.cpu_features()
    yield "OK", "cpu", f"{cpu['cpus']} cores, {cpu['arch']}, copies use {cpu['simd']}", ""
    limit, budget = memory_limit(), config.cpu.budget.resolve(memory_limit())
    fits, fix = budget <= limit, "lower cpu.budget, or raise the cgroup's memory limit"
    finding = f"{human(limit)} allowed, budget {human(budget)}"
    yield "OK" if fits else "FAIL", "memory", finding, "" if fits else fix
    text = HUGE_PAGES.read_text() if HUGE_PAGES.exists() else "[absent]"
    mode, fix = text[text.index("[") + 1 : text.index("]")], f"echo madvise > {HUGE_PAGES}"
    usable = mode in ("always", "madvise") or not config.cpu.huge_pages
    yield "OK" if usable else "NOTE", "huge pages", mode, "" if usable else fix
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
        names = [runtime.getDeviceProperties(i)["name"] for i in range(runtime.getDeviceCount())]
        cuda = ", ".join(name.decode() for name in names)
    except ImportError:
        cuda = "cupy is not installed"
    except Exception as error:  # CUDA's errors have no common base
        cuda = f"no device: {' '.join(str(error).split())}"
    yield "OK", "cuda", cuda, ""


def round_trip(config: Config, tier: TierConfig | None) -> str:
    """Store, drop from host memory, retrieve, compare, over one tier or none; what was found."""
    tokens = np.frombuffer(secrets.token_bytes(CHUNKS * SPEC.chunk_tokens * 4), np.uint32)
    count = CHUNKS * SPEC.pages(0)
    arrays = [np.zeros((2 * count, 2, 16, 2, 64), np.uint16) for _ in SPEC.groups[0].layers]
    for array in arrays:
        noise = np.frombuffer(secrets.token_bytes(array.nbytes // 2), np.uint16)
        array[:count] = noise.reshape(array[:count].shape)
    pages = PagedKV(SPEC, [GroupView(tuple((Plane.of(array),) for array in arrays))], keep=arrays)
    small = config.override(
        cpu={"budget": "16MiB", "slab": "2MiB", "touch": False},
        tiers=[tier.model_copy(update={"admission": "all"})] if tier else [],
        min_hit_tokens=0,
    )
    name = f"lmkv doctor {secrets.token_hex(8)}"
    with scratch(Engine(SPEC, weights=name, layout=pages.layout, config=small)) as engine:
        handle = engine.store(tokens, pages, [np.arange(count)])
        engine.flush(small.operation_timeout)
        for outcomes in handle.tiers.values():
            if lost := sorted(outcomes.keys() - {"written"}):
                raise CheckError(f"store: {lost[0]}", FIXES.get(lost[0], _detail(engine)))
        if tier:
            engine.clear(tokens, tier="cpu")
        found = engine.retrieve(tokens, pages, [np.arange(count, 2 * count)])
        if found.tokens != len(tokens):
            raise CheckError(f"{handle}, then a miss: {found.reason}", _detail(engine))
        if any((array[:count] != array[count:]).any() for array in arrays):
            raise CheckError("other bytes came back", "this machine's memory or disk is faulty")
        return f"stored and read back {CHUNKS} chunks; {_detail(engine)}"


def _detail(engine: Engine) -> str:
    """The last tier's word on itself, and what room it has."""
    name = engine.storage.names[-1]
    detail = str(engine.health()["tiers"][name]["detail"])
    for tier in engine.storage.tiers:
        if tier.url_scheme == "disk" and "buffered" not in detail:
            detail += ", O_DIRECT"
        free = tier.backend.usage().free
        detail += "" if free is None else f", {human(free)} free"
        detail += f", budget {human(tier.budget)}" if tier.budget else ", no budget"
    return detail


def doctor(config: ConfigFile = None) -> None:
    """What this machine offers; store and read back in every tier. Exit 1 on a failure."""
    settings = check_names(Config.load(config))
    verdicts = []

    def report(verdict: str, what: str, finding: str, fix: str = "") -> None:
        verdicts.append(verdict)
        print(f"{verdict:<5} {what}: {finding}" + (f"\n      fix: {fix}" if fix else ""), flush=True)

    for line in machine(settings):
        report(*line)
    for tier in (None, *settings.tiers):
        what = tier.url if tier else "host memory"
        try:
            report("OK", what, round_trip(settings, tier))
        except CheckError as failure:
            report("FAIL", what, *failure.args)
        except LmkvError as error:
            report("FAIL", what, "cannot be used", str(error))
    if "FAIL" in verdicts:
        raise typer.Exit(1)
