"""CachedModel.generate against transformers' own cache, cropped to the restored length."""

# ruff: noqa: E402 - torch and transformers are optional
from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_models import MODELS, cropped_cache, tiny, tokens

from lmkv.errors import BadInput
from lmkv_hf import CachedModel, call, open_engine
from lmkv_hf.buffers import BufferPool
from lmkv_hf.geometry import CACHE

RESTORABLE = [name for name in MODELS if name != "qwen3_next"]
WINDOWED = ["mistral", "gemma3", "gpt_oss"]
CHUNK = 16
SMALL = {"chunk_tokens": CHUNK, "cpu_budget": "16MiB", "cpu_slab": "2MiB"}
GREEDY = {"max_new_tokens": 12, "do_sample": False}
FULL_RESULT = {"return_dict_in_generate": True, "output_logits": True}


def same(a, b):
    return torch.equal(a.sequences, b.sequences) and all(map(torch.equal, a.logits, b.logits))


def hits(cached):
    return [each.hit_tokens for each in cached.last.sequences]


def generate_from_cropped(model, ids, length, **arguments):
    cache = cropped_cache(model, ids, length)
    return model.generate(ids, **{CACHE: cache}, **GREEDY, **FULL_RESULT, **arguments)


@pytest.fixture(params=RESTORABLE)
def any_model(request):
    return tiny(request.param)


@pytest.fixture
def llama():
    with CachedModel(tiny("llama"), **SMALL) as cached:
        yield cached


@pytest.fixture
def gemma():
    with CachedModel(tiny("gemma3"), **SMALL) as cached:
        yield cached


def test_a_cold_call_is_what_transformers_computes(any_model):
    ids = tokens(90)
    with CachedModel(any_model, **SMALL) as cached:
        result = cached.generate(ids, **GREEDY, **FULL_RESULT)
        assert hits(cached) == [0]
        assert cached.last.sequences[0].stored_chunks == 101 // CHUNK
    assert same(result, any_model.generate(ids, **GREEDY, **FULL_RESULT))


def test_a_hit_equals_transformers_own_cache_cropped_to_the_same_length(any_model):
    ids = tokens(90)
    with CachedModel(any_model, **SMALL) as cached:
        cold = cached.generate(ids, **GREEDY)
        result = cached.generate(ids, **GREEDY, **FULL_RESULT)
        report = cached.last.sequences[0]
    assert report.hit_tokens == 80
    assert report.tiers["cpu"] == 80
    assert same(result, generate_from_cropped(any_model, ids, 80))
    assert torch.equal(result.sequences, cold)


def test_another_ending_hits_the_common_prefix(any_model):
    first, ids = tokens(90), tokens(100, seed=1)
    ids[:, :70] = first[:, :70]
    with CachedModel(any_model, **SMALL) as cached:
        cached.generate(first, **GREEDY)
        result = cached.generate(ids, **GREEDY, **FULL_RESULT)
        assert hits(cached) == [64]
    # the oracle computes the common part with the first prompt, as the store's content was
    cache = cropped_cache(any_model, first, 64)
    oracle = any_model.generate(ids, **{CACHE: cache}, **GREEDY, **FULL_RESULT)
    assert same(result, oracle)


@pytest.mark.parametrize("name", RESTORABLE)
def test_corrupted_values_would_be_noticed(name, monkeypatch):
    """The negative control: what these tests compare does depend on what was restored."""
    ids = tokens(90)
    with CachedModel(tiny(name), **SMALL) as cached:
        cold = cached.generate(ids, **GREEDY)
        restore = CachedModel._restore

        def corrupt(self, row, place, buffers):
            restore(self, row, place, buffers)
            for _, values in buffers.layers:
                values[place, :, row.columns - 8 : row.columns] *= -1

        monkeypatch.setattr(CachedModel, "_restore", corrupt)
        result = cached.generate(ids, **GREEDY, **FULL_RESULT)
        assert hits(cached) == [80]
    assert not same(result, generate_from_cropped(cached.model, ids, 80))
    assert not torch.equal(result.sequences, cold)


