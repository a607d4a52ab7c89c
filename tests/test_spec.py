"""Sizes, windows and Hugging Face configs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import BadInput
from lmkv.spec import SHAPES, Kind, KVSpec, LayerGroup

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "growing", "fixed"),
    [
        ("smollm2-135m", 23_040, 0),
        ("llama-3.1-8b", 131_072, 0),
        ("llama-3.1-70b", 327_680, 0),
        ("qwen3-32b", 262_144, 0),
        ("deepseek-v3", 70_272, 0),
        ("gemma-3-27b", 81_920, 416 * MIB),
        ("gpt-oss-120b", 36_864, 4_718_592),
    ],
)
def test_published_bytes_per_token(name: str, growing: int, fixed: int) -> None:
    spec = KVSpec.from_hf_config(SHAPES[name])
    assert spec.bytes_per_token == growing
    assert spec.fixed_bytes == fixed


def test_llama_chunk_is_32_mib_and_deepseek_fp8_is_half_of_bf16() -> None:
    llama = KVSpec.from_hf_config(SHAPES["llama-3.1-8b"])
    assert llama.chunk_bytes(0) == 32 * MIB
    assert llama.groups[0].layer_page_bytes == 65_536
    fp8 = KVSpec.from_hf_config(SHAPES["deepseek-v3"], dtype="float8_e4m3fn")
    assert fp8.bytes_per_token == 35_136
    flash_mla = LayerGroup(Kind.MLA, tuple(range(61)), 64, 1, 656, dtype="uint8")
    assert flash_mla.bytes_per_token == 40_016


def test_groups_of_hybrid_models() -> None:
    gemma = KVSpec.from_hf_config(SHAPES["gemma-3-27b"])
    assert [g.kind for g in gemma.groups] == [Kind.FULL, Kind.SLIDING]
    assert gemma.groups[0].layers == (5, 11, 17, 23, 29, 35, 41, 47, 53, 59)
    assert len(gemma.groups[1].layers) == 52
    assert gemma.groups[1].bytes_per_token == 425_984
    oss = KVSpec.from_hf_config(SHAPES["gpt-oss-120b"])
    assert oss.groups[1].layers == tuple(range(0, 36, 2))


def test_recurrent_group_stores_one_state_a_chunk() -> None:
    spec = KVSpec(
        (LayerGroup(Kind.FULL, (3,), 16, 2, 64), LayerGroup(Kind.RECURRENT, (0, 1, 2), 16, state_bytes=1000)),
        chunk_tokens=64,
    )
    assert spec.bytes_per_token == 512
    assert spec.fixed_bytes == 3000
    assert spec.chunk_bytes(1) == 3000
    assert spec.pages(1) == 1
    assert [spec.page_mask(1, k) for k in range(3)] == [1, 0, 0]
    assert spec.needed_chunks(1, 5) == range(4, 5)
    assert spec.needed_chunks(0, 5) == range(5)
    assert spec.window_chunks(0) is None


def test_padding_is_stored_with_each_page_but_is_no_token() -> None:
    group = LayerGroup(Kind.FULL, (0, 1), 16, 2, 64, page_padding=48)
    assert group.layer_page_bytes == 16 * 512 + 48
    assert group.bytes_per_token == 1024
    assert group.chunk_bytes(64) == 2 * 4 * (16 * 512 + 48)


@given(window=st.integers(1, 200), page=st.integers(1, 8), pages=st.integers(1, 9))
def test_window_is_what_the_next_token_looks_back_on(window: int, page: int, pages: int) -> None:
    size = page * pages
    group = LayerGroup(Kind.SLIDING, (0,), page, 1, 4, window=window)
    spec = KVSpec((group,), chunk_tokens=size)
    chunks = -(-window // size) + 1
    boundary = chunks * size
    seen = range(boundary - (window - 1), boundary)
    needed = {token // size for token in seen}
    assert set(spec.needed_chunks(0, chunks)) == needed
    for chunk in range(chunks):
        mask = sum({1 << (token % size // page) for token in seen if token // size == chunk})
        assert spec.page_mask(0, chunks - 1 - chunk) == mask
    assert all(spec.page_mask(0, k) & ~spec.page_mask(0) == 0 for k in range(chunks))


def test_window_of_gpt_oss_and_gemma_at_256_token_chunks() -> None:
    oss = KVSpec.from_hf_config(SHAPES["gpt-oss-120b"])
    assert oss.window_chunks(1) == 1
    assert oss.page_mask(1) == 0xFF00
    gemma = KVSpec.from_hf_config(SHAPES["gemma-3-27b"])
    assert gemma.window_chunks(1) == 4
    assert gemma.page_mask(1, 3) == 0xFFFF
    assert gemma.page_mask(1, 4) == 0


GROUP: dict[str, Any] = {
    "kind": Kind.FULL, "layers": (0, 1), "page_tokens": 16, "kv_heads": 2, "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_tokens": 0}, "page_tokens"),
        ({"kv_heads": -1}, "kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim_v": -2}, "head_dim_v"),
        ({"dtype": "bfloat17"}, "bfloat17"),
        ({"layers": ()}, "layers"),
        ({"layers": (1, 0)}, "layers"),
        ({"layers": (1, 1)}, "layers"),
        ({"layers": (-1, 1)}, "layers"),
        ({"window": 5}, "window"),
        ({"state_bytes": 5}, "state_bytes"),
        ({"page_padding": -1}, "page_padding"),
        ({"kind": Kind.SLIDING}, "window"),
        ({"kind": Kind.MLA, "head_dim_v": 3}, "head_dim_v"),
        ({"kind": Kind.RECURRENT, "state_bytes": 8}, "kv_heads"),
        ({"kind": Kind.RECURRENT, "kv_heads": 0, "head_dim": 0}, "state_bytes"),
    ],
)
def test_a_group_with_wrong_numbers_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        LayerGroup(**GROUP | change)


@pytest.mark.parametrize("chunk_tokens", [0, -16, 24, 8, 16 * 257])
def test_chunk_must_be_one_to_256_pages(chunk_tokens: int) -> None:
    with pytest.raises(BadInput, match="chunk_tokens"):
        KVSpec((LayerGroup(**GROUP),), chunk_tokens)


def test_spec_without_groups_or_shards_is_refused() -> None:
    with pytest.raises(BadInput):
        KVSpec((), 256)
    with pytest.raises(BadInput):
        KVSpec((LayerGroup(**GROUP),), 256, shards=0)


def test_geometry_changes_with_everything_that_changes_bytes() -> None:
    sliding = {"kind": Kind.SLIDING, "window": 64}
    changes: list[dict[str, Any]] = [
        {}, {"kind": Kind.FULL, "window": 0}, {"layers": (0, 2)}, {"page_tokens": 32},
        {"kv_heads": 4}, {"head_dim": 32}, {"head_dim_v": 32}, {"dtype": "float16"},
        {"window": 65}, {"page_padding": 16},
    ]  # fmt: skip
    groups = [GROUP | sliding | change for change in changes]
    specs = [KVSpec((LayerGroup(**group),), 256) for group in groups]
    specs += [KVSpec(specs[0].groups, 128), KVSpec(specs[0].groups, 256, shards=2)]
    specs += [KVSpec(specs[0].groups * 2, 256)]
    specs += [KVSpec((LayerGroup(Kind.RECURRENT, (0,), 16, state_bytes=size),), 256) for size in (8, 9)]
    assert len({spec.geometry() for spec in specs}) == len(specs)
    assert len({spec.geometry_id for spec in specs}) == len(specs)


def test_geometry_is_a_stable_text() -> None:
    spec = KVSpec((LayerGroup(**GROUP),), 64, shards=2)
    assert spec.geometry() == (
        "chunk_tokens=64 shards=2\n"
        "kind=full layers=0,1 page_tokens=16 kv_heads=2 head_dim=64 head_dim_v=64 dtype=bfloat16 "
        "window=0 state_bytes=0 page_padding=0"
    )
    assert spec == copy.deepcopy(spec)
    assert hash(spec) == hash(copy.deepcopy(spec))
    assert spec.kv_dtype == "bfloat16"


def test_numbers_and_names_are_made_canonical() -> None:
    given_list = LayerGroup("full", [0, 1], 16, 2, 64, dtype="torch.bfloat16")  # type: ignore[arg-type]
    assert given_list == LayerGroup(**GROUP)


LLAMA = SHAPES["llama-3.1-8b"]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "dtype"),
        (LLAMA | {"model_type": "rwkv"}, "rwkv"),
        (LLAMA | {"model_type": None}, "model_type"),
        (LLAMA | {"num_hidden_layers": None}, "num_hidden_layers"),
        (LLAMA | {"num_attention_heads": "32"}, "num_attention_heads"),
        (LLAMA | {"hidden_size": 0}, "hidden_size"),
        (LLAMA | {"dtype": None}, "dtype"),
        (LLAMA | {"dtype": "int5"}, "int5"),
        (LLAMA | {"layer_types": ["linear_attention"] * 32}, "linear_attention"),
        (LLAMA | {"layer_types": ["full_attention"]}, "layer_types"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 32}, "sliding_window"),
        (LLAMA | {"model_type": "mistral"}, "sliding_window"),
        (SHAPES["deepseek-v3"] | {"kv_lora_rank": None}, "kv_lora_rank"),
        (SHAPES["deepseek-v3"] | {"index_head_dim": 128}, "index_head_dim"),
        (SHAPES["gemma-3-27b"] | {"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_unsupported_configs_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        KVSpec.from_hf_config(config)


def test_text_config_inside_a_multimodal_config() -> None:
    text = {k: v for k, v in SHAPES["gemma-3-27b"].items() if k != "dtype"}
    whole = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
    assert KVSpec.from_hf_config(whole) == KVSpec.from_hf_config(SHAPES["gemma-3-27b"])


def test_layer_types_decide_over_the_models_rule() -> None:
    types = ["full_attention", "sliding_attention"] * 18
    spec = KVSpec.from_hf_config(SHAPES["gpt-oss-120b"] | {"layer_types": types})
    assert spec.groups[0].layers == tuple(range(0, 36, 2))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LlamaConfig", {}),
        ("MistralConfig", {"sliding_window": 100}),
        ("MixtralConfig", {}),
        ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 5}),
        ("Qwen3Config", {"use_sliding_window": True, "max_window_layers": 5}),
        ("Qwen3Config", {}),
        ("Gemma2Config", {}),
        ("Gemma3TextConfig", {}),
        ("GptOssConfig", {}),
    ],
)
def test_rules_agree_with_transformers(name: str, settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**settings, dtype="bfloat16").to_dict()
    ours = KVSpec.from_hf_config({k: v for k, v in config.items() if k != "layer_types"})
    theirs = KVSpec.from_hf_config(config)
    assert ours == theirs
    assert sum(len(g.layers) for g in ours.groups) == config["num_hidden_layers"]
