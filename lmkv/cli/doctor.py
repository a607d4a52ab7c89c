"""``lmkv doctor``: what this machine offers, and whether each tier gives back what it took."""

from __future__ import annotations

import importlib
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import typer

from lmkv import _native
from lmkv.cli.config import ConfigFile, check_names
from lmkv.cli.output import human
from lmkv.config import Config, memory_limit
from lmkv.engine import Engine
from lmkv.errors import LmkvError
from lmkv.pages import GroupView, PagedKV, Plane
from lmkv.spec import Kind, KVSpec, LayerGroup

CHUNKS = 4
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SPEC = KVSpec((LayerGroup(Kind.FULL, (0, 1), 16, kv_heads=2, head_dim=64),), chunk_tokens=64)
FIXES = {
    "full": "free some space, or lower the tier's budget",
    "read_only": "give this user write access, or mount it writable",
    "timeout": "the medium hangs: look at dmesg and at the mount",
}
Line = tuple[str, str, str, str]  # OK, NOTE or FAIL; what; finding; fix


def machine(config: Config) -> Iterator[Line]:
    """Processor, memory, huge pages, GPU."""
    cpu = _native.cpu_features()
    extras = ", ".join(name for name, value in cpu.items() if value is True)
    yield (
        "OK",
        "cpu",
        f"{cpu['cpus']} cores, {cpu['arch']}, copies use {cpu['simd']} ({extras})",
        "",
    )
    limit, budget = memory_limit(), config.cpu.budget.resolve(memory_limit())
    finding = f"{human(limit)} allowed, budget {human(budget)}"
    if budget > limit:
        yield "FAIL", "memory", finding, "lower cpu.budget, or raise the cgroup's limit"
    else:
        yield "OK", "memory", finding, ""
    mode = HUGE_PAGES.read_text() if HUGE_PAGES.exists() else "[absent]"
    mode = mode.partition("[")[2].partition("]")[0]
    fix = f"echo madvise > {HUGE_PAGES}: copies and disk reads are slower without"
    usable = mode in ("always", "madvise") or not config.cpu.huge_pages
    yield "OK" if usable else "NOTE", "huge pages", mode, "" if usable else fix
    yield "OK", "cuda", _cuda(), ""


def _cuda() -> str:
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
        names = [runtime.getDeviceProperties(i)["name"] for i in range(runtime.getDeviceCount())]
    except ImportError:
        return "cupy is not installed"
    except Exception as error:  # CUDA's own errors derive from several bases
        return f"no device: {' '.join(str(error).split())}"
    return ", ".join(name.decode() for name in names)


def round_trip(config: Config) -> Iterator[Line]:
    """Store, drop from host memory, retrieve, compare: once for host memory, once for each tier."""
    for number in range(len(config.tiers) + 1):
        tiers = config.tiers[number - 1 : number] if number else ()
        small = {"budget": "16MiB", "slab": "2MiB", "touch": False}
        what = tiers[0].url if tiers else "host memory"
        tiers = tuple(tier.model_copy(update={"admission": "all"}) for tier in tiers)
        try:
            config_one = config.override(tiers=tiers, cpu=small, min_hit_tokens=0)
            yield _one(what, config_one)
        except LmkvError as error:
            yield "FAIL", what, "cannot be opened", str(error)


def _one(what: str, config: Config) -> Line:
    tokens = np.frombuffer(secrets.token_bytes(CHUNKS * SPEC.chunk_tokens * 4), np.uint32)
    count = CHUNKS * SPEC.pages(0)
    arrays = [np.zeros((2 * count, 2, 16, 2, 64), np.uint16) for _ in SPEC.groups[0].layers]
    for array in arrays:
        array[:count] = np.arange(array[:count].size).reshape(array[:count].shape) % 65521
    pages = PagedKV(SPEC, [GroupView(tuple((Plane.of(array),) for array in arrays))], keep=arrays)
    scope = f"lmkv doctor {secrets.token_hex(8)}"
    with Engine(SPEC, weights=scope, layout=pages.layout, config=config) as engine:
        tier = engine.storage.names[-1]
        try:
            handle = engine.store(tokens, pages, [np.arange(count)])
            engine.flush(config.operation_timeout)
            for outcome in handle.tiers.get(tier, {}):
                if outcome != "written":
                    reason = outcome.partition("(")[2].rstrip(")")
                    return (
                        "FAIL",
                        what,
                        f"store: {outcome}",
                        FIXES.get(reason, _detail(engine, tier)),
                    )
            if handle.stored != CHUNKS:
                return "FAIL", what, f"{handle}", "raise cpu.budget"
            if config.tiers:
                engine.clear(tokens, tier="cpu")
            found = engine.retrieve(tokens, pages, [np.arange(count, 2 * count)])
            if found.tokens != len(tokens):
                return "FAIL", what, f"retrieve: {found.reason}", _detail(engine, tier)
            if any((array[:count] != array[count:]).any() for array in arrays):
                return (
                    "FAIL",
                    what,
                    "other bytes came back",
                    "check memory and disk of this machine",
                )
            return "OK", what, f"stored and read back {CHUNKS} chunks; {_detail(engine, tier)}", ""
        finally:
            engine.clear(scope=True)


def _detail(engine: Engine, tier: str) -> str:
    """The tier's word on itself, and what room it has."""
    detail = str(engine.health()["tiers"][tier]["detail"])
    if tier == "cpu":
        return detail
    backend = engine.storage.tiers[0].backend
    free, budget = backend.usage().free, engine.stats()["tiers"][tier]["budget"]
    direct = ["O_DIRECT"] if backend.url.startswith("disk:") and "buffered" not in detail else []
    room = [] if free is None else [f"{human(free)} free"]
    return ", ".join([detail, *direct, *room, f"budget {human(budget) if budget else 'none'}"])


def doctor(config: ConfigFile = None) -> None:
    """What this machine offers; store and read back in every tier. Exit 1 on a failure."""
    settings = check_names(Config.load(config))
    failed = False
    for check in (machine, round_trip):
        for verdict, what, finding, fix in check(settings):
            failed = failed or verdict == "FAIL"
            print(f"{verdict:<5} {what}: {finding}" + (f"\n      fix: {fix}" if fix else ""))
            sys.stdout.flush()
    if failed:
        raise typer.Exit(1)
