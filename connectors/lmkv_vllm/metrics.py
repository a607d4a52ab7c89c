"""The connector's counters as vLLM's stats and as Prometheus metrics; the same names in both.

``vllm:lmkv_events{event=...}`` counts everything, misses and failures under their reasons; ``vllm:lmkv_load_seconds``
is how long loads took, ``vllm:lmkv_hook_seconds`` what all hooks together took of the engine's own time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass
class LMKVStats(KVConnectorStats):
    """``data``: {"counts": {event: n}, "load_seconds": [...], "hook_seconds": s}, all since the last report."""

    def __post_init__(self) -> None:
        self.data = {
            "counts": dict(self.data.get("counts", {})),
            "load_seconds": list(self.data.get("load_seconds", ())),
            "hook_seconds": self.data.get("hook_seconds", 0.0),
        }

    def reset(self) -> None:
        """Empty again."""
        self.data = {"counts": {}, "load_seconds": [], "hook_seconds": 0.0}

    def is_empty(self) -> bool:
        """Nothing happened."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's numbers to these."""
        if not other.is_empty():
            self.data["counts"] = dict(Counter(self.data["counts"]) + Counter(other.data["counts"]))
            self.data["load_seconds"] = self.data["load_seconds"] + other.data["load_seconds"]
            self.data["hook_seconds"] += other.data["hook_seconds"]
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: every count, and the loads' number and mean seconds."""
        seconds = self.data["load_seconds"]
        found: dict[str, int | float] = dict(self.data["counts"])
        if seconds:
            found |= {"loads": len(seconds), "mean load seconds": round(sum(seconds) / len(seconds), 4)}
        return {**found, "hook seconds": round(self.data["hook_seconds"], 4)}


class Since:
    """Counters of a `lmkv.stats.Stats` since the last look."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()

    def take(self, now: dict[str, int]) -> dict[str, int]:
        """What was added since; zeros left out."""
        after = Counter(now)
        found = dict(after - self._before)
        self._before = after
        return found


class LMKVPromMetrics(KVConnectorPromMetrics):
    """The metrics of every engine of a server."""

    def __init__(
        self, vllm_config: VllmConfig, metric_types: dict[Any, Any], labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:  # fmt: skip
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._events = self._counter_cls(
            name="vllm:lmkv_events",
            documentation="What lmkv did, by event; misses and failures by reason.",
            labelnames=[*labelnames, "event"],
        )
        self._seconds = self._histogram_cls(
            name="vllm:lmkv_load_seconds", documentation="Seconds of one load.", buckets=BUCKETS, labelnames=labelnames
        )
        self._hooks = self._counter_cls(
            name="vllm:lmkv_hook_seconds",
            documentation="Seconds inside lmkv's hooks, of scheduler and workers together; in steps that compute "
            "nothing this includes short waits for a load.",
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues[engine_idx]
        stats = LMKVStats(data=transfer_stats_data)
        for event, count in stats.data["counts"].items():
            self._events.labels(*labels, event).inc(count)
        for seconds in stats.data["load_seconds"]:
            self._seconds.labels(*labels).observe(seconds)
        self._hooks.labels(*labels).inc(stats.data["hook_seconds"])
