"""KV events: what lmkv holds of this model, in vLLM's own words and hashes.

A chunk covers several of vLLM's hashed blocks, so an event lists all their hashes. Removals come from the host
service, which knows chunks by their last hash; ``_blocks`` leads back to the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from lmkv.workers import Workers
from lmkv_vllm.geometry import Plan
from lmkv_vllm.messages import Part, Save
from lmkv_vllm.requests import Tracked

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from lmkv.server.client import Host

ASK_SECONDS = 0.25


class Events:
    """Collects events for the scheduler's `take_events`; does nothing unless vLLM publishes events."""

    def __init__(self, config: VllmConfig, plan: Plan) -> None:
        events = config.kv_events_config
        self.wanted = bool(events is not None and events.enable_kv_cache_events)
        self.plan = plan
        self._ready: list[KVCacheEvent] = []
        self._blocks: dict[Part, tuple[Any, ...]] = {}
        self._asked: Future[Any] | None = None
        self._ask_at = 0.0
        self._worker = Workers("vllm-events", 1) if self.wanted else None

    def stored(self, save: Save, state: Tracked, kept: Sequence[Part]) -> None:
        """Parts of a save that host memory holds now."""
        if not self.wanted:
            return
        request, chunk = state.request, self.plan.chunk_tokens
        unit = chunk // self.plan.hash_tokens
        lora, places = request.lora_request, {digest: i for i, digest in enumerate(save.digests, save.first)}
        for digest, group in kept:
            if (digest, group) in self._blocks or digest not in places:
                continue
            i = places[digest]
            hashes = request.block_hashes[i * unit : (i + 1) * unit]
            names = self._blocks[digest, group] = tuple(maybe_convert_block_hash(each) for each in hashes)
            before = maybe_convert_block_hash(request.block_hashes[i * unit - 1]) if i else None
            self._ready.append(
                BlockStored(
                    block_hashes=list(names),
                    parent_block_hash=before,
                    token_ids=list(request.all_token_ids[i * chunk : (i + 1) * chunk]),
                    block_size=self.plan.hash_tokens,
                    lora_id=lora.adapter_id if lora else None,
                    medium=MEDIUM_CPU,
                    lora_name=lora.name if lora else None,
                    group_idx=self._number(group),
                )
            )

    def _number(self, group: int) -> int:
        """vLLM's number of a stored group."""
        return self.plan.groups[min(group, len(self.plan.groups) - 1)].number

    def cleared(self) -> None:
        """Nothing stored before counts any more."""
        if self.wanted:
            self._blocks.clear()
            self._ready = [AllBlocksCleared()]

    def take(self, host: Host | None, scope: bytes) -> list[KVCacheEvent]:
        """Events since the last call; asks the service, in the background, what has left it meanwhile."""
        if self._worker is None or host is None:
            return []
        if self._asked is not None and self._asked.done():
            if self._asked.exception() is None:
                self._removed(self._asked.result(), host)
            self._asked = None
        if self._asked is None and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + ASK_SECONDS
            self._asked = self._worker.submit(host.events, scope)
        ready, self._ready = self._ready, []
        return ready

    def _removed(self, changes: Sequence[tuple[str, str, bytes, int]], host: Host) -> None:
        for kind, tier, digest, group in changes:
            names = self._blocks.get((digest, group))
            if kind != "removed" or names is None:
                continue
            medium = MEDIUM_CPU if tier == host.tiers[0] else MEDIUM_STORAGE
            self._ready.append(BlockRemoved(block_hashes=list(names), medium=medium, group_idx=self._number(group)))
            if medium == MEDIUM_CPU:
                del self._blocks[digest, group]

    def close(self) -> None:
        """End the background thread."""
        if self._worker is not None:
            self._worker.close(time.monotonic())
