"""Which models and calls lmkv_hf serves, which it leaves to transformers, which it refuses."""

# ruff: noqa: E402 - torch and transformers are optional
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import tiny, tokens

from lmkv.errors import BadInput, ConfigError
from lmkv.fingerprint import fingerprint
from lmkv.spec import Kind
from lmkv_hf import CachedModel
from lmkv_hf.geometry import CACHE, Geometry
from lmkv_hf.report import Report, SequenceReport
from lmkv_hf.rows import left_padding
from lmkv_hf.weights import sampled_tensors

SMALL = {"chunk_tokens": 16, "cpu_budget": "16MiB", "cpu_slab": "2MiB"}
GREEDY = {"max_new_tokens": 6, "do_sample": False}
ROPE = {"rope_theta": 1e4, "factor": 2.0}


@pytest.fixture(scope="module")
def cached():
    with CachedModel(tiny("llama"), **SMALL) as cached:
        yield cached


class TestGeometry:
    def groups(self, name, chunk_tokens=64, **changes):
        return Geometry.of(tiny(name, **changes), chunk_tokens, "x").spec.groups

    def test_full_attention_is_one_group_with_one_page_a_chunk(self):
        (group,) = self.groups("llama")
        assert (group.kind, group.layers, group.page_tokens) == (Kind.FULL, (0, 1, 2, 3), 64)
        assert (group.kv_heads, group.head_dim, group.head_dim_v) == (2, 16, 16)
        assert group.dtype == "float32"

    def test_window_layers_are_a_group_of_their_own_with_smaller_pages(self):
        sliding, full = self.groups("gemma3", sliding_window=96)
        assert (sliding.kind, sliding.layers) == (Kind.SLIDING, (0, 1, 2, 3, 4, 6))
        assert (sliding.window, sliding.page_tokens) == (96, 32)
        assert (full.kind, full.layers, full.page_tokens) == (Kind.FULL, (5,), 64)

    def test_an_odd_window_has_pages_of_a_chunk(self):
        (group,) = self.groups("mistral", sliding_window=33)
        assert (group.window, group.page_tokens) == (33, 64)

    def test_latent_attention_keeps_what_transformers_caches(self):
        (group,) = self.groups("deepseek_v3")
        model = tiny("deepseek_v3")
        cache = transformers.DynamicCache(config=model.config)
        model(tokens(3), **{CACHE: cache})
        keys, values = cache.layers[0].keys, cache.layers[0].values
        assert (group.kv_heads, group.head_dim, group.head_dim_v) == (keys.shape[1], keys.shape[3], values.shape[3])

    def test_the_dtype_is_the_models(self):
        model = tiny("llama", dtype=torch.bfloat16)
        assert Geometry.of(model, 16, "x").spec.kv_dtype == "bfloat16"
        ids = tokens(50)
        with CachedModel(model, **SMALL) as cached:
            cold = cached.generate(ids, **GREEDY)
            assert torch.equal(cold, model.generate(ids, **GREEDY))
            assert torch.equal(cached.generate(ids, **GREEDY), cold)
            assert cached.last.hit_tokens == 48

    def test_the_layout_does_not_depend_on_batch_or_length(self, cached):
        pool, spec = cached._pool, cached.spec
        layouts = {pool.take(b, n).pages(spec, b - 1, 3).layout for b, n in ((1, 50), (3, 700))}
        assert layouts == {cached.engine.layout}


