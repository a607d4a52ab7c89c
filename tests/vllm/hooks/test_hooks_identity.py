"""What keeps chunks apart, and which settings stop the start."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from common import FULL, PROMPT, S, warm
from sim.engine import Engine
from sim.host import Service
from sim.models import BLOCK, MODELS, Model, full, setup, vllm_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name

import lmkv_vllm
from lmkv.errors import ConfigError
from lmkv.keys import DIGEST_BYTES
from lmkv_vllm import geometry
from lmkv_vllm.options import Options

# Isolation.

QUESTIONS: dict[str, dict[str, Any]] = {
    "nobody": {},
    "salt a": {"salt": "a"},
    "salt b": {"salt": "b"},
    "adapter": {"lora_request": LoRARequest("one", 1, "/a")},
    "adapter of another name": {"lora_request": LoRARequest("two", 1, "/a")},
    "adapter at another path": {"lora_request": LoRARequest("one", 1, "/b")},
    "picture": {"mm_features": [MultiModalFeatureSpec(None, "image", "p", PlaceholderRange(2, 9))]},
    "another picture": {"mm_features": [MultiModalFeatureSpec(None, "image", "q", PlaceholderRange(2, 9))]},
    "picture elsewhere": {"mm_features": [MultiModalFeatureSpec(None, "image", "p", PlaceholderRange(3, 9))]},
}


def test_salts_adapters_and_pictures_never_share_a_chunk(service: Service) -> None:
    service.faults.late = True
    with Engine(FULL, blocks=70, service=service) as engine:
        asked: dict[str, set[bytes]] = {}
        for who, more in QUESTIONS.items():
            engine.add(PROMPT, 2, **more)
            digests = service.asked[-1][1].digests
            chunks = [digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]
            assert len(chunks) == 7
            asked[who] = set(chunks[1:])  # the first chunk of a picture that begins in it may lie before it
            for name in engine.live:
                engine.abort(name)
        for (one, ours), (other, theirs) in itertools.combinations(asked.items(), 2):
            assert not ours & theirs, f"{one} and {other} share chunks"


def test_prompt_embeddings_never_share_a_chunk_with_tokens_or_each_other(service: Service) -> None:
    service.faults.late = True
    with Engine(FULL, blocks=70, service=service) as engine:
        found = []
        for i in range(2):
            embeds = torch.full((61, 8), float(i))
            engine.add([0] * 61, 2, prompt_embeds=embeds, prompt_is_token_ids=[False] * 61)
            found.append(service.asked[-1][1].digests[:DIGEST_BYTES])
        engine.add([0] * 61, 2)
        found.append(service.asked[-1][1].digests[:DIGEST_BYTES])
        assert len(set(found)) == 3
        for name in engine.live:
            engine.abort(name)


@pytest.mark.parametrize("more", [{"salt": "a"}, {"lora_request": LoRARequest("one", 1, "/a")}])
def test_a_hit_is_for_those_who_stored_it(more: dict[str, Any], engine: Engine) -> None:
    first = warm(engine, **more)
    engine.generate(PROMPT, 4)
    assert engine.loads == 0
    engine.settle()
    engine.forget()
    assert engine.generate(PROMPT, 4, **more) == first
    assert engine.loads == 1
    engine.settle()
    engine.check_nothing_left()


def scope_of(model: Model = FULL, options: dict[str, Any] | None = None, isa: str = "", **cache: Any) -> bytes:
    text = geometry.backend_text

    def backend_text(*args: Any) -> str:
        return text(*args) + isa

    # The hashes themselves do not matter here, and some need a package of their own.
    known = mock.patch("sim.engine.get_hash_fn_by_name", return_value=get_hash_fn_by_name("sha256_cbor"))
    with known, mock.patch.object(geometry, "backend_text", backend_text):
        engine = Engine(model, blocks=40, service=Service(), options=options, **cache)
    with engine:
        scope: bytes = S(engine).scope
        return scope


def test_engines_that_differ_never_share_a_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    plain = Model("plain", (full(),) * 2)
    scopes = {
        "plain": scope_of(plain),
        "other weights": scope_of(plain, {"weights_id": "other"}),
        "kv dtype": scope_of(plain, cache_dtype="fp8"),
        "tensor dtype": scope_of(Model("f16", (full(dtype=torch.float16),) * 2)),
        "layout": scope_of(plain, kv_cache_layout="LBNHC"),
        "instruction set": scope_of(plain, isa=" amx"),
        "chunk": scope_of(plain, {"chunk_tokens": 4 * BLOCK}),
        "hash": scope_of(plain, prefix_caching_hash_algo="sha256"),
        "seeded hash": scope_of(plain, prefix_caching_hash_algo="xxhash_cbor"),
        "ranks": scope_of(Model("tp2", (full(),) * 2, ranks=2)),
        "heads": scope_of(Model("heads", (full(num_kv_heads=1),) * 2)),
        "layers": scope_of(Model("layers", (full(),) * 3)),
        "block": scope_of(Model("block", (full(block_size=8),) * 2), block_size=8),
        "groups": scope_of(MODELS["full+window"]),
    }
    monkeypatch.setenv("PYTHONHASHSEED", "4")
    scopes["another seed"] = scope_of(plain, prefix_caching_hash_algo="xxhash_cbor")
    assert len(set(scopes.values())) == len(scopes), {k: v.hex()[:8] for k, v in scopes.items()}
    monkeypatch.delenv("PYTHONHASHSEED")
    assert scope_of(plain) == scopes["plain"], "the same engine again finds what it stored"


# Configuration.


def build(config: Any, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> Any:
    cache = setup(FULL, 40, config).scheduler_cache
    return KVConnectorFactory.create_connector(config=config, role=role, kv_cache_config=cache)


def test_a_failed_load_is_computed_by_default(caplog: pytest.LogCaptureFixture) -> None:
    config = vllm_config(FULL)
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    build(config)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert sum("recompute" in record.message for record in caplog.records) == 1


def multi(policy: str) -> Any:
    config = vllm_config(FULL)
    child = {
        "kv_connector": "LMKVConnector", "kv_connector_module_path": "lmkv_vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"weights_id": "sim"},
    }  # fmt: skip
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": [child]},
    )  # fmt: skip
    return config


def test_under_a_multi_connector_its_policy_counts() -> None:
    lmkv_vllm.register()
    with pytest.raises(ConfigError, match=r"kv_load_failure_policy.*recompute"):
        build(multi("fail"))
    found = build(multi("recompute"))
    (child,) = found._connectors
    assert isinstance(child, lmkv_vllm.LMKVConnector)
    assert not found.requires_kv_delivery


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"chunk_token": 256}, "chunk_token: unknown key; did you mean 'chunk_tokens'"),
        ({"load": "sync"}, "load: unknown key"),
        ({"sokcet": "/x"}, "did you mean 'socket'"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"lookup_timeout": "soon"}, "lookup_timeout"),
        ({"min_hit_tokens": -1}, "min_hit_tokens"),
    ],
)
def test_wrong_settings_stop_the_start(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(vllm_config(FULL, extra))


def test_settings_take_units() -> None:
    options = Options.of({"lookup_timeout": "20ms", "load_timeout": "2m", "chunk_tokens": "512"})
    assert (options.lookup_timeout, options.load_timeout, options.chunk_tokens) == (0.02, 120.0, 512)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
@pytest.mark.parametrize("seed", [None, "random"])
def test_hashes_that_differ_from_process_to_process_are_refused(
    algorithm: str, seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    with pytest.raises(ConfigError, match=r"sha256_cbor.*PYTHONHASHSEED"):
        build(vllm_config(FULL, prefix_caching_hash_algo=algorithm))
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    build(vllm_config(FULL, prefix_caching_hash_algo=algorithm))


def test_weights_without_a_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="weights_id"):
        build(vllm_config(FULL, {"weights_id": ""}))


def test_another_vllm_is_refused() -> None:
    with mock.patch("vllm.__version__", "0.33.0"), pytest.raises(ConfigError, match=r"0\.33\.0"):
        build(vllm_config(FULL))


def test_the_class_is_found_by_name_and_by_module() -> None:
    lmkv_vllm.register()
    lmkv_vllm.register()
    config = vllm_config(FULL)
    config.kv_transfer_config.kv_connector_module_path = None
    assert isinstance(build(config), lmkv_vllm.LMKVConnector)
    assert issubclass(lmkv_vllm.LMKVConnector, SupportsHMA)
    assert not lmkv_vllm.LMKVConnector.requires_piecewise_for_cudagraph({})
    with pytest.raises(AttributeError, match="nothing"):
        _ = importlib.import_module("lmkv_vllm").nothing


def test_importing_the_package_does_not_import_vllm() -> None:
    code = "import sys, lmkv_vllm; assert 'vllm' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
