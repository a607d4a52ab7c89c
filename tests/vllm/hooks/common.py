"""What the hook tests share."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sim.engine import Engine
from sim.models import BLOCK, MODELS

PROMPT = list(range(100, 161))
CHUNK = 2 * BLOCK
FULL = MODELS["full"]
KINDS = ["full", "window", "full+window", "full+mamba", "mla tp2"]


def warm(engine: Engine, prompt: list[int] = PROMPT, **request: Any) -> list[int]:
    """Have a prompt stored, and vLLM forget it; returns its tokens."""
    tokens = engine.generate(prompt, 4, **request)
    engine.settle()
    engine.forget()
    return tokens


def scheduler_side(engine: Engine) -> Any:
    return engine.connector.side


def worker_side(engine: Engine) -> Any:
    return engine.ranks[0].connector.side


def counted(*sides: Any) -> Counter[str]:
    """Hooks that failed."""
    found: Counter[str] = Counter()
    for side in sides:
        found.update({k: n for k, n in side.stats.snapshot().items() if "failed" in k})
    return found


S, W = scheduler_side, worker_side


def match(engine: Engine, name: str, local: int = 0) -> Any:
    """What the connector offers a request."""
    return engine.connector.get_num_new_matched_tokens(engine.requests[name], local)
