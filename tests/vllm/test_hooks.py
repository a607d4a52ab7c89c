"""The connector's hooks one by one, on the sim: what each promises vLLM, and that none of them can stop the engine."""

from __future__ import annotations

import gc
import importlib
import itertools
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sim.engine import Engine
from sim.host import Faults, Service
from sim.models import BLOCK, MODELS, Model, full, setup, vllm_config
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy, maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import lmkv_vllm
from lmkv.errors import ConfigError, Unavailable
from lmkv.keys import DIGEST_BYTES
from lmkv.rows import PageRows
from lmkv_vllm import geometry
from lmkv_vllm.messages import Load, Step
from lmkv_vllm.options import Options

PROMPT = list(range(100, 161))
CHUNK = 2 * BLOCK
FULL = MODELS["full"]
KINDS = ["full", "window", "full+window", "full+mamba", "mla tp2"]


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def engine(service: Service) -> Iterator[Engine]:
    with Engine(FULL, blocks=70, service=service) as found:
        yield found


def warm(engine: Engine, prompt: list[int] = PROMPT, **request: Any) -> list[int]:
    """Have a prompt stored, and vLLM forget it; returns its tokens."""
    tokens = engine.generate(prompt, 4, **request)
    engine.settle()
    engine.forget()
    return tokens


def scheduler_side(engine: Engine) -> Any:
    return engine.connector.side


def worker_side(engine: Engine) -> Any:
    return engine.ranks[0].connector.side


def counted(*sides: Any) -> Counter[str]:
    """Hooks that failed."""
    found: Counter[str] = Counter()
    for side in sides:
        found.update({k: n for k, n in side.stats.snapshot().items() if "failed" in k})
    return found


# Nothing stops the engine.

S, W = scheduler_side, worker_side
BROKEN: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "arrive": (S, "arrive"),
    "matched": (S, "matched"),
    "allocated": (S, "allocated"),
    "targets": (S, "_targets"),
    "sources": (S, "sources"),
    "step": (S, "step"),
    "measure": (S, "_measure"),
    "settle list": (lambda e: S(e).saves, "to_settle"),
    "save": (S, "save"),
    "save states": (lambda e: S(e).saves, "_put"),
    "heard": (S, "heard"),
    "speed": (S, "_note_speed"),
    "received": (S, "received"),
    "log": (S, "_log"),
    "finished": (S, "finished"),
    "events": (S, "events"),
    "lookup": (lambda e: S(e).host, "lookup_later"),
    "release": (lambda e: S(e).host, "release"),
    "scheduler stats": (lambda e: S(e).stats, "snapshot"),
    "settle": (W, "settle"),
    "stream event": (W, "_event"),
    "rows": (W, "_rows"),
    "fetch": (W, "_fetch"),
    "host fetch": (lambda e: W(e).host, "fetch"),
    "scatter": (lambda e: W(e).pages, "scatter"),
    "bad blocks": (W, "bad_blocks"),
    "take": (W, "take"),
    "outcome": (W, "outcome"),
    "store": (W, "_store"),
    "reserve": (lambda e: W(e).host, "reserve"),
    "gather": (lambda e: W(e).pages, "gather"),
    "commit": (lambda e: W(e).host, "commit"),
    "abort": (lambda e: W(e).host, "abort"),
    "load threads": (lambda e: W(e)._loaders, "submit"),
    "save threads": (lambda e: W(e)._savers, "submit"),
    "worker stats": (lambda e: W(e).stats, "snapshot"),
}


@pytest.mark.parametrize("name", ["full", "full+window"])
@pytest.mark.parametrize("broken", BROKEN)
def test_an_exception_below_any_hook_is_a_miss(broken: str, name: str, service: Service) -> None:
    with Engine(MODELS[name], blocks=100, service=service) as engine:
        first = warm(engine)
        find, attribute = BROKEN[broken]
        service.random.seed(1)
        if broken in {"bad blocks", "take"}:
            service.faults.fetch_reason = 0.5
        with mock.patch.object(find(engine), attribute, side_effect=RuntimeError("injected")) as injected:
            for round_ in range(3):
                same = engine.add(PROMPT, 4)
                engine.add([*PROMPT[:40], 7, 8, 9], 6)
                aborted = engine.add([*PROMPT[:24], round_, 5], 6)
                engine.step()
                engine.abort(aborted)
                engine.run()
                assert engine.outputs[same] == first
                engine.forget()
        if broken not in {"abort", "bad blocks"}:
            assert injected.called
        service.faults = Faults()
        engine.check_outputs()
        if broken != "heard":  # what was not heard is never heard again
            engine.settle()
        assert engine.generate(PROMPT, 4) == first
        assert not engine.parked
        assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
        engine.check_stored(engine.stored())


