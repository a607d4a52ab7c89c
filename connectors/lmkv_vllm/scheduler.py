"""The scheduler's side: what to load, what to save, and when blocks may be reused.

It runs inside the engine's step, so it never waits: lookups are answered in the background, everything else is
arithmetic over block hashes and block ids.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmkv.errors import ConfigError, Unavailable
from lmkv.index import part_bit
from lmkv.keys import Scope
from lmkv.plan import Need, Trailing
from lmkv.server.client import Answer, Host, Query
from lmkv.spec import Kind
from lmkv.stats import Stats
from lmkv_vllm import identity
from lmkv_vllm.events import Events
from lmkv_vllm.geometry import Plan, pages_needed
from lmkv_vllm.messages import Handshake, Load, Outcome, Step
from lmkv_vllm.options import Options
from lmkv_vllm.requests import NO_DIGEST, Tracked
from lmkv_vllm.saves import Saves

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lmkv")
LINES_A_SECOND = 5
MEASURED_TOKENS = 512
MAX_FAILURES = 3  # failed loads of a request; it is computed then


class Scheduler:
    """One engine's scheduler. Useless until `meet` has brought every rank's handshake: all lookups are misses."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, options: Options) -> None:
        self.config, self.options = config, options
        self.plan = Plan.of(config, cache, options.chunk_tokens)
        self.weights = identity.weights_of(config, options.weights_id)
        self.hash = identity.hash_name(config, self.plan.hash_tokens)
        self.stats = Stats()
        self.saves = Saves(self.plan, config.parallel_config.world_size, options.offload_prompt_only, self.stats.add)
        self.host: Host | None = None
        self.need: Need | None = None
        self.scope = b""
        self._epoch, self._where = "", ""
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._fresh: list[int] = []
        self._bad: dict[bytes, set[int]] = {}
        self._failed: dict[str, str] = {}
        self._events = Events(config, self.plan)
        self._steps: deque[tuple[float, int]] = deque()  # those under way: when they began, and their tokens
        self._prefill_speed = self._step_ended = 0.0
        self._load_speed: dict[str, float] = {}
        self._lines = 0.0
        self._lines_at = 0.0

    # Start and end.

    def meet(self, ranks: Iterable[Handshake]) -> None:
        """Know the ranks: the scope is made of what lays out every shard's bytes."""
        by_shard: dict[int, Handshake] = {}
        for each in ranks:
            known = by_shard.setdefault(each.shard, each)
            if known.where != each.where:
                raise ConfigError("kv_cache_layout", "ranks that should hold the same bytes lay them out differently")
        if sorted(by_shard) != list(range(self.plan.shards)):
            raise ConfigError(
                "tensor_parallel_size", f"{self.plan.shards} shards expected, ranks hold {sorted(by_shard)}"
            )
        self._where = " | ".join(by_shard[shard].where for shard in range(self.plan.shards))
        sizes = sorted({size for each in by_shard.values() for size in each.sizes})
        self.need, self._events.groups = self._need(by_shard[0].groups), by_shard[0].groups
        self._set_scope()
        self.host = self.options.host("scheduler")
        try:
            self.host.register(sizes)
        except Unavailable as error:
            logger.warning("lmkv: no host service yet (%s): nothing is found until there is one", error)

    def _need(self, groups: Sequence[int]) -> Need:
        """What a hit needs in the index: a bit for each stored group, of a plan's group each, and shard."""
        growing, trailing = 0, []
        for g, number in enumerate(groups):
            group = self.plan.groups[number]
            bits = sum(part_bit(g, shard) for shard in range(self.plan.shards))
            if group.kind in (Kind.FULL, Kind.MLA):
                growing |= bits
            elif pages := pages_needed(group, self.plan.chunk_tokens):
                trailing.append(Trailing(g, bits, pages))
        return Need(growing, tuple(trailing))

    def _set_scope(self) -> None:
        config = self.config
        parallel = config.parallel_config
        extra = (
            ("engine", "vllm"), ("model", identity.model_text(config)),
            ("ranks", f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size}"),
        )  # fmt: skip
        dtype = str(config.cache_config.cache_dtype)
        self.scope = Scope(
            self.weights, dtype, self._where, self.plan.chunk_tokens, self.hash, self._epoch, extra
        ).digest  # fmt: skip

    def reset(self) -> bool:
        """Nothing stored so far is to be found again: a fresh epoch, and the old chunks are cleared behind it."""
        old, self._epoch = self.scope, secrets.token_hex(16)
        self._set_scope()
        self._bad.clear()
        for state in self._requests.values():
            self._drop(state)
            state.stale = state.loading or state.request.num_computed_tokens > 0
        if self.host is not None:
            self.host.clear_later(old)
        self._events.cleared()
        return True

    def close(self) -> None:
        """Let go of everything held for this engine."""
        self._events.close()
        if self.host is not None:
            self.host.close()

    # Lookup.

    def arrive(self, request: Request) -> None:
        """A request was added: its lookup goes out now, so that the answer is there when it is scheduled."""
        state = self._requests[request.request_id] = Tracked.of(request)
        if not request.skip_reading_prefix_cache and not state.skip_load:
            self._ask(state)

    def matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``local`` can be loaded, None while that is not known yet."""
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = Tracked.of(request)
        if state.skip_load or request.skip_reading_prefix_cache or self.host is None:
            return 0, False
        if state.loading:
            return None, False
        if state.answer is not None and time.monotonic() - state.asked > self.options.load_timeout / 2:
            self._drop(state)  # its lease would end before the load
        if state.answer is None:
            if state.lookup is None and not self._ask(state):
                state.refused = True
                return self._miss(state, "failed before" if self._bad else "shorter than a chunk")
            if not state.lookup.done():  # type: ignore[union-attr]
                if time.monotonic() - state.asked < self.options.lookup_timeout:
                    return None, False
                return self._miss(state, "lookup timeout")
            error = state.lookup.exception()  # type: ignore[union-attr]
            if error is not None:
                return self._miss(state, str(error)[:80] if isinstance(error, Unavailable) else "lookup failed")
            state.answer = state.lookup.result()  # type: ignore[union-attr]
        state.local, found = local, state.answer.chunks * self.plan.chunk_tokens
        gain = found - local
        if gain <= 0:
            return self._miss(state, state.answer.reason if not found else "held by vLLM already")
        if gain < self.options.min_hit_tokens:
            return self._miss(state, "below min_hit_tokens")
        tiers = self._tiers(state.answer, local, found)
        if not self._worth_it(tiers, gain):
            if state.reason != "not worth loading":
                self._try_again(tiers)
            return self._miss(state, "not worth loading")
        state.reason = "not taken by vLLM"
        return gain, True

    def _miss(self, state: Tracked, reason: str) -> tuple[int, bool]:
        state.reason = reason
        return 0, False

    def _ask(self, state: Tracked) -> bool:
        """Send the lookup of a request's hashed chunks, up to the first one that failed to load. Idempotent."""
        if self.host is None or self.need is None:
            return False
        _, digests = state.chunks(self.plan, 0, (state.request.num_tokens - 1) // self.plan.chunk_tokens)
        if self._bad:
            digests = tuple(itertools.takewhile(lambda digest: digest not in self._bad, digests))
        if not digests:
            return False
        state.asked = time.monotonic()
        state.lookup = self.host.lookup_later(
            Query(
                state.request.request_id,
                self.scope,
                b"".join(digests),
                self.plan.chunk_tokens,
                self.need,
                self.options.load_timeout,
                0,
            )
        )
        return True

    def _worth_it(self, tiers: Mapping[str, int], gain: int) -> bool:
        """Loading is predicted to be faster than computing; True as long as nothing was measured."""
        if not self.options.worth_it or not self._prefill_speed:
            return True
        seconds = sum(tokens * self._load_speed.get(tier, 0.0) for tier, tokens in tiers.items())
        return seconds <= gain * self._prefill_speed

    def _try_again(self, tiers: Iterable[str]) -> None:
        """After enough refusals these tiers are loaded from again: what is never tried cannot be measured."""
        for tier in tiers:
            if tier in self._load_speed:
                self._load_speed[tier] *= 0.95

    def _drop(self, state: Tracked) -> None:
        """Let go of a request's lease and forget its answer."""
        if state.lookup is not None and self.host is not None:
            self.host.release(state.request.request_id)
        state.forget_answer()

    # Blocks.

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> bool:
        """vLLM has blocks for a request; ``tokens`` of them are to be loaded, 0 for none (another's, or done)."""
        state = self._requests.get(request.request_id)
        if not tokens:
            if state is not None and not state.loading and (state.lookup is not None or state.refused):
                self._log(state, 0)
                self._drop(state)
            return True
        assert state is not None
        assert state.answer is not None
        ids = blocks.get_block_ids()
        chunk, start, stop = self.plan.chunk_tokens, state.local, state.local + tokens
        before, digests = state.chunks(self.plan, start // chunk, stop // chunk)
        targets = self._targets(ids, start, stop)
        state.tiers = self._tiers(state.answer, start, stop)
        self._start(state, Load(request.request_id, self.scope, start, stop, before, digests, targets))
        state.hit, state.next_save, state.reason = tokens, stop // chunk, ""
        return True

    def fail(self, request: Request) -> None:
        """vLLM waits for a load that could not be planned: hand the workers one that only fails."""
        state = self._requests.setdefault(request.request_id, Tracked.of(request))
        self._start(state, Load(request.request_id, self.scope, 0, 0, NO_DIGEST, (), ()))

    def _targets(self, ids: tuple[list[int], ...], start: int, stop: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(ids[group.number][start // group.block_tokens : stop // group.block_tokens])
            for group in self.plan.groups
        )

    def _start(self, state: Tracked, load: Load) -> None:
        self._loads.append(load)
        self._fresh += itertools.chain(*load.blocks)
        state.loading = True

    def _tiers(self, answer: Answer, start: int, stop: int) -> dict[str, int]:
        """Tokens [start, stop) of a hit by tier."""
        assert self.host is not None
        tiers: Counter[str] = Counter()
        chunk = self.plan.chunk_tokens
        for i in range(start // chunk, stop // chunk):
            tiers[self.host.tiers[answer.places[i]]] += min(stop, (i + 1) * chunk) - max(start, i * chunk)
        return dict(tiers)

    def sources(self, request: Request, tokens: int) -> dict[str, int]:
        """A hit's tokens by tier."""
        state = self._requests.get(request.request_id)
        return dict(state.tiers) if state is not None and sum(state.tiers.values()) == tokens else {}

    # A step.

    def step(self, output: SchedulerOutput) -> Step:
        """The loads of a step, and the saves to settle before it."""
        self._steps.append((time.monotonic(), output.total_num_scheduled_tokens))
        for request_id in output.preempted_req_ids or ():
            state = self._requests.get(request_id)
            if state is not None:
                self._drop(state)
                state.restart()
        step = self.bare_step(self.saves.to_settle(output, self._fresh))
        # Data-parallel ranks step together: one that has nothing to compute must not hold up the others.
        step.idle = not output.total_num_scheduled_tokens and self.config.parallel_config.data_parallel_size == 1
        return step

    def bare_step(self, settle: list[int] | None = None) -> Step:
        """The loads that wait, once; without ``settle`` every save under way is settled."""
        step = Step(self.scope, self._loads, settle=self.saves.all_jobs() if settle is None else settle)
        self._loads, self._fresh = [], []
        return step

    def save(self, output: SchedulerOutput, step: Step) -> None:
        """Add what the step will have computed."""
        if self.host is not None and self.host.available:
            self.saves.add(output, self._requests, step)

    def measure(self) -> None:
        """The oldest step under way has ended. Seconds a token of prefill, from steps that computed enough of them.

        With several steps under way, one starts on the workers when the one before it has ended.
        """
        if not self._steps:
            return
        began, tokens = self._steps.popleft()
        now, began = time.monotonic(), max(began, self._step_ended)
        self._step_ended = now
        if tokens >= MEASURED_TOKENS:
            each = (now - began) / tokens
            self._prefill_speed = 0.8 * self._prefill_speed + 0.2 * each if self._prefill_speed else each

    # What comes back.

    def heard(self, outcome: Outcome) -> None:
        """Saves and loads that ended on the workers."""
        for save, state, kept in self.saves.heard(outcome):
            for digest, group in kept:
                if groups := self._bad.get(digest):
                    groups.discard(group)
                    if not groups:
                        del self._bad[digest]
            if save.scope == self.scope:
                self._events.stored(save, state, kept)
        for done in outcome.loaded:
            if done.reason:
                for digest, group in done.failed:
                    self._bad.setdefault(digest, set()).add(group)
                self._failed[done.request] = done.reason
            else:
                self._note_speed(done.tiers, done.seconds)

    def _note_speed(self, tiers: Mapping[str, int], seconds: float) -> None:
        """Seconds a token of loading, kept for the slowest tier that took part; a short load tells little of a long
        one."""
        tokens = sum(tiers.values())
        if tokens >= MEASURED_TOKENS:
            tier, each = list(tiers)[-1], seconds / tokens
            before = self._load_speed.get(tier, 0.0)
            self._load_speed[tier] = 0.8 * before + 0.2 * each if before else each

    def received(self, request_id: str) -> None:
        """A request's load is over on every rank."""
        state = self._requests.get(request_id)
        failed = self._failed.pop(request_id, "")
        if state is None or not state.loading:
            return
        state.loading = False
        if failed:
            state.restart()
            state.failures += 1
            state.skip_load = state.skip_load or state.failures >= MAX_FAILURES
            state.reason = f"load failed: {failed}"
        else:
            self.stats.add("hit_tokens", state.hit)
        self._log(state, 0 if failed else state.hit)
        self._drop(state)

    def finished(self, request: Request) -> None:
        """A request ended, however it did."""
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._drop(state)

    def events(self) -> list[Any]:
        """KV events since the last call, empty unless vLLM publishes them."""
        return self._events.take(self.host, self.scope)

    def _log(self, state: Tracked, tokens: int) -> None:
        """One line a request, a few a second at most."""
        now = time.monotonic()
        self._lines = max(0.0, self._lines - (now - self._lines_at) * LINES_A_SECOND)
        self._lines_at = now
        self.stats.add("lookups")
        if not tokens:
            self.stats.add(f"miss.{state.reason or 'not stored'}")
        if self._lines < LINES_A_SECOND:
            self._lines += 1
            tiers = ", ".join(f"{count} from {tier}" for tier, count in state.tiers.items()) if tokens else "nothing"
            logger.info(
                "lmkv: request %s: %s%s", state.request.request_id, tiers, f" ({state.reason})" if state.reason else ""
            )
