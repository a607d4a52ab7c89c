"""``lmkv doctor``: what this machine offers, and whether each tier gives back what it took."""

from __future__ import annotations

import importlib
import mmap
import secrets
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import closing
from itertools import chain
from pathlib import Path

import typer

from lmkv import _native, backends, chunk
from lmkv.backends import Read, Status, Write
from lmkv.cli.config import ConfigFile, check_names
from lmkv.cli.output import human
from lmkv.config import Config, TierConfig, memory_limit
from lmkv.keys import ChunkKey
from lmkv.workers import Workers

Line = tuple[str, str, str, str]  # OK, NOTE or FAIL; what; finding; fix

NBYTES = 1 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FIXES = {
    Status.FULL: "free some space",
    Status.READ_ONLY: "give this user write access, or mount it writable",
    Status.TIMEOUT: "the medium hangs: look at the mount and the kernel's log",
}


def machine(config: Config) -> Iterator[Line]:
    """Processor, memory, huge pages, GPU."""
    cpu = _native.cpu_features()
    yield "OK", "processor", f"{cpu['cpus']} cores, {cpu['arch']}, copies use {cpu['simd']}", ""
    limit, budget = memory_limit(), config.cpu.budget.resolve(memory_limit())
    verdict = "OK" if budget <= limit else "FAIL"
    fix = "lower cpu.budget, or raise the cgroup's memory limit"
    yield verdict, "memory", f"{human(limit)} allowed, budget {human(budget)}", fix
    text = HUGE_PAGES.read_text() if HUGE_PAGES.exists() else "[absent]"
    mode = text[text.index("[") + 1 : text.index("]")]
    usable = mode in ("always", "madvise") or not config.cpu.huge_pages
    yield "OK" if usable else "NOTE", "huge pages", mode, f"echo madvise > {HUGE_PAGES}"
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
        names = [runtime.getDeviceProperties(i)["name"] for i in range(runtime.getDeviceCount())]
        cuda = ", ".join(name.decode() for name in names)
    except ImportError:
        cuda = "cupy is not installed"
    except Exception as error:  # CUDA's errors have no common base
        cuda = f"no device: {' '.join(str(error).split())}"
    yield "OK", "cuda", cuda, ""


def round_trip(tier: TierConfig) -> Line:
    """Store one container, read it back, compare, delete."""
    key = ChunkKey(bytes(16), bytes(8), secrets.token_bytes(32), bytes(8), 0, 0, 0)
    sent, back = (memoryview(mmap.mmap(-1, NBYTES)) for _ in range(2))  # at a page's start, as O_DIRECT wants
    sent[chunk.PAGE :] = secrets.token_bytes(NBYTES - chunk.PAGE)
    part = chunk.Part(0, 1, 0, chunk.PAGE, NBYTES - chunk.PAGE, NBYTES - chunk.PAGE, 0)
    chunk.seal(sent, chunk.Header(key, 0, 1, 1, 1, 0, (part,), NBYTES))  # a server looks into what it is given
    with closing(backends.open(tier.url)) as backend:
        stored, read = backend.write([Write(key, sent)])[0], backend.read([Read(key, back)])[0]
        backend.delete([key])
        detail, free = backend.health().detail, backend.usage().free
    for step, result in (("store", stored), ("read back", read)):
        if result.status is not Status.OK:
            fix = FIXES.get(result.status, f"{detail}; look at the kernel's log")
            return "FAIL", tier.url, f"{step}: {result.status.value} {result.detail}", fix
    if sent != back:
        return "FAIL", tier.url, "other bytes came back", "this machine's memory or disk is faulty"
    finding = "stored and read back"
    finding += ", O_DIRECT" if tier.url.startswith("disk:") and "buffered" not in detail else ""
    finding += "" if free is None else f", {human(free)} free"
    finding += f", budget {tier.budget}" if tier.budget else ""
    return "OK", tier.url, f"{finding}; {detail}", ""


def check(tier: TierConfig, timeout: float) -> Line:
    """A tier's verdict, after ``timeout`` seconds at most."""
    try:
        return Workers("doctor", 1).submit(round_trip, tier).result(timeout)
    except NoAnswer:
        return "FAIL", tier.url, f"no answer in {timeout:g} s", FIXES[Status.TIMEOUT]
    except Exception as error:  # a plug-in may raise anything
        return "FAIL", tier.url, "cannot be used", str(error)


def doctor(config: ConfigFile = None) -> None:
    """What this machine offers; store and read back in every tier. Exit 1 on a failure."""
    settings, failed = check_names(Config.load(config)), False
    tiers = (TierConfig(url="cpu://", budget=None), *settings.tiers)
    checks = (check(tier, settings.operation_timeout) for tier in tiers)
    for verdict, what, finding, fix in chain(machine(settings), checks):
        failed |= verdict == "FAIL"
        print(f"{verdict:<5} {what}: {finding}" + (f"\n      fix: {fix}" if verdict != "OK" else ""), flush=True)
    if failed:
        raise typer.Exit(1)