def test_a_growing_conversation_hits_all_earlier_turns(any_model):
    with CachedModel(any_model, **SMALL) as cached:
        ids, known = tokens(40), 0
        for turn in range(4):
            answer = cached.generate(ids, **GREEDY)
            assert torch.equal(answer, any_model.generate(ids, **GREEDY)), turn
            if turn:
                # all full chunks of the turn before: its prompt and its answer but the last token
                assert hits(cached) == [(known - 1) // CHUNK * CHUNK]
            known = answer.shape[1]
            ids = torch.cat([answer, tokens(17, seed=turn + 1)], dim=1)


def test_without_store_generated_only_the_prompt_is_kept():
    with CachedModel(tiny("llama"), store_generated=False, **SMALL) as cached:
        answer = cached.generate(tokens(40), max_new_tokens=40, do_sample=False)
        assert cached.last.sequences[0].stored_chunks == 2
        cached.generate(answer, **GREEDY)
        assert hits(cached) == [32]


def test_a_prompt_of_whole_chunks_leaves_one_token_to_compute(llama):
    ids = tokens(64)
    llama.generate(ids, **GREEDY)
    result = llama.generate(ids, **GREEDY, **FULL_RESULT)
    assert hits(llama) == [63]
    assert same(result, generate_from_cropped(llama.model, ids, 63))


@pytest.mark.parametrize("name", WINDOWED)
def test_with_windows_a_prompt_of_whole_chunks_leaves_one_chunk_to_compute(name):
    ids = tokens(64)
    with CachedModel(tiny(name), **SMALL) as cached:
        cached.generate(ids, **GREEDY)
        result = cached.generate(ids, **GREEDY, **FULL_RESULT)
        assert hits(cached) == [48]
    assert same(result, generate_from_cropped(cached.model, ids, 48))


def test_a_prompt_below_one_chunk_is_served_and_its_answer_stored(llama):
    ids = tokens(5)
    answer = llama.generate(ids, **GREEDY)
    assert torch.equal(answer, llama.model.generate(ids, **GREEDY))
    assert llama.last.sequences[0].reason == "shorter than a chunk"
    llama.generate(answer, **GREEDY)
    assert hits(llama) == [16]


def test_sampling_draws_the_same_tokens_from_the_same_seed(llama):
    ids = tokens(90)
    settings = {"max_new_tokens": 30, "do_sample": True, "temperature": 2.0, "top_k": 0}
    torch.manual_seed(5)
    expected = llama.model.generate(ids, **settings)
    for hit in (0, 80):
        torch.manual_seed(5)
        assert torch.equal(llama.generate(ids, **settings), expected)
        assert hits(llama) == [hit]


class TestBatches:
    def ragged(self, *lengths, seed=0):
        """A batch of the beginnings of one text, padded on the left, and its mask."""
        text, width = tokens(200, seed=seed)[0], max(lengths)
        ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), []
        for row, length in enumerate(lengths):
            ids[row, width - length :] = text[:length]
            mask.append([0] * (width - length) + [1] * length)
        return ids, torch.tensor(mask)

    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    @pytest.mark.parametrize("with_mask", [True, False])
    def test_each_row_gets_its_own_hit(self, name, with_mask):
        model = tiny(name)
        ids, mask = self.ragged(90, 30, 60, 9)
        arguments = {"attention_mask": mask} if with_mask else {}
        expected = model.generate(ids, attention_mask=mask, **GREEDY)
        with CachedModel(model, **SMALL) as cached:
            cached.generate(self.ragged(60)[0], **GREEDY)
            assert torch.equal(cached.generate(ids, **arguments, **GREEDY), expected)
            assert hits(cached) == [48, 16, 48, 0]
            assert torch.equal(cached.generate(ids, **arguments, **GREEDY), expected)
            assert hits(cached) == [80, 16, 48, 0]
            assert [row.prompt_tokens for row in cached.last.sequences] == [90, 30, 60, 9]

    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_rows_that_begin_at_one_column_run_together_as_the_cropped_batch(self, name):
        model = tiny(name)
        ids, mask = self.ragged(90, 74)
        ids[1, 16:] = tokens(74, seed=9)[0]  # else both rows get the chunks of the first
        with CachedModel(model, **SMALL) as cached:
            cached.generate(ids, attention_mask=mask, **GREEDY)
            result = cached.generate(ids, attention_mask=mask, **GREEDY, **FULL_RESULT)
            assert hits(cached) == [80, 64]
        cache = cropped_cache(model, ids, 80, mask)
        oracle = model.generate(ids, attention_mask=mask, **{CACHE: cache}, **GREEDY, **FULL_RESULT)
        assert same(result, oracle)

    def test_a_result_for_the_whole_batch_needs_one_call(self, llama):
        ids, mask = self.ragged(90, 61)
        expected = llama.model.generate(ids, attention_mask=mask, **GREEDY, **FULL_RESULT)
        llama.generate(ids, attention_mask=mask, **GREEDY)
        result = llama.generate(ids, attention_mask=mask, **GREEDY, **FULL_RESULT)
        assert same(result, expected)
        assert hits(llama) == [0, 0]
        assert "begin alike" in llama.last.sequences[0].reason

    def test_several_samples_of_one_prompt_share_its_prefix(self, llama):
        settings = {"max_new_tokens": 9, "do_sample": True, "num_return_sequences": 3}
        ids = tokens(50)
        torch.manual_seed(1)
        expected = llama.model.generate(ids, temperature=3.0, **settings)
        for expected_hits in ([0, 0, 0], [48, 48, 48]):
            torch.manual_seed(1)
            assert torch.equal(llama.generate(ids, temperature=3.0, **settings), expected)
            assert hits(llama) == expected_hits
        assert len({tuple(row) for row in expected.tolist()}) == 3

    def test_a_row_that_ended_early_is_padded_and_its_padding_not_stored(self, llama):
        ids, mask = self.ragged(90, 62)
        free = llama.model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
        end = free[1, 90 + 3].item()
        settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": end}
        expected = llama.model.generate(ids, attention_mask=mask, **settings)
        for _ in range(2):
            result = llama.generate(ids, attention_mask=mask, **settings)
            assert torch.equal(result, expected)
        assert hits(llama) == [80, 48]
        longer = torch.cat([expected[1:, 28:], tokens(30)], dim=1)
        llama.generate(longer, attention_mask=torch.ones_like(longer), **GREEDY)
        assert hits(llama) == [64]  # 62 + 4 tokens belong to the row, the rest is padding


