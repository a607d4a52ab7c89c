"""What the scheduler's side answers, counts and announces when something has changed since it asked."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from common import FULL, PROMPT, S, match, warm
from sim.engine import Engine
from sim.host import Service
from sim.models import vllm_config
from sim.rank import Rank
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from lmkv.errors import ConfigError
from lmkv_vllm import scheduler
from lmkv_vllm.requests import MAX_TTL

CHUNKS = 7  # of PROMPT


# Worth it.


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_is_timed_from_its_start_to_its_end(service: Service, overlap: bool) -> None:
    """Also when vLLM schedules the next step before the one under way has ended."""
    with (
        mock.patch.object(scheduler, "MEASURED_TOKENS", 40),
        Engine(FULL, blocks=70, service=service, options={"worth_it": True}, overlap=overlap) as engine,
    ):
        update = engine._update

        def slow() -> Any:
            engine.clock.now += 1.0
            return update()

        with mock.patch.object(engine, "_update", slow):
            for i in range(3):
                engine.generate([i, *PROMPT[:45]], 3, params={"lmkv.skip_load": True})
            assert S(engine)._prefill_speed == pytest.approx(1 / 46, rel=0.2)
            S(engine)._prefill_speed = 0.0
            engine.add([8, *PROMPT[:7]], 20)
            engine.step()
            engine.add([9, *PROMPT[:45]], 3, params={"lmkv.skip_load": True})  # while a step is under way
            engine.run()
        assert S(engine)._prefill_speed == pytest.approx(1 / 47, rel=0.2)
        assert len(S(engine)._steps) <= 1


def test_polling_does_not_change_what_is_worth_loading(service: Service) -> None:
    with Engine(FULL, blocks=70, service=service, options={"worth_it": True}) as engine:
        warm(engine)
        S(engine)._prefill_speed, S(engine)._load_speed = 0.001, {"cpu": 0.002}
        name = engine.add(PROMPT, 4)
        assert {match(engine, name) for _ in range(50)} == {(0, False)}
        assert S(engine)._load_speed["cpu"] == pytest.approx(0.0019), "one refusal, one step towards another try"


# Answers and reasons.


def test_an_answer_too_old_is_asked_for_again(engine: Engine, service: Service) -> None:
    name = engine.add(PROMPT, 4)
    assert match(engine, name) == (0, False)
    with Engine(FULL, blocks=70, service=service) as other:
        warm(other)
    assert match(engine, name) == (0, False), "the same answer to every question"
    engine.clock.now += 0.6 * S(engine).options.load_timeout
    assert match(engine, name) == (56, True)


def test_a_prompt_without_a_chunk_is_counted(engine: Engine) -> None:
    engine.generate(PROMPT[:5], 2)
    assert S(engine).stats.snapshot()["miss.shorter than a chunk"] == 1


def test_what_failed_before_is_named(engine: Engine, service: Service) -> None:
    warm(engine)
    service.faults.fetch_reason = 1.0
    engine.generate(PROMPT, 4, params={"lmkv.skip_save": True})
    engine.forget()
    engine.generate(PROMPT, 4, params={"lmkv.skip_save": True})
    counts = S(engine).stats.snapshot()
    assert counts["miss.failed before"] >= 1
    assert counts["hit_tokens"] == 0, "nothing of a load that failed"


def test_a_hit_that_vllm_does_not_take_is_named(engine: Engine) -> None:
    warm(engine)
    name = engine.add(PROMPT, 4)
    assert match(engine, name) == (56, True)
    engine.connector.update_state_after_alloc(engine.requests[name], mock.Mock(), 0)
    assert S(engine).stats.snapshot()["miss.not taken by vLLM"] == 1
    engine.run()


def test_a_ttl_beyond_reason_is_a_long_one(engine: Engine, service: Service) -> None:
    engine.generate(PROMPT, 1, params={"lmkv.ttl": 1e300})
    engine.settle()
    assert len(service.stored) == CHUNKS
    assert MAX_TTL + time.time() < 2**32


# Blocks and resets.


def test_blocks_of_a_group_that_is_not_stored_are_settled(engine: Engine) -> None:
    """All groups take from one pool, those that no prefix can share too."""
    engine.add(PROMPT, 1)
    (save,) = engine.step(share=0.0).kv_connector_metadata.saves
    nothing = SimpleNamespace(new_block_ids=[], req_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    for block, settled in ((save.blocks[0][3], [save.job]), (60, [])):
        new = SimpleNamespace(block_ids=([50, 51], [block]), num_computed_tokens=0)
        output = SimpleNamespace(kv_cache_block_copies=None, scheduled_new_reqs=[new], scheduled_cached_reqs=nothing)
        assert S(engine).saves.to_settle(output, ()) == settled


def test_blocks_from_before_a_reset_are_not_stored_after_it(engine: Engine, service: Service) -> None:
    """vLLM keeps its own cache while a load is under way; what starts from it is of the old weights."""
    warm(engine)
    engine.generate(PROMPT[:25], 1, params={"lmkv.skip_load": True})
    with mock.patch.object(Rank, "_check"):
        name = engine.add(PROMPT, 4)
        engine.step(share=0.0)
        assert engine.parked == {name}
        assert not engine.reset(), "vLLM says that its own cache is as it was"
        engine.weights += 1
        engine.run()
        engine.settle()
    assert not [key for key in service.stored if key.scope == S(engine).scope]


# Start.


def test_a_handshake_of_another_connector_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="MultiConnector has another connector"):
        engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): KVConnectorHandshakeMetadata()})


# Events.


class Listener:
    """An engine with KV events, and what it published."""

    def __init__(self, service: Service) -> None:
        config = vllm_config(FULL)
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.engine = Engine(FULL, blocks=70, service=service, config=config)
        self.seen: list[Any] = []
        self.side = S(self.engine)
        take = self.side.events

        def events() -> Any:
            found = take()
            self.seen.extend(found)
            return found

        self.side.events = events

    def names(self) -> list[str]:
        return [type(each).__name__ for each in self.seen]

    def hear(self, change: tuple[str, str, bytes, int]) -> None:
        """The service's answer to the next question."""
        with mock.patch.object(self.side.host, "events", return_value=[change]):
            for _ in range(2):
                self.side._events._ask_at = 0.0
                self.side.events()
                if self.side._events._asked is not None:
                    self.side._events._asked.exception(10)
            self.side.events()


