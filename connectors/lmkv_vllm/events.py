"""KV events: what lmkv holds of this model, in vLLM's own words and hashes.

A chunk covers several of vLLM's hashed blocks, so an event lists all their hashes. What reaches and leaves the tiers
after a save comes from the host service, which knows chunks by their last hash; ``_held`` leads back to the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
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
HOST_TIER = "cpu"


class Events:
    """Collects events for the scheduler's `take_events`; does nothing unless vLLM publishes events."""

    def __init__(self, config: VllmConfig, plan: Plan) -> None:
        events = config.kv_events_config
        self.wanted = bool(events is not None and events.enable_kv_cache_events)
        self.plan = plan
        self._ready: list[KVCacheEvent] = []
        self.groups: tuple[int, ...] = (0,)  # of the plan, for each stored one
        self._held: dict[Part, tuple[BlockStored, set[str]]] = {}  # and the tiers it is in
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
            if (digest, group) in self._held or digest not in places:
                continue
            i = places[digest]
            hashes = request.block_hashes[i * unit : (i + 1) * unit]
            before = maybe_convert_block_hash(request.block_hashes[i * unit - 1]) if i else None
            event = BlockStored(
                block_hashes=[maybe_convert_block_hash(each) for each in hashes],
                parent_block_hash=before,
                token_ids=list(request.all_token_ids[i * chunk : (i + 1) * chunk]),
                block_size=self.plan.hash_tokens,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_CPU,
                lora_name=lora.name if lora else None,
                group_idx=self.plan.groups[self.groups[group]].number,
            )
            self._held[digest, group] = event, {HOST_TIER}
            self._ready.append(event)

    def cleared(self) -> None:
        """Nothing stored before counts any more."""
        if self.wanted:
            self._held.clear()
            self._asked = None  # its answer is about what is gone
            self._ready = [AllBlocksCleared()]

    def take(self, host: Host | None, scope: bytes) -> list[KVCacheEvent]:
        """Events since the last call; asks the service, in the background, what has left it meanwhile."""
        if self._worker is None or host is None:
            return []
        if self._asked is not None and self._asked.done():
            if self._asked.exception() is None:
                self._moved(self._asked.result())
            self._asked = None
        if self._asked is None and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + ASK_SECONDS
            self._asked = self._worker.submit(host.events, scope)
        ready, self._ready = self._ready, []
        return ready

    def _forget(self) -> None:
        """The service is another one, or cleared for another engine: tell all that was told as gone."""
        for event, tiers in self._held.values():
            for medium in sorted({_medium(tier) for tier in tiers}):
                self._ready.append(_removed(event, medium))
        self._held.clear()

    def _moved(self, changes: Sequence[tuple[str, str, bytes, int]]) -> None:
        for kind, tier, digest, group in changes:
            if kind in ("lost", "cleared"):
                self._forget()
                continue
            event, tiers = self._held.get((digest, group), (None, set()))
            if event is None or (tier in tiers) == (kind == "stored"):
                continue
            medium = _medium(tier)
            if kind == "stored":
                tiers.add(tier)
                self._ready.append(msgspec.structs.replace(event, medium=medium))
                continue
            tiers.discard(tier)
            if medium not in {_medium(each) for each in tiers}:
                self._ready.append(_removed(event, medium))
            if not tiers:
                del self._held[digest, group]

    def close(self) -> None:
        """End the background thread."""
        if self._worker is not None:
            self._worker.close(time.monotonic())


def _medium(tier: str) -> str:
    return MEDIUM_CPU if tier == HOST_TIER else MEDIUM_STORAGE


def _removed(event: BlockStored, medium: str) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(event.block_hashes), medium=medium, group_idx=event.group_idx)