def test_a_damaged_chunk_on_disk_ends_the_hit_and_the_tokens_stay_right(any_model, tmp_path):
    ids = tokens(90)
    with CachedModel(any_model, tiers=[f"disk://{tmp_path}?budget=64MiB"], **SMALL) as cached:
        cold = cached.generate(ids, **GREEDY)
        assert cached.engine.flush(30).safe
        cached.engine.clear(tier="cpu")
        assert torch.equal(cached.generate(ids, **GREEDY), cold)
        assert cached.last.sequences[0].tiers["disk"] == 80
        cached.engine.clear(tier="cpu")
        last = [path for path in tmp_path.rglob("*-4-*-0") if path.is_file()]
        assert last
        for path in last:
            data = bytearray(path.read_bytes())
            data[4096] ^= 1
            path.write_bytes(data)
        assert torch.equal(cached.generate(ids, **GREEDY), cold)
        assert hits(cached) == [64]
        assert cached.last.sequences[0].reason != "end of prompt"


def test_rows_are_sorted_anew_when_one_restore_falls_short(tmp_path):
    ids, mask = TestBatches().ragged(90, 74)
    ids[1, 16:] = tokens(74, seed=9)[0]
    with CachedModel(tiny("llama"), tiers=[f"disk://{tmp_path}?budget=64MiB"], **SMALL) as cached:
        for row, start in ((0, 0), (1, 16)):
            cached.generate(ids[row : row + 1, start:], **GREEDY)
        cached.engine.flush(30)
        cached.engine.clear(tier="cpu")
        keys = cached.engine.keys(ids[1, 16:].numpy())
        name = str(keys.key(2, cached.engine.scope.digest)).split("-", 1)[1]
        (path,) = tmp_path.rglob(f"*{name}")
        path.write_bytes(path.read_bytes()[:4096] + bytes(path.stat().st_size - 4096))
        expected = cached.model.generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(cached.generate(ids, attention_mask=mask, **GREEDY), expected)
        assert hits(cached) == [80, 32]


