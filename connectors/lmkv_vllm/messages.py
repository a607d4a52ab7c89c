"""What scheduler and workers tell each other, step by step. Plain data: vLLM sends it between processes."""

from __future__ import annotations

from collections import Counter
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


@dataclass(frozen=True)
class Load:
    """Bring tokens [start, stop) of a request into its blocks.

    digests: of chunks ``start // chunk`` to ``stop // chunk``, behind ``before``, the digest in front of them. blocks:
    per vLLM group, the block ids of those tokens, 0 where there is none to write.
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
    overwritten. scope: the current one; what was asked under another is void."""

    scope: bytes
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    settle: list[int] = field(default_factory=list)


@dataclass
class Loaded:
    """How one rank's load ended: tokens valid from the start, by tier the tokens it copied, seconds, failed digests."""

    request: str
    tokens: int
    tiers: dict[str, int]
    seconds: float
    nbytes: int
    failed: tuple[bytes, ...] = ()
    reason: str = ""


@dataclass
class Outcome(KVConnectorWorkerMetadata):
    """What ended on a worker since its last word. saved: job -> ranks that are done with it; kept: digests now
    stored, with the tier they are in."""

    saved: Counter[int] = field(default_factory=Counter)
    loaded: list[Loaded] = field(default_factory=list)
    kept: dict[int, tuple[bytes, ...]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Outcome:
        """Both ranks' words as one."""
        assert isinstance(other, Outcome)
        kept = {**self.kept}
        for job, digests in other.kept.items():
            kept[job] = tuple(d for d in digests if d in set(kept[job])) if job in kept else digests
        return Outcome(self.saved + other.saved, self.loaded + other.loaded, kept)
