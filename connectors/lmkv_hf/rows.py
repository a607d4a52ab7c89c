"""The sequences of a batch: where they stand in it, which run together, their joined results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lmkv.plan import Plan

from .report import SequenceReport

Tokens = np.ndarray[Any, Any]


@dataclass(eq=False)
class Row:
    """One sequence: ``tokens`` begin at column ``pad`` of the batch. ``plan`` is what it takes from
    the store; ``identity`` is salt and adapter; ``stored`` counts new chunks."""

    index: int
    pad: int
    tokens: Tokens
    identity: tuple[str, str]
    plan: Plan
    stored: int = 0
    _tiers: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._tiers = self.plan.chunks  # now: a hit moves chunks into faster tiers

    @property
    def hit(self) -> int:
        """Restored tokens; one token at least is left to compute."""
        return min(self.plan.tokens, len(self.tokens) - 1)

    @property
    def columns(self) -> int:
        """Columns of the batch that are filled before the model runs."""
        return self.pad + self.hit if self.hit else 0

    def cut(self, tokens: int, reason: str) -> None:
        """Take at most so many tokens."""
        self.plan = self.plan.cut(tokens // self.plan.keys.chunk_tokens, reason)

    def report(self) -> SequenceReport:
        chunk_tokens = self.plan.keys.chunk_tokens
        found = Counter(name for name in self._tiers[: self.plan.tokens // chunk_tokens] if name)
        tiers = {name: count * chunk_tokens for name, count in found.items()}
        return SequenceReport(len(self.tokens), self.hit, tiers, self.stored, self.plan.reason)


def left_padding(mask: torch.Tensor) -> list[int] | None:
    """Columns of padding before each row of a ``[batch, columns]`` mask; None when it is anything
    but left padding, or a row is empty."""
    kept = mask.to(torch.bool)
    pads = (~kept).sum(dim=1)
    expected = torch.arange(kept.shape[1], device=kept.device) >= pads[:, None]
    return pads.tolist() if torch.equal(kept, expected) and kept[:, -1].all() else None


def alike(rows: Iterable[Row], first: Row) -> list[Row]:
    """The rows that can run in one call with ``first``."""
    return [row for row in rows if row.columns == first.columns]


def computed(row: Row, generated: Tokens, columns: int, ends: Sequence[int]) -> Tokens:
    """Tokens of a row that the cache holds and that belong to it: those in ``columns`` (the last
    one generated never ran through the model), none after the first end token (padding follows)."""
    stop = np.flatnonzero(np.isin(generated, ends))
    if len(stop):
        generated = generated[: stop[0] + 1]
    return np.concatenate([row.tokens, generated])[: columns - row.pad]


def join(batch: int, parts: Sequence[tuple[list[Row], Any]], pad_token: int) -> Any:
    """Results of several calls as one ``[batch, columns]`` tensor, padded on the right as generate
    does; a single one as it is."""
    if len(parts) == 1:
        return parts[0][1]
    width = max(result.shape[1] for _, result in parts)
    whole = parts[0][1].new_full((batch, width), pad_token)
    for rows, result in parts:
        whole[[row.index for row in rows], : result.shape[1]] = result
    return whole
