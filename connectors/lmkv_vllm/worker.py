"""The worker's side: one rank's copies between vLLM's blocks and the host service's memory.

Loads and saves run on threads of their own. The engine's thread only hands them over and collects what ended; it
waits for nothing but a copy under way out of a block that is about to be overwritten.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from lmkv import chunk
from lmkv.codec import meanings
from lmkv.errors import BadInput, ConfigError, LmkvError, Unavailable
from lmkv.keys import NO_TENANT, ChunkKey
from lmkv.pages import PagedKV
from lmkv.rows import PageRows
from lmkv.server.client import Host
from lmkv.stats import Stats
from lmkv.workers import Workers
from lmkv_vllm import geometry
from lmkv_vllm.messages import Handshake, Load, Loaded, Outcome, Part, Save, Step
from lmkv_vllm.options import Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.lmkv")
LOADERS = 2
BATCH_BYTES = 64 << 20
RESERVE_SECONDS = 30.0
IDLE_SECONDS = 0.005  # what a step without anything to compute waits for a load, instead of spinning on its core


class SaveJob:
    """One save on its way. It may be given up between copies; a copy under way is waited for."""

    def __init__(self, save: Save, after: Any) -> None:
        self.save, self.after = save, after
        self._changed = threading.Condition()
        self._copying = self._given_up = self._over = False

    def start_copy(self) -> bool:
        """The blocks are read from now on, unless the job was given up."""
        with self._changed:
            self._copying = not self._given_up
            return self._copying

    def end_copy(self, over: bool = False) -> None:
        """The blocks are not being read; ``over``: and will not be."""
        with self._changed:
            self._copying, self._over = False, self._over or over
            self._changed.notify_all()

    @property
    def given_up(self) -> bool:
        """Its blocks may hold other bytes by now."""
        return self._given_up

    def settle(self) -> bool:
        """Return once the blocks may be overwritten. True: the job had to be given up for that."""
        with self._changed:
            before, self._given_up = self._given_up, True
            self._changed.wait_for(lambda: not self._copying)
            return not (before or self._over)


class Worker:
    """One rank. ``register`` comes first; everything before it, and everything without a service, is a miss."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, options: Options, rank: tuple[int, int]) -> None:
        self.config, self.cache, self.options = config, cache, options
        self.plan = geometry.Plan.of(config, cache, options.chunk_tokens)
        pp, tp = rank
        self.shard = (pp * config.parallel_config.tensor_parallel_size + tp) // self.plan.replicas
        self.writes = tp % self.plan.replicas == 0
        self.stats = Stats()
        self.host: Host | None = None
        self.pages: PagedKV | None = None
        self.where = self._pinned_for = ""
        self._scope, self._idle = b"", False
        self._lock, self._pinning = threading.Lock(), threading.Lock()
        self._load_ended = threading.Condition(self._lock)
        self._jobs: dict[int, SaveJob] = {}
        self._outcome = Outcome()
        self._ended: list[Loaded] = []
        self._loads: dict[str, Load] = {}
        begin = _leave_core if config.device_config.device_type == "cpu" else None
        self._loaders = Workers("vllm-load", LOADERS, begin)
        self._savers = Workers("vllm-save", 1, begin)

    # Start and end.

    def register(self, tensors: dict[str, Any]) -> None:
        """Describe the pages and connect to the host service; ConfigError for what cannot be stored exactly."""
        self.spec, views, self.groups = geometry.describe(self.plan, self.cache, tensors)
        threads = self.options.copy_threads or min(4, os.cpu_count() or 1)
        self.host = self.options.host("worker")
        self.sizes = tuple(chunk.container_bytes(self.spec, g) for g in range(len(self.spec.groups)))
        first = next(iter(tensors.values()))
        self.device = first[0] if isinstance(first, (list, tuple)) else first
        plain = self.device.is_cuda
        axes, rope = (geometry.axes(self.spec, views), geometry.rope(self.spec, self.config)) if plain else ("", None)
        known = {self.spec.geometry_id: meanings(self.spec, axes, rope)}
        try:
            self.host.register(self.sizes, meanings=known)
        except Unavailable as error:
            logger.warning("lmkv: no host service yet (%s): nothing is stored until there is one", error)
        if self.device.is_cuda:
            from lmkv.cuda import CudaPagedKV, PinnedMemory

            if importlib.util.find_spec("cupy") is None:
                raise ConfigError("cuda", "copies on a GPU need CuPy: pip install 'lmkv[cuda]'")
            self._pinned = PinnedMemory(self.device.get_device())
            self._pin()
            self.pages = CudaPagedKV(self.spec, views, self._pinned, keep=tensors, device=self.device.get_device())
        else:
            self.pages = PagedKV(self.spec, views, threads=threads, keep=tensors)
        self.where = f"{geometry.backend_text(self.config, tensors)} {self.spec.geometry()} {self.pages.layout}"

    def _pin(self) -> None:
        """Let the GPU use the service's memory: another mapping after another service took over."""
        if not self.device.is_cuda or self.host is None:
            return
        with self._pinning:
            address, nbytes = self.host.region
            if nbytes and self.host.server_id != self._pinned_for:
                self._pinned.add(address, nbytes)
                self._pinned_for = self.host.server_id

    def handshake(self) -> Handshake | None:
        """What the scheduler needs to know of this rank."""
        return Handshake(self.shard, self.sizes, self.groups, self.where) if self.pages else None

    def close(self, timeout: float = 3.0) -> None:
        """End within about ``timeout`` seconds; what is not saved by then is lost."""
        deadline = time.monotonic() + timeout
        self._savers.close(deadline)
        self._loaders.close(deadline)
        if self.host is not None:
            self.host.close()

    # A step.

    def settle(self, step: Step) -> None:
        """Before anything is overwritten: saves out of blocks that were handed out again are over or given up."""
        for number in step.settle:
            job = self._jobs.get(number)
            if job is not None and job.settle():
                self.stats.add("saves.given_up")

    def load(self, step: Step) -> None:
        """Start this step's loads."""
        self._scope, self._idle = step.scope, step.idle
        after, ends = None, time.monotonic() + self.options.load_timeout
        for load in step.loads:
            with self._lock:
                self._loads[load.request] = load
            try:
                after = after or self._event()
                self._loaders.submit(self._load, load, after, ends)
            except Exception as error:  # vLLM waits for the request: it must hear of its end
                self._end(Loaded(load.request, 0, {}, 0.0, 0, (), _reason(error)))

    def save(self, step: Step) -> None:
        """Start this step's saves; the forward that made their bytes has been submitted."""
        after = None
        for save in step.saves:
            if not self.writes:
                self._saved(save, None)
                continue
            try:
                after = after or self._event()
                job = self._jobs[save.job] = SaveJob(save, after)
                self._savers.submit(self._save, job)
            except Exception as error:
                self.stats.add(f"save.failed.{_reason(error)}")
                self._saved(save, ())

    def _event(self) -> Any:
        if not self.device.is_cuda:
            return None
        import torch

        event = torch.cuda.Event()
        event.record()
        return event

    def ended(self) -> list[Loaded]:
        """Loads that ended since the last call, failed ones too; each exactly once."""
        with self._lock:
            if self._idle and self._loads:
                self._load_ended.wait_for(lambda: self._ended, IDLE_SECONDS)
            ended, self._ended = self._ended, []
            for done in ended:
                load = self._loads.get(done.request)
                if load is not None and load.scope != self._scope and not done.reason:
                    done.tokens, done.reason = load.start, "reset"
                if done.reason:
                    self.stats.add(f"load.failed.{done.reason}")
        return ended

    def bad_blocks(self, ended: Loaded, load: Load) -> set[int]:
        """The blocks that a failed load of a single-group model left without their bytes."""
        tokens = self.plan.groups[0].block_tokens
        return {block for block in load.blocks[0][max(0, ended.tokens - load.start) // tokens :] if block}

    def take(self, request: str) -> Load | None:
        """Forget a load that ended."""
        with self._lock:
            return self._loads.pop(request, None)

    def outcome(self) -> Outcome | None:
        """What the scheduler is to hear, None for nothing."""
        with self._lock:
            outcome, self._outcome = self._outcome, Outcome()
        return outcome if outcome.saved or outcome.loaded else None

    # Copies, on our threads.

    def _rows(self, blocks: Sequence[Sequence[int]], start: int, stop: int) -> PageRows:
        """Blocks as page ids; block 0 is vLLM's null block and stands for none."""
        assert self.pages is not None
        ids = []
        for place in self.groups:
            given = np.asarray(blocks[place], np.int64)
            ids.append(np.where(given > 0, given, -1))
        return PageRows(self.spec, self.pages, ids, start, stop)

    def _load(self, load: Load, after: Any, ends: float) -> None:
        started = time.monotonic()
        try:
            done = (
                self._fetch(load, after, ends) if load.digests else Loaded(load.request, 0, {}, 0.0, 0, (), "no plan")
            )
        except Exception as error:
            done = Loaded(load.request, load.start, {}, 0.0, 0, ((load.digests[0], 0),), _reason(error))
        done.seconds = time.monotonic() - started
        self._end(done)

    def _end(self, done: Loaded) -> None:
        with self._lock:
            self._ended.append(done)
            self._load_ended.notify_all()
            self._outcome.loaded.append(done)

    def _fetch(self, load: Load, after: Any, ends: float) -> Loaded:
        chunk_tokens = self.plan.chunk_tokens
        first, chunks = load.start // chunk_tokens, load.stop // chunk_tokens
        rows = self._rows(load.blocks, load.start, load.stop)
        needed = [self.spec.needed_chunks(g, chunks) for g in range(len(self.spec.groups))]
        keys = [
            self._key(load.scope, load.digests, load.before, first, i, g)
            for i in range(first, chunks)
            for g in range(len(needed))
            if i in needed[g]
        ]
        assert self.host is not None
        self._pin()
        tiers: dict[str, int] = {}
        got, nbytes, reason = 0, 0, ""
        try:
            left = ends - time.monotonic()
            if left <= 0:  # other loads took its time
                raise Unavailable("timeout")
            for run in self.host.fetch(keys, [self.sizes[key.group] for key in keys], left):
                if isinstance(run, str):
                    reason = run
                    break
                rows.scatter(zip(keys[got : got + len(run)], run, strict=True), after)
                for key, each in zip(keys[got : got + len(run)], run, strict=True):
                    nbytes += self.sizes[key.group]
                    if key.group == keys[0].group:
                        tier = self.host.tiers[each.tier]
                        tiers[tier] = tiers.get(tier, 0) + chunk_tokens
                got += len(run)
        except LmkvError as error:
            reason = _reason(error)
        if got == len(keys):
            return Loaded(load.request, load.stop, tiers, 0.0, nbytes)
        at = keys[got].depth  # the chunks before it are whole; behind it everything may be missing
        return Loaded(
            load.request, max(load.start, at * chunk_tokens), tiers, 0.0, nbytes,
            ((keys[got].digest, keys[got].group),), reason or "ended early",
        )  # fmt: skip

    def _key(
        self, scope: bytes, digests: Sequence[bytes], before: bytes, first: int, i: int, group: int
    ) -> ChunkKey:  # fmt: skip
        parent = digests[i - first - 1] if i > first else before
        return ChunkKey(scope, NO_TENANT, digests[i - first], parent[:8], i, group, self.shard)

    def _save(self, job: SaveJob) -> None:
        save = job.save
        kept: tuple[Part, ...] = ()
        try:
            kept = self._store(job)
        except Exception as error:
            self.stats.add(f"save.failed.{_reason(error)}")
        finally:
            job.end_copy(over=True)
            self._saved(save, kept)

    def _store(self, job: SaveJob) -> tuple[Part, ...]:
        """Reserve, copy, commit. Returns what is stored now."""
        save, host = job.save, self.host
        chunk_tokens = self.plan.chunk_tokens
        assert host is not None
        if save.scope != self._scope:
            return ()
        self._pin()
        rows = self._rows(save.blocks, save.first * chunk_tokens, (save.first + len(save.digests)) * chunk_tokens)
        whole = [rows.complete(g) for g in range(len(self.spec.groups))]
        keys = [
            self._key(save.scope, save.digests, save.before, save.first, save.first + i, g)
            for i in range(len(save.digests))
            for g in range(len(whole))
            if whole[g][i]
        ]
        size = max(self.sizes)
        step = max(1, BATCH_BYTES // size)
        kept: list[Part] = []
        for at in range(0, len(keys), step):
            if job.given_up:
                break
            batch = keys[at : at + step]
            answers = host.reserve(str(save.job), [(key, self.sizes[key.group]) for key in batch], RESERVE_SECONDS)
            taken = [(key, each) for key, each in zip(batch, answers, strict=True) if not isinstance(each, str)]
            for key, answer in zip(batch, answers, strict=True):
                if isinstance(answer, str):
                    self.stats.add(f"save.{answer}")
                    kept += [(key.digest, key.group)] if answer == "held" else []
            kept += self._fill(job, rows, taken)
            if "no slot" in answers:
                break
        return tuple(kept)

    def _fill(self, job: SaveJob, rows: PageRows, taken: Sequence[tuple[ChunkKey, Any]]) -> list[Part]:
        """Copy into reserved memory and publish it; a job that was given up publishes nothing."""
        host, slots = self.host, [each for _, each in taken]
        assert host is not None
        if not slots:
            return []
        if not job.start_copy():
            host.abort(slots)
            return []
        ttl = job.save.ttl
        expires = int(time.time() + ttl) + 1 if ttl else 0
        try:
            masks = rows.fill(taken, expires, job.after)
        except BaseException:
            host.abort(slots)
            raise
        finally:
            job.end_copy()
        done = host.commit(slots, masks, expires)
        self.stats.add("save.bytes", sum(self.sizes[key.group] for (key, _), ok in zip(taken, done, strict=True) if ok))
        self.stats.add("save.chunks", sum(done))
        return [(key.digest, key.group) for (key, _), ok in zip(taken, done, strict=True) if ok]

    def _saved(self, save: Save, kept: tuple[Part, ...] | None) -> None:
        """A save is over; ``kept`` None: another rank stores these bytes."""
        with self._lock:
            self._jobs.pop(save.job, None)
            self._outcome.saved[save.job] += 1
            if kept is not None:
                self._outcome.kept[save.job] = kept


def _leave_core() -> None:
    """Let this thread, and the copy threads it starts, run on all cores of the engine.

    vLLM's CPU backend ties a worker's main thread to one of its compute cores, and that thread spins there. Threads
    begun by it would share that one core; the engine's own process is not tied.
    """
    if multiprocessing.parent_process() is not None:
        with suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


_quiet_until: dict[str, float] = {}  # by the exception's name


def _reason(error: Exception) -> str:
    """A word or two for a counter; what is unexpected is logged once a minute at most."""
    reason: Callable[[], str] | str = getattr(error, "reason", "")
    if isinstance(error, Unavailable):
        reason = str(error)[:80]
    if isinstance(reason, str) and reason:
        return reason
    name, now = type(error).__name__, time.monotonic()
    if not isinstance(error, (LmkvError, BadInput, OSError)) and now >= _quiet_until.get(name, 0.0):
        _quiet_until[name] = now + 60
        logger.warning("lmkv: %s", error, exc_info=True)
    return name
