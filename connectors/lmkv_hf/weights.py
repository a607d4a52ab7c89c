"""The name of a model's weights, and of the adapter that is active on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lmkv.fingerprint import PIECES, SAMPLE_BYTES


def sampled_tensors(model: torch.nn.Module) -> Iterator[tuple[str, tuple[int, ...], str, Any]]:
    """The state dict as `lmkv.fingerprint` takes it. At most 64 KiB of a tensor are read, cut out
    where it lies: a model on a GPU has the same fingerprint as on the host."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            yield name, tuple(tensor.shape), str(tensor.dtype), _sample(tensor).cpu().numpy()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() <= SAMPLE_BYTES:
        return data
    piece = SAMPLE_BYTES // PIECES
    last = data.numel() - piece
    return torch.cat([data[(at := last * i // (PIECES - 1)) : at + piece] for i in range(PIECES)])


def active_adapters(model: Any) -> str:
    """Names of the active PEFT adapters, joined by commas; empty without any."""
    names = getattr(model, "active_adapters", None)
    if callable(names):
        # transformers' own method raises when no adapter was ever loaded
        names = names() if getattr(model, "_hf_peft_config_loaded", False) else None
    return ",".join(names) if names else ""
