"""Every layout vLLM can give its pages: what is copied out of one cache and into another is what torch would copy.

The caches are made by vLLM's own code, on CPU tensors, in all six layouts; a backend that can only use some of them
does not matter to the copies.
"""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sim.host import Memory
from sim.models import Model, full, mamba, mla, sliding, vllm_config
from sim.rank import views
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, KVQuantMode
from vllm.v1.kv_cache_layout import KVCacheLayout

from lmkv import _native, chunk
from lmkv.codec import Meanings, Rope, meanings, split
from lmkv.codec.klt_reference import rotate
from lmkv.errors import ConfigError
from lmkv.keys import ChunkKey
from lmkv.pages import PagedKV
from lmkv.rows import PageRows
from lmkv.spec import Kind, KVSpec, LayerGroup
from lmkv_vllm.geometry import Plan, axes, describe, rope
from lmkv_vllm.options import Options
from lmkv_vllm.worker import Worker

LAYOUTS = [layout.name for layout in KVCacheLayout]
BLOCKS = 13


@dataclass(frozen=True)
class Case:
    """Layers, kernel blocks they are split into (0: not at all), and layouts vLLM cannot give them."""

    layers: tuple[KVCacheSpec, ...]
    kernel_block: int = 0
    never: frozenset[str] = field(default_factory=frozenset)


SCATTERED = frozenset({"LHBNC", "BHLNC"})
SPLIT = frozenset(LAYOUTS) - {"LBHNC", "LBNHC"}
SCALES = {"dtype": torch.int8, "kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD, "state_content_bytes": 2 * (8 + 4)}
CASES = {
    "full": Case((full(),) * 3),
    "pages of two sizes": Case(
        (full(), full(num_kv_heads=4), full()), never=frozenset({"LBHNC", "LBNHC", "LHBNC", "BHLNC"})
    ),
    "other V width": Case((full(head_size_v=4),) * 2),
    "padded page": Case((full(page_size_padded=320),) * 2, never=SCATTERED),
    "kernel split": Case((full(block_size=16),) * 2, 4, SPLIT),
    "aliasing groups": Case((sliding(), sliding(), full())),
    "aliasing padded state": Case((mamba(), mamba(), full())),
    "MLA": Case((mla(),) * 3),
    "MLA aligned": Case((mla(alignment=256),) * 2),
    "MLA kernel split": Case((mla(block_size=8),) * 2, 4, frozenset({"BLHNC", "BLNHC", "BHLNC"})),
    "fp8": Case((full(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),) * 2),
    "fp8 torch dtype": Case((full(dtype=torch.float8_e4m3fn),) * 2),
    "fp8 kernel split": Case((full(dtype=torch.uint8, block_size=8),) * 2, 4, SPLIT),
    "scales per token and head": Case((full(**SCALES),) * 2),
    "scales, padded": Case((full(**SCALES, page_size_padded=256),) * 2, never=SCATTERED),
}
PAIRS = [(name, layout) for name, case in CASES.items() for layout in LAYOUTS if layout not in case.never]


class Cache:
    """A KV cache of a case in a layout, full of random bytes."""

    def __init__(self, case: Case, layout: str, blocks: int = BLOCKS, seed: int = 0) -> None:
        self.case = case
        self.specs = {f"model.layers.{i}.attn": spec for i, spec in enumerate(case.layers)}
        block = max(spec.block_size for spec in case.layers)
        config = vllm_config(Model("layouts", case.layers, chunk=2 * block), kv_cache_layout=layout)
        groups = get_kv_cache_groups(config, dict(self.specs))
        one = get_kv_cache_config_from_groups(config, groups, 1 << 24)
        per_block = one.kv_cache_tensors[0].size // one.num_blocks
        self.config: KVCacheConfig = get_kv_cache_config_from_groups(config, groups, blocks * per_block)
        self.config.kv_cache_layout = layout
        self.tensors: dict[str, Any] = views(self.config, self.specs, case.kernel_block or None)
        self.raw = next(iter(self.tensors.values())).view(torch.uint8).untyped_storage()
        self.bytes = torch.frombuffer(_native.memory(self.raw.data_ptr(), self.raw.nbytes()), dtype=torch.uint8)
        self.bytes.copy_(torch.randint(256, self.bytes.shape, dtype=torch.uint8, generator=seeded(seed)))
        self.plan = Plan.of(config, self.config, 2 * block)
        self.spec, self.planes, self.places = describe(self.plan, self.config, self.tensors)
        self.pages = PagedKV(self.spec, self.planes, keep=self.tensors)

    def layers(self, group: int) -> list[torch.Tensor]:
        """A stored group's layers as [block, ...] bytes."""
        number = self.plan.groups[self.places[group]].number
        tensors = [self.tensors[name] for name in self.config.kv_cache_groups[number].layer_names]
        found = [each.view(torch.uint8).unflatten(0, (self.config.num_blocks, -1)) for each in tensors]
        return [each for each in found if each[0].numel() == self.spec.groups[group].layer_page_bytes]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(cache: Cache, count: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """Random blocks for ``count`` pages of every group; no block belongs to two groups."""
    order = np.random.default_rng(seed).permutation(np.arange(1, cache.config.num_blocks))
    sizes = [cache.spec.pages(g) * count for g in range(len(cache.spec.groups))]
    return [np.array(part, np.int64) for part in np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])]