@pytest.mark.parametrize(
    ("find", "attribute", "event"),
    [
        (S, "arrive", "hook.failed.on_new_request"),
        (S, "matched", "hook.failed.get_num_new_matched_tokens"),
        (S, "finished", "hook.failed.request_finished_all_groups"),
        (W, "settle", "hook.failed.handle_preemptions"),
        (W, "outcome", "hook.failed.build_connector_worker_meta"),
        (W, "_fetch", "load.failed.RuntimeError"),
        (W, "_store", "save.failed.RuntimeError"),
    ],
)
def test_what_fails_is_counted(find: Any, attribute: str, event: str, engine: Engine) -> None:
    warm(engine)
    with mock.patch.object(find(engine), attribute, side_effect=RuntimeError("injected")):
        engine.generate([*PROMPT, 1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert counted(S(engine), W(engine))[event] >= 1


def test_a_failing_hook_is_logged_once_a_minute(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.object(S(engine), "matched", side_effect=RuntimeError("injected")):
        for i in range(5):
            engine.generate([i, *PROMPT], 2)
    assert sum("get_num_new_matched_tokens failed" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("name", MODELS)
def test_a_service_that_fails_in_everything_and_then_recovers(name: str, service: Service) -> None:
    with Engine(MODELS[name], blocks=100, service=service) as engine:
        first = warm(engine)
        service.faults = Faults(**dict.fromkeys(("lookup_error", "fetch_error", "reserve_error", "commit_error"), 1.0))
        assert engine.generate(PROMPT, 4) == first
        engine.forget()
        service.faults = Faults(fetch_error=1.0)
        assert engine.generate(PROMPT, 4) == first
        service.faults = Faults()
        engine.settle()
        engine.forget()
        loads = engine.loads
        assert engine.generate(PROMPT, 4) == first
        assert engine.loads == loads + 1, "it does not hit again"
        engine.settle()
        engine.check_nothing_left()


def test_no_service_at_all_is_a_miss(service: Service) -> None:
    with mock.patch("sim.host.FakeHost.register", side_effect=Unavailable("nobody there")):
        engine = Engine(FULL, blocks=70, service=service)
    with engine:
        engine.generate(PROMPT, 4)
        engine.settle()
        engine.check_outputs()
        engine.check_nothing_left()


# Lookup.


def match(engine: Engine, name: str, local: int = 0) -> Any:
    return engine.connector.get_num_new_matched_tokens(engine.requests[name], local)


def test_a_lookup_changes_nothing_however_often_it_is_asked(engine: Engine, service: Service) -> None:
    warm(engine)
    asked = service.lookups
    name = engine.add(PROMPT, 4)
    answers = {match(engine, name) for _ in range(20)}
    assert answers == {(56, True)}
    assert service.lookups == asked + 1
    assert len(service.leases) == 1
    assert match(engine, name, 24) == (32, True)
    engine.abort(name)
    engine.run()
    assert not service.leases


def test_a_failed_allocation_keeps_one_lease(engine: Engine, service: Service) -> None:
    warm(engine)
    engine.add(PROMPT, 4)
    with mock.patch.object(engine.scheduler.kv_cache_manager, "allocate_slots", return_value=None):
        for _ in range(5):
            engine.step()
    assert len(service.leases) == 1
    engine.run()
    assert engine.loads == 1
    engine.settle()
    engine.check_nothing_left()


def test_a_lost_hit_gives_its_lease_back(engine: Engine, service: Service) -> None:
    warm(engine)
    name = engine.add(PROMPT, 4)
    assert match(engine, name) == (56, True)
    engine.connector.update_state_after_alloc(
        engine.requests[name], engine.scheduler.kv_cache_manager.empty_kv_cache_blocks, 0
    )
    assert not service.leases
    assert match(engine, name) == (56, True), "it may be asked again after a preemption"
    engine.run()
    engine.settle()
    engine.check_nothing_left()


def test_an_answer_that_is_late_is_a_miss_and_one_that_is_later_leaks_nothing(service: Service) -> None:
    service.faults.late = True
    with Engine(FULL, blocks=70, service=service) as engine:
        warm(engine)
        name = engine.add(PROMPT, 4)
        assert match(engine, name) == (None, False)
        engine.clock.now += 0.049
        assert match(engine, name) == (None, False)
        engine.clock.now += 0.002
        assert match(engine, name) == (0, False)
        for _ in range(3):
            engine.step(share=0.0)
        assert engine.requests[name].num_computed_tokens
        engine.run()
        assert not service.leases
        assert S(engine).stats.snapshot()["miss.lookup timeout"] == 1
        engine.settle()
        engine.check_nothing_left()


def test_the_last_token_is_never_offered(engine: Engine) -> None:
    prompt = PROMPT[: 4 * CHUNK]
    warm(engine, prompt)
    for extra, found in ((0, 3), (1, 4)):
        name = engine.add([*prompt, *range(extra)], 2)
        assert match(engine, name) == (found * CHUNK, True)
        engine.run()
        engine.forget()


def test_requests_that_must_not_read_the_cache_do_not_ask(engine: Engine, service: Service) -> None:
    warm(engine)
    asked = service.lookups
    engine.generate(PROMPT, 4, skip_reading=True)
    assert service.lookups == asked
    assert engine.loads == 0
    engine.settle()
    engine.check_nothing_left()


def test_skip_load_and_skip_save(engine: Engine, service: Service) -> None:
    engine.generate(PROMPT, 4, params={"lmkv.skip_save": True})
    engine.settle()
    assert not service.stored
    warm(engine)
    asked = service.lookups
    engine.generate(PROMPT, 4, params={"lmkv.skip_load": True})
    assert (service.lookups, engine.loads) == (asked, 0)


@pytest.mark.parametrize(
    ("ttl", "counts"), [(600, True), (0.5, True), (0, False), (-1, False), ("1h", False), (True, False)]
)
def test_ttl_is_passed_on(ttl: Any, counts: bool, engine: Engine, service: Service) -> None:
    before = time.time()
    engine.generate(PROMPT, 4, params={"lmkv.ttl": ttl})
    engine.settle()
    expires = {part.expires for part in service.stored.values()}
    assert service.stored
    assert all(before + ttl <= each <= time.time() + ttl + 2 for each in expires) if counts else expires == {0}


@pytest.mark.parametrize("wrong", [{"lmkv.skip_save": "yes"}, {"lmkv.skip_load": 1}, {"lmkv.other": []}])
def test_wishes_that_make_no_sense_are_ignored(wrong: dict[str, Any], engine: Engine) -> None:
    warm(engine, params=wrong)
    engine.generate(PROMPT, 4, params=wrong)
    assert engine.loads == 1


def test_hits_too_small_are_left(service: Service) -> None:
    with Engine(FULL, blocks=70, service=service, options={"min_hit_tokens": 57}) as engine:
        warm(engine)
        engine.generate(PROMPT, 4)
        assert engine.loads == 0
        assert S(engine).stats.snapshot()["miss.below min_hit_tokens"] == 1


def test_a_hit_slower_than_computing_is_left(service: Service) -> None:
    with Engine(FULL, blocks=70, service=service, options={"worth_it": True}) as engine:
        warm(engine)
        S(engine)._prefill_speed, S(engine)._load_speed = 0.001, {"cpu": 0.002}
        engine.generate(PROMPT, 4)
        assert engine.loads == 0
        S(engine)._load_speed = {"cpu": 0.0005}
        engine.forget()
        engine.generate(PROMPT, 4)
        assert engine.loads == 1


def test_prompts_only(service: Service) -> None:
    with Engine(FULL, blocks=70, service=service, options={"offload_prompt_only": True}) as engine:
        engine.generate(PROMPT[:20], 30)
        engine.settle()
        assert {key.depth for key in service.stored} == {0, 1}


def test_a_chunk_that_failed_is_not_offered_until_it_is_stored_again(engine: Engine, service: Service) -> None:
    first = warm(engine)
    service.faults.fetch_reason = 1.0
    assert engine.generate(PROMPT, 4, params={"lmkv.skip_save": True}) == first
    engine.forget()
    service.faults = Faults()
    name = engine.add(PROMPT, 4)
    assert match(engine, name) == (0, False), "offered though it has failed"
    engine.run()
    engine.settle()
    engine.forget()
    name = engine.add(PROMPT, 4)
    assert match(engine, name) == (56, True), "not offered though it was stored again"
    engine.run()


@pytest.mark.parametrize("name", ["full", "full tp2", "mla tp2", "full+window", "full+mamba"])
def test_a_hit_needs_every_part(name: str, service: Service) -> None:
    with Engine(MODELS[name], blocks=100, service=service) as engine:
        warm(engine)
        found, _ = match(engine, engine.add(PROMPT, 2))
        engine.run()
        engine.forget()
        parts = {(key.group, key.shard) for key in service.stored}
        assert found > 0
        for group, shard in parts:
            stored = dict(service.stored)
            for key in stored:
                if (key.group, key.shard) == (group, shard):
                    del service.stored[key]
            request = engine.add(PROMPT, 2, params={"lmkv.skip_save": True})
            assert match(engine, request) == (0, False), f"a hit without group {group} shard {shard}"
            engine.run()
            engine.forget()
            service.stored.update(stored)


def test_replicas_are_written_once(service: Service) -> None:
    with Engine(MODELS["mla tp2"], blocks=70, service=service) as engine:
        warm(engine)
        assert {key.shard for key in service.stored} == {0}
        assert not any(rank.connector.side.stats.snapshot().get("save.chunks") for rank in engine.ranks[1:])
        engine.generate(PROMPT, 4)
        assert (engine.loads, engine.reports) == (1, 2)


def test_hit_sources_are_exact(engine: Engine, service: Service) -> None:
    warm(engine)
    for key, part in service.stored.items():
        part.tier = int(key.depth >= 5)
    seen: list[dict[CacheHitSource, int]] = []
    ask = engine.connector.get_external_cache_hit_sources

    def sources(request: Any, tokens: int) -> Any:
        seen.append(ask(request, tokens))
        assert sum(seen[-1].values()) == tokens
        return seen[-1]

    with mock.patch.object(engine.connector, "get_external_cache_hit_sources", sources):
        engine.generate(PROMPT, 4)
    assert seen == [{CacheHitSource.HOST: 40, CacheHitSource.DISK: 16}]


# Saving.


def test_only_final_tokens_are_saved(engine: Engine, service: Service) -> None:
    name = engine.add(PROMPT[:13], 12)
    while engine.scheduler.has_requests():
        output = engine.step()
        request = engine.requests[name]
        saved = sum(len(s.digests) for s in output.kv_connector_metadata.saves)
        assert saved * CHUNK <= request.num_computed_tokens
        done = max((key.depth + 1 for key in service.stored), default=0)
        assert done * CHUNK <= min(request.num_computed_tokens, request.num_tokens)
    engine.settle()
    assert {key.depth for key in service.stored} == {0, 1, 2}, "the last sampled token has no KV"


def test_tokens_that_are_not_hashed_yet_are_not_saved(engine: Engine) -> None:
    """As with drafts: scheduled, but nobody knows whether they will stay."""
    name = engine.add(PROMPT[:13], 12)
    engine.step()
    held = SimpleNamespace(get_block_ids=lambda _: ([1, 2, 3, 4, 5, 6, 7],), boundary_state_offloads={})
    output = SimpleNamespace(num_scheduled_tokens={name: 15}, kv_connector_block_state=held)
    step = Step(S(engine).scope)
    S(engine).saves.add(output, S(engine)._requests, step)
    assert all((save.first + len(save.digests)) * CHUNK <= engine.requests[name].num_tokens for save in step.saves)


def test_a_queued_save_is_given_up_when_its_blocks_are_handed_out(service: Service) -> None:
    with Engine(FULL, blocks=20, service=service) as engine:
        engine.add(PROMPT, 1)
        while engine.scheduler.has_requests():
            engine.step(share=0.0)
        assert len(W(engine)._savers.jobs) == 2
        name = engine.add([*range(61)], 1)
        while engine.scheduler.has_requests():
            engine.step(share=0.0)
        assert W(engine).stats.snapshot()["saves.given_up"] == 2
        engine.settle()
        tokens = [tokens for _, tokens in (engine.known[key.digest] for key in service.stored)]
        assert all(each[0] == 0 for each in tokens), "a save that was given up was stored"
        assert engine.outputs[name]
        assert engine.check_stored(engine.stored()) == 7
        engine.check_nothing_left()


def test_blocks_that_vllm_copies_over_are_handed_out_too(engine: Engine) -> None:
    engine.add(PROMPT, 1)
    metadata = engine.step(share=0.0).kv_connector_metadata
    (save,) = metadata.saves
    nothing = SimpleNamespace(new_block_ids=[], req_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    for target, settled in ((save.blocks[0][3], [save.job]), (60, [])):
        copies = [KVCacheBlockCopy(src_block_id=61, dst_block_id=target)]
        output = SimpleNamespace(kv_cache_block_copies=copies, scheduled_new_reqs=[], scheduled_cached_reqs=nothing)
        assert S(engine).saves.to_settle(output, ()) == settled


def test_a_copy_under_way_is_waited_for(service: Service) -> None:
    order: list[str] = []
    started, go = threading.Event(), threading.Event()
    fill, finished = PageRows.fill, threading.Event()

    def slow_fill(*args: Any, **kwargs: Any) -> Any:
        started.set()
        assert go.wait(60)
        masks = fill(*args, **kwargs)
        order.append("copied")
        return masks

    with Engine(FULL, blocks=20, service=service, threads=True) as engine:
        with mock.patch.object(PageRows, "fill", slow_fill):
            engine.add(PROMPT, 1)
            engine.step()
            assert started.wait(60)
            (job,) = W(engine)._jobs

            def settle() -> None:
                W(engine).settle(Step(b"", settle=[job]))
                order.append("settled")
                finished.set()

            threading.Thread(target=settle, daemon=True).start()
            go.set()
            assert finished.wait(60)
        assert order == ["copied", "settled"]
        engine.run()
        engine.settle()
        engine.check_stored(engine.stored())
        engine.check_nothing_left()


def test_settling_never_waits_for_the_service(service: Service) -> None:
    with Engine(FULL, blocks=20, service=service, threads=True) as engine:
        for where in ("reserve", "commit"):
            service.hold(where)
            engine.add([*PROMPT, len(where)], 1)
            engine.step()
            assert service.entered[where].wait(60)
            W(engine).settle(Step(b"", settle=list(W(engine)._jobs)))
            service.open(where)
            engine.run()
            engine.settle()
            engine.forget()
        engine.check_stored(engine.stored())


# Reset.


def test_a_reset_voids_saves_in_flight(engine: Engine, service: Service) -> None:
    engine.add(PROMPT, 1)
    while engine.scheduler.has_requests():
        engine.step(share=0.0)
    assert W(engine)._savers.jobs
    assert engine.reset()
    engine.weights += 1
    engine.step(share=0.0)
    engine.settle()
    assert not service.stored, "a save from before the reset was stored"
    engine.generate(PROMPT, 1)
    assert engine.loads == 0


def test_a_save_that_ends_between_reset_and_the_next_step_is_not_found(engine: Engine) -> None:
    engine.add(PROMPT, 1)
    while engine.scheduler.has_requests():
        engine.step(share=0.0)
    assert engine.reset()
    engine.weights += 1
    engine.work()
    engine.settle()
    engine.generate(PROMPT, 1)
    assert engine.loads == 0


@pytest.mark.parametrize("name", KINDS)
def test_what_runs_during_a_reset_is_not_stored_under_new_weights(name: str, service: Service) -> None:
    with Engine(MODELS[name], blocks=100, service=service) as engine:
        running = engine.add(PROMPT, 20)
        for _ in range(4):
            engine.step()
        assert engine.requests[running].num_computed_tokens > 40
        engine.reset()
        engine.weights += 1
        old, new = engine.chains[running], S(engine).scope
        engine.run()
        engine.settle()
        assert engine.chains[running] is old
        assert not [key for key in service.stored if key.scope == new]


def test_a_load_that_runs_during_a_reset_fails(engine: Engine, service: Service) -> None:
    warm(engine)
    stored = dict(service.stored)
    name = engine.add(PROMPT, 4)
    engine.step(share=0.0)
    assert engine.parked == {name}
    engine.reset()
    engine.weights += 1
    engine.step(share=0.0)
    service.stored.update(stored)
    engine.run()
    engine.settle()
    assert W(engine).stats.snapshot()["load.failed.reset"] == 1
    assert engine.check_stored(engine.stored())
    engine.check_nothing_left()


def test_a_reset_clears_what_was_stored_and_leaves_no_lease(engine: Engine, service: Service) -> None:
    warm(engine)
    old = S(engine).scope
    name = engine.add(PROMPT, 4)
    assert match(engine, name) == (56, True)
    assert engine.reset()
    assert service.cleared == [old]
    assert not service.stored
    assert match(engine, name) == (0, False)
    engine.run()
    engine.settle()
    engine.check_nothing_left()


# Isolation.

QUESTIONS: dict[str, dict[str, Any]] = {
    "nobody": {},
    "salt a": {"salt": "a"},
    "salt b": {"salt": "b"},
    "adapter": {"lora_request": LoRARequest("one", 1, "/a")},
    "adapter of another name": {"lora_request": LoRARequest("two", 1, "/a")},
    "adapter at another path": {"lora_request": LoRARequest("one", 1, "/b")},
    "picture": {"mm_features": [MultiModalFeatureSpec(None, "image", "p", PlaceholderRange(2, 9))]},
    "another picture": {"mm_features": [MultiModalFeatureSpec(None, "image", "q", PlaceholderRange(2, 9))]},
    "picture elsewhere": {"mm_features": [MultiModalFeatureSpec(None, "image", "p", PlaceholderRange(3, 9))]},
}


def test_salts_adapters_and_pictures_never_share_a_chunk(service: Service) -> None:
    service.faults.late = True
    with Engine(FULL, blocks=70, service=service) as engine:
        asked: dict[str, set[bytes]] = {}
        for who, more in QUESTIONS.items():
            engine.add(PROMPT, 2, **more)
            digests = service.asked[-1][1].digests
            chunks = [digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]
            assert len(chunks) == 7
            asked[who] = set(chunks[1:])  # the first chunk of a picture that begins in it may lie before it
            for name in engine.live:
                engine.abort(name)
        for (one, ours), (other, theirs) in itertools.combinations(asked.items(), 2):
            assert not ours & theirs, f"{one} and {other} share chunks"


def test_prompt_embeddings_never_share_a_chunk_with_tokens_or_each_other(service: Service) -> None:
    service.faults.late = True
    with Engine(FULL, blocks=70, service=service) as engine:
        found = []
        for i in range(2):
            embeds = torch.full((61, 8), float(i))
            engine.add([0] * 61, 2, prompt_embeds=embeds, prompt_is_token_ids=[False] * 61)
            found.append(service.asked[-1][1].digests[:DIGEST_BYTES])
        engine.add([0] * 61, 2)
        found.append(service.asked[-1][1].digests[:DIGEST_BYTES])
        assert len(set(found)) == 3
        for name in engine.live:
            engine.abort(name)


@pytest.mark.parametrize("more", [{"salt": "a"}, {"lora_request": LoRARequest("one", 1, "/a")}])
def test_a_hit_is_for_those_who_stored_it(more: dict[str, Any], engine: Engine) -> None:
    first = warm(engine, **more)
    engine.generate(PROMPT, 4)
    assert engine.loads == 0
    engine.settle()
    engine.forget()
    assert engine.generate(PROMPT, 4, **more) == first
    assert engine.loads == 1
    engine.settle()
    engine.check_nothing_left()


def scope_of(model: Model = FULL, options: dict[str, Any] | None = None, isa: str = "", **cache: Any) -> bytes:
    text = geometry.backend_text

    def backend_text(*args: Any) -> str:
        return text(*args) + isa

    # The hashes themselves do not matter here, and some need a package of their own.
    known = mock.patch("sim.engine.get_hash_fn_by_name", return_value=get_hash_fn_by_name("sha256_cbor"))
    with known, mock.patch.object(geometry, "backend_text", backend_text):
        engine = Engine(model, blocks=40, service=Service(), options=options, **cache)
    with engine:
        scope: bytes = S(engine).scope
        return scope


def test_engines_that_differ_never_share_a_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    plain = Model("plain", (full(),) * 2)
    scopes = {
        "plain": scope_of(plain),
        "other weights": scope_of(plain, {"weights_id": "other"}),
        "kv dtype": scope_of(plain, cache_dtype="fp8"),
        "tensor dtype": scope_of(Model("f16", (full(dtype=torch.float16),) * 2)),
        "layout": scope_of(plain, kv_cache_layout="LBNHC"),
        "instruction set": scope_of(plain, isa=" amx"),
        "chunk": scope_of(plain, {"chunk_tokens": 4 * BLOCK}),
        "hash": scope_of(plain, prefix_caching_hash_algo="sha256"),
        "seeded hash": scope_of(plain, prefix_caching_hash_algo="xxhash_cbor"),
        "ranks": scope_of(Model("tp2", (full(),) * 2, ranks=2)),
        "heads": scope_of(Model("heads", (full(num_kv_heads=1),) * 2)),
        "layers": scope_of(Model("layers", (full(),) * 3)),
        "block": scope_of(Model("block", (full(block_size=8),) * 2), block_size=8),
        "groups": scope_of(MODELS["full+window"]),
    }
    monkeypatch.setenv("PYTHONHASHSEED", "4")
    scopes["another seed"] = scope_of(plain, prefix_caching_hash_algo="xxhash_cbor")
    assert len(set(scopes.values())) == len(scopes), {k: v.hex()[:8] for k, v in scopes.items()}
    monkeypatch.delenv("PYTHONHASHSEED")
    assert scope_of(plain) == scopes["plain"], "the same engine again finds what it stored"


# Configuration.


def build(config: Any, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> Any:
    cache = setup(FULL, 40, config).scheduler_cache
    return KVConnectorFactory.create_connector(config=config, role=role, kv_cache_config=cache)


def test_a_failed_load_is_computed_by_default(caplog: pytest.LogCaptureFixture) -> None:
    config = vllm_config(FULL)
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    build(config)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert sum("recompute" in record.message for record in caplog.records) == 1


def multi(policy: str) -> Any:
    config = vllm_config(FULL)
    child = {
        "kv_connector": "LMKVConnector", "kv_connector_module_path": "lmkv_vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"weights_id": "sim"},
    }  # fmt: skip
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": [child]},
    )  # fmt: skip
    return config


def test_under_a_multi_connector_its_policy_counts() -> None:
    lmkv_vllm.register()
    with pytest.raises(ConfigError, match=r"kv_load_failure_policy.*recompute"):
        build(multi("fail"))
    found = build(multi("recompute"))
    (child,) = found._connectors
    assert isinstance(child, lmkv_vllm.LMKVConnector)
    assert not found.requires_kv_delivery


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"chunk_token": 256}, "chunk_token: unknown key; did you mean 'chunk_tokens'"),
        ({"load": "sync"}, "load: unknown key"),
        ({"sokcet": "/x"}, "did you mean 'socket'"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"lookup_timeout": "soon"}, "lookup_timeout"),
        ({"min_hit_tokens": -1}, "min_hit_tokens"),
    ],
)
def test_wrong_settings_stop_the_start(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(vllm_config(FULL, extra))


def test_settings_take_units() -> None:
    options = Options.of({"lookup_timeout": "20ms", "load_timeout": "2m", "chunk_tokens": "512"})
    assert (options.lookup_timeout, options.load_timeout, options.chunk_tokens) == (0.02, 120.0, 512)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("seed", [None, "random"])
def test_hashes_that_differ_from_process_to_process_are_refused(
    algorithm: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    with pytest.raises(ConfigError, match=r"sha256_cbor.*PYTHONHASHSEED"):
        build(vllm_config(FULL, prefix_caching_hash_algo=algorithm))
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    build(vllm_config(FULL, prefix_caching_hash_algo=algorithm))


def test_weights_without_a_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="weights_id"):
        build(vllm_config(FULL, {"weights_id": ""}))


def test_another_vllm_is_refused() -> None:
    with mock.patch("vllm.__version__", "0.33.0"), pytest.raises(ConfigError, match=r"0\.33\.0"):
        build(vllm_config(FULL))


def test_the_class_is_found_by_name_and_by_module() -> None:
    lmkv_vllm.register()
    lmkv_vllm.register()
    config = vllm_config(FULL)
    config.kv_transfer_config.kv_connector_module_path = None
    assert isinstance(build(config), lmkv_vllm.LMKVConnector)
    assert issubclass(lmkv_vllm.LMKVConnector, SupportsHMA)
    assert not lmkv_vllm.LMKVConnector.requires_piecewise_for_cudagraph({})
    with pytest.raises(AttributeError, match="nothing"):
        _ = importlib.import_module("lmkv_vllm").nothing


def test_importing_the_package_does_not_import_vllm() -> None:
    code = "import sys, lmkv_vllm; assert 'vllm' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Stats and events.


def test_stats_say_what_happened(engine: Engine) -> None:
    warm(engine)
    engine.generate(PROMPT, 4)
    engine.settle()
    cls = lmkv_vllm.LMKVConnector
    total = cls.build_kv_connector_stats()
    assert total is not None
    assert total.is_empty()
    for data in ({"counts": {"a": 1, "b": 2}, "load_seconds": [0.5]}, {"counts": {"a": 3}, "load_seconds": [1.5]}):
        total = total.aggregate(cls.build_kv_connector_stats(data))
    assert total.reduce() == {"a": 4, "b": 2, "loads": 2, "mean load seconds": 1.0}
    total.reset()
    assert total.is_empty()
    assert engine.connector.get_kv_connector_stats() is None, "reported before"
    assert S(engine).stats.snapshot()["hit_tokens"] == 56


def test_events_tell_what_is_stored_removed_and_cleared(service: Service) -> None:
    config = vllm_config(FULL)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with Engine(FULL, blocks=70, service=service, config=config) as engine:
        side, seen = S(engine), []
        take = side.events

        def events() -> Any:
            found = take()
            seen.extend(found)
            return found

        with mock.patch.object(side, "events", events):
            name = engine.add(PROMPT, 2)
            engine.run()
            engine.settle()
            hashes = [maybe_convert_block_hash(each) for each in engine.requests[name].block_hashes]
            stored = [each for each in seen if isinstance(each, BlockStored)]
            assert [h for each in stored for h in each.block_hashes] == [hashes[i] for i in range(14)]
            assert [each.parent_block_hash for each in stored] == [None, *(hashes[i] for i in range(1, 12, 2))]
            assert {(each.medium, each.block_size) for each in stored} == {(MEDIUM_CPU, BLOCK)}
            assert [t for each in stored for t in each.token_ids] == PROMPT[:56]
            gone = next(key for key in service.stored if key.depth == 6)
            change = [("removed", "cpu", gone.digest, gone.group)]
            with mock.patch.object(side.host, "events", return_value=change):
                engine.clock.now += 10
                for _ in range(200):
                    events()
                    if any(isinstance(each, BlockRemoved) for each in seen):
                        break
                    side._events._ask_at = 0.0
                    if side._events._asked is not None:
                        side._events._asked.exception(10)
            removed = [each for each in seen if isinstance(each, BlockRemoved)]
            assert removed[0].block_hashes == stored[-1].block_hashes
            assert engine.reset()
            engine.step()
            assert isinstance(seen[-1], AllBlocksCleared)


# The worker alone.


def test_every_load_is_reported_once(engine: Engine) -> None:
    side, scope = W(engine), S(engine).scope
    loads = [
        Load(f"r{i}", scope, 0, CHUNK, bytes(32), digests, ((1, 2),)) for i, digests in enumerate([(), (b"x" * 32,)])
    ]
    side.load(Step(scope, loads))
    engine.work()
    assert sorted(done.request for done in side.ended()) == ["r0", "r1"]
    assert side.ended() == []
    assert {done.reason for done in side.outcome().loaded} == {"no plan", "not stored"}
    assert side.outcome() is None
    for name in ("r0", "r1"):
        side.take(name)


# Cost. Printed, never asserted: other work runs on the machine.


def spread(seconds: list[float]) -> str:
    p50, p99, most = (1e6 * np.percentile(seconds, q) for q in (50, 99, 100))
    return f"p50 {p50:.0f} us, p99 {p99:.0f} us, longest {most:.0f} us"


def test_what_the_hooks_cost(capsys: pytest.CaptureFixture[str]) -> None:
    service = Service()
    service.faults.late = True
    with Engine(FULL, blocks=400, service=service, options={"lookup_timeout": 3600}) as engine:
        connector = engine.connector
        seconds: dict[str, list[float]] = {}

        def timed(name: str) -> None:
            call = getattr(connector, name)

            def measure(*args: Any) -> Any:
                began = time.perf_counter()
                result = call(*args)
                seconds.setdefault(name, []).append(time.perf_counter() - began)
                return result

            setattr(connector, name, measure)

        for name in ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
                     "update_connector_output", "request_finished_all_groups", "get_kv_connector_stats"):  # fmt: skip
            timed(name)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(400, size=160).tolist() for _ in range(1000)]
        freeze_gc_heap()  # as vLLM's engine core does
        for prompt in prompts:
            engine.add(prompt, 2)
        engine.step(share=0.0)
        polls = seconds["get_num_new_matched_tokens"]
        one_pass = sum(polls[:200])
        service.answer()
        for _ in range(60):
            engine.step(share=1.0)
        gc.unfreeze()
        with capsys.disabled():
            print(f"\nhook cost with 1,000 pending requests of 160 tokens; 200 polls in {1e3 * one_pass:.2f} ms")
            for name, each in seconds.items():
                print(f"  {name}: {spread(each)} ({len(each)} calls)")
        for name in engine.live:
            engine.abort(name)
        engine.run()
