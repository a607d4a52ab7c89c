"""What keeps chunks apart, and what finds them again: each case is another engine, or another request, on one store.

A hit shows in how many prompt tokens were cached after vLLM's own prefix cache was forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_models
from engine import Engine, EngineError
from models import prompt
from service import settled

TOKENS, CHUNK = 600, 128
HIT = (TOKENS - 1) // CHUNK * CHUNK


@pytest.fixture(scope="module")
def folder() -> Path:
    """A tiny checkpoint with plain attention."""
    return vllm_models.write("qwen3")


@pytest.fixture
def extra(place: Path) -> dict[str, Any]:
    """The connector's settings on a store of its own."""
    return {"socket": str(place / "socket"), "cpu_budget": "256MiB", "chunk_tokens": CHUNK, "worth_it": False,
            "lookup_timeout": "10s"}  # fmt: skip


def store(engine: Engine, extra: dict[str, Any], ids: Any, **request: Any) -> None:
    """Compute a prompt and wait until it is stored."""
    socket = Path(extra["socket"])
    before = settled(socket, 0)["tiers"]["cpu"]["objects"]
    engine.generate([ids], max_tokens=1, **request)
    settled(socket, before + HIT // extra["chunk_tokens"])


def cached(engine: Engine, ids: Any, **request: Any) -> int:
    """Tokens of the prompt that a request need not compute, vLLM's own cache being empty."""
    engine.reset()
    (output,) = engine.generate([ids], max_tokens=1, **request)
    return output.cached


def test_requests_with_other_salts_share_nothing(engine: Engine, folder: Path, extra: dict[str, Any]) -> None:
    engine.open(folder, connector=extra)
    salted = {"prompt_token_ids": prompt(TOKENS, 1), "cache_salt": "one"}
    store(engine, extra, salted)
    assert cached(engine, {**salted, "cache_salt": "two"}) == 0
    assert cached(engine, prompt(TOKENS, 1)) == 0
    assert cached(engine, salted) == HIT


def test_a_request_may_neither_load_nor_save(engine: Engine, folder: Path, extra: dict[str, Any]) -> None:
    engine.open(folder, connector=extra)
    kept, not_kept = prompt(TOKENS, 2), prompt(TOKENS, 3)
    engine.generate([not_kept], max_tokens=1, extra_args={"kv_transfer_params": {"lmkv.skip_save": True}})
    store(engine, extra, kept)
    assert cached(engine, not_kept, extra_args={"kv_transfer_params": {"lmkv.skip_save": True}}) == 0
    assert cached(engine, kept, extra_args={"kv_transfer_params": {"lmkv.skip_load": True}}) == 0
    assert cached(engine, kept) == HIT


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        pytest.param({}, {}, HIT, id="the same engine again"),
        pytest.param({}, {"weights_id": "another"}, 0, id="named weights", marks=pytest.mark.all),
        pytest.param({"weights_id": "a"}, {"weights_id": "b"}, 0, id="other weights"),
        pytest.param({}, {"chunk_tokens": 2 * CHUNK}, 0, id="chunk", marks=pytest.mark.all),
        pytest.param({}, {"hash": "sha256_cbor"}, 0, id="hash", marks=pytest.mark.all),
        pytest.param(
            {"hash": "sha256_cbor"}, {"hash": "sha256_cbor"}, HIT, id="the same hash again", marks=pytest.mark.all
        ),
    ],
)
def test_engines_share_what_means_the_same(
    engine: Engine, folder: Path, extra: dict[str, Any], first: dict[str, Any], second: dict[str, Any], found: int
) -> None:
    def opened(settings: dict[str, Any]) -> dict[str, Any]:
        own = {**extra, **settings}
        more = {"prefix_caching_hash_algo": own.pop("hash")} if "hash" in own else {}
        engine.open(folder, connector=own, **more)
        return own

    ids = prompt(TOKENS, 4)
    store(engine, opened(first), ids)
    opened(second)
    assert cached(engine, ids) == found


def test_a_hash_that_differs_from_process_to_process_is_refused(
    engine: Engine, folder: Path, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(EngineError, match="sha256_cbor"):
        engine.open(folder, connector=extra, prefix_caching_hash_algo="xxhash")


@pytest.fixture(autouse=True)
def closed(engine: Engine) -> Iterator[None]:
    """No engine outlives the store that it is for."""
    yield
    engine.close()
