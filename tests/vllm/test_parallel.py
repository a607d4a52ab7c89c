"""Several ranks and several engines on one host service."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import vllm_models
from engine import Engine, Output
from models import prompt
from service import settled, stop_service, watching

TOKENS = 600
CHUNKS = 4  # of 128 tokens, the whole blocks before the last token
# A core for each of two ranks; without it vLLM wants a NUMA node for each.
CORES = sorted(os.sched_getaffinity(0)) * 2
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}"}


def settings(place: Path, **changes: Any) -> dict[str, Any]:
    return {
        "socket": str(place / "socket"),
        "cpu_budget": "128MiB",
        "tiers": [f"disk://{place / 'disk'}?budget=1GiB"],
        "chunk_tokens": 128,
        "linger": 60,
        "lookup_timeout": 5,
        "worth_it": False,
        **changes,
    }


def hit(engine: Engine, ids: list[int], right: Output) -> Output:
    """The first hit on ``ids``; until then, while a service is found, every answer has the right tokens."""
    deadline = time.monotonic() + 120
    while True:
        assert engine.reset()
        (again,) = engine.generate([ids])
        assert again.tokens == right.tokens
        if again.cached:
            return again
        assert time.monotonic() < deadline, f"no hit\n{engine.tail()}"


def test_two_ranks(place: Path, tmp_path: Path) -> None:
    """TP=2: each rank stores and loads its own heads; a hit needs both."""
    ids, other = prompt(TOKENS, 1), prompt(TOKENS, 2)
    with Engine(tmp_path / "vllm.log", split=True, env=TWO_RANKS) as engine:
        folder = vllm_models.write("qwen3")
        engine.open(folder, connector=settings(place), tensor_parallel_size=2, disable_log_stats=False)
        (cold,) = engine.generate([ids])
        (local,) = engine.generate([ids])
        assert (cold.cached, local.cached) == (0, 128 * CHUNKS)
        stats = settled(place / "socket", CHUNKS)
        assert len([each for each in stats["clients"] if "worker" in each["name"]]) == 2

        assert hit(engine, ids, local) == local

        assert stop_service(place / "socket", signal.SIGKILL)
        (alone,) = engine.generate([other])
        assert alone.cached == 0
        assert hit(engine, ids, local) == local  # by another service, from disk

        assert engine.reset(connector=True)
        assert engine.generate([ids])[0].cached == 0


def test_two_engines_share_one_service(place: Path, tmp_path: Path) -> None:
    """Replicas: what one has computed the other finds, both ways, and one more finds it after both."""
    folder, prompts = vllm_models.write("qwen3"), [prompt(TOKENS, seed) for seed in (1, 2)]
    with Engine(tmp_path / "one.log") as one, Engine(tmp_path / "two.log") as two:
        for engine in (one, two):
            engine.open(folder, connector=settings(place))
        for here, there, ids in ((one, two, prompts[0]), (two, one, prompts[1])):
            with watching(place / "socket") as host:
                before = host.stats()["tiers"]["cpu"]["objects"]
            (cold,) = here.generate([ids])
            (local,) = here.generate([ids])
            settled(place / "socket", before + CHUNKS)
            assert (cold.cached, local.cached) == (0, 128 * CHUNKS)
            assert there.generate([ids]) == [local]
        with watching(place / "socket") as host:
            assert host.stats()["tiers"]["cpu"]["objects"] == 2 * CHUNKS
        one.close()
        assert two.reset()
        assert two.generate([prompts[0]])[0].cached == 128 * CHUNKS


@pytest.mark.all
def test_replicas_are_stored_once(place: Path, tmp_path: Path) -> None:
    """MLA under TP=2: both ranks hold the same latents, one of them stores them, both load."""
    ids = prompt(TOKENS)
    with Engine(tmp_path / "vllm.log", split=True, env=TWO_RANKS) as engine:
        engine.open(vllm_models.write("deepseek_v2"), connector=settings(place), tensor_parallel_size=2)
        (cold,) = engine.generate([ids])
        stats = settled(place / "socket", CHUNKS)
        assert stats["tiers"]["cpu"]["objects"] == CHUNKS
        if engine.info["prefix_caching"]:
            assert engine.reset()
        (first,) = engine.generate([ids])
        if engine.info["prefix_caching"]:
            assert engine.reset()
        (second,) = engine.generate([ids])
        assert (cold.cached, first.cached) == (0, 128 * CHUNKS)
        assert first == second
