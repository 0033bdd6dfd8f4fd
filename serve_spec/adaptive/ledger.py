"""What a fleet knows about acceptance: summaries of its replicas, merged, as a start for new ones.

Without it a new replica would learn from its users what its neighbours have known for hours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from serve_spec.adaptive.calibration import Floats

Summary: TypeAlias = Mapping[str, object]

# A replica that has been silent for this many times `stale_after_s` is gone for good.
_FORGET_FACTOR = 4
# Positions of fewer trials in the whole fleet are as good as untried.
_FEWEST_TRIALS = 1.0
# Beyond these a summary is no measurement, and its sums need not be numbers.
_MOST_TRIALS = 1e9
_LEAST_TOKENS_PER_MS, _MOST_TOKENS_PER_MS = 1e-9, 1e9
_MOST_BUCKETS = 64
# No estimator gets closer to certainty, and one that starts from it must be able to leave it.
_LOWEST_RATE, _HIGHEST_RATE = 1e-6, 1 - 1e-6


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Decode tokens per millisecond as measured in one bucket of batch sizes; None: not yet."""

    off: float | None = None
    """In rounds without drafts."""
    speculating: float | None = None


@dataclass(frozen=True, slots=True)
class _Report:
    counts: Floats
    """Hits and trials by position, [2, max_steps]."""
    speeds: Mapping[int, DecodeSpeed]
    time_s: float


class AcceptanceLedger:
    """The latest summary of every replica, and what they say together.

    All times are seconds of one clock, the caller's. Stale replicas do not count, and those silent
    for much longer are dropped.
    """

    def __init__(self, max_steps: int, *, stale_after_s: float) -> None:
        self.max_steps = max_steps
        self.stale_after_s = stale_after_s
        self.num_malformed = 0
        """Summaries ignored: not what `summarise` makes of an estimator of `max_steps`."""
        self._reports: dict[str, _Report] = {}
        self._swept_at_s = float("-inf")

    def report(self, replica: str, summary: Summary, now_s: float) -> None:
        """Takes a replica's summary in place of its last one; a malformed one is only counted."""
        try:
            counts, speeds = _parsed_counts(summary, self.max_steps), _parsed_speeds(summary)
        except _Malformed:
            self.num_malformed += 1
            return
        self._reports[replica] = _Report(counts, speeds, now_s)
        if now_s - self._swept_at_s >= self.stale_after_s:
            self._swept_at_s = now_s
            self._drop_the_dead(now_s)

    def forget(self, replica: str) -> None:
        """Drops a replica that said goodbye; harmless if it is unknown."""
        self._reports.pop(replica, None)

    def prior(self, now_s: float) -> list[float] | None:
        """What a new `SurvivalEstimator` could start from: accept rates, weighted by trials.

        Positions that nobody tried continue the one before; None if nobody tried the first.
        """
        return self._rates(self._counts(self._fresh(now_s)))

    def view(self, now_s: float) -> dict[str, object]:
        """The fleet as an operator sees it, JSON-able."""
        fresh = self._fresh(now_s)
        counts = self._counts(fresh)
        rates = self._rates(counts)
        shown = [None] * self.max_steps if rates is None else [round(rate, 4) for rate in rates]
        columns = zip(shown, counts[1].tolist(), strict=True)
        return {
            "num_replicas": len(fresh),
            "num_stale": len(self._reports) - len(fresh),
            "num_malformed": self.num_malformed,
            "positions": [
                {"position": position, "accept_rate": rate, "trials": round(trials, 1)}
                for position, (rate, trials) in enumerate(columns, start=1)
            ],
            "tokens_per_ms": _merged_speeds(fresh),
        }

    def _fresh(self, now_s: float) -> list[_Report]:
        oldest = now_s - self.stale_after_s
        return [report for report in self._reports.values() if report.time_s >= oldest]

    def _counts(self, reports: list[_Report]) -> Floats:
        counts = np.array([report.counts for report in reports]).reshape(-1, 2, self.max_steps)
        total: Floats = counts.sum(axis=0)
        return total

    @staticmethod
    def _rates(counts: Floats) -> list[float] | None:
        rates: list[float] = []
        for hits, trials in counts.T.tolist():
            if trials >= _FEWEST_TRIALS:
                rates.append(hits / trials)
            elif rates:
                rates.append(rates[-1])
            else:
                return None
        return rates

    def _drop_the_dead(self, now_s: float) -> None:
        oldest = now_s - self.stale_after_s * _FORGET_FACTOR
        self._reports = {
            name: report for name, report in self._reports.items() if report.time_s >= oldest
        }


def _merged_speeds(reports: list[_Report]) -> dict[str, object]:
    by_size: defaultdict[int, list[DecodeSpeed]] = defaultdict(list)
    for report in reports:
        for size, speed in report.speeds.items():
            by_size[size].append(speed)
    return {str(size): _merged_speed(speeds) for size, speeds in sorted(by_size.items())}


def _merged_speed(speeds: list[DecodeSpeed]) -> dict[str, object]:
    """Mean speeds; the speedup is of the replicas that measured both, for machines differ."""
    both = [(s.off, s.speculating) for s in speeds if s.off and s.speculating]
    return {
        "off": _mean([speed.off for speed in speeds if speed.off]),
        "speculating": _mean([speed.speculating for speed in speeds if speed.speculating]),
        "speedup": round(sum(s for _, s in both) / sum(o for o, _ in both), 4) if both else None,
    }


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


class _Malformed(ValueError):
    """What no replica of this fleet would send."""


def _parsed_counts(summary: object, max_steps: int) -> Floats:
    rates = _column(_get(summary, "accept_rates"), max_steps, _LOWEST_RATE, _HIGHEST_RATE)
    trials = _column(_get(summary, "trials"), max_steps, 0.0, _MOST_TRIALS)
    return np.array([np.multiply(rates, trials), trials])


def _parsed_speeds(summary: object) -> dict[int, DecodeSpeed]:
    buckets = _get(summary, "tokens_per_ms")
    if not isinstance(buckets, Mapping) or len(buckets) > _MOST_BUCKETS:
        raise _Malformed
    return {
        _size(key): DecodeSpeed(_speed(_get(pair, "off")), _speed(_get(pair, "speculating")))
        for key, pair in buckets.items()
    }


def _get(mapping: object, key: str) -> object:
    if not isinstance(mapping, Mapping) or key not in mapping:
        raise _Malformed
    return mapping[key]


def _column(values: object, length: int, lowest: float, highest: float) -> list[float]:
    if not isinstance(values, list) or len(values) != length:
        raise _Malformed
    return [_number(value, lowest, highest) for value in values]


def _speed(value: object) -> float | None:
    return None if value is None else _number(value, _LEAST_TOKENS_PER_MS, _MOST_TOKENS_PER_MS)


def _size(key: object) -> int:
    if not isinstance(key, str) or not (key.isascii() and key.isdigit() and len(key) < 10):
        raise _Malformed
    return int(key)


def _number(value: object, lowest: float, highest: float) -> float:
    # The comparison also refuses NaN, infinities and integers that no float holds.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Malformed
    if not lowest <= value <= highest:
        raise _Malformed
    return float(value)
