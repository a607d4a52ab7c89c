"""Reading a generate call: what lmkv can serve, what runs as plain transformers, what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from lmkv.errors import BadInput

from .rows import left_padding

# arguments that change how tokens are chosen, not what the model computes for them
HARMLESS = {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer", "tokenizer", "synced_gpus",
            "negative_prompt_ids", "negative_prompt_attention_mask", "logits_to_keep"}  # fmt: skip
# of these, the ones that see the batch as a whole: it cannot be split
WHOLE_BATCH = HARMLESS - {"tokenizer", "synced_gpus", "logits_to_keep"}
NEW_TOKENS = 2048  # columns set aside for generated tokens at most; the buffers grow beyond


@dataclass(frozen=True)
class Call:
    """``ids`` and ``mask`` ``[batch, columns]`` with one row a returned sequence, ``pads`` per row; ``arguments`` go to
    transformers' generate. plain: why lmkv stays out of it, else empty. whole: the batch must run as one call."""

    ids: torch.Tensor
    mask: torch.Tensor
    pads: list[int]
    config: GenerationConfig
    arguments: dict[str, Any]
    whole: bool

    @property
    def ends(self) -> list[int]:
        """End-of-sequence token ids."""
        ends = self.config.eos_token_id
        return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]

    @property
    def pad_token(self) -> int:
        """What finished rows are filled with."""
        pad = self.config.pad_token_id
        return pad if pad is not None else self.ends[0] if self.ends else 0

    @property
    def capacity(self) -> int:
        """Columns that the call will fill, as far as that is known."""
        limit = self.config.max_length or 0
        new = self.config.max_new_tokens or max(limit, limit - self.ids.shape[1])
        return self.ids.shape[1] + min(new, NEW_TOKENS)


def read(
    model: PreTrainedModel,
    ids: Any,
    mask: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    arguments: dict[str, Any],
) -> Call | str:
    """The call, or why transformers must run it on its own. BadInput: it brings a cache of its own."""
    for name in ("past_key_values", "cache"):
        if arguments.get(name) is not None:
            raise BadInput(f"{name}: lmkv brings the cache; leave it out, or call model.generate")
    config, extra = model._prepare_generation_config(generation_config, **arguments)
    if config.cache_implementation not in (None, "dynamic"):
        raise BadInput(
            f"cache_implementation={config.cache_implementation!r}: lmkv restores into its own cache; leave it"
            " out, or call model.generate"
        )
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"generation mode {mode.value}"
    if config.use_cache is False:
        return "use_cache=False"
    if config.output_attentions or config.output_hidden_states:
        return "attentions or hidden states of the whole prompt are asked for"
    unknown = sorted(name for name, value in extra.items() if value is not None and name not in HARMLESS)
    if unknown:
        return f"argument {unknown[0]}"
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        return "the input is not a [batch, tokens] tensor of token ids"
    mask = default_mask(ids, config) if mask is None else mask
    pads = left_padding(mask) if mask.shape == ids.shape else None
    if pads is None:
        return "the attention mask is not left padding"
    copies = config.num_return_sequences or 1
    arguments = {**arguments, "generation_config": generation_config}
    if copies > 1:
        ids, mask = (each.repeat_interleave(copies, dim=0) for each in (ids, mask))
        pads = [pad for pad in pads for _ in range(copies)]
        arguments["num_return_sequences"] = 1
    if config.cache_implementation:
        arguments["cache_implementation"] = None
    whole = config.return_dict_in_generate or any(extra.get(name) is not None for name in WHOLE_BATCH)
    return Call(ids, mask, pads, config, arguments, bool(whole))


def default_mask(ids: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """transformers' own guess: padding tokens are masked, unless padding is also an end token."""
    pad, ends = config.pad_token_id, config.eos_token_id
    ends = ends if isinstance(ends, (list, tuple)) else [ends]
    if pad is None or pad in ends:
        return torch.ones_like(ids)
    return ids.ne(pad).to(ids.dtype)
