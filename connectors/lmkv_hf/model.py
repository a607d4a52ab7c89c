"""CachedModel: a transformers model whose generate restores the prefixes it has seen before.

    with lmkv_hf.CachedModel(model, cpu_budget="4GiB", tiers=["disk:///var/cache/lmkv"]) as cached:
        output = cached.generate(**inputs, max_new_tokens=100)
        print(cached.last)

A call: read it, look each sequence up, restore into buffers, let transformers generate, store.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from lmkv.config import Config
from lmkv.engine import Engine
from lmkv.errors import BadInput
from lmkv.spec import Kind, LayerGroup

from . import call as calls
from .buffers import BufferPool, Buffers, paged
from .cache import cache_over
from .call import Call
from .geometry import AXES, CACHE, Geometry
from .report import Report
from .rows import Row, Tokens, alike, computed, join
from .weights import active_adapters


def open_engine(model: PreTrainedModel, weights_id: str | None = None, **config: Any) -> Engine:
    """An `lmkv.Engine` for a model, to pass to `CachedModel` (which opens its own without one).

    config: keywords of `lmkv.Config`: ``cpu_budget="4GiB"``, ``tiers=["disk:///path"]``.
    """
    settings = Config.load(**config)
    geometry = Geometry.of(model, settings.chunk_tokens, weights_id)
    return _open(geometry, settings)


def _open(geometry: Geometry, settings: Config) -> Engine:
    return Engine(
        geometry.spec, weights=geometry.weights, layout=geometry.layout, axes=AXES, rope=geometry.ropes, config=settings
    )


class CachedModel:
    """``generate`` as the model's own, with stored prefixes restored and new ones stored.

    model: a decoder-only transformers model in evaluation mode; what cannot be restored exactly is
    refused with BadInput. engine: one from `open_engine`; without it an engine is opened from the
    ``config`` keywords and closed with the CachedModel. tokenizer: lets ``generate`` take text.
    weights_id: a name for the weights instead of their fingerprint. store_generated: also store
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
        if engine is not None and config:
            raise BadInput(f"the engine has its own config: {', '.join(config)} cannot be set here")
        self.model, self.tokenizer, self.store_generated = model, tokenizer, store_generated
        self.last = Report()
        settings = engine.config if engine is not None else Config.load(**config)
        self._geometry = geometry = Geometry.of(model, settings.chunk_tokens, weights_id)
        self.spec = geometry.spec
        if engine is not None:
            wanted = geometry.spec, geometry.layout, geometry.weights
            if (engine.spec, engine.layout, engine.scope.weights) != wanted:
                raise BadInput("the engine is for another spec, layout or weights: see open_engine")
        self._owned = engine is None
        self.engine = _open(geometry, settings) if engine is None else engine
        device = geometry.device
        step, staged = self.spec.chunk_tokens, device.type != "cpu"
        self._pool = BufferPool(geometry.shapes, step, device, staged)
        self._full_only = all(group.kind is Kind.FULL for group in self.spec.groups)

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

        inputs, input_ids: token ids ``[batch, tokens]``, padded on the left, or text when there is
        a tokenizer. salt: a tenant's secret; only calls with the same one share prefixes. adapter:
        names the active LoRA adapter and its version. BadInput: a cache of the caller's own, an
        active adapter without a name.
        """
        ids = input_ids if inputs is None else inputs
        if isinstance(ids, (str, list)):
            ids, attention_mask = self._tokenize(ids)
        if not adapter and (active := active_adapters(self.model)):
            raise BadInput(f"adapter {active} is active: name it and its version with adapter=")
        call = calls.read(self.model, ids, attention_mask, generation_config, arguments)
        if isinstance(call, str):
            given = {"attention_mask": attention_mask, "generation_config": generation_config}
            arguments |= {name: value for name, value in given.items() if value is not None}
            result = self.model.generate(ids, **arguments)
            self.last = Report(plain=call)
            return result
        rows = list(self._rows(call, (salt, adapter)))
        result = self._run_all(call, rows)
        self.last = Report(tuple(row.report() for row in rows))
        return result

    def _tokenize(self, text: str | list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.tokenizer is None:
            raise BadInput("text needs a tokenizer: CachedModel(model, tokenizer=...)")
        texts = [text] if isinstance(text, str) else text
        padding = {"padding": len(texts) > 1, "padding_side": "left"}
        encoded = self.tokenizer(texts, return_tensors="pt", **padding).to(self.model.device)
        return encoded["input_ids"], encoded["attention_mask"]

    def _rows(self, call: Call, identity: tuple[str, str]) -> Iterator[Row]:
        """Each sequence with what the store has for it."""
        for index, (ids, pad) in enumerate(zip(call.ids.cpu().numpy(), call.pads, strict=True)):
            # A full hit leaves the last token to compute. A window layer would then need one more
            # token before its window than is stored, so it looks for a shorter prefix.
            tokens = ids[pad:] if self._full_only else ids[pad:-1]
            plan = self.engine.lookup(self.engine.keys(tokens, *identity))
            yield Row(index, pad, ids[pad:], identity, plan)

    def _run_all(self, call: Call, rows: list[Row]) -> Any:
        """Rows that begin at the same column run together. Where a restore comes out shorter than
        planned, the rows are sorted anew."""
        pending, parts = rows, []
        while pending:
            group = pending if call.whole else alike(pending, pending[0])
            if len(alike(group, group[0])) < len(group):
                for row in group:
                    row.cut(0, "the rows of one call must begin alike")
            buffers = self._pool.take(len(group), call.capacity)
            for place, row in enumerate(group):
                self._restore(row, place, buffers)
            if len(alike(group, group[0])) < len(group):
                self._pool.give(buffers)
                continue
            parts.append((group, self._run(call, group, buffers)))
            pending = [row for row in pending if row not in group]
        return join(len(rows), parts, call.pad_token)

    def _restore(self, row: Row, place: int, buffers: Buffers) -> None:
        """Copy the row's plan into ``place`` of the buffers; a failure shortens the plan."""
        if not row.hit:
            return
        pages = buffers.pages(self.spec, place, row.pad, self.engine.threads)
        ids = [np.arange(row.plan.tokens // group.page_tokens) for group in self.spec.groups]
        got = self.engine.retrieve(row.plan.keys, pages, ids, stop=row.plan.tokens)
        if got.tokens < row.plan.tokens:
            row.cut(got.tokens, got.reason)
        buffers.push(place, slice(row.pad, row.columns))
        for buffer in (each for pair in buffers.layers if pair is not None for each in pair):
            buffer[place, :, : row.pad] = 0  # masked, but a NaN there would pass through any mask

    def _run(self, call: Call, rows: list[Row], buffers: Buffers) -> Any:
        """Generate for rows whose first ``columns`` are restored, then store what is new."""
        config, shapes = self.model.config.get_text_config(decoder=True), self._geometry.shapes
        cache = cache_over(config, shapes, buffers.layers, rows[0].columns)
        chosen = [row.index for row in rows]
        result = self.model.generate(
            call.ids[chosen], attention_mask=call.mask[chosen], **{CACHE: cache}, **call.arguments
        )
        plain = isinstance(result, torch.Tensor)
        sequences = (result if plain else result.sequences).cpu().numpy()
        for place, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            generated = sequence[call.ids.shape[1] :] if self.store_generated else sequence[:0]
            ends = calls.end_tokens(call.config)
            tokens = computed(row, generated, cache.get_seq_length(), ends)
            self._store(row, tokens, place, cache, buffers)
        if plain:
            self._pool.give(buffers)  # else the caller has the cache, and the buffers with it
        return result

    def _store(self, row: Row, tokens: Tokens, place: int, cache: DynamicCache, buffers: Buffers) -> None:
        """Store the row's full chunks; those that are there already cost a look at the index."""
        layers = [getattr(layer, "buffers", None) for layer in cache.layers]
        if all(now is was for now, was in zip(layers, buffers.layers, strict=True)):
            buffers.pull(place, slice(row.pad + row.hit, row.pad + len(tokens)))
            pages = buffers.pages(self.spec, place, row.pad, self.engine.threads)
        else:  # more tokens than was set aside for: the layers have larger buffers of their own
            host = [pair and (pair[0].cpu(), pair[1].cpu()) for pair in layers]
            pages = paged(self.spec, host, place, row.pad, self.engine.threads)
        ids = [_present(group, len(tokens), row.hit) for group in self.spec.groups]
        handle = self.engine.store(self.engine.keys(tokens, *row.identity), pages, ids)
        row.stored = -(-handle.stored // len(self.spec.groups))

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


def _present(group: LayerGroup, tokens: int, hit: int) -> Tokens:
    """Page ids of a sequence, -1 for pages before the window that was restored: they are empty."""
    ids = np.arange(tokens // group.page_tokens)
    if hit and group.kind is Kind.SLIDING:
        ids[ids * group.page_tokens < hit - (group.window - 1)] = -1
    return ids
