"""The worker's side under a queue, a reset and repeated failures."""

from __future__ import annotations

import time
from unittest import mock

import pytest
from common import FULL, PROMPT, S, W, warm
from sim.engine import Engine
from sim.host import Service

from lmkv_vllm import worker
from lmkv_vllm.messages import Load, Save
from lmkv_vllm.worker import SaveJob


def test_a_load_that_ended_before_a_reset_is_not_used_after_it(engine: Engine) -> None:
    warm(engine)
    name = engine.add(PROMPT, 4)
    engine.step(share=0.0)
    assert engine.parked == {name}
    engine.work()
    engine.reset()
    engine.weights += 1
    engine.run()
    assert W(engine).stats.snapshot()["load.failed.reset"] == 1


def test_the_wait_for_other_loads_is_part_of_the_time_limit(engine: Engine) -> None:
    side = W(engine)
    warm(engine)
    load = Load("r", S(engine).scope, 0, 8, bytes(32), (bytes(32),), ((1, 2),))
    with mock.patch.object(side.host, "fetch") as fetch:
        side._load(load, None, time.monotonic() - 1)
    (done,) = side.ended()
    assert (done.reason, done.tokens, len(done.failed)) == ("timeout", 0, 1)
    fetch.assert_not_called()


def test_loads_are_given_the_limit_from_when_they_came(engine: Engine) -> None:
    side, limit = W(engine), 30.0
    with mock.patch.object(side, "_loaders") as loaders:
        warm(engine)
        engine.add(PROMPT, 4)
        engine.step(share=0.0)
    ends = loaders.submit.call_args.args[3]
    assert ends - worker.time.monotonic() == pytest.approx(limit, abs=10)


def test_a_save_given_up_before_it_began_asks_the_service_for_nothing(engine: Engine) -> None:
    side = W(engine)
    job = SaveJob(Save(1, side._scope, 0, bytes(32), (bytes(32),), ((1, 2),), None), None)
    assert job.settle()
    with mock.patch.object(side.host, "reserve") as reserve:
        assert side._store(job) == ()
    reserve.assert_not_called()


def test_one_kind_of_surprise_is_logged_once_a_minute(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    class Surprise(Exception):
        pass

    with Engine(FULL, blocks=70, service=service) as engine:
        with mock.patch.object(W(engine), "_store", side_effect=Surprise("x")):
            for i in range(5):
                engine.generate([i, *PROMPT], 1)
            engine.settle()
        assert W(engine).stats.snapshot()["save.failed.Surprise"] >= 5
    assert len([each for each in caplog.records if each.exc_info]) == 1
