"""What the scheduler's side knows of one request."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmkv.keys import DIGEST_BYTES
from lmkv.server.client import Answer

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from lmkv_vllm.geometry import Plan

NO_DIGEST = bytes(DIGEST_BYTES)
MAX_TTL = 1e9


@dataclass(eq=False)
class Tracked:
    """One request from its arrival to its end.

    asked: when its lookup went out (monotonic). local: tokens vLLM held itself when it asked. hit: tokens of the load
    that was started, by tier in ``tiers``. next_save: the first chunk not handed to the workers yet. stale: its blocks
    hold bytes from before a reset. refused: there was nothing to look up. failures: its loads that failed.
    """

    request: Request
    skip_save: bool = False
    skip_load: bool = False
    ttl: float | None = None
    asked: float = 0.0
    lookup: Future[Answer] | None = None
    answer: Answer | None = None
    loading: bool = False
    local: int = 0
    hit: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    next_save: int = 0
    stale: bool = False
    refused: bool = False
    failures: int = 0
    reason: str = ""

    @classmethod
    def of(cls, request: Request) -> Tracked:
        """With the request's own wishes: ``kv_transfer_params`` keys ``lmkv.skip_save``, ``lmkv.skip_load``,
        ``lmkv.ttl`` (seconds); what is no such thing is ignored."""
        params: dict[str, Any] = request.kv_transfer_params or {}
        ttl = params.get("lmkv.ttl")
        number = isinstance(ttl, (int, float)) and not isinstance(ttl, bool) and ttl > 0
        return cls(
            request, params.get("lmkv.skip_save") is True, params.get("lmkv.skip_load") is True,
            min(float(ttl), MAX_TTL) if number else None,
        )  # fmt: skip

    def chunks(self, plan: Plan, first: int, stop: int) -> tuple[bytes, tuple[bytes, ...]]:
        """The digest before chunk ``first``, and those of chunks [first, stop) as far as vLLM has hashed the tokens.

        A chunk's digest is vLLM's hash of its last block, which covers all tokens before it.
        """
        unit, hashes = plan.chunk_tokens // plan.hash_tokens, self.request.block_hashes
        stop = min(stop, len(hashes) // unit)
        found = tuple(
            bytes(hashes[(i + 1) * unit - 1]).ljust(DIGEST_BYTES, b"\0") for i in range(max(0, first - 1), stop)
        )
        return (found[0], found[1:]) if first and found else (NO_DIGEST, found)

    @property
    def saves(self) -> bool:
        """What it computes is to be stored."""
        return not (self.skip_save or self.stale)

    def restart(self) -> None:
        """It will be computed from its first token again; vLLM's own prefix cache may still bring stale blocks."""
        self.next_save = 0

    def forget_answer(self) -> None:
        """Ask again next time."""
        self.lookup, self.answer, self.asked, self.refused = None, None, 0.0, False
