"""A simulated engine over a simulated service, for each hook test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sim.engine import Engine
from sim.host import Service
from sim.models import MODELS

FULL = MODELS["full"]


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def engine(service: Service) -> Iterator[Engine]:
    with Engine(FULL, blocks=70, service=service) as found:
        yield found
