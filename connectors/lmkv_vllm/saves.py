"""Which chunks to save in a step, and which saves must be over before vLLM overwrites their blocks.

A save reads its blocks after the step that filled them, beside later steps. A running request keeps its blocks; once
they are freed, vLLM may hand them out again. So every block of a save under way is remembered, and a step that was
given such a block names the saves to settle first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lmkv.spec import Kind
from lmkv_vllm.geometry import Plan
from lmkv_vllm.messages import Outcome, Part, Save, Step, both
from lmkv_vllm.requests import Tracked

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

_NONE: set[int] = set()


class Saves:
    """The saves of one engine. ranks: how many workers must be done with each."""

    def __init__(self, plan: Plan, ranks: int, prompt_only: bool, count: Callable[[str], None]) -> None:
        self.plan, self.ranks, self.prompt_only, self._count = plan, ranks, prompt_only, count
        self._numbers = itertools.count()
        self._jobs: dict[int, tuple[Save, Tracked, int, tuple[Part, ...] | None]] = {}
        self._blocks: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def all_jobs(self) -> list[int]:
        """Every save under way."""
        return sorted(self._jobs)

    def to_settle(self, output: SchedulerOutput, fresh: Iterable[int]) -> list[int]:
        """Saves whose blocks this step may overwrite; fresh: blocks given to loads."""
        settle: set[int] = set()
        if self._blocks:
            for block in itertools.chain(fresh, self._handed_out(output)):
                settle |= self._blocks.get(block, _NONE)
        return sorted(settle)

    def _handed_out(self, output: SchedulerOutput) -> Iterator[int]:
        """Blocks allocated for this step; those found in vLLM's own prefix cache are only read."""
        for copy in output.kv_cache_block_copies or ():
            yield copy.dst_block_id
        for new in output.scheduled_new_reqs:
            yield from self._behind(new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, blocks in enumerate(cached.new_block_ids):
            if blocks:
                resumed = cached.req_ids[i] in cached.resumed_req_ids
                yield from self._behind(blocks, cached.num_computed_tokens[i] if resumed else 0)

    def _behind(self, blocks: Sequence[Sequence[int]], tokens: int) -> Iterator[int]:
        for group in self.plan.groups:
            yield from blocks[group.number][tokens // group.block_tokens :]
        for number in self._unstored(len(blocks)):
            yield from blocks[number]

    def _unstored(self, groups: int) -> set[int]:
        """vLLM's groups that are not stored: their blocks come from the same pool."""
        return set(range(groups)) - {group.number for group in self.plan.groups}

    def add(self, output: SchedulerOutput, requests: dict[str, Tracked], step: Step) -> None:
        """Put this step's saves into ``step``: the chunks whose last token it computes, and states handed over."""
        held = output.kv_connector_block_state
        if held is None:
            return
        chunk = self.plan.chunk_tokens
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None or not state.saves:
                continue
            final = state.request.num_computed_tokens + scheduled
            if final >= (state.next_save + 1) * chunk:
                self._add_chunks(request_id, state, final, held, step)
        for request_id, offers in held.boundary_state_offloads.items():
            state = requests.get(request_id)
            if state is not None and state.saves:
                self._add_states(state, offers, step)

    def _add_chunks(self, request_id: str, state: Tracked, final: int, held: KVConnectorBlockState, step: Step) -> None:
        """Chunks up to token ``final``, as far as vLLM has hashed them: what it has not is not known to stay."""
        chunk, first = self.plan.chunk_tokens, state.next_save
        if self.prompt_only:
            final = min(final, state.request.num_prompt_tokens)
        before, digests = state.chunks(self.plan, first, final // chunk)
        ids = held.get_block_ids(request_id) if digests else None
        if ids is None:
            return
        stop = first + len(digests)
        blocks = []
        for group in self.plan.groups:
            own = ids[group.number][first * chunk // group.block_tokens : stop * chunk // group.block_tokens]
            if group.kind is Kind.RECURRENT:
                own = [0] * len(digests)
            elif len(own) * group.block_tokens != len(digests) * chunk:
                self._count("save.blocks missing")
                return
            blocks.append(tuple(own))
        state.next_save = stop
        self._put(step, state, first, before, digests, tuple(blocks))

    def _add_states(self, state: Tracked, offers: list[tuple[int, int, int]], step: Step) -> None:
        """Recurrent states at boundaries (vLLM group, block, tokens), by the exact blocks vLLM names."""
        by_chunk: dict[int, dict[int, int]] = {}
        for number, block, tokens in offers:
            if block and tokens and tokens % self.plan.chunk_tokens == 0:
                by_chunk.setdefault(tokens // self.plan.chunk_tokens - 1, {})[number] = block
        for chunk, given in by_chunk.items():
            before, digests = state.chunks(self.plan, chunk, chunk + 1)
            if digests:
                blocks = tuple(
                    (given.get(group.number, 0),)
                    if group.kind is Kind.RECURRENT
                    else (0,) * (self.plan.chunk_tokens // group.block_tokens)
                    for group in self.plan.groups
                )
                self._put(step, state, chunk, before, digests, blocks)

    def _put(
        self, step: Step, state: Tracked, first: int, before: bytes, digests: tuple[bytes, ...],
        blocks: tuple[tuple[int, ...], ...],
    ) -> None:  # fmt: skip
        save = Save(next(self._numbers), step.scope, first, before, digests, blocks, state.ttl)
        self._jobs[save.job] = (save, state, self.ranks, None)
        for block in itertools.chain(*blocks):
            if block:
                self._blocks.setdefault(block, set()).add(save.job)
        step.saves.append(save)

    def heard(self, outcome: Outcome) -> Iterator[tuple[Save, Tracked, tuple[Part, ...]]]:
        """Saves that every rank is done with, whose they were, and what all ranks store of them now."""
        for job, count in outcome.saved.items():
            if job not in self._jobs:
                continue
            save, state, left, kept = self._jobs[job]
            if (more := outcome.kept.get(job)) is not None:
                kept = more if kept is None else both(kept, more)
            if left > count:
                self._jobs[job] = (save, state, left - count, kept)
                continue
            del self._jobs[job]
            for block in itertools.chain(*save.blocks):
                jobs = self._blocks.get(block)
                if jobs is not None:
                    jobs.discard(job)
                    if not jobs:
                        del self._blocks[block]
            yield save, state, kept or ()
