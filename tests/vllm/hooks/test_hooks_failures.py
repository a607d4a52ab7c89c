"""Nothing below a hook can stop the engine: whatever fails is a counted miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from common import FULL, PROMPT, S, W, counted, warm
from sim.engine import Engine
from sim.host import Faults, Service
from sim.models import MODELS

from lmkv.errors import Unavailable

BROKEN: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "arrive": (S, "arrive"),
    "matched": (S, "matched"),
    "allocated": (S, "allocated"),
    "targets": (S, "_targets"),
    "sources": (S, "sources"),
    "step": (S, "step"),
    "measure": (S, "measure"),
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
