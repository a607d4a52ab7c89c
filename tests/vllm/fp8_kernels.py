"""vLLM's three kernels for 8-bit KV on CPUs, written in torch: its build for CPUs without AVX-512 lacks them.

They read and write the pages as the kernels do, [blocks, heads, tokens of a block, head] bytes, so that scheduler,
workers, pages and connector are the real ones. Rounding may differ from the kernels' in the last bit: both sides of a
comparison must come from here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

FORMATS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def install() -> None:
    """Put them in the place of vLLM's for these types; the others keep vLLM's."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    plan, store, attend = (
        ops.cpu_attn_get_scheduler_metadata, ops.cpu_attn_reshape_and_cache, ops.cpu_attention_with_kv_cache
    )  # fmt: skip
    choose = cpu_attn._get_attn_isa

    def choose_for(dtype: torch.dtype, block: int, head: int | None = None, kv_dtype: str | None = None) -> Any:
        return choose(dtype, block, head, None if kv_dtype in FORMATS else kv_dtype)

    def plan_for(**given: Any) -> Any:
        return torch.empty(0) if given["kv_cache_dtype"] in FORMATS else plan(**given)

    def store_for(*given: Any, **more: Any) -> None:
        (_store if more["kv_cache_dtype"] in FORMATS else store)(*given, **more)

    def attend_for(**given: Any) -> None:
        (_attend if given["kv_cache_dtype"] in FORMATS else attend)(**given)

    cpu_attn._get_attn_isa = choose_for
    ops.cpu_attn_get_scheduler_metadata = plan_for
    ops.cpu_attn_reshape_and_cache = store_for
    ops.cpu_attention_with_kv_cache = attend_for


def _store(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, isa: str, *,
    k_scale: float, v_scale: float, kv_cache_dtype: str,
) -> None:  # fmt: skip
    """Rows of key and value, [tokens, heads, head], into their slots; a slot below zero is padding."""
    taken = slots >= 0
    block, row = slots[taken] // keys.shape[2], slots[taken] % keys.shape[2]
    most = torch.finfo(FORMATS[kv_cache_dtype]).max
    for pages, new, scale in ((keys, key, k_scale), (values, value, v_scale)):
        rows = (new[: len(slots)][taken].float() / scale).clamp(-most, most).to(FORMATS[kv_cache_dtype])
        pages[block, :, row] = rows.view(torch.uint8)


def _attend(
    *, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, output: torch.Tensor,
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, scale: float, k_scale: float,
    v_scale: float, kv_cache_dtype: str, sliding_window: int, **_: Any,
) -> None:  # fmt: skip
    """Causal full attention of each request's new tokens over its pages."""
    assert sliding_window < 0
    starts, tokens = query_start_loc.tolist(), key_cache.shape[2]
    for request, length in enumerate(seq_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        blocks = block_table[request, : -(-length // tokens)].long()
        k, v = (
            pages[blocks].view(FORMATS[kv_cache_dtype]).float().transpose(0, 1).flatten(1, 2)[:, :length] * factor
            for pages, factor in ((key_cache, k_scale), (value_cache, v_scale))
        )
        seen = torch.ones(last - first, length, dtype=torch.bool).tril(length - (last - first))
        q = query[first:last].float().transpose(0, 1)
        found = scaled_dot_product_attention(q[None], k[None], v[None], seen, scale=scale, enable_gqa=True)[0]
        output[first:last].copy_(found.transpose(0, 1).reshape(output[first:last].shape))
