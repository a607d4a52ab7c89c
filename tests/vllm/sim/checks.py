"""What a test asks of the sim's engine at the end: right tokens, right bytes in the store, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lmkv import chunk
from lmkv.keys import NO_TENANT, ChunkKey
from sim.rank import expected, state
from sim.truth import Chain


class Checks:
    """The checks of `sim.engine.Engine`, apart from what it does."""

    scheduler: Any
    connector: Any
    pool: Any
    plan: Any
    service: Any
    ranks: list[Any]
    requests: dict[str, Any]
    outputs: dict[str, list[int]]
    finish_reasons: dict[str, Any]
    expected_failures: dict[str, int]
    parked: set[str]
    scopes: dict[bytes, int]
    known: dict[bytes, tuple[str, list[int]]]
    weights: int
    who: Any

    def check_outputs(self) -> None:
        """Every request that came to its end has the tokens its prompt leads to."""
        for name, reason in self.finish_reasons.items():
            request = self.requests[name]
            assert str(reason) != "error", f"{name} ended in an error"
            if self.weights == 1:
                chain = Chain(self.weights, self.who(request), request.prompt_token_ids or [])
                for token in self.outputs[name]:
                    assert token == chain.next_token(), f"{name}: wrong token at {len(chain)}"
                    chain.extend([token])

    def check_nothing_left(self) -> None:
        """Nothing is held for requests that are no more."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        for what in ("requests", "running", "waiting", "kv_holding_waiting", "deferred_waiting", "deferred_frees",
                     "finished_recving_kv_req_ids", "failed_recving_kv_req_ids", "_inflight_prefills"):  # fmt: skip
            assert not getattr(scheduler, what), f"scheduler.{what}: {getattr(scheduler, what)}"
        assert not self.parked, f"parked and never reported: {self.parked}"
        for each in manager.coordinator.single_type_managers:
            assert not each.req_to_blocks, f"blocks of requests that are gone: {dict(each.req_to_blocks)}"
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert all(not block.ref_cnt for block in self.pool.blocks if not block.is_null)
        for side in (self.connector.side, *(rank.connector.side for rank in self.ranks)):
            failed = {event: n for event, n in side.stats.snapshot().items() if event.startswith("hook.failed")}
            assert failed == self.expected_failures, failed
        side = self.connector.side
        for what in ("_requests", "_loads", "_fresh", "_failed"):
            assert not getattr(side, what), f"lmkv scheduler {what}: {getattr(side, what)}"
        assert not side.saves._jobs, f"saves in flight: {side.saves._jobs}"
        assert not side.saves._blocks, f"blocks of saves: {side.saves._blocks}"
        for rank in self.ranks:
            for what in ("_jobs", "_loads", "_ended"):
                assert not getattr(rank.connector.side, what), f"lmkv worker {what}"
        if self.service is not None:
            assert not self.service.leases, f"leases: {self.service.leases}"
            assert not self.service.writing, f"reservations: {self.service.writing}"
            assert not self.service.reading, "runs that were never let go"

    def check_stored(self, parts: Iterator[tuple[ChunkKey, Any, int]]) -> int:
        """Containers (key, bytes, page mask) hold exactly what their digest stands for. Returns how many."""
        count = 0
        for key, data, mask in parts:
            weights = self.scopes.get(key.scope)
            if weights is None:
                continue
            assert key.digest in self.known, "stored under a hash that no request ever had"
            who, tokens = self.known[key.digest]
            chain = Chain(weights, who, tokens)
            self._check_container(key, data, mask, chain)
            count += 1
        return count

    def _check_container(self, key: ChunkKey, data: Any, mask: int, chain: Chain) -> None:
        rank = next(rank for rank in self.ranks if rank.connector.side.shard == key.shard)
        side = rank.connector.side
        spec, place = side.spec, side.groups[key.group]
        layers = rank.layers[self.plan.groups[place].number]
        pages = spec.pages(key.group)
        size = spec.groups[key.group].layer_page_bytes
        start = len(chain) - self.plan.chunk_tokens
        assert key.depth * self.plan.chunk_tokens == start, "stored at another depth"
        header = chunk.parse(memoryview(data), key)
        assert header.page_mask == (mask or (1 << pages) - 1)
        for part in chunk.layout(spec, key.group):
            for nth in range(part.layers):
                layer, array, _ = layers[part.first_layer + nth]
                for page in range(pages):
                    if mask and not mask >> page & 1:
                        continue
                    at = part.offset + (nth * pages + page) * size
                    found = data[at : at + size]
                    if spec.groups[key.group].state_bytes:
                        right = state(chain, layer, array, len(chain))
                    else:
                        tokens = spec.groups[key.group].page_tokens
                        first = start + page * tokens
                        right = expected(chain, layer, array, first, first + tokens).transpose(1, 0, 2).ravel()
                    assert (found == right).all(), f"wrong bytes stored for {key} layer {layer} page {page}"

    def stored(self) -> Iterator[tuple[ChunkKey, Any, int]]:
        """Every container the fake service has."""
        for key, part in list(self.service.stored.items()) if self.service else ():
            yield key, part.data, part.mask

    def stored_for_real(self) -> Iterator[tuple[ChunkKey, Any, int]]:
        """Every container of this engine's chunks that the real service has, read through it."""
        host = self.ranks[0].connector.side.host
        for scope in self.scopes:
            for digest, (_, tokens) in self.known.items():
                for rank in {rank.connector.side.shard: rank.connector.side for rank in self.ranks}.values():
                    for group, size in enumerate(rank.sizes):
                        depth = len(tokens) // self.plan.chunk_tokens - 1
                        before = self._digest_before(digest, tokens)
                        key = ChunkKey(scope, NO_TENANT, digest, before[:8], depth, group, rank.shard)
                        for run in host.fetch([key], [size], 5.0):
                            if not isinstance(run, str):
                                data = np.frombuffer(bytes(run[0].view()), np.uint8)
                                full = (1 << rank.spec.pages(group)) - 1
                                mask = chunk.parse(memoryview(data)).page_mask
                                yield key, data, 0 if mask == full else mask

    def _digest_before(self, digest: bytes, tokens: list[int]) -> bytes:
        who = self.known[digest][0]
        shorter = tokens[: -self.plan.chunk_tokens]
        if not shorter:
            return bytes(32)
        return next(d for d, (w, t) in self.known.items() if w == who and t == shorter)
