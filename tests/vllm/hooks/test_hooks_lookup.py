"""What the scheduler's side asks, offers and leases."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
from common import CHUNK, FULL, PROMPT, S, match, warm
from sim.engine import Engine
from sim.host import Faults, Service
from sim.models import MODELS
from vllm.v1.metrics.cache_hit_source import CacheHitSource


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