def carry(source: Cache, target: Cache, chunks: int = 1, absent: bool = False) -> None:
    """Copy chunks out of one cache and into another through containers, then compare with torch indexing."""
    given, taken = ids(source, chunks, 1), ids(target, chunks, 2)
    if absent:
        for each in given:
            each[0] = -1
    tokens = chunks * source.spec.chunk_tokens
    out = PageRows(source.spec, source.pages, given, 0, tokens)
    back = PageRows(
        target.spec, target.pages, [np.where(g < 0, -1, t) for g, t in zip(given, taken, strict=True)], 0, tokens
    )
    containers = []
    for group in range(len(source.spec.groups)):
        for i in range(chunks):
            key = ChunkKey(bytes(16), bytes(8), bytes([i]) * 32, bytes(8), i, group, 0)
            containers.append((key, Memory(chunk.container_bytes(source.spec, group))))
    out.fill(containers)
    wanted = target.bytes.clone()
    back.scatter(containers)
    found = target.bytes.clone()
    target.bytes.copy_(wanted)
    for group in range(len(source.spec.groups)):
        there = given[group] >= 0
        for ours, theirs in zip(source.layers(group), target.layers(group), strict=True):
            theirs[torch.from_numpy(taken[group][there])] = ours[torch.from_numpy(given[group][there])]
    assert torch.equal(found, target.bytes)


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_pages_come_back_whole_and_nothing_else_is_touched(name: str, layout: str) -> None:
    chunks = 1 if "aliasing" in name else 2
    carry(Cache(CASES[name], layout), Cache(CASES[name], layout, BLOCKS + 4, seed=5), chunks)


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_absent_pages_are_left_out(name: str, layout: str) -> None:
    carry(Cache(CASES[name], layout), Cache(CASES[name], layout, BLOCKS + 4, seed=5), absent=True)


@pytest.mark.parametrize("name", CASES)
def test_layouts_share_chunks_only_where_their_bytes_are_equal(name: str) -> None:
    caches = [
        Cache(CASES[name], layout, 17, seed=i) for i, layout in enumerate(LAYOUTS) if layout not in CASES[name].never
    ]
    for one, other in itertools.permutations(caches, 2):
        if one.pages.layout == other.pages.layout:
            assert one.spec.geometry() == other.spec.geometry()
            carry(one, other)


def test_layouts_that_order_heads_and_tokens_differently_are_told_apart() -> None:
    text = {layout: Cache(CASES["full"], layout).pages.layout for layout in LAYOUTS}
    assert text["LBHNC"] == text["BLHNC"] == text["BHLNC"] == text["LHBNC"]
    assert text["LBNHC"] == text["BLNHC"] != text["LBHNC"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["full", "other V width", "fp8 torch dtype", "MLA"])
def test_codecs_are_told_the_order_of_the_axes(name: str, layout: str) -> None:
    """K and V of a stored chunk, by the axes that were told, are those of vLLM's [block, head, token, K and V]."""
    if layout in CASES[name].never:
        pytest.skip("vLLM has no such pages")
    cache = Cache(CASES[name], layout)
    known = Meanings.of({cache.spec.geometry_id: meanings(cache.spec, axes(cache.spec, cache.planes))})
    key, slot = (
        ChunkKey(bytes(16), bytes(8), bytes(32), bytes(8), 0, 0, 0),
        Memory(chunk.container_bytes(cache.spec, 0)),
    )
    given = ids(cache, 1, 1)
    PageRows(cache.spec, cache.pages, given, 0, cache.spec.chunk_tokens).fill([(key, slot)])
    view = _native.memory(slot.address, chunk.container_bytes(cache.spec, 0))
    header = chunk.parse(view)
    (part,) = header.parts
    shape = known.shape_of(header, part)
    assert shape is not None
    keys, values = split(view[part.offset : part.offset + part.raw], shape)
    for n, tensor in enumerate(cache.tensors.values()):
        pages = tensor[torch.from_numpy(given[0])].transpose(1, 2).contiguous().view(torch.uint8).numpy()
        found = np.concatenate([keys[n], values[n]], -1)
        np.testing.assert_array_equal(np.ascontiguousarray(found).view(np.uint8), pages)