class TestRefusedModels:
    def refused(self, model, match):
        with pytest.raises(BadInput, match=match):
            CachedModel(model, **SMALL)

    def test_recurrent_layers(self):
        self.refused(tiny("qwen3_next"), "LinearAttentionLayer")

    def test_encoder_decoders(self):
        config = transformers.T5Config(vocab_size=64, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2)
        self.refused(transformers.T5ForConditionalGeneration(config).eval(), "encoder-decoder")

    def test_training_mode(self):
        self.refused(tiny("llama").train(), "eval")

    @pytest.mark.parametrize("kind", ["dynamic", "longrope"])
    def test_rope_that_depends_on_the_length(self, kind):
        model = tiny("llama")
        model.config.rope_parameters = {"rope_type": kind, **ROPE}
        self.refused(model, kind)

    def test_rope_that_depends_on_the_length_in_one_layer_type(self):
        model = tiny("gemma3")
        model.config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
        self.refused(model, "dynamic")

    def test_rope_of_images(self):
        model = tiny("llama")
        model.config.rope_parameters = {"rope_type": "default", "mrope_section": [4, 2, 2]}
        self.refused(model, "images")

    def test_attention_to_later_tokens(self):
        model = tiny("gemma3")
        model.config.use_bidirectional_attention = True
        self.refused(model, "not causal")

    def test_layers_that_never_use_the_cache(self):
        model = tiny("llama")
        model.model.layers = model.model.layers[:2]
        self.refused(model, "layer 2")

    def test_wrong_settings_name_the_key(self):
        with pytest.raises(ConfigError, match=r"cpu_budgt.*cpu\.budget"):
            CachedModel(tiny("llama"), cpu_budgt="1GiB")


class TestRefusedCalls:
    @pytest.mark.parametrize("name", ["past_key_values", "cache"])
    def test_a_cache_of_the_callers_own(self, cached, name):
        cache = transformers.DynamicCache(config=cached.model.config)
        with pytest.raises(BadInput, match=name):
            cached.generate(tokens(20), **{name: cache}, **GREEDY)

    @pytest.mark.parametrize("kind", ["static", "offloaded", "quantized"])
    def test_another_kind_of_cache(self, cached, kind):
        with pytest.raises(BadInput, match=kind):
            cached.generate(tokens(20), cache_implementation=kind, **GREEDY)

    def test_text_without_a_tokenizer(self, cached):
        with pytest.raises(BadInput, match="tokenizer"):
            cached.generate("text", **GREEDY)

    def test_an_active_adapter_without_a_name(self, cached, monkeypatch):
        monkeypatch.setattr(cached.model, "_hf_peft_config_loaded", True, raising=False)
        monkeypatch.setattr(cached.model, "active_adapters", lambda: ["tuned"], raising=False)
        with pytest.raises(BadInput, match="tuned"):
            cached.generate(tokens(20), **GREEDY)
        cached.generate(tokens(20), adapter="tuned-3", **GREEDY)
        assert cached.last.sequences


class TestPlainCalls:
    """What runs as transformers alone; the result is its result, and the report says why."""

    def plain(self, cached, reason, ids=None, **arguments):
        ids = tokens(40) if ids is None else ids
        stored = cached.engine.stats()["stored_chunks"]
        expected = cached.model.generate(ids, **{**GREEDY, **arguments})
        assert torch.equal(cached.generate(ids, **{**GREEDY, **arguments}), expected)
        assert reason in cached.last.plain
        assert not cached.last.sequences
        assert cached.engine.stats()["stored_chunks"] == stored

    def test_beam_search(self, cached):
        self.plain(cached, "beam_search", num_beams=2)

    def test_assisted_decoding(self, cached):
        self.plain(cached, "assisted", prompt_lookup_num_tokens=2)

    def test_no_cache(self, cached):
        self.plain(cached, "use_cache", use_cache=False)

    def test_inputs_that_are_not_tokens(self, cached):
        embeds = cached.model.get_input_embeddings()(tokens(40)).detach()
        expected = cached.model.generate(inputs_embeds=embeds, **GREEDY)
        assert torch.equal(cached.generate(inputs_embeds=embeds, **GREEDY), expected)
        assert "inputs_embeds" in cached.last.plain

    def test_positions_of_the_callers_own(self, cached):
        self.plain(cached, "position_ids", position_ids=torch.arange(40)[None] + 3)

    def test_hidden_states_of_the_prompt(self, cached):
        arguments = {"return_dict_in_generate": True, "output_hidden_states": True, **GREEDY}
        cached.generate(tokens(40), **GREEDY)
        result = cached.generate(tokens(40), **arguments)
        assert result.hidden_states[0][0].shape[1] == 40
        assert "hidden_states" in cached.last.plain

    @pytest.mark.parametrize("masked", [slice(3, 5), slice(38, 40), slice(0, 40)])
    def test_masks_other_than_left_padding(self, cached, masked):
        mask = torch.ones(1, 40, dtype=torch.long)
        mask[0, masked] = 0
        self.plain(cached, "left padding", attention_mask=mask)