@pytest.mark.parametrize("change", [("lost", "", b"", 0), ("cleared", "cpu", b"", 0)])
def test_what_another_service_does_not_hold_is_told(service: Service, change: tuple[str, str, bytes, int]) -> None:
    listener = Listener(service)
    with listener.engine as engine:
        engine.generate(PROMPT, 1)
        engine.settle()
        engine.step()
        assert listener.names() == ["BlockStored"] * CHUNKS
        service.stored.clear()
        listener.hear(change)
        told = [each for each in listener.seen if isinstance(each, BlockStored)]
        gone = [each for each in listener.seen if isinstance(each, BlockRemoved)]
        assert [each.block_hashes for each in gone] == [each.block_hashes for each in told]
        engine.forget()
        engine.generate(PROMPT, 1)
        engine.settle()
        engine.step()
        assert listener.names().count("BlockStored") == 2 * CHUNKS, "stored again, told again"


def test_a_save_from_before_a_reset_is_not_told(service: Service) -> None:
    listener = Listener(service)
    with listener.engine as engine:
        engine.add(PROMPT, 1)
        while engine.scheduler.has_requests():
            engine.step(share=0.0)
        engine.work()
        assert engine.reset()
        engine.settle()
        engine.step()
        assert isinstance(listener.seen[-1], AllBlocksCleared)
        engine.generate(PROMPT, 1)
        engine.settle()
        engine.step()
        assert listener.names().count("BlockStored") == CHUNKS
