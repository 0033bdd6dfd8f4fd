"""Figures of an engine in this process, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A figure. labels: `model_name`."""

    name: str
    labels: dict[str, str] = field(kw_only=True, default_factory=dict)


@dataclass(frozen=True)
class Counter(Metric):
    """A sum since the start."""

    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """A value of now."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Sums since the start, one for each position of a draft."""

    values: list[int]


def llm_metrics(engine: Any, speculation: Any, model_name: str) -> list[Metric]:
    """Return the figures in the snapshots of an engine and of its `MetricsCollector`."""
    cache, prefixes, sums = engine["kv"], engine["prefix_cache"], engine["counters"]
    positions = speculation["since_start"]["positions"]
    free = cache["free_pages"] / cache["total_pages"]
    labels = {"model_name": model_name}
    counters = {
        "num_preemptions": engine["num_preemptions"],
        "prefix_cache_queries": prefixes["query_tokens"],
        "prefix_cache_hits": prefixes["hit_tokens"],
        "spec_decode_num_drafts": positions[0]["verified"] if positions else 0,
        "spec_decode_num_draft_tokens": sums["draft_tokens"],
        "spec_decode_num_accepted_tokens": sums["correct_drafts"],
    }
    gauges = {
        "num_requests_running": engine["num_running"],
        "num_requests_waiting": engine["num_waiting"],
        "kv_cache_usage_perc": 1 - free,
    }
    accepted = [position["accepted"] for position in positions]
    return [
        *(Gauge(f"vllm:{name}", value, labels=labels) for name, value in gauges.items()),
        *(Counter(f"vllm:{name}", value, labels=labels) for name, value in counters.items()),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", accepted, labels=labels),
    ]
