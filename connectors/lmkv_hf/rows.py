"""The sequences of a batch: where they stand in it, which can run together, and their results in one tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from lmkv.keys import ChunkKeys
from lmkv.plan import Plan

from .report import SequenceReport


@dataclass(eq=False)
class Row:
    """One sequence: ``tokens`` begin at column ``pad`` of the batch. ``plan`` is what it takes from the store;
    ``identity`` is salt and adapter."""

    index: int
    pad: int
    tokens: np.ndarray
    keys: ChunkKeys
    plan: Plan
    identity: tuple[str, str]
    stored: int = 0

    @property
    def hit(self) -> int:
        """Restored tokens; one token at least is left to compute."""
        return min(self.plan.tokens, len(self.tokens) - 1)

    @property
    def columns(self) -> int:
        """Columns of the batch that are filled before the model runs: rows that agree can run in one call."""
        return self.pad + self.hit if self.hit else 0

    def forget(self, chunks: int, reason: str) -> None:
        """Take at most so many chunks."""
        self.plan = self.plan.cut(chunks, reason)

    def report(self) -> SequenceReport:
        tiers = self.plan.tiers if self.hit else {}
        return SequenceReport(len(self.tokens), self.hit, tiers, self.stored, self.plan.reason)


def left_padding(mask: torch.Tensor) -> list[int] | None:
    """Columns of padding before each row of a ``[batch, columns]`` mask; None when it is anything but left padding,
    or a row is empty."""
    kept = mask.to(torch.bool)
    pads = (~kept).sum(dim=1)
    expected = torch.arange(kept.shape[1], device=kept.device) >= pads[:, None]
    if not torch.equal(kept, expected) or not kept[:, -1].all():
        return None
    return pads.tolist()


def alike(rows: Iterable[Row], first: Row) -> list[Row]:
    """The rows that can share a call with ``first``."""
    return [row for row in rows if row.columns == first.columns]


def computed_tokens(
    prompt: np.ndarray, generated: np.ndarray, columns: int, ends: Iterable[int]
) -> np.ndarray:
    """Tokens of a row that the cache holds and that belong to it: ``columns`` of them at most (the last generated one
    never ran through the model), and none after the first end token (a finished row is filled with padding)."""
    stop = np.flatnonzero(np.isin(generated, list(ends)))
    if len(stop):
        generated = generated[: stop[0] + 1]
    return np.concatenate([prompt, generated])[:columns]


def stitch(batch: int, parts: list[tuple[list[Row], torch.Tensor]], pad_token: int) -> torch.Tensor:
    """Results of several calls as one ``[batch, columns]`` tensor, padded on the right as generate does."""
    if len(parts) == 1:
        return parts[0][1]
    width = max(result.shape[1] for _, result in parts)
    whole = parts[0][1].new_full((batch, width), pad_token)
    for rows, result in parts:
        whole[[row.index for row in rows], : result.shape[1]] = result
    return whole