class TestServedCalls:
    def test_the_model_takes_its_settings_from_a_generation_config(self, cached):
        config = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
        result = cached.generate(tokens(40), generation_config=config)
        assert torch.equal(result, cached.model.generate(tokens(40), generation_config=config))
        assert result.shape[1] == 43

    def test_inputs_may_be_named(self, cached):
        ids = tokens(40, seed=4)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        first = cached.generate(**inputs, **GREEDY)
        assert torch.equal(cached.generate(**inputs, **GREEDY), first)
        assert cached.last.hit_tokens == 32

    def test_a_limit_on_the_whole_length(self, cached):
        ids = tokens(40, seed=5)
        for _ in range(2):
            result = cached.generate(ids, max_length=45, do_sample=False)
            assert torch.equal(result, cached.model.generate(ids, max_length=45, do_sample=False))

    def test_the_dynamic_cache_may_be_named(self, cached):
        cached.generate(tokens(40), cache_implementation="dynamic", **GREEDY)
        assert cached.last.sequences

    def test_processors_and_streamers_see_what_they_always_see(self, cached):
        class Log:
            def __init__(self):
                self.seen = []

            def put(self, value):
                self.seen.append(value.tolist())

            def end(self):
                self.seen.append("end")

            def __call__(self, ids, scores):
                self.seen.append(ids.shape[1])
                return scores

        ids, logs = tokens(40, seed=6), []
        for generate in (cached.model.generate, cached.generate, cached.generate):
            log = Log()
            generate(ids, streamer=log, logits_processor=[log], **GREEDY)
            logs.append(log.seen)
        assert cached.last.hit_tokens == 32
        assert logs[0] == logs[1] == logs[2]

    def test_a_prefill_in_pieces(self, cached):
        ids = tokens(90, seed=7)
        expected = cached.model.generate(ids, prefill_chunk_size=13, **GREEDY)
        for hit in (0, 80):
            result = cached.generate(ids, prefill_chunk_size=13, **GREEDY)
            assert torch.equal(result, expected)
            assert cached.last.hit_tokens == hit


class TestWeights:
    def name(self, model):
        return fingerprint(sampled_tensors(model), model.config.to_dict())

    def test_the_same_weights_have_the_same_fingerprint(self):
        assert self.name(tiny("llama")) == self.name(tiny("llama"))

    def test_one_changed_weight_config_value_or_dtype_changes_it(self):
        model, before = tiny("llama"), self.name(tiny("llama"))
        with torch.no_grad():
            model.model.layers[2].mlp.up_proj.weight[5, 5] += 1e-3
        changed = tiny("llama")
        changed.config.rms_norm_eps = 1e-4
        names = {self.name(model), self.name(changed), self.name(tiny("llama").half()), before}
        assert len(names) == 4

    def test_a_weights_id_takes_its_place(self):
        ids = tokens(40)
        with CachedModel(tiny("llama"), weights_id="mine-1", **SMALL) as cached:
            assert cached.engine.scope.weights == "mine-1"
            cached.generate(ids, **GREEDY)


@pytest.mark.parametrize(
    ("rows", "pads"),
    [
        ([[1, 1, 1]], [0]),
        ([[0, 1, 1], [1, 1, 1], [0, 0, 1]], [1, 0, 2]),
        ([[1, 1, 0]], None),
        ([[1, 0, 1]], None),
        ([[0, 0, 0], [1, 1, 1]], None),
    ],
)
def test_left_padding(rows, pads):
    assert left_padding(torch.tensor(rows)) == pads


def test_reports_print_themselves():
    one = SequenceReport(100, 96, {"cpu": 64, "disk": 32}, 2, "end of prompt")
    line = "96 of 100 prompt tokens restored (64 from cpu, 32 from disk): end of prompt"
    assert str(Report((one, one))).splitlines() == [f"{line}; 2 chunks stored"] * 2
    assert Report((one, one)).hit_tokens == 192
    assert str(Report(plain="use_cache=False")) == "ran without lmkv: use_cache=False"
