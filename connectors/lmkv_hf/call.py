"""Reading a generate call: what lmkv serves, what runs as plain transformers, what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from lmkv.errors import BadInput

from .rows import left_padding

# arguments that may look at the whole batch: it cannot be split then
WHOLE_BATCH = {
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
}
# further ones that do not change what the model computes for a token
HARMLESS = {"tokenizer", "synced_gpus", "logits_to_keep"}
NEW_TOKENS = 2048  # columns set aside for new tokens at most; the buffers grow beyond


@dataclass(frozen=True)
class Call:
    """``ids`` and ``mask`` ``[batch, columns]`` with one row a returned sequence, ``pads`` per row;
    ``arguments`` go to transformers. whole: the batch must run as one call."""

    ids: torch.Tensor
    mask: torch.Tensor
    pads: list[int]
    config: GenerationConfig
    arguments: dict[str, Any]
    whole: bool

    @property
    def pad_token(self) -> int:
        """What finished rows are filled with."""
        pad, ends = self.config.pad_token_id, end_tokens(self.config)
        return pad if pad is not None else ends[0] if ends else 0

    @property
    def capacity(self) -> int:
        """Columns that the call will fill, as far as can be said."""
        new = self.config.max_new_tokens or self.config.max_length or 0
        return self.ids.shape[1] + min(new, NEW_TOKENS)


def end_tokens(config: GenerationConfig) -> list[int]:
    """End-of-sequence token ids."""
    ends = config.eos_token_id
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]


def read(
    model: Any,
    ids: Any,
    mask: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    arguments: dict[str, Any],
) -> Call | str:
    """The call, or why transformers must run it on its own. BadInput: it brings a cache."""
    for name in ("past_key_values", "cache"):
        if arguments.get(name) is not None:
            raise BadInput(f"{name}: lmkv brings the cache; leave it out, or call model.generate")
    config, extra = model._prepare_generation_config(generation_config, **arguments)
    if config.cache_implementation not in (None, "dynamic"):
        raise BadInput(
            f"cache_implementation={config.cache_implementation!r}: lmkv restores into its own"
            " cache; leave it out, or call model.generate"
        )
    if reason := unsupported(config, extra):
        return reason
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return "the input is not a [batch, tokens] tensor of token ids"
    mask = default_mask(ids, config) if mask is None else mask
    pads = left_padding(mask) if mask.shape == ids.shape and ids.numel() else None
    if pads is None:
        return "the attention mask is not left padding"
    arguments = {**arguments, "generation_config": generation_config}
    copies = config.num_return_sequences or 1
    if copies > 1:
        ids, mask = (each.repeat_interleave(copies, dim=0) for each in (ids, mask))
        pads = [pad for pad in pads for _ in range(copies)]
        arguments["num_return_sequences"] = 1
    if config.cache_implementation:
        arguments["cache_implementation"] = None
    sees_all = any(extra.get(name) is not None for name in WHOLE_BATCH)
    whole = bool(config.return_dict_in_generate or sees_all)
    return Call(ids, mask, pads, config, arguments, whole)


def unsupported(config: GenerationConfig, extra: dict[str, Any]) -> str:
    """What in the settings or the further arguments lmkv has no part in; empty when nothing."""
    mode = config.get_generation_mode(extra.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"generation mode {mode.value}"
    if config.use_cache is False:
        return "use_cache=False"
    given = {name for name, value in extra.items() if value is not None}
    if unknown := given - WHOLE_BATCH - HARMLESS:
        return f"argument {min(unknown)}"
    return ""


def default_mask(ids: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """transformers' own guess: padding tokens are masked, unless padding is also an end token."""
    pad = config.pad_token_id
    if pad is None or pad in end_tokens(config):
        return torch.ones_like(ids)
    return ids.ne(pad).to(ids.dtype)