def test_a_new_process_would_find_the_chunks_on_disk(tmp_path):
    settings = {**SMALL, "tiers": [f"disk://{tmp_path}?budget=64MiB"]}
    ids = tokens(90)
    with CachedModel(tiny("gemma3"), **settings) as cached:
        cold = cached.generate(ids, **GREEDY)
    with CachedModel(tiny("gemma3"), **settings) as cached:
        assert torch.equal(cached.generate(ids, **GREEDY), cold)
        assert cached.last.sequences[0].tiers["disk"] == 80
    with CachedModel(tiny("gemma3", initializer_range=0.2), **settings) as other:
        other.generate(ids, **GREEDY)
        assert hits(other) == [0]


def test_tenants_do_not_share(llama):
    ids = tokens(90)
    for salt, hit in (("a", 0), ("b", 0), ("", 0), ("a", 80)):
        llama.generate(ids, salt=salt, **GREEDY)
        assert hits(llama) == [hit]


def test_adapters_do_not_share(llama):
    ids = tokens(90)
    for adapter, hit in (("x-1", 0), ("x-2", 0), ("x-1", 80)):
        llama.generate(ids, adapter=adapter, **GREEDY)
        assert hits(llama) == [hit]


def test_more_tokens_than_were_set_aside_for_are_stored_too(gemma, monkeypatch):
    monkeypatch.setattr(call, "NEW_TOKENS", 4)
    ids = tokens(40)
    answer = gemma.generate(ids, max_new_tokens=100, do_sample=False)
    assert torch.equal(answer, gemma.model.generate(ids, max_new_tokens=100, do_sample=False))
    assert gemma.last.sequences[0].stored_chunks == 139 // CHUNK
    gemma.generate(answer, **GREEDY)
    assert hits(gemma) == [128]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_buffers_on_another_device_go_through_host_memory(name):
    ids = tokens(90)
    with CachedModel(tiny(name), **SMALL) as cached:
        shapes, device = cached._geometry.shapes, cached._geometry.device
        cached._pool = BufferPool(shapes, CHUNK, device, staged=True)
        cached.generate(ids, **GREEDY)
        result = cached.generate(ids, **GREEDY, **FULL_RESULT)
        assert hits(cached) == [80]
    assert same(result, generate_from_cropped(cached.model, ids, 80))


def test_the_cache_that_a_call_returns_belongs_to_the_caller(llama):
    ids = tokens(90)
    result = llama.generate(ids, **GREEDY, **FULL_RESULT)
    kept = [layer.keys.clone() for layer in result[CACHE].layers]
    for seed in (1, 2, 3):
        llama.generate(tokens(90, seed=seed), **GREEDY)
    assert all(map(torch.equal, kept, (layer.keys for layer in result[CACHE].layers)))
    longer = torch.cat([result.sequences, tokens(3)], dim=1)
    more = llama.model.generate(longer, **{CACHE: result[CACHE]}, **GREEDY)
    assert torch.equal(more, llama.model.generate(longer, **GREEDY))


def test_calls_inside_and_outside_of_inference_mode_mix(llama):
    ids = tokens(90)
    with torch.inference_mode():
        first = llama.generate(ids, **GREEDY)
    assert torch.equal(llama.generate(ids, **GREEDY), first)
    assert hits(llama) == [80]


def test_threads_may_call_at_once(llama):
    prompts = [tokens(70 + seed, seed=seed) for seed in range(4)]
    expected = [llama.model.generate(ids, **GREEDY) for ids in prompts]
    results = {}

    def work(number):
        for _ in range(3):
            results[number] = llama.generate(prompts[number], **GREEDY)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(results[number], expected[number]) for number in range(4))


def test_two_models_of_the_same_weights_can_share_an_engine():
    ids = tokens(90)
    with open_engine(tiny("llama"), **SMALL) as engine:
        with CachedModel(tiny("llama"), engine) as first:
            first.generate(ids, **GREEDY)
        with CachedModel(tiny("llama"), engine) as second:
            second.generate(ids, **GREEDY)
            assert hits(second) == [80]
        with pytest.raises(BadInput, match="or weights"):
            CachedModel(tiny("llama", initializer_range=0.2), engine)
        with pytest.raises(BadInput, match="cpu_budget"):
            CachedModel(tiny("llama"), engine, cpu_budget="1GiB")


def test_after_close_every_call_is_a_miss_and_still_right(llama):
    ids = tokens(90)
    cold = llama.generate(ids, **GREEDY)
    llama.close()
    assert torch.equal(llama.generate(ids, **GREEDY), cold)
    assert hits(llama) == [0]
