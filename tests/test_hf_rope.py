"""What lmkv_hf tells codecs of a model's keys: the frequencies of the config, checked on the keys themselves."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import tiny
from transformers import DynamicCache

from lmkv import chunk
from lmkv.codec import split
from lmkv.codec.shape import Meaning
from lmkv_hf import CachedModel
from lmkv_hf.geometry import Geometry


def ropes(name: str, **changes: object):
    return Geometry.of(tiny(name, **changes), 64, "w").ropes


def angles(theta: float, dim: int = 16) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_rope_has_the_frequencies_of_theta(dtype):
    (rope,) = ropes("llama", dtype=dtype, rope_parameters={"rope_type": "default", "rope_theta": 50000.0})
    assert rope is not None
    assert (rope.interleaved, rope.factor) == (False, 1.0)
    assert rope.inv_freq == pytest.approx(angles(50000.0), rel=1e-6)


def test_static_scaling_is_in_the_frequencies_and_yarns_factor_apart():
    (linear,) = ropes("llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    assert linear is not None
    assert linear.inv_freq == pytest.approx([each / 4 for each in angles(1e4)], rel=1e-6)
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 1024}
    (rope,) = ropes("llama", rope_parameters=yarn)
    assert rope is not None
    assert rope.factor == pytest.approx(0.1 * math.log(4) + 1)
    assert rope.inv_freq[-1] == pytest.approx(angles(1e4)[-1] / 4, rel=1e-6)


def test_layer_types_have_their_own_and_sinks_do_not_hide_it():
    near, far = ropes("gemma3")
    assert near is not None
    assert far is not None
    assert near.inv_freq[0] == far.inv_freq[0] == 1.0
    assert near.inv_freq[1] != far.inv_freq[1]
    first, second = ropes("gpt_oss")
    assert first == second
    assert first is not None


def test_what_is_not_rotated_over_the_first_channels_is_not_known():
    assert ropes("deepseek_v3") == (None,)


def test_an_engine_of_a_model_knows_its_keys():
    """Split by the engine's own shape, a stored chunk holds transformers' keys and values."""
    model, count = tiny("llama", dtype=torch.bfloat16), 64
    ids = torch.randint(2, 256, (1, count + 1), generator=torch.Generator().manual_seed(1))
    with CachedModel(model, chunk_tokens=count, cpu_budget="16MiB") as cached:
        cached.generate(ids, max_new_tokens=1, do_sample=False)
        engine = cached.engine
        key = engine.keys(ids[0].numpy()).key(0, engine.scope.digest, 0, 0)
        slot = engine.storage.cpu.hold(key)
        assert slot is not None
        view = slot.view(engine.sizes[0])
        header = chunk.parse(view)
        meaning = next(iter(engine.storage.meanings))
        assert isinstance(meaning, Meaning)
        assert meaning.rope is not None
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :count], past_key_values=cache, use_cache=True)
        for part in header.parts:
            shape = engine.storage.meanings.shape_of(header, part)
            assert (shape.layers, shape.heads, shape.page_tokens) == (part.layers, 2, count)
            keys, values = split(view[part.offset : part.offset + part.raw], shape)
            for n in range(part.layers):
                layer = cache.layers[part.first_layer + n]
                for mine, theirs in ((keys, layer.keys), (values, layer.values)):
                    wanted = theirs[0].transpose(0, 1).contiguous().view(torch.int16).numpy()
                    assert (mine[n, 0].view("i2") == wanted).all()
        engine.storage.arena.release(slot)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "deepseek_v3"])
def test_a_models_chunks_go_through_a_codec_of_its_axes(name, tmp_path):
    """What `kch` gives back from disk is near what the model computed, in every group."""
    model = tiny(name, dtype=torch.bfloat16, attn_implementation="eager")
    ids = torch.randint(2, 256, (1, 1025), generator=torch.Generator().manual_seed(1))
    settings = {"chunk_tokens": 256, "cpu_budget": "64MiB", "tiers": [f"disk://{tmp_path}?codec=kch&level=0"]}
    with CachedModel(model, **settings) as cached:
        cached.generate(ids, max_new_tokens=1, do_sample=False)
        assert cached.engine.flush(60).failed == {}
        assert "disk.encode.failed" not in cached.engine.stats()
        plan = cached.engine.lookup(ids[0, :-1].numpy())
        exact = [
            _payload(cached.engine, entry.key(g, 0)) for entry in plan.entries if entry for g in cached.engine.groups
        ]
        cached.engine.clear(ids[0, :-1].numpy(), tier="cpu")
        cached.generate(ids, max_new_tokens=1, do_sample=False)
        assert cached.last.sequences[0].tiers == {"disk": 1024}
        coded = [
            _payload(cached.engine, entry.key(g, 0)) for entry in plan.entries if entry for g in cached.engine.groups
        ]
    pairs = [(a, b) for a, b in zip(coded, exact, strict=True) if a is not None and b is not None]
    assert len(pairs) >= 4
    assert all(0 < (mine - theirs).norm() / theirs.norm() < 0.05 for mine, theirs in pairs)


def _payload(engine, key):
    """A chunk's numbers in host memory, None where it is not there."""
    slot = engine.storage.cpu.hold(key)
    if slot is None:
        return None
    view = slot.view(engine.sizes[key.group])
    parts = [bytes(view[part.offset : part.offset + part.raw]) for part in chunk.parse(view).parts]
    engine.storage.arena.release(slot)
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.bfloat16).float()
