"""Statistics of the fleet, merged from the snapshots of its replicas.

The caller passes the time, in seconds of one clock.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from serve_spec.metrics import batch_size_bucket
from serve_spec.serving.reports import (
    AcceptanceSummary,
    Figures,
    Report,
    Snapshot,
    Speed,
    acceptance_summary,
    decode_part,
    drafted_steps,
    number,
    section,
    sums,
)

# Maximum number of model pairs; a rolling update has two.
_MAX_PAIRS = 16
# Merging all replicas at every report would be too slow.
_MERGE_EVERY_S = 5.0
# Positions with fewer trials in the whole fleet count as untried.
_MIN_TRIALS = 1.0


@dataclass(slots=True)
class _Pair:
    """Reports of the replicas with one pair of models and one maximum depth."""

    reports: dict[str, tuple[float, AcceptanceSummary]] = field(default_factory=dict)
    """Time and content of the last report, by replica."""
    num_malformed: int = 0
    merged_s: float = float("-inf")
    remembered: tuple[float, list[float]] | None = None
    """Time and rates of the last merge with any rates."""

    def fresh(self, oldest_s: float) -> list[AcceptanceSummary]:
        return [summary for time_s, summary in self.reports.values() if time_s >= oldest_s]


class FleetAcceptance:
    """Acceptance rates of the fleet, by pair of models and maximum depth.

    Replicas that have not reported for `stale_after_s` are left out. The prior is kept for
    `memory_s` after its replicas have gone, so that a single replica restarts warm.
    """

    def __init__(self, *, stale_after_s: float, memory_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._memory_s = memory_s
        self._pairs: dict[tuple[str, int], _Pair] = {}

    def report(self, replica: str, snapshot: Snapshot, now_s: float) -> None:
        """Store the latest snapshot of a replica.

        A snapshot without drafting is ignored. A malformed one is only counted.
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
        """Remove a replica; its rates remain in the prior for `memory_s`."""
        for pair in self._pairs.values():
            pair.reports.pop(replica, None)

    def prior(self, pair: str, max_steps: int, now_s: float) -> list[float] | None:
        """Return accept rates by position, weighted by trials, or None if there are none.

        A new policy starts from them. An untried position has the rate of the one before it.
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
        """Return the acceptance and speed of every pair for `/server_info`."""
        oldest_s = now_s - self._stale_after_s
        return [
            {"pair": pair, "max_steps": max_steps, **_view(known, known.fresh(oldest_s), max_steps)}
            for (pair, max_steps), known in sorted(self._pairs.items(), key=itemgetter(0))
        ]

    def _pair(self, key: tuple[str, int]) -> _Pair | None:
        """Return or create a pair, replacing one without replicas; None if all are in use."""
        if key not in self._pairs and len(self._pairs) >= _MAX_PAIRS:
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
        if trials >= _MIN_TRIALS:
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
    """Return mean speeds; the speedup covers only replicas that measured both."""
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


class Series:
    """A time series of several columns, oldest first.

    A point that follows the last one too soon is dropped, so that `history_s` seconds take at most
    about `max_points` points.
    """

    def __init__(self, columns: Sequence[str], *, history_s: float, max_points: int) -> None:
        self.columns = tuple(columns)
        self._width = 1 + len(self.columns)
        self._history_s = history_s
        self._interval_s = history_s / max_points
        self._max_values = self._width * (max_points + 1)
        self._values = array("d")

    def is_due(self, now_s: float) -> bool:
        """Return whether `add` would keep a point now."""
        return not self._values or now_s - self._values[-self._width] >= self._interval_s

    def add(self, now_s: float, point: Sequence[float]) -> None:
        """Add a point, one number per column, if one is due."""
        if self.is_due(now_s):
            self._values.extend((now_s, *point))
            del self._values[: max(0, len(self._values) - self._max_values)]

    def view(self, now_s: float) -> dict[str, list[float]]:
        """Return `time_s` and the columns of the last `history_s` seconds."""
        start = 0
        while start < len(self._values) and self._values[start] < now_s - self._history_s:
            start += self._width
        names = ("time_s", *self.columns)
        return {
            name: self._values[start + offset :: self._width].tolist()
            for offset, name in enumerate(names)
        }


# A replica is removed after this many times `stale_after_s` without a report.
_FORGET_FACTOR = 4
_MAX_ACCEPTANCE_READS_PER_S = 200
"""Limit on reports decoded for their acceptance, which changes slowly."""
_MAX_SUMMED_PER_S = 2000
"""Limit on replicas summed for points of the fleet's history."""
_FLEET_POINTS, _REPLICA_POINTS = 600, 120
_SHOWN_POINTS = 120
_SHOWN_REPLICAS = 64
"""Limit on replicas on the status page, whatever the size of the fleet."""

