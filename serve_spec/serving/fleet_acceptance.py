"""What a fleet knows of acceptance, by pair of models, and the start it gives new replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from serve_spec.serving.snapshots import (
    AcceptanceSummary,
    Snapshot,
    Speed,
    acceptance_summary,
    drafted_steps,
)

# Replicas of so many pairs share one actor at most; a rolling update needs two.
_MOST_PAIRS = 16
# A merge over all replicas is too much for every report.
_MERGE_EVERY_S = 5.0
# Positions of fewer trials in the whole fleet are as good as untried.
_FEWEST_TRIALS = 1.0


@dataclass(slots=True)
class _Pair:
    """What the replicas of one pair of models and one depth reported."""

    reports: dict[str, tuple[float, AcceptanceSummary]] = field(default_factory=dict)
    """Time and content of the last report, by replica."""
    num_malformed: int = 0
    merged_s: float = float("-inf")
    remembered: tuple[float, list[float]] | None = None
    """Time and rates of the last merge that had any."""

    def fresh(self, oldest_s: float) -> list[AcceptanceSummary]:
        return [summary for time_s, summary in self.reports.values() if time_s >= oldest_s]


class FleetAcceptance:
    """Merges what replicas report, by pair of models and depth: others say nothing of each other.

    All times are seconds of one clock, the caller's. Replicas that did not report for
    `stale_after_s` do not count. A prior is remembered for `memory_s` after its replicas have gone,
    so that a fleet of one does not start cold after a restart.
    """

    def __init__(self, *, stale_after_s: float, memory_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._memory_s = memory_s
        self._pairs: dict[tuple[str, int], _Pair] = {}

    def report(self, replica: str, snapshot: Snapshot, now_s: float) -> None:
        """Take a replica's snapshot in place of its last one.

        One of a replica that cannot draft is passed over, a malformed one only counted.
        """
        max_steps = drafted_steps(snapshot)
        if not max_steps:
            return
        key = (str(snapshot.get("pair", "")), max_steps)
        for other in self._pairs.keys() - {key}:
            self._pairs[other].reports.pop(replica, None)
        pair = self._pair(key)
        if pair is None:
            return
        summary = acceptance_summary(snapshot, max_steps)
        if summary is None:
            pair.num_malformed += 1
            return
        pair.reports[replica] = now_s, summary
        if now_s - pair.merged_s >= _MERGE_EVERY_S:
            pair.merged_s = now_s
            rates = _rates(_totals(pair.fresh(now_s - self._stale_after_s), max_steps))
            if rates is not None:
                pair.remembered = now_s, rates

    def forget(self, replica: str) -> None:
        """Drop a replica; what it taught stays a prior for a while."""
        for pair in self._pairs.values():
            pair.reports.pop(replica, None)

    def prior(self, pair: str, max_steps: int, now_s: float) -> list[float] | None:
        """Return accept rates by position, weighted by trials, for a new policy to start from.

        Positions without trials continue the one before; None: nothing is known.
        """
        known = self._pairs.get((pair, max_steps))
        if known is None:
            return None
        rates = _rates(_totals(known.fresh(now_s - self._stale_after_s), max_steps))
        if rates is None and known.remembered is not None:
            time_s, remembered = known.remembered
            return remembered if now_s - time_s <= self._memory_s else None
        return rates

    def view(self, now_s: float) -> list[dict[str, object]]:
        """Return what is known of every pair, JSON-able."""
        oldest_s = now_s - self._stale_after_s
        return [
            {"pair": pair, "max_steps": max_steps, **_view(known, known.fresh(oldest_s), max_steps)}
            for (pair, max_steps), known in sorted(self._pairs.items(), key=itemgetter(0))
        ]

    def _pair(self, key: tuple[str, int]) -> _Pair | None:
        """Return a pair, a new one in place of one without replicas; None: all are in use."""
        if key not in self._pairs and len(self._pairs) >= _MOST_PAIRS:
            unused = [other for other, pair in self._pairs.items() if not pair.reports]
            if not unused:
                return None
            del self._pairs[unused[0]]
        return self._pairs.setdefault(key, _Pair())


def _totals(summaries: list[AcceptanceSummary], max_steps: int) -> list[tuple[float, float]]:
    """Return accepted drafts and trials by position."""
    columns = zip(*(summary.positions for summary in summaries), strict=True)
    totals = [(sum(p * n for p, n in column), sum(n for _, n in column)) for column in columns]
    return totals or [(0.0, 0.0)] * max_steps


def _rates(totals: list[tuple[float, float]]) -> list[float] | None:
    rates: list[float] = []
    for accepted, trials in totals:
        if trials >= _FEWEST_TRIALS:
            rates.append(accepted / trials)
        elif rates:
            rates.append(rates[-1])
        else:
            return None
    return rates


def _view(pair: _Pair, fresh: list[AcceptanceSummary], max_steps: int) -> dict[str, object]:
    totals = _totals(fresh, max_steps)
    rates = _rates(totals)
    shown = [None] * max_steps if rates is None else [round(rate, 4) for rate in rates]
    by_size: defaultdict[int, list[Speed]] = defaultdict(list)
    for summary in fresh:
        for size, speed in summary.speeds.items():
            by_size[size].append(speed)
    return {
        "num_replicas": len(fresh),
        "num_stale": len(pair.reports) - len(fresh),
        "num_malformed": pair.num_malformed,
        "positions": [
            {"position": position, "accept_rate": rate, "trials": round(trials, 1)}
            for position, (rate, (_, trials)) in enumerate(zip(shown, totals, strict=True), start=1)
        ],
        "tokens_per_ms": {str(size): _mean_speed(by_size[size]) for size in sorted(by_size)},
    }


def _mean_speed(speeds: list[Speed]) -> dict[str, float | None]:
    """Return mean speeds; the speedup is of replicas that measured both, for machines differ."""
    both = [speed for speed in speeds if speed.off and speed.speculating]
    plain, drafting = sum(s.off for s in both), sum(s.speculating for s in both)
    return {
        "off": _mean(s.off for s in speeds),
        "speculating": _mean(s.speculating for s in speeds),
        "speedup": round(drafting / plain, 4) if both else None,
    }


def _mean(measured: Iterable[float]) -> float | None:
    known = [value for value in measured if value]
    return round(sum(known) / len(known), 4) if known else None
