"""The cache layers of lmkv_hf behave as transformers' own, bit for bit, without copying."""

# ruff: noqa: E402 - torch and transformers are optional
from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_models import MODELS, cropped_cache, tiny, tokens
from transformers import DynamicCache

from lmkv_hf.buffers import BufferPool, Buffers
from lmkv_hf.cache import BufferedLayer, BufferedSlidingLayer, cache_over
from lmkv_hf.geometry import CACHE, probe

CPU = torch.device("cpu")
RESTORABLE = [name for name in MODELS if name != "qwen3_next"]


def own_cache(model, batch=1, capacity=256, columns=0, source=None):
    """A cache of ours with NaN wherever nothing was written, or what ``source`` holds."""
    shapes, device, _ = probe(model)
    buffers = Buffers(shapes, batch, capacity, device, staged=False)
    for index, pair in enumerate(buffers.layers):
        for buffer, name in zip(pair, ("keys", "values"), strict=True):
            buffer.fill_(float("nan"))
            if source is not None:
                held = getattr(source.layers[index], name)
                buffer[:, :, columns - held.shape[2] : columns] = held
    config = model.config.get_text_config(decoder=True)
    return cache_over(config, shapes, buffers.layers, columns), buffers


@torch.no_grad()
def logits(model, ids, cache, splits):
    """Logits of ``ids`` fed in pieces that end at ``splits``."""
    parts, start = [], cache.get_seq_length()
    for stop in splits:
        parts.append(model(ids[:, start:stop], use_cache=True, **{CACHE: cache}).logits)
        start = stop
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", RESTORABLE)
def test_prefill_and_decoding_give_the_logits_of_transformers_own_cache(name):
    model, ids = tiny(name), tokens(90)
    splits = [50, 70, *range(71, 91)]
    theirs = logits(model, ids, DynamicCache(config=model.config), splits)
    ours, _ = own_cache(model)
    assert torch.equal(logits(model, ids, ours, splits), theirs)


@pytest.mark.parametrize("name", RESTORABLE)
def test_a_restored_prefix_gives_the_logits_of_the_cropped_cache(name):
    model, ids = tiny(name), tokens(90)
    theirs = cropped_cache(model, ids, 64)
    ours, _ = own_cache(model, columns=64, source=theirs)
    splits = [80, *range(81, 91)]
    assert torch.equal(logits(model, ids, ours, splits), logits(model, ids, theirs, splits))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_show_the_tensors_and_sizes_that_transformers_layers_show(name):
    model, ids = tiny(name), tokens(90, batch=2)
    theirs, (ours, _) = DynamicCache(config=model.config), own_cache(model, batch=2)
    for splits in ([10], [50], [51], [52]):
        logits(model, ids, theirs, splits)
        logits(model, ids, ours, splits)
        for a, b in zip(ours.layers, theirs.layers, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
            assert a.get_mask_sizes(7) == b.get_mask_sizes(7)
            assert a.get_seq_length() == b.get_seq_length()
            assert a.get_max_length() == b.get_max_length()
    assert ours.is_sliding == theirs.is_sliding


def test_update_writes_in_place_and_returns_views():
    model = tiny("llama")
    ours, buffers = own_cache(model)
    keys, values = buffers.layers[0]
    new = torch.ones(1, 2, 5, 16)
    shown = ours.layers[0].update(new, 2 * new)
    assert [part.data_ptr() for part in shown] == [keys.data_ptr(), values.data_ptr()]
    assert (keys[:, :, :5] == 1).all()
    assert (values[:, :, :5] == 2).all()
    assert keys[:, :, 5:].isnan().all()


def test_a_buffer_that_is_too_small_grows():
    model, ids = tiny("gemma3"), tokens(90)
    ours, buffers = own_cache(model, capacity=32)
    theirs = DynamicCache(config=model.config)
    splits = [20, 40, *range(41, 91)]
    assert torch.equal(logits(model, ids, ours, splits), logits(model, ids, theirs, splits))
    assert ours.layers[0].buffers is not buffers.layers[0]


def test_crop_takes_tokens_off_the_end():
    model, ids = tiny("gemma3"), tokens(90)
    ours, _ = own_cache(model)
    before = logits(model, ids, ours, [60, 90])[:, 60:]
    ours.crop(-30)
    assert ours.get_seq_length() == 60
    assert torch.equal(logits(model, ids, ours, [90]), before)


def test_crop_refuses_absolute_lengths_and_columns_that_were_not_restored():
    model, ids = tiny("gemma3"), tokens(90)
    ours, _ = own_cache(model, columns=64, source=cropped_cache(model, ids, 64))
    with pytest.raises(ValueError, match="negative"):
        ours.crop(10)
    with pytest.raises(RuntimeError, match="before the window"):
        ours.crop(-1)
    logits(model, ids, ours, [80])
    ours.crop(-16)
    assert ours.get_seq_length() == 64


def test_batch_operations_act_on_the_buffers():
    model, ids = tiny("mistral"), tokens(60, batch=2)
    theirs, (ours, _) = DynamicCache(config=model.config), own_cache(model, batch=2)
    order = torch.tensor([1, 1])
    for cache in (theirs, ours):
        logits(model, ids, cache, [50])
        cache.reorder_cache(order)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3]))
    following = ids[order]
    assert torch.equal(logits(model, following, ours, [55, 60]), logits(model, following, theirs, [55, 60]))


