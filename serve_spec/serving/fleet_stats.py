"""What the whole fleet does, merged from the snapshots of its replicas. Time is a number."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Snapshot: TypeAlias = Mapping[str, object]

# A replica that has been silent for this many times `stale_after_s` is gone for good.
_FORGET_FACTOR = 4
# History is thinned so that its length does not depend on how often replicas report.
_HISTORY_POINTS = 600

_GAUGES = ("batch_size", "num_running", "num_waiting", "num_preemptions")
_COUNTERS = ("steps", "decode_rows", "decode_tokens", "draft_tokens", "correct_drafts")


@dataclass(frozen=True)
class _Report:
    snapshot: Snapshot
    time_s: float


class FleetStats:
    """The latest snapshot of every replica, their sums, and a bounded history of the sums.

    All times are seconds of one clock, the caller's. Sums leave out stale replicas, so counters
    fall when a replica goes away.
    """

    def __init__(self, *, stale_after_s: float, history_s: float) -> None:
        self.stale_after_s = stale_after_s
        self.history_s = history_s
        self._reports: dict[str, _Report] = {}
        self._history: deque[dict[str, object]] = deque(maxlen=_HISTORY_POINTS)
        self._sampled_at = float("-inf")

    def report(self, replica: str, snapshot: Snapshot, now_s: float) -> None:
        """Takes a replica's snapshot (`EngineLoop.snapshot`); a newer one replaces an older."""
        self._reports[replica] = _Report(snapshot, now_s)
        if now_s - self._sampled_at >= self.history_s / _HISTORY_POINTS:
            self._sampled_at = now_s
            self._drop_the_dead(now_s)
            self._history.append({"time_s": now_s, **self._fleet(now_s)})

    def forget(self, replica: str) -> None:
        """Drops a replica that said goodbye; harmless if it is unknown."""
        self._reports.pop(replica, None)

    def view(self, now_s: float) -> dict[str, object]:
        """`internal_states` and `fleet` of `/server_info`, replicas in order of their names."""
        self._drop_the_dead(now_s)
        states = [
            {
                **report.snapshot,
                "replica": name,
                "age_s": round(now_s - report.time_s, 3),
                "stale": self._is_stale(report, now_s),
            }
            for name, report in sorted(self._reports.items())
        ]
        return {"internal_states": states, "fleet": self._fleet(now_s)}

    def history(self, now_s: float) -> list[dict[str, object]]:
        """The fleet's sums of the last `history_s` seconds, oldest first, each with its time."""
        oldest = now_s - self.history_s
        return [point for point in self._history if _number(point, "time_s") >= oldest]

    def _fleet(self, now_s: float) -> dict[str, object]:
        fresh = [r.snapshot for r in self._reports.values() if not self._is_stale(r, now_s)]
        counters = _sums([_section(s, "counters") for s in fresh], _COUNTERS)
        rows = counters["decode_rows"]
        # An engine that has not decoded yet has no tier.
        tiers = [t for s in fresh if (t := s.get("speculative_num_steps")) is not None]
        return {
            "num_replicas": len(fresh),
            "num_stale": len(self._reports) - len(fresh),
            **_sums(fresh, _GAUGES),
            # Weighted by decoded rows: the mean over replicas would count an idle one in full.
            "avg_spec_accept_length": (round(counters["decode_tokens"] / rows, 4) if rows else 1.0),
            "replicas_by_num_steps": dict(sorted(Counter(map(str, tiers)).items())),
            "kv": _sums([_section(s, "kv") for s in fresh], ("free_pages", "total_pages")),
            "counters": counters,
        }

    def _is_stale(self, report: _Report, now_s: float) -> bool:
        return now_s - report.time_s > self.stale_after_s

    def _drop_the_dead(self, now_s: float) -> None:
        limit = self.stale_after_s * _FORGET_FACTOR
        self._reports = {
            name: report for name, report in self._reports.items() if now_s - report.time_s <= limit
        }


def _section(snapshot: Snapshot, name: str) -> Snapshot:
    """A nested mapping of a snapshot; empty where a replica does not send it."""
    section = snapshot.get(name)
    return section if isinstance(section, Mapping) else {}


def _sums(snapshots: Iterable[Snapshot], names: tuple[str, ...]) -> dict[str, float]:
    totals = dict.fromkeys(names, 0.0)
    for snapshot in snapshots:
        for name in names:
            totals[name] += _number(snapshot, name)
    return {name: int(total) if total.is_integer() else total for name, total in totals.items()}


def _number(snapshot: Snapshot, name: str) -> float:
    """A number of a snapshot; 0 where a replica (of another version, say) does not send it."""
    value = snapshot.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0
