"""Two engines that share nothing but a remote store: what one stored the other one hits, and the store may die."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import remote_stores
from engine import Engine
from models import MODELS, prompt
from s3_servers import keys_in_environment
from service import settled, stop_service

TOKENS, HIT = 600, 512


def settings(place: Path, name: str, url: str) -> dict[str, Any]:
    """For an engine with a host service of its own."""
    return {
        "socket": str(place / name), "cpu_budget": "128MiB", "tiers": [url], "chunk_tokens": 128, "linger": 1,
        "lookup_timeout": 5, "load_timeout": 10, "worth_it": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.all] if each != "lmkv" else []) for each in remote_stores.NAMES]
)
def test_another_engine_hits(name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys_in_environment(monkeypatch)
    folder, ids = MODELS[0].folder(), prompt(TOKENS, 4)
    with remote_stores.running(name, tmp_path) as store, Engine(tmp_path / "log") as engine:
        url = remote_stores.tier(store)
        engine.open(folder, connector=settings(place, "one", url))
        engine.generate([ids])
        (local,) = engine.generate([ids])
        settled(place / "one", HIT // 128)
        engine.close()
        stop_service(place / "one")

        engine.open(folder, connector=settings(place, "two", url), disable_log_stats=False)
        (hit,) = engine.generate([ids])
        assert (local.cached, hit) == (HIT, local)
        assert engine.metrics()["vllm:external_prefix_cache_hits"] == HIT
        engine.close()
        stop_service(place / "two")

        store.down()
        engine.open(folder, connector=settings(place, "three", url))
        (cold,) = engine.generate([ids])
        assert (cold.cached, cold.tokens) == (0, local.tokens)
        engine.close()
        stop_service(place / "three")

        store.up()
        engine.open(folder, connector=settings(place, "four", url))
        deadline = time.monotonic() + 60
        while store.keeps and not engine.generate([ids])[0].cached:
            assert engine.reset()
            assert time.monotonic() < deadline, engine.tail()
        assert engine.generate([ids])[0].tokens == local.tokens
        engine.close()
        stop_service(place / "four")
