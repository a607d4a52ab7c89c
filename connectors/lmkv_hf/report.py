"""What a generate call got from the store and gave to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SequenceReport:
    """One sequence of the batch, padding not counted.

    hit_tokens: restored, by tier in ``tiers``; ``reason``: why there were no more. stored_chunks:
    new ones in the store after the call.
    """

    prompt_tokens: int
    hit_tokens: int = 0
    tiers: Mapping[str, int] = field(default_factory=dict)
    stored_chunks: int = 0
    reason: str = ""

    def __str__(self) -> str:
        tiers = ", ".join(f"{count} from {name}" for name, count in self.tiers.items())
        text = f"{self.hit_tokens} of {self.prompt_tokens} prompt tokens restored"
        text += f" ({tiers})" if tiers else ""
        return f"{text}: {self.reason}; {self.stored_chunks} chunks stored"


@dataclass(frozen=True)
class Report:
    """A whole call, one report a sequence. ``plain``: why transformers ran on its own, or empty."""

    sequences: tuple[SequenceReport, ...] = ()
    plain: str = ""

    @property
    def prompt_tokens(self) -> int:
        return sum(each.prompt_tokens for each in self.sequences)

    @property
    def hit_tokens(self) -> int:
        return sum(each.hit_tokens for each in self.sequences)

    def __str__(self) -> str:
        if self.plain:
            return f"ran without lmkv: {self.plain}"
        return "\n".join(map(str, self.sequences))