PLAIN = LayerGroup(Kind.FULL, (0, 1), 16, 2, 64)


def embedding(theta: float = 1e4, style: bool = True, **scaling: object) -> RotaryEmbedding:
    """As vLLM makes it for a model with heads of 64."""
    with set_current_vllm_config(VllmConfig()):
        return get_rope(64, 256, style, {"rope_theta": theta, "rope_type": "default", **scaling}, torch.float32)


def told(
    monkeypatch: pytest.MonkeyPatch, *made: RotaryEmbedding, group: LayerGroup = PLAIN, **config: object
) -> Rope | None:
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", dict(enumerate(made)))
    text = SimpleNamespace(**config)
    return rope(KVSpec((group,), 256), SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text)))


@pytest.mark.parametrize("style", [True, False])
@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"partial_rotary_factor": 0.5},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=["plain", "half", "llama3", "yarn"],
)  # fmt: skip
def test_codecs_are_told_how_keys_are_rotated(
    monkeypatch: pytest.MonkeyPatch, scaling: dict[str, Any], style: bool
) -> None:
    """Keys that are rotated as told are those that vLLM rotates."""
    module = embedding(3e4, style, **scaling)
    known = told(monkeypatch, module, module)
    assert known is not None
    keys = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    theirs = module.forward_native(torch.arange(100), keys.clone(), keys.clone())[1]
    mine = keys.T.contiguous().numpy()
    rotate(mine, known, 0)
    np.testing.assert_allclose(mine.T, theirs.numpy(), atol=2e-4)
    assert len(known.inv_freq) == (16 if "partial_rotary_factor" in scaling else 32)


def test_what_is_not_rotated_by_the_position_alone_and_alike_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = embedding()
    assert told(monkeypatch, plain) is not None
    assert told(monkeypatch) is None
    assert told(monkeypatch, plain, embedding(1e6)) is None
    assert told(monkeypatch, embedding(rope_type="dynamic", factor=2.0)) is None
    assert told(monkeypatch, plain, no_rope_layers=[1, 1, 0]) is None
    assert told(monkeypatch, plain, group=LayerGroup(Kind.MLA, (0,), 16, 1, 576)) is None
    assert told(monkeypatch, plain, group=LayerGroup(Kind.SLIDING, (0,), 16, 1, 64, window=64)) is None
    assert told(monkeypatch, plain, group=LayerGroup(Kind.FULL, (0,), 16, 1, 32)) is None


def test_pages_of_another_make_have_no_axes() -> None:
    for case, layout in (("kernel split", "LBHNC"), ("scales, padded", "LBHNC")):
        cache = Cache(CASES[case], layout)
        assert axes(cache.spec, cache.planes) == [""]


@pytest.mark.parametrize("codec", ["kch", "cachegen"])
def test_a_codec_that_must_know_the_axes_is_refused_at_start_on_a_cpu(place: Path, codec: str) -> None:
    """By a host service of its own, before anything is stored."""
    cache = Cache(CASES["full"], "LBHNC")
    extra = {"socket": str(place / "socket"), "cpu_budget": "16MiB", "tiers": [f"disk://{place}/disk?codec={codec}"]}
    worker = Worker(vllm_config(Model("layouts", cache.case.layers)), cache.config, Options.of(extra), (0, 0))
    with closing(worker), pytest.raises(ConfigError) as caught:
        worker.register(cache.tensors)
    assert caught.value.key == "tiers.0.codec"
    assert f"{codec} must know how pages are laid out, which it is not told here; these work: " in str(caught.value)
    assert "xpl" in str(caught.value)


def test_a_kernel_split_is_told_apart() -> None:
    case = CASES["kernel split"]
    assert Cache(case, "LBHNC").pages.layout != Cache(Case(case.layers), "LBHNC").pages.layout


def test_padding_between_pages_is_not_stored() -> None:
    plain, padded = Cache(CASES["full"], "LBHNC"), Cache(CASES["padded page"], "LBHNC")
    assert padded.spec.groups[0].layer_page_bytes == plain.spec.groups[0].layer_page_bytes == 256
    assert padded.pages.layout.replace("2*", "3*") == plain.pages.layout
