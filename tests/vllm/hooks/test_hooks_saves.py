"""Which tokens are saved, when a save is given up, and what a reset voids."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from common import CHUNK, FULL, KINDS, PROMPT, S, W, match, warm
from sim.engine import Engine
from sim.host import Service
from sim.models import MODELS
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

from lmkv.rows import PageRows
from lmkv_vllm.messages import Step

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
