"""The connector under vLLM's real scheduler, without a model: random schedules, every byte checked, nothing left."""

from __future__ import annotations

from sim.engine import Engine
from sim.host import Service
from sim.models import MODELS
import pytest


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_stored_and_comes_back(name: str) -> None:
    service = Service()
    with Engine(MODELS[name], service=service) as engine:
        prompt = list(range(100, 161))
        first = engine.generate(prompt, 6)
        engine.settle()
        assert engine.reset(connector=False)
        assert engine.check_stored(engine.stored())
        assert engine.generate(prompt, 6) == first
        assert engine.loads == 1
        engine.settle()
        engine.check_outputs()
        engine.check_nothing_left()
