"""The Engine: tokens, keys and pages above, keys and containers below.

    with Engine(spec, weights=fingerprint, layout=pages.layout, tiers="disk:///var/cache/lmkv") as engine:
        engine.store(tokens, pages, page_ids)
        hit = engine.retrieve(tokens, pages, page_ids)      # hit.tokens are valid in the pages now

Wrong arguments raise BadInput and change nothing. Everything else that can go wrong is a counted miss with a reason.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np

from lmkv import chunk
from lmkv.codec import Meanings, Rope, meanings
from lmkv.config import Config
from lmkv.errors import BadInput, Closed, ConfigError
from lmkv.keys import ChunkKey, ChunkKeys, Identity, Scope
from lmkv.leases import Lease, Reservation
from lmkv.loads import Wanted
from lmkv.pages import PagedKV
from lmkv.plan import Need, Plan
from lmkv.results import Explanation, FlushReport, Retrieved, StoreHandle, explain
from lmkv.rows import PageRows
from lmkv.spec import KVSpec
from lmkv.storage import StorageManager
from lmkv.writer import Tally

Tokens = Sequence[int] | np.ndarray[Any, Any] | ChunkKeys
ATTEMPTS = 3
OWNER = "engine"


class Engine:
    """Store, find and restore the KV cache of token prefixes.

    spec: what the model caches. weights: a fingerprint or name of the weights (see `lmkv.fingerprint`). layout: the
    payload order, ``PagedKV.layout`` of the pages that will be passed. shard: which of ``spec.shards`` this engine
    holds. axes, rope: for codecs, the order of the axes in a stored page of each group ("kv head token dim", "": not
    known) and how K was rotated (None: not, or not known), or one for all groups; see `lmkv.codec.Shape`. config: a
    `Config`; keyword arguments override single keys (``cpu_budget="8GiB"``).
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        weights: str,
        layout: str = "",
        shard: int = 0,
        axes: str | Sequence[str] = "",
        rope: Rope | Sequence[Rope | None] | None = None,
        config: Config | None = None,
        **overrides: Any,
    ) -> None:
        if not weights:
            raise ConfigError(
                "weights", "needs a fingerprint or a name of the weights: without it wrong KV could be served"
            )
        if not 0 <= shard < spec.shards:
            raise BadInput(f"shard {shard} of {spec.shards}")
        self.spec, self.shard = spec, shard
        self.config = (
            (config or Config.load(**overrides)) if not (config and overrides) else config.override(**overrides)
        )
        self.scope = Scope(weights, spec.kv_dtype, f"{spec.geometry()} {layout}", spec.chunk_tokens)
        self.need = Need.of(spec)
        self.layout = layout
        self.groups = range(len(spec.groups))
        self.threads = self.config.copy_threads or min(4, os.cpu_count() or 1)
        self.sizes = [chunk.container_bytes(spec, g) for g in self.groups]
        known = Meanings.of({spec.geometry_id: meanings(spec, axes, rope)})
        self.storage = StorageManager(self.config, self.sizes, known)
        self.counters = self.storage.stats

    # Keys and lookup.

    def keys(
        self, tokens: Tokens, salt: str = "", adapter: str = "", media: Sequence[tuple[str, int, int]] = ()
    ) -> ChunkKeys:
        """The chunk keys of a prompt, hashed on demand; make them once and pass them to every call below."""
        if isinstance(tokens, ChunkKeys):
            if tokens.chunk_tokens != self.spec.chunk_tokens:
                raise BadInput(
                    f"keys of {tokens.chunk_tokens}-token chunks, the engine's have {self.spec.chunk_tokens}"
                )
            return tokens
        return ChunkKeys.from_tokens(tokens, self.spec.chunk_tokens, Identity(salt, adapter, tuple(media)))

    def lookup(self, tokens: Tokens) -> Plan:
        """The longest restorable prefix, and why it ends. Takes nothing and promises nothing: see `acquire`."""
        keys = self.keys(tokens)
        if unusable := self._unusable():
            return Plan(keys, self.need, (), unusable, self.storage.names)
        plan = self.storage.lookup(self.scope.digest, keys, self.need)
        if 0 < plan.tokens < self.config.min_hit_tokens:
            plan = plan.cut(0, f"below min_hit_tokens ({plan.tokens})")
        self.counters.add("lookups")
        self.counters.add("lookup_tokens", keys.tokens)
        self.counters.add("hit_tokens", plan.tokens)
        return plan

    def acquire(self, owner: str, plan: Plan, timeout: float | None = None) -> Lease:
        """Keep a plan's chunks from being evicted for ``timeout`` seconds; idempotent per owner.

        The lease may cover less than the plan (its ``plan.reason`` says why); waiting requests together hold at most
        half of host memory.
        """
        return self.storage.leases.acquire(owner, plan, timeout or self.config.cpu.lease_timeout)

    # Storing.

    def store(
        self,
        tokens: Tokens,
        pages: PagedKV,
        page_ids: Sequence[Any],
        *,
        start: int = 0,
        ttl: float | None = None,
        after: Any = None,
    ) -> StoreHandle:
        """Copy the full chunks of ``tokens`` out of ``pages`` into host memory, and queue them for the other tiers.

        page_ids: per group, the ids of the pages that hold tokens from ``start`` (a multiple of the chunk) on, in
        order; -1 where a page is gone (a window has slid past it); a recurrent group has one id a chunk, -1 where the
        engine kept no state. ttl: seconds, else the setting. after: on a GPU, the event of the step that writes the
        pages. When this returns the pages may be reused; what was not taken is in the handle, with its reason.
        """
        keys = self.keys(tokens)
        if start % self.spec.chunk_tokens or not 0 <= start <= keys.chunks * self.spec.chunk_tokens:
            raise BadInput(f"start {start} is not a multiple of the chunk ({self.spec.chunk_tokens}) inside the prompt")
        rows = self._rows(pages, page_ids, start, keys.chunks * self.spec.chunk_tokens)
        tally = Tally()
        handle = StoreHandle(tally)
        if unusable := self._unusable():
            handle.drop(unusable, keys.chunks - rows.first)
            return handle
        self.counters.add("stores")
        ttl = self.config.ttl if ttl is None else ttl
        expires = int(time.time() + ttl) + 1 if ttl else 0
        reserved: dict[ChunkKey, Reservation] = {}
        try:
            held = self._reserve(self._storable(keys, rows), reserved, handle)
            filled = [(key, each.slot) for key, each in reserved.items()]
            for each, mask in zip(reserved.values(), rows.fill(filled, expires, after), strict=True):
                each.pages = mask
            done = self.storage.commit(list(reserved.values()), expires, tally)
        finally:
            for reservation in reserved.values():
                self.storage.abort(reservation)
        handle.stored = sum(done)
        if late := len(done) - handle.stored:
            handle.drop("late", late)
        self.storage.write_through(held, tally)
        self.storage.touch(map(self.storage.index.find(self.scope.digest), keys.upto(keys.chunks)))
        self.storage.room.evict_ahead()
        self.counters.add("stored_chunks", handle.stored)
        self.counters.add("skipped_chunks", handle.skipped)
        self.counters.add("dropped_chunks", handle.dropped)
        return handle

    def _storable(self, keys: ChunkKeys, rows: PageRows) -> list[ChunkKey]:
        """The containers, in prefix order, all of whose pages are there."""
        there = [rows.complete(g) for g in self.groups]
        scope = self.scope.digest
        return [
            keys.key(rows.first + i, scope, g, self.shard)
            for i in range(keys.chunks - rows.first)
            for g in self.groups
            if there[g][i]
        ]

    def _reserve(
        self, wanted: list[ChunkKey], reserved: dict[ChunkKey, Reservation], handle: StoreHandle
    ) -> list[ChunkKey]:
        """Reserve slots until one is refused for want of memory; returns the keys already in the store."""
        held = []
        deadline = time.monotonic() + self.config.operation_timeout
        for n, key in enumerate(wanted):
            got = self.storage.reserve(OWNER, key, self.sizes[key.group], deadline)
            if isinstance(got, Reservation):
                reserved[key] = got
            elif got == "no slot":
                handle.drop(got, len(wanted) - n)
                break
            else:
                handle.skip(got)
                held += [key] if got == "held" else []
        return held

    def _rows(self, pages: PagedKV, page_ids: Sequence[Any], start: int, stop: int) -> PageRows:
        self._check_layout(pages)
        return PageRows(self.spec, pages, page_ids, start, stop)

    def _check_layout(self, pages: PagedKV) -> None:
        if pages.layout != self.layout:
            raise BadInput(f"pages laid out as {pages.layout!r}, the engine was opened for {self.layout!r}")

    # Retrieving.

    def retrieve(
        self,
        tokens: Tokens | Lease,
        pages: PagedKV,
        page_ids: Sequence[Any],
        *,
        start: int = 0,
        stop: int | None = None,
        timeout: float | None = None,
        after: Any = None,
    ) -> Retrieved:
        """Copy the longest stored prefix into ``pages`` and say how long it is.

        tokens: or a `Lease` from `acquire`. page_ids: per group, the ids of the pages for tokens from ``start`` on;
        at least as many as the hit needs, -1 for a page that is not to be written. start: tokens the pages hold
        already, a multiple of the page; pages below it are not touched. stop: use at most so many tokens.
        """
        lease = tokens if isinstance(tokens, Lease) else None
        keys = lease.plan.keys if lease else self.keys(tokens)  # type: ignore[arg-type]
        self._check_layout(pages)
        for g in self.groups:
            pages.check_ids(g, (), start, 0)
        if self._unusable() or (lease and not self.storage.leases.use(lease)):
            return Retrieved(0, 0, {}, self._unusable() or "lease void")
        self.counters.add("retrieves")
        deadline = time.monotonic() + (timeout or self.config.operation_timeout)
        try:
            for _ in range(ATTEMPTS):
                plan = lease.plan if lease else self.lookup(keys)
                if stop is not None and stop < plan.tokens:
                    plan = plan.cut(stop // self.spec.chunk_tokens, "stop")
                found = self._load(plan, pages, page_ids, start, deadline, after)
                if lease or found.tokens or plan.tokens <= start or not self.need.trailing:
                    break
        finally:
            if lease:
                self.storage.leases.done(lease)
        self.counters.add("retrieved_tokens", found.loaded)
        return found

    def _load(
        self, plan: Plan, pages: PagedKV, page_ids: Sequence[Any], start: int, deadline: float, after: Any
    ) -> Retrieved:
        if plan.tokens <= start:
            return Retrieved(0, 0, {}, plan.reason)
        rows = self._rows(pages, page_ids, start, plan.tokens)
        wanted = self._wanted(plan, rows.first)
        tiers: Counter[str] = Counter()
        got, reason = 0, plan.reason
        for run in self.storage.fetch(wanted, deadline):
            if isinstance(run, str):
                reason = run
                self.counters.add("retrieve_failures")
                break
            keys = [want.key for want in wanted[got : got + len(run)]]
            try:
                rows.scatter(((key, ready.slot) for key, ready in zip(keys, run, strict=True)), after)
            finally:
                self.storage.release(run)
            for key, ready in zip(keys, run, strict=True):
                if key.group == wanted[0].key.group:
                    tiers[self.storage.names[ready.tier]] += self.spec.chunk_tokens
            got += len(run)
        ends = plan.tokens
        if got < len(wanted):
            ends = 0 if self.need.trailing else wanted[got].key.depth * self.spec.chunk_tokens
        self.storage.touch(plan.entries[: ends // self.spec.chunk_tokens])
        self.storage.write_through([want.key for want in wanted[:got]], Tally())
        return Retrieved(ends, ends - start, dict(tiers), reason) if ends > start else Retrieved(0, 0, {}, reason)

    def _wanted(self, plan: Plan, first: int) -> list[Wanted]:
        """Containers to fetch, chunk by chunk."""
        needed = [self.spec.needed_chunks(g, len(plan.entries)) for g in self.groups]
        return [
            Wanted(entry, entry.key(g, self.shard), self.sizes[g])
            for i, entry in enumerate(plan.entries)
            if entry is not None and i >= first
            for g in self.groups
            if i in needed[g]
        ]

    def prefetch(self, tokens: Tokens) -> Future[int]:
        """Bring the stored prefix into host memory in the background; the result is the tokens that are there."""
        return self.storage.calls.submit(self._prefetch, self.keys(tokens))

    def _prefetch(self, keys: ChunkKeys) -> int:
        plan = self.lookup(keys)
        wanted, got = self._wanted(plan, 0), 0
        for run in self.storage.fetch(wanted, time.monotonic() + self.config.operation_timeout):
            if isinstance(run, str):
                return 0 if self.need.trailing else wanted[got].key.depth * self.spec.chunk_tokens
            got += len(run)
            self.storage.release(run)
        return plan.tokens

    def submit_store(self, *args: Any, **kwargs: Any) -> Future[StoreHandle]:
        """`store` on a background thread; the pages must stay as they are until the future is done."""
        return self.storage.calls.submit(lambda: self.store(*args, **kwargs))

    def submit_retrieve(self, *args: Any, **kwargs: Any) -> Future[Retrieved]:
        """`retrieve` on a background thread."""
        return self.storage.calls.submit(lambda: self.retrieve(*args, **kwargs))

    # Keeping and forgetting.

    def pin(self, tokens: Tokens) -> int:
        """Keep the stored prefix in every tier it is in until `unpin`; returns its tokens. Pins count."""
        return self._pin(tokens, 1)

    def unpin(self, tokens: Tokens) -> int:
        """Undo one `pin`; returns the tokens that were pinned."""
        return self._pin(tokens, -1)

    def _pin(self, tokens: Tokens, step: int) -> int:
        keys = self.keys(tokens)
        if self._unusable():
            return 0
        plan = self.storage.lookup(self.scope.digest, keys, self.need)
        with self.storage.lock:
            entries = [entry for entry in plan.entries if entry is not None and entry.pins + step >= 0]
            for entry in entries:
                entry.pins += step
        return len(entries) * self.spec.chunk_tokens

    def clear(
        self, tokens: Tokens | None = None, *, scope: bool = False, tenant: str | None = None, tier: str | None = None,
        everything: bool = False,
    ) -> int:  # fmt: skip
        """Remove chunks and return how many there were.

        Exactly one of: tokens (that prompt's chunks), scope (this model's), tenant (a salt's, of this model),
        everything (other models' too). ``tier`` alone empties one tier, else it limits the removal to it.
        """
        given = [tokens is not None, scope, tenant is not None, everything]
        if sum(given) > 1 or not (any(given) or tier):
            raise BadInput("clear needs one of tokens, scope, tenant, everything, or a tier")
        if tier is not None and tier not in self.storage.names:
            raise BadInput(f"no tier {tier!r}; there are {', '.join(self.storage.names)}")
        if unusable := self._unusable():
            raise Closed(unusable)
        mine = self.scope.digest
        if tokens is not None:
            keys = self.keys(tokens)
            digests = set(keys.upto(keys.chunks))
            return self._clear(lambda entry: entry.scope == mine and entry.digest in digests, tier)
        if tenant is not None:
            tag = Identity(tenant).tenant
            return self._clear(lambda entry: entry.scope == mine and entry.tenant == tag, tier)
        return self._clear(lambda entry: not scope or entry.scope == mine, tier)

    def _clear(self, match: Any, tier: str | None) -> int:
        return self.storage.clear(match, None if tier is None else self.storage.names.index(tier))

    # Looking in, and ending.

    def explain(self, tokens: Tokens) -> Explanation:
        """Tier by tier, what a lookup of ``tokens`` finds and why it ends where it does. Print it."""
        return explain(self, self.keys(tokens))

    def flush(self, timeout: float | None = None) -> FlushReport:
        """Wait until what was stored so far is in every tier that takes it, or was given up; says which."""
        safe = self.storage.flush(timeout)
        return FlushReport.of(safe, [writer.total.take() for writer in self.storage.writers])

    def stats(self) -> dict[str, Any]:
        """Counters since start, and per tier the bytes, objects, budget and measured speed."""
        return {**self.counters.snapshot(), "tiers": self.storage.usage()}

    def health(self) -> dict[str, Any]:
        """``ok`` when every tier is, and each tier's own word."""
        tiers = self.storage.health()
        return {"ok": not self._unusable() and all(each["ok"] for each in tiers.values()), "tiers": tiers}

    def _unusable(self) -> str:
        return self.storage.usable

    def close(self) -> None:
        """Write what is queued, within ``close_timeout`` seconds, and release everything. Later calls are misses."""
        self.storage.close(self.config.close_timeout)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
