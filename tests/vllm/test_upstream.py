"""vLLM's own connector tests, from the sources of the release, with LMKVConnector where they build one of theirs.

They are fetched by version when needed and kept in the cache. `upstream_target` is the plugin that puts our connector
in and reports which tests met it; only those count here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from engine import HERE, ROOT, vllm_metadata
from models import MODELS

SMOLLM2 = MODELS[0]
VERSION = "0.32.0"
SUITE = ROOT / ".cache" / f"vllm-{VERSION}-tests"
UNIT = "tests/v1/kv_connector/unit"
FILES = (
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_deferred_block_free.py",
    "tests/v1/core/test_prefix_replay.py",
    "tests/v1/core/test_prefix_caching.py",
    "tests/v1/core/test_swa_inflight_window_free.py",
    f"{UNIT}/test_hma_auto_config.py",
    f"{UNIT}/test_kv_connector_lifecycle.py",
    f"{UNIT}/test_multi_connector.py",
)
# What meets our connector and cannot pass, with the reason.
EXCEPTIONS = {
    "test_throttle_prefills_excludes_fully_transferred_remote_kv": "wants the last prompt token loaded; a hit of lmkv "
    "leaves at least one to compute",
    "test_external_prefix_cache_metrics[False-True]": "wants a hit of less than a block; lmkv has whole chunks",
    "test_kv_load_carrying_window_does_not_replay[63-True]": "wants a hit that ends inside a block",
    "test_requires_kv_delivery_defaults_to_producer_role": "tests the base class's default; a cache need not deliver",
    "test_kv_pressure_preempt_mid_handoff[kv_producer-False]": "a prefill engine that must deliver; a cache need not",
    "test_kv_connector_mixin_clears_metadata": "starts a worker of a model without KV caches, which lmkv refuses",
}
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "word_embed_proj_dim": 768,
    "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 2048,
    "vocab_size": 50272, "do_layer_norm_before": True, "activation_function": "relu", "bos_token_id": 2,
    "eos_token_id": 2, "pad_token_id": 1, "torch_dtype": "float16",
}  # fmt: skip


def fetch() -> Path:
    """The folder with vLLM's ``tests``, downloaded once.

    pip unpacks the source archive and then fails to read its metadata, which needs a compiler's worth of packages; the
    unpacked tree is all that is wanted.
    """
    if SUITE.exists():
        return SUITE
    SUITE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SUITE.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", f"vllm=={VERSION}", "--no-deps", "--no-binary", "vllm"]
        command += ["--no-build-isolation", "--no-clean", "--dest", folder]
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found = next(Path(folder).glob("**/tests/v1/kv_connector"), None)
        if found is None:
            pytest.skip(f"vllm {VERSION}'s sources cannot be had: {done.stderr[-300:]}")
        ready = Path(folder) / "ready"
        shutil.copytree(found.parent.parent, ready / "tests")
        model = ready / "facebook" / "opt-125m"  # what the tests call their model; its configuration is enough
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(OPT))
        (ready / "pytest.ini").write_text("[pytest]\nmarkers =\n    cpu_test\n    slow_test\n    optional\n")
        ready.rename(SUITE)
    return SUITE


def run(command: list[str], suite: Path, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Python in the suite's folder, with its tests, ours and vLLM's metadata on the path."""
    paths = [suite, HERE, *filter(None, [vllm_metadata(tmp_path / "metadata")])]
    environment = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=suite,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def reported(suite: Path, tmp_path: Path) -> dict[str, Any]:
    """Run `FILES`; what `upstream_target` reports of the tests that met our connector."""
    report = tmp_path / "report.json"
    command = ["-m", "pytest", "-q", "--tb=short", "--noconftest", "-p", "no:cacheprovider"]
    command += ["-p", f"{UNIT.replace('/', '.')}.conftest", "-p", "upstream_target", *FILES]
    done = run(command, suite, tmp_path, LMKV_REPORT=str(report), VLLM_LOGGING_LEVEL="ERROR")
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    return {name: each for name, each in json.loads(report.read_text()).items() if each.get("built")}


@pytest.mark.all
def test_vllm_tests_with_our_connector(tmp_path: Path) -> None:
    found = reported(fetch(), tmp_path)
    ended: dict[str, dict[str, str]] = {"passed": {}, "failed": {}, "skipped": {}}
    for name, each in found.items():
        ended[each["outcome"]][name.rpartition("::")[2]] = each["why"]
    print(f"{len(ended['passed'])} passed: {', '.join(sorted(ended['passed']))}")
    unexpected = {name: why[-600:] for name, why in ended["failed"].items() if name not in EXCEPTIONS}
    assert not unexpected
    assert ended["failed"].keys() == EXCEPTIONS.keys()
    assert len(ended["passed"]) >= 40


@pytest.mark.all
def test_vllm_offloading_test_with_our_connector(place: Path, tmp_path: Path) -> None:
    done = run([str(HERE / "upstream_offload.py"), str(SMOLLM2.folder()), str(place / "socket")], fetch(), tmp_path)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
