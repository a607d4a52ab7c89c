"""Stats, events, the ends of loads, and what the hooks cost."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest
from common import CHUNK, FULL, PROMPT, S, W, warm
from sim.engine import Engine
from sim.host import Service
from sim.models import BLOCK, vllm_config
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

import lmkv_vllm
from lmkv.workers import Workers
from lmkv_vllm import worker
from lmkv_vllm.messages import Load, Step
from lmkv_vllm.requests import NO_DIGEST

# Stats and events.


def test_stats_say_what_happened(engine: Engine) -> None:
    warm(engine)
    engine.generate(PROMPT, 4)
    engine.settle()
    cls = lmkv_vllm.LMKVConnector
    total = cls.build_kv_connector_stats()
    assert total is not None
    assert total.is_empty()
    for data in (
        {"counts": {"a": 1, "b": 2}, "load_seconds": [0.5], "hook_seconds": 0.25},
        {"counts": {"a": 3}, "load_seconds": [1.5]},
        {"hook_seconds": 0.5},
    ):
        total = total.aggregate(cls.build_kv_connector_stats(data))
    assert total.reduce() == {"a": 4, "b": 2, "loads": 2, "mean load seconds": 1.0, "hook seconds": 0.75}
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


def test_a_step_without_work_waits_for_a_load_and_others_do_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = W(engine)
    load = Load("r", S(engine).scope, 0, 0, NO_DIGEST, (), ())
    side.load(Step(S(engine).scope, [load]))
    assert side.ended() == [], "it computes: it must go on"
    monkeypatch.setattr(worker, "IDLE_SECONDS", 60.0)
    side.load(Step(S(engine).scope, idle=True))
    threading.Timer(0.1, side._load, (load, None, time.monotonic() + 60)).start()
    assert [each.request for each in side.ended()] == ["r"]
    side.take("r")


def _cores_of_a_copy_thread(core: int, answer: Any) -> None:
    os.sched_setaffinity(0, {core})  # as vLLM's CPU backend does to a worker's main thread
    answer.put(Workers("test", 1, worker._leave_core).submit(os.sched_getaffinity, 0).result(30))


def test_copy_threads_are_not_tied_to_the_compute_core() -> None:
    context = multiprocessing.get_context("spawn")
    answer, cores = context.Queue(), os.sched_getaffinity(0)
    child = context.Process(target=_cores_of_a_copy_thread, args=(min(cores), answer))
    child.start()
    assert answer.get(timeout=120) == cores
    child.join()


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
