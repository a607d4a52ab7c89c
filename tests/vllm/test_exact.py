"""A hit is exact: after it a model says what it says after vLLM's own prefix hit of the same length, bit for bit.

The local hit is what to compare with, not the cold run: vLLM computes a prompt in other pieces then, which alone
changes the last bits, and with some kernels far more. Every test has its negative control: stored KV that was changed
on the way changes the answer, so equal answers mean equal KV.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine import AMX, Engine, Output, distance, example_config
from models import MODELS, Model, cases, prompt
from service import corrupt, settled, stop_service

SMOLLM2 = MODELS[0]


def settings(place: Path, **changes: Any) -> dict[str, Any]:
    """The connector's extra config: a service in ``place``, and chunks of one vLLM block as its own hits have."""
    return {
        "socket": str(place / "socket"),
        "cpu_budget": "512MiB",
        "tiers": [f"disk://{place / 'disk'}?budget=4GiB"],
        "chunk_tokens": 1,
        "linger": 5,
        "lookup_timeout": 5,
        "worth_it": False,
        **changes,
    }


def hit_length(engine: Engine, tokens: int) -> int:
    """Tokens of a local hit on all of a prompt but what vLLM must compute: whole blocks, less than the prompt."""
    block = engine.info["block_size"]
    return (tokens - 1) // block * block


def local_hit(engine: Engine, ids: list[int]) -> Output:
    """What vLLM says after its own prefix hit, and says again; the prompt is computed first."""
    (cold,) = engine.generate([ids])
    (local,) = engine.generate([ids])
    (again,) = engine.generate([ids])
    assert (cold.cached, local.cached) == (0, hit_length(engine, len(ids)))
    assert again == local, "vLLM itself does not repeat its answer"
    print(f"cold and local hit differ by {distance(cold, local):.3g}, tokens equal: {cold.tokens == local.tokens}")
    return local


@pytest.mark.parametrize("model", cases())
def test_hit_equals_local_hit(engine: Engine, place: Path, model: Model) -> None:
    ids, folder, wanted = prompt(), model.folder(), settings(place)
    engine.open(folder, connector=wanted, **model.args)
    local = local_hit(engine, ids)
    chunks = hit_length(engine, len(ids)) // engine.info["block_size"]
    settled(place / "socket", chunks)

    assert engine.reset()
    (from_host,) = engine.generate([ids])
    assert from_host.cached == local.cached
    assert from_host == local

    engine.close()
    assert stop_service(place / "socket")
    engine.open(folder, connector=wanted, **model.args)
    (from_disk,) = engine.generate([ids])
    assert from_disk.cached == local.cached
    assert from_disk == local

    engine.close()
    assert stop_service(place / "socket")
    assert corrupt(place / "disk") >= chunks
    engine.open(folder, connector=wanted, **model.args)
    (changed,) = engine.generate([ids])
    assert changed.cached == local.cached
    assert changed.logprobs != local.logprobs
    assert distance(changed, local) > 1e-3
    engine.close()


def test_processes_of_their_own(place: Path, tmp_path: Path) -> None:
    """As `vllm serve` runs: the scheduler in one process, the worker in another."""
    with Engine(tmp_path / "vllm.log", split=True) as engine:
        engine.open(SMOLLM2.folder(), connector=settings(place), **SMOLLM2.args)
        ids = prompt()
        local = local_hit(engine, ids)
        settled(place / "socket", local.cached // engine.info["block_size"])
        assert engine.reset()
        assert engine.generate([ids]) == [local]
        assert engine.reset(connector=True)
        assert engine.generate([ids])[0].cached == 0


@pytest.mark.all
@pytest.mark.skipif(AMX, reason="with AMX vLLM itself caches prefixes of MLA models")
def test_mla_without_vllm_prefix_caching(engine: Engine, place: Path) -> None:
    """Without AMX vLLM turns its own prefix caching off for MLA models; a hit is what a local one would be."""
    model, ids = next(each for each in MODELS if each.name == "deepseek_v2"), prompt()
    engine.open(model.folder(), **model.args)
    local = local_hit(engine, ids)
    engine.open(model.folder(), connector=settings(place))
    assert not engine.info["prefix_caching"]
    assert engine.generate([ids])[0].cached == 0
    settled(place / "socket", local.cached // engine.info["block_size"])
    assert engine.generate([ids]) == [local]
    engine.close()


@pytest.mark.all
def test_example_connector_agrees(engine: Engine, tmp_path: Path) -> None:
    """vLLM's own example, without lmkv: the bench itself finds a connector exact that is known to be."""
    engine.open(SMOLLM2.folder(), transfer=example_config(tmp_path), **SMOLLM2.args)
    ids = prompt()
    local = local_hit(engine, ids)
    assert engine.reset()
    assert engine.generate([ids]) == [local]
    engine.close()
