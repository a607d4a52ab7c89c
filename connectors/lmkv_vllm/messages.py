"""What scheduler and workers tell each other, step by step. Plain data: vLLM sends it between processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):
    """One rank's part of the scope. shard: which bytes the rank holds; replicas of one shard say the same. sizes:
    container bytes of its groups; groups: the plan's group of each; where: what lays its bytes out, as text."""

    shard: int
    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    where: str


Part = tuple[bytes, int]  # a chunk's digest and the number of a stored group


@dataclass(frozen=True)
class Load:
    """Bring tokens [start, stop) of a request into its blocks.

    digests: of chunks ``start // chunk`` to ``stop // chunk``, behind ``before``, the digest in front of them. blocks:
    per vLLM group, the block ids of those tokens, 0 where there is none to write. Without digests it only fails, so
    that vLLM, which waits for the request, hears of it.
    """

    request: str
    scope: bytes
    start: int
    stop: int
    before: bytes
    digests: tuple[bytes, ...]
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Save:
    """Keep chunks ``first`` on; their tokens are final once this step has run. blocks: per vLLM group, block ids of
    those chunks, 0 where a block is gone or the group saves nothing of the chunk."""

    job: int
    scope: bytes
    first: int
    before: bytes
    digests: tuple[bytes, ...]
    blocks: tuple[tuple[int, ...], ...]
    ttl: float | None = None


@dataclass
class Step(KVConnectorMetadata):
    """One step's work. settle: saves whose blocks are handed out again, to be over or given up before anything is
    overwritten. scope: the current one; what was asked under another is void. idle: nothing is computed in this step,
    so that it can wait a little for a load."""

    scope: bytes
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    settle: list[int] = field(default_factory=list)
    idle: bool = False


@dataclass
class Loaded:
    """How one rank's load ended. tokens: valid from the prompt's start; tiers: tokens copied, by tier; reason: '' for a
    whole load; failed: what could not be had."""

    request: str
    tokens: int
    tiers: dict[str, int]
    seconds: float
    nbytes: int
    failed: tuple[Part, ...] = ()
    reason: str = ""


@dataclass
class Outcome(KVConnectorWorkerMetadata):
    """What ended on a worker since its last word. saved: job -> ranks that are done with it; kept: job -> the parts
    that are stored on all of those that store any."""

    saved: Counter[int] = field(default_factory=Counter)
    loaded: list[Loaded] = field(default_factory=list)
    kept: dict[int, tuple[Part, ...]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Outcome:
        """Both ranks' words as one."""
        assert isinstance(other, Outcome)
        kept = {**self.kept}
        for job, parts in other.kept.items():
            kept[job] = both(kept[job], parts) if job in kept else parts
        return Outcome(self.saved + other.saved, self.loaded + other.loaded, kept)


def both(one: Sequence[Part], other: Sequence[Part]) -> tuple[Part, ...]:
    """What is in both, in the first one's order."""
    others = set(other)
    return tuple(part for part in one if part in others)
