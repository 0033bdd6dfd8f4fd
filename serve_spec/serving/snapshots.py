"""Reading what a replica sent. It may be of another version, so nothing is taken for granted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from serve_spec.config.adaptive_file import MAX_STEPS

Snapshot: TypeAlias = Mapping[str, object]

_LOWEST_RATE, _HIGHEST_RATE = 1e-6, 1 - 1e-6


def section(snapshot: Snapshot, *path: str) -> Snapshot:
    """A nested mapping of a snapshot; empty where a replica does not send it."""
    for name in path:
        inner = snapshot.get(name)
        if not isinstance(inner, Mapping):
            return {}
        snapshot = inner
    return snapshot


def number(snapshot: Snapshot, name: str) -> float:
    """A number of a snapshot; 0 where a replica does not send it."""
    value = snapshot.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def sums(snapshots: Iterable[Snapshot], names: Iterable[str]) -> dict[str, float]:
    """Sums by name, whole ones as integers."""
    totals = dict.fromkeys(names, 0.0)
    for snapshot in snapshots:
        for name in totals:
            totals[name] += number(snapshot, name)
    return {name: int(total) if total.is_integer() else total for name, total in totals.items()}


def acceptance_summary(snapshot: Snapshot) -> dict[str, object] | None:
    """What `AcceptanceLedger.report` takes (`ledger.summarise`), from an engine's snapshot.

    The rates are those of the policy's own estimate where it keeps one, else of the counts since
    start. None where nothing can be drafted.
    """
    max_steps = _max_steps(snapshot)
    estimated = section(snapshot, "acceptance").get("positions")
    counted = snapshot.get("positions")
    if isinstance(estimated, list):
        known = _by_position(estimated, "trials")
    elif isinstance(counted, list):
        known = _by_position(counted, "reached")
    else:
        return None
    if not max_steps:
        return None
    columns = [known.get(position, (0.5, 0.0)) for position in range(1, max_steps + 1)]
    return {
        "accept_rates": [min(max(rate, _LOWEST_RATE), _HIGHEST_RATE) for rate, _ in columns],
        "trials": [trials for _, trials in columns],
        "tokens_per_ms": _speeds(section(snapshot, "speculation", "by_batch_size")),
    }


def _max_steps(snapshot: Snapshot) -> int:
    steps = snapshot.get("candidate_steps")
    known = [k for k in steps if isinstance(k, int)] if isinstance(steps, list) else []
    deepest = max(known, default=0)
    return deepest if deepest <= MAX_STEPS else 0


def _by_position(entries: list[object], trials: str) -> dict[int, tuple[float, float]]:
    return {
        int(number(entry, "position")): (number(entry, "accept_rate"), number(entry, trials))
        for entry in entries
        if isinstance(entry, Mapping)
    }


def _speeds(by_batch_size: Snapshot) -> dict[str, object]:
    """Plain speed as measured; drafting speed from the speedup, which compares like with like."""
    speeds: dict[str, object] = {}
    for size, bucket in by_batch_size.items():
        if isinstance(bucket, Mapping):
            off = number(section(bucket, "tokens_per_ms"), "0") or None
            speedup = number(bucket, "effective_speedup") or None
            speculating = off * speedup if off and speedup else None
            speeds[size] = {"off": off, "speculating": speculating}
    return speeds
