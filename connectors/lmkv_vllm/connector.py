"""vLLM's connector class: each hook handed to the scheduler's or the worker's side, and none of them ever raises.

Wrong configuration stops the engine when the class is built. After that an exception anywhere is a counted miss: the
hook answers what "nothing to do" looks like.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from lmkv.errors import ConfigError
from lmkv_vllm.messages import Handshake, Loaded, Outcome, Step
from lmkv_vllm.metrics import LMKVPromMetrics, LMKVStats, Since
from lmkv_vllm.options import Options
from lmkv_vllm.scheduler import Scheduler
from lmkv_vllm.worker import Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lmkv")
TESTED = ("0.32",)
LOG_SECONDS = 60.0
REPORT_SECONDS = 0.01  # in hooks, from when on they are worth a report of their own


def guarded(default: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A hook that answers ``default()`` instead of raising, counts that, and logs it once a minute. It is timed."""

    def wrap(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(self: LMKVConnector, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                self.side.stats.add(f"hook.failed.{hook.__name__}")
                if time.monotonic() - self._logged > LOG_SECONDS:
                    self._logged = time.monotonic()
                    logger.exception("lmkv: %s failed; this is a miss, the engine goes on", hook.__name__)
                return default()
            finally:
                self._spent += time.perf_counter() - started

        return call

    return wrap


def _nothing() -> None:
    return None


class LMKVConnector(KVConnectorBase_V1, SupportsHMA):
    """lmkv in vLLM. Settings: ``kv_connector_extra_config``, see docs/vllm.md."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_version()
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        options = Options.of(transfer.kv_connector_extra_config)
        self._logged = -LOG_SECONDS
        self._since = Since()
        self._seconds: list[float] = []
        self._spent = 0.0
        self._step: Step | None = None
        self._bad_blocks: set[int] = set()
        self.side: Scheduler | Worker
        if role == KVConnectorRole.SCHEDULER:
            _recover_by_recompute(vllm_config, _parent())
            self.side = Scheduler(vllm_config, kv_cache_config, options)
        else:
            self.side = Worker(vllm_config, kv_cache_config, options, _rank())
        self._by_blocks = self.side.plan.by_blocks and len(kv_cache_config.kv_cache_groups) == 1

    @property
    def scheduler(self) -> Scheduler:
        """The side this instance is, where it must be the scheduler's."""
        assert isinstance(self.side, Scheduler)
        return self.side

    @property
    def worker(self) -> Worker:
        """The side this instance is, where it must be a worker's."""
        assert isinstance(self.side, Worker)
        return self.side

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what was not stored is a miss later, never a reason to recompute now."""
        return False

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Configuration errors are raised here too: the engine is still starting."""
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.handshake()

    @guarded(_nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Step)
        self.worker.settle(kv_connector_metadata)

    @guarded(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        self.worker.load(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole before or beside a step, never layer by layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves start after the step, block by block."""

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        self.worker.save(step)

    @guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for done in self.worker.ended():
            results.finished_recving.add(done.request)
            if not self._good(done):
                results.failed_recving.add(done.request)
        return results

    @guarded(lambda: False)
    def _good(self, done: Loaded) -> bool:
        """The load brought all its blocks, or those that it did not bring are told one by one."""
        self._seconds.append(done.seconds)
        load = self.worker.take(done.request)
        if done.reason and self._by_blocks and load is not None and load.blocks:
            bad = self.worker.bad_blocks(done, load)
            self._bad_blocks |= bad
            return bool(bad)
        return not done.reason

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.outcome()

    # Scheduler.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Configuration errors are raised here too: the engine is still starting."""
        ranks = [each for each in metadata.values() if isinstance(each, Handshake)]
        if len(ranks) < len(metadata):  # vLLM's MultiConnector hands one child's handshake to all of them
            raise ConfigError("kv_connector", "the MultiConnector has another connector with a handshake of its own")
        self.scheduler.meet(ranks)

    @guarded(_nothing)
    def on_new_request(self, request: Request) -> None:
        self.scheduler.arrive(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._allocated(request, blocks, num_external_tokens) is None and num_external_tokens:
            self.scheduler.fail(request)

    @guarded(_nothing)
    def _allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> bool:
        return self.scheduler.allocated(request, blocks, tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        names = {"cpu": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
        found: dict[CacheHitSource, int] = {}
        for tier, tokens in self.scheduler.sources(request, num_external_tokens).items():
            source = names.get(tier.partition("-")[0], CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[source] = found.get(source, 0) + tokens
        return found

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        step = self._begin(scheduler_output)
        if step is None:  # settle everything: which blocks are handed out again is not known
            step = self.scheduler.bare_step()
        self._save(scheduler_output, step)
        return step

    @guarded(_nothing)
    def _begin(self, scheduler_output: SchedulerOutput) -> Step:
        return self.scheduler.step(scheduler_output)

    @guarded(_nothing)
    def _save(self, scheduler_output: SchedulerOutput, step: Step) -> None:
        self.scheduler.save(scheduler_output, step)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._heard(connector_output.kv_connector_worker_meta)
        for request_id in connector_output.finished_recving or ():
            self._received(request_id)

    @guarded(_nothing)
    def _heard(self, outcome: KVConnectorWorkerMetadata | None) -> None:
        if isinstance(outcome, Outcome):
            self.scheduler.heard(outcome)

    @guarded(_nothing)
    def _received(self, request_id: str) -> None:
        self.scheduler.received(request_id)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request)
        return False, None

    @guarded(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.scheduler.events()

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        return self.scheduler.reset()

    # Both.

    @guarded(_nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """On the scheduler's side vLLM asks once for every step that has ended, in order."""
        if isinstance(self.side, Scheduler):
            self.side.measure()
        counts = self._since.take(self.side.stats.snapshot())
        seconds, self._seconds = self._seconds, []
        if not counts and not seconds and self._spent < REPORT_SECONDS:
            return None
        spent, self._spent = self._spent, 0.0
        return LMKVStats(data={"counts": counts, "load_seconds": seconds, "hook_seconds": spent})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return LMKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: dict[Any, Any], labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LMKVPromMetrics:  # fmt: skip
        return LMKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(_nothing)
    def shutdown(self) -> None:
        self.side.close()


def _rank() -> tuple[int, int]:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, get_tp_group().rank_in_group


def _check_version() -> None:
    import vllm

    version = vllm.__version__
    if not version.startswith(TESTED):
        raise ConfigError(
            "vllm", f"version {version} is not one this connector was tested with: {', '.join(TESTED)}.x "
            f"(lmkv {importlib.metadata.version('lmkv')})"
        )  # fmt: skip


def _recover_by_recompute(config: VllmConfig, parent: KVTransferConfig | None) -> None:
    """A failed load must be computed, not end the request. A MultiConnector's own policy is the one that counts."""
    transfer = config.kv_transfer_config
    assert transfer is not None
    if parent is not None and parent.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kv_load_failure_policy",
            'the MultiConnector must say "recompute": with "fail", a chunk that cannot be read would end its request',
        )
    if parent is None and transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        logger.warning('lmkv: kv_load_failure_policy is now "recompute": a chunk that cannot be read is computed')


def _parent() -> KVTransferConfig | None:
    """The configuration of the MultiConnector that is building this connector, None when there is none.

    vLLM gives a child a configuration of its own and no other way to see its parent's than the call itself.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    frame = sys._getframe(2)
    builder = frame.f_locals.get("self")
    return builder._kv_transfer_config if isinstance(builder, MultiConnector) else None
