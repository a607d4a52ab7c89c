"""The sim's engine core: it adds requests, steps the real scheduler, and checks what nobody else would notice."""

from __future__ import annotations

import itertools
import pickle
import random
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import lmkv_vllm.connector
import lmkv_vllm.options
import lmkv_vllm.scheduler
import lmkv_vllm.worker
from sim.checks import Checks
from sim.host import FakeHost, Service
from sim.models import Model, Setup, setup, vllm_config
from sim.rank import Rank, no_forward
from sim.truth import Chain
from sim.work import Clock, Manual, Threaded

DEADLINE = 60.0


class Engine(Checks):
    """An engine of ``model`` with few blocks.

    service: the fake host service; None: the real one at ``options["socket"]``. threads: background work runs on its
    own threads; else when `work` is called. overlap: the next step is scheduled before the output of this one is known,
    by vLLM's AsyncScheduler or, with a pipeline, from other requests.
    """

    def __init__(
        self, model: Model, blocks: int = 40, service: Service | None = None, options: dict[str, Any] | None = None,
        threads: bool = False, overlap: bool = False, config: Any = None, **cache: Any,
    ) -> None:  # fmt: skip
        self.model, self.service, self.threads, self.clock = model, service, threads, Clock()
        self.overlap = overlap
        self.config = config or vllm_config(model, options, **cache)
        self.config.scheduler_config.async_scheduling = overlap and model.stages == 1
        self.setup: Setup = setup(model, blocks, self.config)
        self.weights = 1
        self.chains: dict[str, Chain] = {}
        self.requests: dict[str, Request] = {}
        self.parked: set[str] = set()
        self.reports = self.steps = self.loads = self.failures = 0
        self.expected_failures: dict[str, int] = {}
        self.handed_out: set[int] = set()
        self.computed: dict[str, int] = {}
        self.flying: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.aborts: list[str] = []
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, Any] = {}
        self.scopes: dict[bytes, int] = {}
        self.known: dict[bytes, tuple[str, list[int]]] = {}
        self.pools: list[Any] = []
        self._names = itertools.count()
        self._patches = ExitStack()
        self._open()

    def _open(self) -> None:
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(self.setup.hash_tokens, hash_fn)
        if self.service is not None:
            self._patches.enter_context(mock.patch.object(lmkv_vllm.scheduler, "time", self.clock))
        if not self.threads:  # nothing ends while a step waits for it
            self._patches.enter_context(mock.patch.object(lmkv_vllm.worker, "IDLE_SECONDS", 0.0))
        with ExitStack() as made:
            made.enter_context(mock.patch.object(lmkv_vllm.worker, "Workers", self._pool))
            if self.service is not None:
                made.enter_context(mock.patch.object(lmkv_vllm.options, "Host", self._host))
            model = self.model
            ranks = [(stage, rank) for stage in range(model.stages) for rank in range(model.ranks)]
            made.enter_context(mock.patch.object(lmkv_vllm.connector, "_rank", side_effect=ranks))
            self.ranks = [Rank(self.setup, number) for number in range(model.workers)]
            self.scheduler = (AsyncScheduler if self.config.scheduler_config.async_scheduling else Scheduler)(
                vllm_config=self.config,
                kv_cache_config=self.setup.scheduler_cache,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=self.setup.block_tokens,
                hash_block_size=self.setup.hash_tokens,
                log_stats=True,
            )
            self.connector: Any = self.scheduler.connector
            self.connector.set_xfer_handshake_metadata_pp_aware(
                {key: rank.connector.get_handshake_metadata() for key, rank in zip(ranks, self.ranks, strict=True)}
            )
        self.aggregator = KVOutputAggregator.from_connector(self.connector, len(self.ranks))
        self.pool = self.scheduler.kv_cache_manager.block_pool
        give = self.pool.get_new_blocks

        def get_new_blocks(count: int) -> Any:
            found = give(count)
            self.handed_out |= {block.block_id for block in found}
            return found

        self.pool.get_new_blocks = get_new_blocks
        self.plan = self.connector.side.plan

    def _pool(self, name: str, count: int, _begin: Any = None) -> Any:
        pool = (Threaded if self.threads else Manual)(name, count)
        self.pools.append(pool)
        return pool

    def _host(self, socket: str = "", **settings: Any) -> FakeHost:
        assert self.service is not None
        return FakeHost(self.service, socket, **settings)

    # Requests.

    def add(
        self, prompt: Sequence[int], max_tokens: int = 4, params: dict[str, Any] | None = None, salt: str | None = None,
        skip_reading: bool = False, name: str = "", **more: Any,
    ) -> str:  # fmt: skip
        """A request; returns its id."""
        name = name or f"r{next(self._names)}"
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params} if params else None
        )
        request = Request(
            request_id=name, prompt_token_ids=list(prompt), sampling_params=sampling, pooling_params=None,
            cache_salt=salt, block_hasher=self.hasher, **more,
        )  # fmt: skip
        request.skip_reading_prefix_cache = skip_reading
        self.requests[name], self.outputs[name] = request, []
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self, running: bool = False, connector: bool = True) -> bool:
        """`reset_prefix_cache`; False where vLLM cannot."""
        return self.scheduler.reset_prefix_cache(running, connector)

    def forget(self) -> None:
        """vLLM's own prefix cache is empty from now on; running requests keep their blocks."""
        self.pool.evict_blocks({block.block_id for block in self.pool.blocks if not block.is_null})

    def new_weights(self) -> None:
        """What follows a weight update: everything computed before is void. Nothing may be parked or hold blocks."""
        while self.flying:
            self._update()
        assert self.reset(running=True)
        self.weights += 1

    @property
    def busy(self) -> bool:
        """There is something to do, or a step whose output is still to come."""
        return bool(self.scheduler.has_requests() or self.flying)

    @property
    def live(self) -> list[str]:
        return [name for name, each in self.scheduler.requests.items() if not each.is_finished()]

    def who(self, request: Request) -> str:
        lora = request.lora_request
        return f"{request.cache_salt or ''}/{lora.lora_name if lora else ''}"

    # Background work.

    def work(self, dice: random.Random | None = None, share: float = 1.0) -> int:
        """Answer lookups and run queued jobs, each with probability ``share``. Returns how many."""
        dice = dice or random.Random(0)
        done = 0
        if self.service is not None and self.service.asked and dice.random() < share:
            done += self.service.answer(dice.randint(1, 3) if share < 1 else 1 << 30)
        for pool in self.pools:
            while isinstance(pool, Manual) and pool.jobs and dice.random() < share:
                pool.run(dice.randrange(min(2, len(pool.jobs))) if "load" in pool.name else 0)
                done += 1
        return done

    def rest(self) -> None:
        """An engine that had nothing to compute lets its threads work, as vLLM's core does."""
        pending = [each for pool in self.pools if isinstance(pool, Threaded) for each in tuple(pool.pending)]
        if pending:
            wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
        elif self.service is None:
            time.sleep(0.001)

    # Steps.

    def step(self, dice: random.Random | None = None, share: float = 1.0) -> SchedulerOutput:
        """One step; ``dice`` and ``share`` say how much background work is done in between, all by default."""
        self.steps += 1
        self.clock.now += 0.01
        scheduler = self.scheduler
        self._note_hashes()
        if self.flying and not scheduler.has_requests():
            return self._update()
        output = scheduler.schedule()
        for name, request in scheduler.requests.items():
            waits = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            if waits and name not in self.parked | scheduler.finished_recving_kv_req_ids:
                self.parked.add(name)
                self.loads += 1
        fresh, self.handed_out = self.handed_out, set()
        for name in output.num_scheduled_tokens:
            request = scheduler.requests[name]
            chain = self.chains.get(name)
            if chain is None or request.num_preemptions != getattr(chain, "life", 0):
                chain = self.chains[name] = Chain(self.weights, self.who(request))
                chain.life = request.num_preemptions  # type: ignore[attr-defined]
            chain.grow(list(request.all_token_ids))
        self.work(dice, share)
        outs = self._execute(output, fresh, dice, share)
        for each in outs:
            self.reports += len(each.finished_recving or ())
            self.failures += len(each.failed_recving or ()) + bool(each.invalid_block_ids)
        self.flying.append((output, self._results(output, outs)))
        if not (self.overlap and len(self.flying) < 2 and (output.num_scheduled_tokens or scheduler.has_requests())):
            self._update()
        self.work(dice, share)
        if not output.total_num_scheduled_tokens:
            self.rest()
        return output

    def _update(self) -> SchedulerOutput:
        """The scheduler hears of the oldest step; who was aborted while it ran goes first."""
        output, result = self.flying.pop(0)
        for name in (result.kv_connector_output or KVConnectorOutput()).finished_recving or ():
            assert name in self.parked, f"{name} was reported, but was not parked"
            self.parked.discard(name)
        while self.aborts:
            self.abort(self.aborts.pop())
        found = self.scheduler.update_from_output(output, result)
        for each in itertools.chain.from_iterable(outputs.outputs for outputs in found.values()):
            self.outputs[each.request_id] += each.new_token_ids
            if each.finish_reason is not None:
                self.finish_reasons[each.request_id] = each.finish_reason
        self._note_hashes()
        return output

    def _execute(
        self, output: SchedulerOutput, fresh: set[int], dice: random.Random | None, share: float
    ) -> list[KVConnectorOutput]:
        """The step on every rank, in the model runner's order."""
        outs = []
        for rank in self.ranks:
            rank.begin(output)
            self.work(dice, share)
            computed = self.computed = rank.update(output, self.chains)
            rank.poison(fresh)
            rank.zero(output.new_block_ids_to_zero)
            rank.copy(output, fresh)
            rank.carry_states(output, computed)
            rank.bind(output)
            self.work(dice, share)
            rank.forward(output, computed)
            outs.append(rank.finish(output))
        return outs

    def _results(self, output: SchedulerOutput, outs: list[KVConnectorOutput]) -> ModelRunnerOutput:
        if not output.total_num_scheduled_tokens:
            made = [no_forward(each) for each in outs]
        else:
            names = list(output.num_scheduled_tokens)
            tokens = [self._sampled(name, output) for name in names]
            order = {name: i for i, name in enumerate(names)}
            made = [ModelRunnerOutput(names, order, tokens, kv_connector_output=each) for each in outs]
        if len(made) == 1:
            return made[0]
        result = self.aggregator.aggregate(pickle.loads(pickle.dumps(made)))  # each comes from a process of its own
        assert result is not None
        return result

    def _sampled(self, name: str, output: SchedulerOutput) -> list[int]:
        chain = self.chains[name]
        if self.computed[name] + output.num_scheduled_tokens[name] < len(chain):
            return []
        token = chain.next_token()
        chain.extend([token])
        return [token]

    def _note_hashes(self) -> None:
        """Which tokens every chunk's digest stands for."""
        self.scopes.setdefault(self.connector.side.scope, self.weights)
        unit = self.plan.chunk_tokens // self.plan.hash_tokens
        for request in self.scheduler.requests.values():
            for i in range(unit - 1, len(request.block_hashes), unit):
                digest = bytes(request.block_hashes[i])
                if digest not in self.known:
                    tokens = list(request.all_token_ids[: (i + 1) * self.plan.hash_tokens])
                    self.known[digest] = (self.who(request), tokens)

    def run(self, limit: int = 2000, **how: Any) -> None:
        """Step until no request is left."""
        deadline = time.monotonic() + DEADLINE
        while self.busy:
            self.step(**how)
            limit -= 1
            late = not limit or time.monotonic() > deadline
            assert not late, f"the engine does not come to an end: {self.describe()}"

    def generate(self, prompt: Sequence[int], max_tokens: int = 4, **request: Any) -> list[int]:
        """One request on its own; returns what it generated."""
        name = self.add(prompt, max_tokens, **request)
        self.run()
        return self.outputs[name]

    def settle(self) -> None:
        """Steps until the scheduler has heard of every save."""
        for _ in range(1000):
            if not len(self.connector.side.saves) and not self.flying:
                return
            self.step()
        raise AssertionError(f"saves that never end: {self.connector.side.saves._jobs}")

    def describe(self) -> str:
        states = {name: str(each.status) for name, each in self.scheduler.requests.items()}
        return f"{states} parked {self.parked}"

    # End.

    def close(self) -> None:
        """Shut down as vLLM does: the scheduler, then the workers."""
        try:
            self.scheduler.shutdown()
            for rank in self.ranks:
                rank.connector.shutdown()
        finally:
            for pool in self.pools:
                pool.close(time.monotonic() + 5)
            self._patches.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
