"""The connector under vLLM's real scheduler, without a model: random schedules, every byte checked, nothing left.

A schedule is made of its seed alone: what the requests are, how few blocks there are, when background work runs, what
the host service gets wrong. ``LMKV_SEED=n`` runs one; the mark ``all`` runs a thousand.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sim.engine import Engine
from sim.host import Faults, Service
from sim.models import MODELS
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from lmkv.config import Config
from lmkv.server.client import Host

ONE = [int(os.environ["LMKV_SEED"])] if "LMKV_SEED" in os.environ else []
SEEDS, SOAK = ONE or range(150), ONE or range(150, 1000)
REAL, REAL_SOAK = ONE or range(20), ONE or range(20, 100)


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_stored_and_comes_back(name: str) -> None:
    with Engine(MODELS[name], blocks=70, service=Service()) as engine:
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


def faults_of(dice: random.Random) -> Faults:
    """Half of the schedules have a service that does all it is asked to, the others one with some faults."""
    found = Faults(late=dice.random() < 0.7)
    if dice.random() < 0.5:
        return found
    for name in vars(found):
        if name != "late" and dice.random() < 0.4:
            setattr(found, name, dice.choice([0.02, 0.1, 0.5]))
    return found


class Schedule:
    """One random schedule, from its first request to the end of the engine. socket: of a real host service, whose
    engines have threads and time of their own."""

    def __init__(self, seed: int, socket: Path | None = None) -> None:
        self.socket = socket
        self.dice = dice = random.Random(seed)
        self.model = MODELS[dice.choice(list(MODELS))]
        self.threads = dice.random() < 0.15 or socket is not None
        self.share = dice.choice([0.15, 0.4, 0.8, 1.0])
        parts = dice.choice([1 << 30, 1 << 30, 40, 12])
        self.service = Service(parts, faults_of(dice), random.Random(seed))
        options: dict[str, Any] = {}
        if socket is not None:
            # A late answer is a miss, and on a busy machine there would be no hits to check.
            options |= {"socket": str(socket), "spawn": False, "weights_id": f"sim {seed}", "lookup_timeout": 5}
        if dice.random() < 0.2:
            options["offload_prompt_only"] = True
        if dice.random() < 0.2:
            options["min_hit_tokens"] = 16
        blocks = self.model.blocks + dice.choice([0, 4, 12, 60])
        service = self.service if socket is None else None
        overlap = dice.random() < 0.35
        if overlap and any(isinstance(spec, SlidingWindowSpec) for spec in self.model.layers):
            blocks += 30  # windows keep their blocks until the step before is over
        self.engine = Engine(self.model, blocks, service, options, self.threads, overlap)
        self.documents = [[dice.randrange(400) for _ in range(70)] for _ in range(dice.randint(1, 3))]
        self.left = dice.randint(8, 20)
        self.forgetful = dice.choice([0.0, 0.2, 0.5])
        self.events: Counter[str] = Counter()
        self.refuse = dice.choice([0.0, 0.0, 0.05, 0.2])
        self._refuse_allocations()

    def _refuse_allocations(self) -> None:
        """Now and then the block pool has nothing for a request, as if others had taken it all."""
        manager = self.engine.scheduler.kv_cache_manager
        allocate = manager.allocate_slots

        def allocate_slots(*args: Any, **kwargs: Any) -> Any:
            if self.dice.random() < self.refuse:
                self.events["refused"] += 1
                return None
            return allocate(*args, **kwargs)

        manager.allocate_slots = allocate_slots

    def prompt(self) -> list[int]:
        dice = self.dice
        return dice.choice(self.documents)[: dice.randint(3, 70)] + [
            dice.randrange(400) for _ in range(dice.choice([0, 1, 5, 20]))
        ]

    def add(self) -> None:
        dice = self.dice
        params = {
            key: value
            for key, value, chance in (
                ("lmkv.skip_save", True, 0.05), ("lmkv.skip_load", True, 0.05), ("lmkv.ttl", 600, 0.1), ("x", 1, 0.05),
            )
            if dice.random() < chance
        }  # fmt: skip
        self.engine.add(
            self.prompt(), dice.randint(1, 14), params, dice.choice([None, None, None, "salt"]), dice.random() < 0.05
        )
        self.left -= 1

    def disturb(self) -> None:
        """What happens to an engine from outside."""
        dice, engine = self.dice, self.engine
        draw = dice.random()
        if draw < 0.05 and engine.live:
            name = dice.choice(engine.live)
            engine.aborts.append(name) if dice.random() < 0.5 else engine.abort(name)
            self.events["abort"] += 1
        elif draw < 0.06:
            engine.reset(connector=dice.random() < 0.5)
            self.events["reset"] += 1
        elif draw < 0.07 and not engine.parked and not engine.scheduler.kv_holding_waiting:
            engine.new_weights()
            self.events["new weights"] += 1
        elif draw < 0.10:
            self.service.evict(dice.randint(1, 6))
        elif draw < 0.12:
            self.service.demote(dice.randint(1, 6))
        elif draw < 0.12 + self.forgetful:
            engine.forget()

    def run(self) -> None:
        dice, engine = self.dice, self.engine
        stop_at = dice.randint(5, 60) if dice.random() < 0.1 else 0
        while self.left or engine.busy:
            while self.left and (dice.random() < 0.3 or not engine.busy):
                self.add()
            self.disturb()
            engine.step(dice, self.share)
            if engine.steps == stop_at:
                return
            assert engine.steps < 3000, engine.describe()
        engine.settle()
        engine.check_outputs()
        engine.check_nothing_left()
        assert engine.reports == engine.loads * self.model.workers


def run(seed: int, socket: Path | None = None) -> Schedule:
    """Run a schedule and look at what it stored."""
    schedule = Schedule(seed, socket)
    engine, service = schedule.engine, schedule.service
    try:
        schedule.run()
        if socket is not None:
            engine.check_stored(engine.stored_for_real())
    finally:
        engine.close()
    engine.check_stored(engine.stored())
    assert not service.leases
    assert not service.writing
    return schedule


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedule(seed: int) -> None:
    run(seed)


@pytest.mark.all
@pytest.mark.parametrize("seed", SOAK)
def test_random_schedule_soak(seed: int) -> None:
    run(seed)


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    """A host service of this module's own, which must hold nothing for anybody at the end."""
    folder = Path(tempfile.mkdtemp(prefix="lmkv-"))
    host = Host(str(folder / "socket"), config=Config.load(None, cpu_budget="48MiB"), linger=0.1)
    try:
        host.register([8192])
        yield folder / "socket"
        cpu = host.stats()["tiers"]["cpu"]
        assert (cpu["leases"], cpu["reservations"]) == (0, 0), cpu
        assert all(not client["holds"] for client in host.stats()["clients"])
    finally:
        host.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("seed", REAL)
def test_random_schedule_with_a_real_service(seed: int, socket: Path) -> None:
    run(seed, socket)


@pytest.mark.all
@pytest.mark.parametrize("seed", REAL_SOAK)
def test_random_schedule_with_a_real_service_soak(seed: int, socket: Path) -> None:
    run(seed, socket)
