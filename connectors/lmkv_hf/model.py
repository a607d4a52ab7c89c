"""CachedModel: a transformers model whose generate finds the key-value cache of prompts it has seen.

    with lmkv_hf.CachedModel(model, cpu_budget="4GiB", tiers="disk:///var/cache/lmkv") as cached:
        output = cached.generate(**inputs, max_new_tokens=100)
        print(cached.last)
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from lmkv.config import Config
from lmkv.engine import Engine
from lmkv.errors import BadInput
from lmkv.fingerprint import fingerprint
from lmkv.spec import Kind, LayerGroup

from . import call as calls
from .buffers import BufferPool, Buffers, paged
from .cache import BufferedLayer, BufferedSlidingLayer
from .call import Call
from .geometry import CACHE, check_model, kv_spec, probe
from .report import Report
from .rows import Row, alike, computed_tokens, stitch
from .weights import active_adapters, sampled_tensors

_owners = itertools.count()


class CachedModel:
    """``generate`` as the model's own, with stored prefixes restored and new ones stored.

    model: a decoder-only transformers model in evaluation mode; other ones, and those whose cache cannot be restored
    exactly, are refused with BadInput. engine: an open `lmkv.Engine` to use (it must have this model's spec, layout and
    weights: see ``engine_arguments``); without one, an engine is opened from the ``config`` keywords (as for
    `lmkv.Config`: ``cpu_budget="4GiB"``, ``tiers="disk:///path"``) and closed with the CachedModel. tokenizer: lets
    ``generate`` take text. weights_id: a name for the weights instead of their fingerprint. store_generated: also store
    what was generated, for the next turn of a conversation.

    ``last`` is the `Report` of the latest call. Several threads may call ``generate``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: Engine | None = None,
        tokenizer: Any = None,
        *,
        weights_id: str | None = None,
        store_generated: bool = True,
        **config: Any,
    ) -> None:
        check_model(model)
        if engine is not None and config:
            raise BadInput(f"the engine given has its own config: {', '.join(config)} cannot be set here")
        self.model, self.tokenizer, self.store_generated = model, tokenizer, store_generated
        self.last = Report()
        settings = Config.load(**config) if engine is None else engine.config
        self._shapes, device = probe(model)
        self._text_config = model.config.get_text_config(decoder=True)
        self.spec = kv_spec(self._shapes, settings.chunk_tokens)
        self._pool = BufferPool(self._shapes, self.spec.chunk_tokens, device)
        self._exact_end = all(group.kind is Kind.FULL for group in self.spec.groups)
        weights = weights_id or fingerprint(sampled_tensors(model), model.config.to_dict())
        buffers = self._pool.take(1, self.spec.chunk_tokens)
        layout = buffers.pages(self.spec, 0, 0).layout
        self._owned = engine is None
        self.engine = engine or Engine(self.spec, weights=weights, layout=layout, config=settings)
        if self.engine.spec != self.spec or self.engine.layout != layout:
            raise BadInput("the engine given was opened for another spec or layout than this model has")

    @torch.no_grad()
    def generate(
        self,
        inputs: torch.Tensor | str | list[str] | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        salt: str = "",
        adapter: str = "",
        **arguments: Any,
    ) -> Any:
        """What ``model.generate`` returns for the same arguments.

        inputs, input_ids: token ids ``[batch, tokens]``, padded on the left, or text when there is a tokenizer. salt:
        a tenant's secret; only calls with the same one share stored prefixes. adapter: names the active LoRA adapter
        and its version. BadInput: a cache of the caller's own, active adapters without a name.
        """
        ids = input_ids if inputs is None else inputs
        if isinstance(ids, (str, list)):
            ids, attention_mask = self._tokenize(ids)
        if not adapter and (active := active_adapters(self.model)):
            raise BadInput(f"adapter {active} is active: name it and its version with adapter=")
        call = calls.read(self.model, ids, attention_mask, generation_config, arguments)
        if isinstance(call, str):
            self.last = Report(plain=call)
            given = {"attention_mask": attention_mask, "generation_config": generation_config, **arguments}
            return self.model.generate(ids, **{k: v for k, v in given.items() if v is not None})
        rows = list(self._rows(call, salt, adapter))
        result = self._run_all(call, rows)
        self.last = Report(tuple(row.report() for row in rows))
        return result

    def _tokenize(self, text: str | list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.tokenizer is None:
            raise BadInput("text needs a tokenizer: CachedModel(model, tokenizer=...)")
        many = not isinstance(text, str) and len(text) > 1
        encoded = self.tokenizer(text, return_tensors="pt", padding=many, padding_side="left").to(self.model.device)
        return torch.atleast_2d(encoded["input_ids"]), torch.atleast_2d(encoded["attention_mask"])

    def _rows(self, call: Call, salt: str, adapter: str) -> Iterator[Row]:
        """Each sequence with what the store has for it."""
        for index, (ids, pad) in enumerate(zip(call.ids.cpu().numpy(), call.pads, strict=True)):
            tokens = ids[pad:]
            # a full hit leaves one token to compute; a window layer would then need one token before its window
            keys = self.engine.keys(tokens if self._exact_end else tokens[:-1], salt=salt, adapter=adapter)
            yield Row(index, pad, tokens, keys, self.engine.lookup(keys), (salt, adapter))

    def _run_all(self, call: Call, rows: list[Row]) -> Any:
        """Rows that begin at the same column run together; a row whose restore came out shorter is sorted anew."""
        pending, parts = rows, []
        while pending:
            group = pending if call.whole else alike(pending, pending[0])
            if len(alike(group, group[0])) < len(group):
                for row in group:
                    row.forget(0, "the rows of one call must begin alike")
            buffers = self._pool.take(len(group), call.capacity)
            for place, row in enumerate(group):
                self._restore(row, buffers, place)
            if len(alike(group, group[0])) < len(group):
                self._pool.give(buffers)
                continue
            parts.append((group, self._run(call, group, buffers)))
            pending = [row for row in pending if row not in group]
        return stitch(len(rows), parts, call.pad_token) if not call.whole else parts[0][1]

    def _restore(self, row: Row, buffers: Buffers, place: int) -> None:
        """Copy the row's plan into ``place`` of the buffers; a failure shortens the plan."""
        if not row.hit:
            return
        pages = buffers.pages(self.spec, place, row.pad, self.engine.threads)
        ids = [np.arange(row.plan.tokens // group.page_tokens) for group in self.spec.groups]
        with self.engine.acquire(f"hf-{os.getpid()}-{next(_owners)}", row.plan) as lease:
            got = self.engine.retrieve(lease, pages, ids)
        if got.tokens < row.plan.tokens:
            row.forget(got.tokens // self.spec.chunk_tokens, got.reason)
        if row.pad:
            for pair in filter(None, buffers.layers):
                for buffer in pair:
                    buffer[place, :, : row.pad] = 0  # masked, but a NaN left there would pass any mask

    def _run(self, call: Call, rows: list[Row], buffers: Buffers) -> Any:
        """Generate for rows whose first ``columns`` columns are restored, then store what is new."""
        cache = self._cache(buffers, rows[0].columns)
        chosen = [row.index for row in rows]
        result = self.model.generate(
            call.ids[chosen], attention_mask=call.mask[chosen], **{CACHE: cache}, **call.arguments
        )
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        for place, (row, sequence) in enumerate(zip(rows, sequences.cpu().numpy(), strict=True)):
            self._store(call, row, sequence, place, cache, buffers)
        if isinstance(result, torch.Tensor):
            self._pool.give(buffers)  # otherwise the caller has the cache, and the buffers with it
        return result

    def _cache(self, buffers: Buffers, columns: int) -> DynamicCache:
        """transformers' cache over the buffers, of which ``columns`` are filled."""
        cache = DynamicCache(config=self._text_config)
        for index, (shape, pair) in enumerate(zip(self._shapes, buffers.layers, strict=True)):
            if shape is not None and pair is not None:
                layer = BufferedLayer() if shape.window is None else BufferedSlidingLayer(shape.window)
                layer.attach(*pair)
                layer.restore(columns, 0 if layer.window is None else max(0, columns - layer.window))
                cache.layers[index] = layer
        return cache

    def _store(
        self, call: Call, row: Row, sequence: np.ndarray, place: int, cache: DynamicCache, buffers: Buffers
    ) -> None:
        """Store the row's full chunks; those that are there already cost a look at the index."""
        generated = sequence[call.ids.shape[1] :] if self.store_generated else sequence[:0]
        columns = cache.get_seq_length() - row.pad
        tokens = computed_tokens(row.tokens, generated, columns, call.ends)
        layers = [getattr(layer, "buffers", None) for layer in cache.layers]
        first = next(index for index, pair in enumerate(layers) if pair is not None)
        pages = buffers.pages(self.spec, place, row.pad, self.engine.threads)
        if layers[first][0] is not buffers.layers[first][0]:  # the buffers turned out too small, the layers have larger ones
            pages = paged(self.spec, layers, place, row.pad, self.engine.threads)
        ids = [self._present(group, len(tokens), row) for group in self.spec.groups]
        salt, adapter = row.identity
        handle = self.engine.store(self.engine.keys(tokens, salt=salt, adapter=adapter), pages, ids)
        row.stored = handle.stored

    def _present(self, group: LayerGroup, tokens: int, row: Row) -> np.ndarray:
        """Page ids of a sequence, -1 for pages before the window that was restored: nothing was written there."""
        ids = np.arange(tokens // group.page_tokens)
        if row.hit and group.kind is Kind.SLIDING:
            ids[ids * group.page_tokens < row.hit - (group.window - 1)] = -1
        return ids

    def close(self) -> None:
        """Close the engine if this object opened it. The model stays usable."""
        if self._owned:
            self.engine.close()

    def __enter__(self) -> CachedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