def test_reset_and_deepcopy():
    model, ids = tiny("gemma3"), tokens(60)
    ours, _ = own_cache(model)
    first = logits(model, ids, ours, [40, 60])
    twin = copy.deepcopy(ours)
    ours.reset()
    assert ours.get_seq_length() == 0
    assert torch.equal(logits(model, ids, ours, [40, 60]), first)
    more = torch.cat([ids, tokens(5, seed=3)], dim=1)
    assert torch.equal(logits(model, more, ours, [65]), logits(model, more, twin, [65]))


def test_layers_are_transformers_layers():
    model = tiny("gemma3")
    ours, _ = own_cache(model)
    theirs = DynamicCache(config=model.config)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert isinstance(a, type(b))
        assert isinstance(a, (BufferedLayer, BufferedSlidingLayer))


class TestPool:
    def pool(self, **changes):
        shapes, _, _ = probe(tiny("llama"))
        return BufferPool(shapes, **{"step": 16, "device": CPU, "staged": False, **changes})

    def test_buffers_come_back_when_they_fit(self):
        pool = self.pool()
        first = pool.take(1, 100)
        assert first.capacity == 112  # an eighth more, in whole steps
        pool.give(first)
        assert pool.take(1, 112) is first

    def test_the_smallest_that_fits_is_taken(self):
        pool = self.pool()
        small, large = pool.take(1, 100), pool.take(1, 500)
        pool.give(large)
        pool.give(small)
        assert pool.take(1, 90) is small

    def test_another_batch_or_more_tokens_get_new_ones(self):
        pool = self.pool()
        first = pool.take(1, 100)
        pool.give(first)
        assert pool.take(2, 100).batch == 2
        assert pool.take(1, 113).capacity == 128
        assert pool.take(1, 100) is first

    def test_only_the_last_ones_are_kept(self):
        pool = self.pool(keep=1)
        first, second = pool.take(1, 100), pool.take(1, 100)
        pool.give(first)
        pool.give(second)
        assert pool.take(1, 100) is second
        assert pool.take(1, 100) is not first

    def test_buffers_do_not_overlap(self):
        buffers = self.pool().take(2, 40)
        tensors = [tensor for pair in buffers.layers for tensor in pair]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        assert [tensor.unique().tolist() for tensor in tensors] == [[n] for n in range(8)]

    def test_staged_buffers_move_only_the_columns_asked_for(self):
        buffers = self.pool(staged=True).take(2, 40)
        for pair in [*buffers.layers, *buffers.host]:
            for tensor in pair:
                tensor.zero_()
        buffers.host[3][1][1] += 7
        buffers.push(1, slice(5, 9))
        moved = buffers.layers[3][1]
        assert (moved[1, :, 5:9] == 7).all()
        assert moved.sum() == moved[1, :, 5:9].sum()
        buffers.layers[0][0][0] += 2
        buffers.pull(0, slice(0, 3))
        assert buffers.host[0][0].sum() == 2 * 2 * 3 * 16
