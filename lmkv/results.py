"""What the engine's calls answer: values, not exceptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lmkv.index import part_bit
from lmkv.writer import Tally

if TYPE_CHECKING:
    from lmkv.engine import Engine
    from lmkv.keys import ChunkKeys


_REFUSED = {
    "lossy": "chunk {} is lossy there, and codec = {!r} wants it more exact",
    "codec": "chunk {} is there, in a codec that is not known here",
    "profile": "chunk {} is there, but its codec's profile is not here",
}


class StoreHandle:
    """How a store went. Counts are containers (one a chunk, group and shard).

    stored: now in host memory. skipped: held or being written already. dropped: not taken, see ``reasons``.
    tiers: per lower tier, outcome -> containers, final once ``done()``.
    """

    def __init__(self, tally: Tally) -> None:
        self.stored = self.skipped = self.dropped = 0
        self.reasons: Counter[str] = Counter()
        self._tally = tally

    def skip(self, reason: str) -> None:
        """One container was not needed."""
        self.skipped += 1
        self.reasons[reason] += 1

    def drop(self, reason: str, count: int) -> None:
        """``count`` containers were not taken."""
        self.dropped += count
        self.reasons[reason] += count

    @property
    def tiers(self) -> dict[str, dict[str, int]]:
        """Outcomes of the write-through so far."""
        with self._tally.changed:
            return {tier: dict(counts) for tier, counts in self._tally.outcomes.items()}

    def done(self) -> bool:
        """Every tier has written its copy or given up."""
        return not self._tally.pending

    def result(self, timeout: float | None = None) -> StoreHandle:
        """Wait until ``done()``; TimeoutError after ``timeout`` seconds."""
        if not self._tally.wait(timeout):
            raise TimeoutError(f"{self._tally.pending} writes are still under way")
        return self

    def __repr__(self) -> str:
        why = f" ({', '.join(f'{reason}: {n}' for reason, n in self.reasons.items())})" if self.reasons else ""
        return f"<stored {self.stored}, skipped {self.skipped}, dropped {self.dropped}{why}>"


class Retrieved(NamedTuple):
    """``tokens``: the pages hold this prefix now, 0 when nothing beyond ``start`` could be restored. ``loaded``: tokens
    copied. ``tiers``: loaded tokens by the tier they came from. ``reason``: why it is not longer."""

    tokens: int
    loaded: int
    tiers: dict[str, int]
    reason: str


@dataclass(frozen=True)
class FlushReport:
    """``safe``: nothing is queued any more. Containers since the last flush: per tier written, dropped, failed."""

    safe: bool
    written: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, safe: bool, taken: Sequence[dict[str, Counter[str]]]) -> FlushReport:
        """From the writers' outcomes."""
        written: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        for outcomes in taken:
            for tier, counts in outcomes.items():
                for outcome, count in counts.items():
                    kind = failed if outcome.startswith("failed") else written if outcome == "written" else dropped
                    kind[tier] += count
        return cls(safe, dict(written), dict(dropped), dict(failed))


@dataclass(frozen=True)
class Explanation:
    """A lookup looked into: ``str()`` is for people."""

    tokens: int
    hit: int
    reason: str
    tiers: dict[str, tuple[int, int, str]]

    def __str__(self) -> str:
        lines = [f"{self.hit} of {self.tokens} tokens can be restored; it ends there: {self.reason}"]
        width = max(map(len, self.tiers), default=0)
        for name, (prefix, held, why) in self.tiers.items():
            lines.append(f"  {name:<{width}}  first {prefix} tokens without a gap, {held} in all; {why}")
        return "\n".join(lines)


def explain(engine: Engine, keys: ChunkKeys) -> Explanation:
    """Tier by tier, what is held of a prompt's chunks and where each tier's run ends."""
    plan = engine.lookup(keys)
    storage, spec = engine.storage, engine.spec
    find = storage.index.find(engine.scope.digest)
    entries = [find(digest) for digest in keys.upto(keys.chunks)]
    bits = engine.need.growing or sum(part_bit(g, engine.shard) for g in range(len(spec.groups)))
    tiers = {}
    for number, name in enumerate(storage.names):
        held = [entry is not None and entry.masks[number] & bits == bits for entry in entries]
        run = held.index(False) if False in held else len(held)
        why = "the whole prompt" if run == len(held) else f"chunk {run} is not there"
        if number and run < len(held):
            part = keys.key(run, engine.scope.digest, 0, engine.shard)
            tier = storage.tiers[number - 1]
            if refused := tier.refuses(part):
                why = _REFUSED[refused].format(run, tier.config.codec)
        if number and storage.tiers[number - 1].breaker.open:
            why += "; the tier is failing and is not asked"
        elif number and not storage.tiers[number - 1].scanned.is_set():
            why += "; still being scanned"
        tiers[name] = (run * spec.chunk_tokens, sum(held) * spec.chunk_tokens, why)
    return Explanation(keys.tokens, plan.tokens, plan.reason, tiers)