_GAUGES = ("batch_size", "num_running", "num_waiting", "num_preemptions")
_COUNTERS = ("steps", "decode_rows", "decode_tokens", "draft_tokens", "correct_drafts")
_FLEET_COLUMNS = (
    "num_replicas", "batch_size", "num_waiting", "decode_tokens", "mean_num_steps",
    "tokens_per_step", "effective_speedup", "free_pages",
)  # fmt: skip
_REPLICA_COLUMNS = Figures._fields[:7]
_SHOWN_FIELDS = (
    "replica", "replica_rank", "age_s", "stale", "strategy", "speculative_num_steps",
    "candidate_steps", "last_reason", "fallback", "costs", "refused_user_config", "slot", "slots",
    "batch_size", "num_running", "num_waiting", "kv", "avg_spec_accept_length", "switches",
    "predicted_goodput", "predicted_ms", "break_even", "rounds_by_num_steps",
    "speculation", "synthetic_acceptance",
)  # fmt: skip


@dataclass(slots=True)
class _Replica:
    series: Series
    report: Report
    time_s: float
    acceptance_read_s: float = float("-inf")
    """When its acceptance was last read."""


class FleetStats:
    """The latest snapshot of every replica, fleet totals, acceptance rates and history.

    Totals leave out stale replicas, so counters fall when a replica leaves. Memory per replica and
    time per report are bounded.
    """

    def __init__(self, *, stale_after_s: float, history_s: float) -> None:
        self.stale_after_s = stale_after_s
        self.history_s = history_s
        self._replicas: dict[str, _Replica] = {}
        # Acceptance rates stay valid longer than a replica's load.
        self._acceptance = FleetAcceptance(
            stale_after_s=stale_after_s * _FORGET_FACTOR, memory_s=history_s
        )
        self._series = Series(_FLEET_COLUMNS, history_s=history_s, max_points=_FLEET_POINTS)
        self._summed_s = float("-inf")

    def report(self, replica: str, snapshot: Snapshot, now_s: float) -> None:
        """Store the latest snapshot of a replica (`EngineClient.snapshot`)."""
        self.take(Report.of(replica, snapshot), now_s)

    def take(self, report: Report, now_s: float) -> None:
        """Store an encoded snapshot; most are never decoded."""
        replica = self._replicas.get(report.replica)
        if replica is None:
            replica = _Replica(self._new_series(), report, now_s)
            self._replicas[report.replica] = replica
        replica.report, replica.time_s = report, now_s
        replica.series.add(now_s, report.figures[: len(_REPLICA_COLUMNS)])
        if now_s - replica.acceptance_read_s >= self._acceptance_interval_s():
            replica.acceptance_read_s = now_s
            self._acceptance.report(report.replica, decode_part(report.whole), now_s)
        if now_s - self._summed_s >= len(self._replicas) / _MAX_SUMMED_PER_S:
            self._sum_up(now_s)

    @property
    def num_replicas(self) -> int:
        """Number of known replicas, stale ones included."""
        return len(self._replicas)

    def silent(self, now_s: float, for_s: float) -> dict[str, float]:
        """Return the age in seconds of the last report of replicas silent for `for_s`."""
        ages = {name: now_s - replica.time_s for name, replica in self._replicas.items()}
        return {name: age_s for name, age_s in ages.items() if age_s > for_s}

    def forget(self, replica: str) -> None:
        """Remove a replica; no-op if it is unknown."""
        self._replicas.pop(replica, None)
        self._acceptance.forget(replica)

    def prior(self, pair: str, max_steps: int, now_s: float) -> list[float] | None:
        """See `FleetAcceptance.prior`."""
        return self._acceptance.prior(pair, max_steps, now_s)

    def view(self, now_s: float) -> dict[str, object]:
        """Return `internal_states` and `fleet` of `/server_info`, replicas sorted by name."""
        return decode_view(self.encoded_view(now_s))

    def encoded_view(self, now_s: float) -> dict[str, object]:
        """Return `view` with encoded snapshots, for `decode_view` to decode."""
        self._remove_gone(now_s)
        states = [
            (self._replicas[name].report.whole, self._identity_of(name, now_s))
            for name in sorted(self._replicas)
        ]
        return {"internal_states": states, "fleet": self._fleet(now_s)}

    def status(self, now_s: float) -> dict[str, object]:
        """Return the data of the status page: the fleet and the first replicas, with history.

        Its size is bounded for any fleet.
        """
        self._remove_gone(now_s)
        shown = sorted(self._replicas)[:_SHOWN_REPLICAS]
        return {
            "time_s": now_s,
            "fleet": self._fleet(now_s),
            "history": self.history(now_s, _SHOWN_POINTS),
            "replicas": [self._shown(name, now_s) for name in shown],
        }

    def history(self, now_s: float, max_points: int = _FLEET_POINTS + 1) -> dict[str, list[float]]:
        """Return the fleet's history of the last `history_s` seconds by column, oldest first."""
        columns = self._series.view(now_s)
        stride = -(-len(columns["time_s"]) // max_points) or 1
        # Strided from the end, so that the newest point is kept.
        return {name: values[::-1][::stride][::-1] for name, values in columns.items()}

    def _new_series(self) -> Series:
        return Series(_REPLICA_COLUMNS, history_s=self.history_s, max_points=_REPLICA_POINTS)

    def _identity_of(self, name: str, now_s: float) -> dict[str, object]:
        """Return the fields of a replica that are not in its snapshot."""
        replica = self._replicas[name]
        return {
            "replica": name,
            "age_s": round(now_s - replica.time_s, 3),
            "stale": self._is_stale(replica, now_s),
        }

    def _shown(self, name: str, now_s: float) -> dict[str, object]:
        replica = self._replicas[name]
        state = {**decode_part(replica.report.whole), **self._identity_of(name, now_s)}
        return {
            **{field: state[field] for field in _SHOWN_FIELDS if field in state},
            "history": replica.series.view(now_s),
        }

    def _fleet(self, now_s: float) -> dict[str, object]:
        replicas = self._fresh(now_s)
        fresh: list[Snapshot] = [decode_part(replica.report.summary) for replica in replicas]
        counters = sums((section(s, "counters") for s in fresh), _COUNTERS)
        # An engine has no depth before its first decode step.
        tiers = [t for s in fresh if (t := s.get("speculative_num_steps")) is not None]
        return {
            "num_replicas": len(fresh),
            "num_stale": len(self._replicas) - len(fresh),
            **sums(fresh, _GAUGES),
            "avg_spec_accept_length": _accept_length(counters),
            "effective_speedup": _speedup([replica.report.figures for replica in replicas]),
            "replicas_by_num_steps": _counted(tiers),
            "replicas_by_batch_size": _counted(
                batch_size_bucket(size) if (size := int(number(s, "batch_size"))) > 0 else 0
                for s in fresh
            ),
            "replicas_by_last_reason": _counted(
                reason for s in fresh if (reason := s.get("last_reason")) is not None
            ),
            "switches": _sum_of_counts(section(s, "switches") for s in fresh),
            "slots": _mean_averages(fresh),
            "acceptance": self._acceptance.view(now_s),
            "kv": sums((section(s, "kv") for s in fresh), ("free_pages", "total_pages")),
            "counters": counters,
        }

    def _sum_up(self, now_s: float) -> None:
        """Add a point to the fleet's history, if one is due."""
        self._summed_s = now_s
        if self._series.is_due(now_s):
            self._remove_gone(now_s)
            self._series.add(now_s, _fleet_point([r.report.figures for r in self._fresh(now_s)]))

    def _acceptance_interval_s(self) -> float:
        """Return how often a replica's acceptance is read, in seconds; about 0 in a small fleet."""
        longest_s = self.stale_after_s * _FORGET_FACTOR / 2
        return min(longest_s, len(self._replicas) / _MAX_ACCEPTANCE_READS_PER_S)

    def _fresh(self, now_s: float) -> list[_Replica]:
        replicas = self._replicas.values()
        return [replica for replica in replicas if not self._is_stale(replica, now_s)]

    def _is_stale(self, replica: _Replica, now_s: float) -> bool:
        return now_s - replica.time_s > self.stale_after_s

    def _remove_gone(self, now_s: float) -> None:
        oldest = now_s - self.stale_after_s * _FORGET_FACTOR
        gone = [name for name, replica in self._replicas.items() if replica.time_s < oldest]
        for name in gone:
            self.forget(name)


def decode_view(encoded: Mapping[str, Any]) -> dict[str, object]:
    """Decode the result of `encoded_view` into that of `view`."""
    states = [{**decode_part(whole), **about} for whole, about in encoded["internal_states"]]
    return {**encoded, "internal_states": states}


def _fleet_point(points: list[Figures]) -> tuple[float, ...]:
    batch_size = sum(point.batch_size for point in points)
    # Weighted by requests, so that idle replicas do not count.
    weighted = sum(point.batch_size * point.tokens_per_step for point in points)
    return (
        len(points),
        batch_size,
        sum(point.num_waiting for point in points),
        sum(point.decode_tokens for point in points),
        sum(point.num_steps for point in points) / len(points) if points else 0.0,
        weighted / batch_size if batch_size else 0.0,
        _speedup(points) or 0.0,
        sum(point.free_pages for point in points),
    )


def _accept_length(counters: dict[str, float]) -> float:
    """Return tokens per request and step; 1.0 before the first step."""
    rows = counters["decode_rows"]
    return round(counters["decode_tokens"] / rows, 4) if rows else 1.0


def _speedup(points: list[Figures]) -> float | None:
    """Return the measured speedup over plain decoding, weighted by busy time; None if unknown."""
    known = [point for point in points if point.speedup]
    busy_s = sum(point.busy_s for point in known)
    weighted = sum(point.busy_s * point.speedup for point in known)
    return round(weighted / busy_s, 4) if busy_s else None


def _mean_averages(fresh: list[Snapshot]) -> dict[str, object]:
    """Return the mean over replicas of `ema_accept_len`, by batch-size slot."""
    found: dict[str, list[float]] = {}
    for snapshot in fresh:
        for size in section(snapshot, "slots"):
            slot = section(snapshot, "slots", size)
            if "ema_accept_len" in slot:
                found.setdefault(size, []).append(number(slot, "ema_accept_len"))
    return {
        size: {"ema_accept_len": round(sum(values) / len(values), 4), "num_replicas": len(values)}
        for size, values in sorted(found.items())
    }


def _sum_of_counts(mappings: Iterable[Snapshot]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for mapping in mappings:
        total.update({name: int(number(mapping, name)) for name in mapping})
    return dict(sorted(total.items()))


def _counted(values: Iterable[object]) -> dict[str, int]:
    return dict(sorted(Counter(map(str, values)).items()))
