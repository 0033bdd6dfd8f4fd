"""Statistics of the fleet, merged from the snapshots of its replicas.

A snapshot may come from another version of the program, so every field is optional and checked. The
caller passes the time, in seconds of one clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from serve_spec.config.adaptive_file import MAX_STEPS
from serve_spec.metrics import batch_size_bucket
from serve_spec.serving.statistics.decisions import Decisions
from serve_spec.serving.statistics.snapshot import Snapshot, number, section

# Limits of `PositionRates`, which cannot start at 0 or 1.
_LOWEST_RATE, _HIGHEST_RATE = 0.001, 0.999
# Upper limit for counts of trials, speeds and speedups.
_MOST = 1e15
_MOST_SIZES = 64
# Maximum number of model pairs; a rolling update has two.
_MAX_PAIRS = 16
# Merging all replicas at every report would be too slow.
_MERGE_EVERY_S = 5.0
# Positions with fewer trials in the whole fleet count as untried.
_MIN_TRIALS = 1.0


class _Speed(NamedTuple):
    """Decode tokens/ms in a range of batch sizes; 0: not measured yet."""

    off: float
    speculating: float


class _Acceptance(NamedTuple):
    positions: list[tuple[float, float]]
    """(accept rate, trials) by position."""
    speeds: dict[int, _Speed]
    """Speeds by the lower bound of the range of batch sizes."""


def _drafted_steps(snapshot: Snapshot) -> int:
    """Return the maximum speculation depth of a replica; 0 if it is missing."""
    steps = snapshot.get("candidate_steps")
    known = [k for k in steps if isinstance(k, int)] if isinstance(steps, list) else []
    deepest = int(max(known, default=0))
    return deepest if 0 < deepest <= MAX_STEPS else 0


def _acceptance(snapshot: Snapshot, max_steps: int) -> _Acceptance:
    """Return acceptance, estimated or counted, and speeds of a replica; ValueError if malformed."""
    listed = section(snapshot, "acceptance").get("positions")
    trials = "trials"
    if not isinstance(listed, list):
        listed = section(snapshot, "speculation", "since_start").get("positions")
        trials = "reached"
    if not isinstance(listed, list):
        raise ValueError("no positions")
    known = {}
    for row in listed:
        if isinstance(row, Mapping) and row.get("accept_rate") is not None:
            rate = min(max(_figure(row, "accept_rate", 1.0), _LOWEST_RATE), _HIGHEST_RATE)
            known[int(_figure(row, "position", MAX_STEPS))] = rate, _figure(row, trials, _MOST)
    untried = 0.5, 0.0
    positions = [known.get(position, untried) for position in range(1, max_steps + 1)]
    return _Acceptance(positions, _speeds(section(snapshot, "speculation", "by_batch_size")))


def _speeds(by_batch_size: Snapshot) -> dict[int, _Speed]:
    """Return speeds by batch size; the speculating one is derived from the speedup."""
    if len(by_batch_size) > _MOST_SIZES:
        raise ValueError(len(by_batch_size))
    speeds = {}
    for size, bucket in by_batch_size.items():
        if isinstance(bucket, Mapping):
            off = _figure(section(bucket, "tokens_per_ms"), "0", _MOST)
            speedup = _figure(bucket, "effective_speedup", _MOST)
            speeds[int(str(size))] = _Speed(off, off * speedup)
    return speeds


def _figure(mapping: Snapshot, name: str, most: float) -> float:
    """Return a number in [0, `most`]; 0 if it is missing. Raise ValueError for other values."""
    value = mapping.get(name)
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or not 0 <= value <= most:  # NaN compares false
        raise ValueError(f"{name}={value!r}")
    return float(value)


def _totals(measured: Sequence[_Acceptance], max_steps: int) -> list[tuple[float, float]]:
    """Return accepted drafts and trials by position."""
    columns = zip(*(each.positions for each in measured), strict=True)
    totals = [(sum(p * n for p, n in column), sum(n for _, n in column)) for column in columns]
    return totals or [(0.0, 0.0)] * max_steps


def _rates(totals: Sequence[tuple[float, float]]) -> list[float] | None:
    rates: list[float] = []
    for accepted, trials in totals:
        if trials >= _MIN_TRIALS:
            rates.append(accepted / trials)
        elif rates:
            rates.append(rates[-1])
        else:
            return None
    return rates


def _mean_speed(speeds: Sequence[_Speed]) -> dict[str, float | None]:
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


# A replica is removed after this many times `stale_after_s` without a report.
_FORGET_FACTOR = 4
_FLEET_POINTS, _REPLICA_POINTS = 300, 120
# Limit on replicas on the status page, whatever the size of the fleet.
_SHOWN_REPLICAS = 64

_GAUGES = ("batch_size", "num_running", "num_waiting", "num_preemptions")
_COUNTERS = ("steps", "decode_rows", "decode_tokens", "draft_tokens", "correct_drafts")
_PREFIX_COUNTERS = ("query_tokens", "hit_tokens")
_FLEET_COLUMNS = (
    "num_replicas", "batch_size", "num_waiting", "decode_tokens", "mean_num_steps",
    "tokens_per_step", "effective_speedup", "free_pages",
)  # fmt: skip
# Columns of a replica's history, and where its snapshot has them.
_REPLICA_COLUMNS = {
    "num_steps": ("speculative_num_steps",),
    "batch_size": ("batch_size",),
    "tokens_per_step": ("speculation", "window", "tokens_per_step"),
    "decode_tokens": ("counters", "decode_tokens"),
    "draft_budget": ("speculation", "draft_budget"),
    "observed_to_expected": ("speculation", "window", "observed_to_expected_drafts"),
    "measured_to_predicted": ("speculation", "window", "measured_to_predicted_ms"),
}
_SHOWN_FIELDS = (
    "replica", "replica_rank", "age_s", "stale", "strategy", "speculative_num_steps",
    "candidate_steps", "decision", "last_reason", "fallback", "costs", "refused_user_config",
    "slot", "slots", "batch_size", "num_running", "num_waiting", "kv", "avg_spec_accept_length",
    "switches", "predicted_goodput", "predicted_ms", "break_even", "rounds_by_num_steps",
    "speculation", "synthetic_acceptance",
)  # fmt: skip


class _Series:
    def __init__(self, columns: Iterable[str], history_s: float, max_points: int) -> None:
        self._names = ("time_s", *columns)
        self._history_s = history_s
        self._interval_s = history_s / max_points
        self._points: deque[tuple[float, ...]] = deque(maxlen=max_points + 1)

    def is_due(self, now_s: float) -> bool:
        """Return whether enough time has passed since the last point."""
        return not self._points or now_s - self._points[-1][0] >= self._interval_s

    def add(self, now_s: float, *point: float) -> None:
        self._points.append((now_s, *point))

    def view(self, now_s: float) -> dict[str, list[float]]:
        """Return `time_s` and the columns of the last `history_s` seconds."""
        points = [point for point in self._points if point[0] >= now_s - self._history_s]
        return {name: [point[i] for point in points] for i, name in enumerate(self._names)}


@dataclass(slots=True)
class _Pair:
    """What is known of one pair of models and one maximum depth, apart from its replicas."""

    num_malformed: int = 0
    merged_s: float = float("-inf")
    remembered: tuple[float, list[float]] | None = None
    """Time and rates of the last merge with any rates."""


@dataclass(slots=True)
class _Replica:
    series: _Series
    decisions: Decisions
    snapshot: Snapshot = field(default_factory=dict)
    time_s: float = 0.0
    pair: tuple[str, int] | None = None
    """Models and maximum depth of its last report; None if it does not draft."""
    acceptance: _Acceptance | None = None
    """The last one that was not malformed."""


class FleetStats:
    """The latest snapshot of every replica, fleet totals, acceptance rates and history.

    Totals leave out replicas that are silent for `stale_after_s`. Acceptance rates are kept for
    `history_s` after the last replica of a pair of models, so that a single one restarts warm.
    """

    def __init__(self, *, stale_after_s: float, history_s: float) -> None:
        self.stale_after_s = stale_after_s
        self.history_s = history_s
        self._replicas: dict[str, _Replica] = {}
        self._pairs: dict[tuple[str, int], _Pair] = {}
        self._series = _Series(_FLEET_COLUMNS, history_s, _FLEET_POINTS)

    @property
    def num_replicas(self) -> int:
        """Number of known replicas, stale ones included."""
        return len(self._replicas)

    def report(self, name: str, snapshot: Snapshot, now_s: float) -> None:
        """Store the latest snapshot of a replica (`EngineClient.snapshot`)."""
        replica = self._replicas.get(name)
        if replica is None:
            series = _Series(_REPLICA_COLUMNS, self.history_s, _REPLICA_POINTS)
            decisions = Decisions(self.history_s, _REPLICA_POINTS)
            replica = self._replicas[name] = _Replica(series, decisions)
        replica.snapshot, replica.time_s = snapshot, now_s
        if replica.series.is_due(now_s):
            point = (number(snapshot, *path) for path in _REPLICA_COLUMNS.values())
            replica.series.add(now_s, *point)
            replica.decisions.add(now_s, snapshot)
        self._learn(replica, now_s)
        if self._series.is_due(now_s):
            self._remove_gone(now_s)
            self._series.add(now_s, *_fleet_point(self._fresh(now_s)))

    def silent(self, now_s: float, for_s: float) -> dict[str, float]:
        """Return the age in seconds of the last report of replicas silent for `for_s`."""
        ages = {name: now_s - replica.time_s for name, replica in self._replicas.items()}
        return {name: age_s for name, age_s in ages.items() if age_s > for_s}

    def forget(self, replica: str) -> None:
        """Remove a replica; no-op if it is unknown."""
        self._replicas.pop(replica, None)

    def prior(self, pair: str, max_steps: int, now_s: float) -> list[float] | None:
        """Return accept rates by position, weighted by trials, for a new policy; None: unknown."""
        self._remove_gone(now_s)
        known = self._pairs.get((pair, max_steps))
        rates = _rates(_totals(self._measured((pair, max_steps)), max_steps))
        if rates is None and known is not None and known.remembered is not None:
            time_s, remembered = known.remembered
            return remembered if now_s - time_s <= self.history_s else None
        return rates

    def totals(self, now_s: float) -> dict[str, object]:
        """Return `fleet` of `/server_info`."""
        self._remove_gone(now_s)
        return self._fleet(now_s)

    def view(self, now_s: float) -> dict[str, object]:
        """Return `internal_states` and `fleet` of `/server_info`, replicas sorted by name."""
        self._remove_gone(now_s)
        states = [self._state(name, now_s) for name in sorted(self._replicas)]
        return {"internal_states": states, "fleet": self._fleet(now_s)}

    def status(self, now_s: float) -> dict[str, object]:
        """Return the data of the status page, of bounded size: fleet, first replicas, histories."""
        self._remove_gone(now_s)
        return {
            "time_s": now_s,
            "fleet": self._fleet(now_s),
            "history": self._series.view(now_s),
            "replicas": [
                {
                    **{key: state[key] for key in _SHOWN_FIELDS if key in state},
                    "history": self._replicas[name].series.view(now_s),
                    "decisions": self._replicas[name].decisions.view(now_s),
                }
                for name in sorted(self._replicas)[:_SHOWN_REPLICAS]
                if (state := self._state(name, now_s))
            ],
        }

    def _learn(self, replica: _Replica, now_s: float) -> None:
        """Take acceptance rates from a replica's snapshot; a malformed one is only counted."""
        max_steps = _drafted_steps(replica.snapshot)
        key = (str(replica.snapshot.get("pair", "")), max_steps) if max_steps else None
        if key != replica.pair:
            replica.pair, replica.acceptance = key, None
        pair = None if key is None else self._pair(key)
        if pair is None:
            replica.pair = None
            return
        try:
            replica.acceptance = _acceptance(replica.snapshot, max_steps)
        except ValueError:
            pair.num_malformed += 1
            return
        if key is not None and now_s - pair.merged_s >= _MERGE_EVERY_S:
            pair.merged_s = now_s
            self._remove_gone(now_s)
            rates = _rates(_totals(self._measured(key), max_steps))
            if rates is not None:
                pair.remembered = now_s, rates

    def _pair(self, key: tuple[str, int]) -> _Pair | None:
        """Return or create a pair, replacing one without replicas; None if all are in use."""
        if key not in self._pairs and len(self._pairs) >= _MAX_PAIRS:
            used = {replica.pair for replica in self._replicas.values()}
            unused = [other for other in self._pairs if other not in used]
            if not unused:
                return None
            del self._pairs[unused[0]]
        return self._pairs.setdefault(key, _Pair())

    def _measured(self, pair: tuple[str, int]) -> list[_Acceptance]:
        replicas = self._replicas.values()
        return [r.acceptance for r in replicas if r.pair == pair and r.acceptance is not None]

    def _acceptance_view(self, key: tuple[str, int], pair: _Pair, now_s: float) -> Snapshot:
        name, max_steps = key
        measured = self._measured(key)
        totals = _totals(measured, max_steps)
        rates = _rates(totals)
        shown = [None] * max_steps if rates is None else [round(rate, 4) for rate in rates]
        by_size: defaultdict[int, list[_Speed]] = defaultdict(list)
        for each in measured:
            for size, speed in each.speeds.items():
                by_size[size].append(speed)
        fresh = sum(r.pair == key and r.acceptance is not None for r in self._fresh(now_s))
        return {
            "pair": name,
            "max_steps": max_steps,
            "num_replicas": len(measured),
            "num_stale": len(measured) - fresh,
            "num_malformed": pair.num_malformed,
            "positions": [
                {"position": position, "accept_rate": rate, "trials": round(trials, 1)}
                for position, (rate, (_, trials)) in enumerate(zip(shown, totals, strict=True), 1)
            ],
            "tokens_per_ms": {str(size): _mean_speed(by_size[size]) for size in sorted(by_size)},
        }

    def _state(self, name: str, now_s: float) -> dict[str, object]:
        replica = self._replicas[name]
        return {
            **replica.snapshot,
            "replica": name,
            "age_s": round(now_s - replica.time_s, 3),
            "stale": self._is_stale(replica, now_s),
        }

    def _fleet(self, now_s: float) -> dict[str, object]:
        fresh = [replica.snapshot for replica in self._fresh(now_s)]
        counters = _sums((section(s, "counters") for s in fresh), _COUNTERS)
        rows = counters["decode_rows"]
        sizes = [int(number(s, "batch_size")) for s in fresh]
        pairs = sorted(self._pairs.items(), key=itemgetter(0))
        return {
            "num_replicas": len(fresh),
            "num_stale": len(self._replicas) - len(fresh),
            **_sums(fresh, _GAUGES),
            # Tokens per request and step, without grammar drafts.
            "avg_spec_accept_length": round(1 + counters["correct_drafts"] / max(1, rows), 4),
            "effective_speedup": _speedup(fresh),
            # An engine has no depth before its first decode step.
            "replicas_by_num_steps": _counted(s.get("speculative_num_steps") for s in fresh),
            "replicas_by_batch_size": _counted(
                batch_size_bucket(size) if size > 0 else 0 for size in sizes
            ),
            "replicas_by_last_reason": _counted(s.get("last_reason") for s in fresh),
            "switches": _sum_of_counts(section(s, "switches") for s in fresh),
            "slots": _mean_averages(fresh),
            "acceptance": [self._acceptance_view(key, pair, now_s) for key, pair in pairs],
            "kv": _sums((section(s, "kv") for s in fresh), ("free_pages", "total_pages")),
            "prefix_cache": _sums((section(s, "prefix_cache") for s in fresh), _PREFIX_COUNTERS),
            "counters": counters,
        }

    def _fresh(self, now_s: float) -> list[_Replica]:
        return [r for r in self._replicas.values() if not self._is_stale(r, now_s)]

    def _is_stale(self, replica: _Replica, now_s: float) -> bool:
        return now_s - replica.time_s > self.stale_after_s

    def _remove_gone(self, now_s: float) -> None:
        for name in self.silent(now_s, self.stale_after_s * _FORGET_FACTOR):
            self.forget(name)


def _sums(snapshots: Iterable[Snapshot], names: Sequence[str]) -> dict[str, float]:
    """Return sums over snapshots by name; those without a fraction as integers."""
    known = list(snapshots)
    totals = {name: sum((number(snapshot, name) for snapshot in known), 0.0) for name in names}
    return {name: int(total) if total.is_integer() else total for name, total in totals.items()}


def _fleet_point(replicas: Sequence[_Replica]) -> tuple[float, ...]:
    fresh = [replica.snapshot for replica in replicas]
    batch_size = sum(number(s, "batch_size") for s in fresh)
    # Weighted by requests, so that idle replicas do not count.
    weighted = sum(
        number(s, "batch_size") * number(s, "speculation", "window", "tokens_per_step")
        for s in fresh
    )
    num_steps = sum(number(s, "speculative_num_steps") for s in fresh)
    return (
        len(fresh),
        batch_size,
        sum(number(s, "num_waiting") for s in fresh),
        sum(number(s, "counters", "decode_tokens") for s in fresh),
        num_steps / len(fresh) if fresh else 0.0,
        weighted / batch_size if batch_size else 0.0,
        _speedup(fresh) or 0.0,
        sum(number(s, "kv", "free_pages") for s in fresh),
    )


def _speedup(fresh: Sequence[Snapshot]) -> float | None:
    """Return the measured speedup over plain decoding, weighted by busy time; None if unknown."""
    weighted = busy_s = 0.0
    for snapshot in fresh:
        if speedup := number(snapshot, "speculation", "effective_speedup"):
            replica_s = number(snapshot, "speculation", "window", "busy_s")
            weighted += replica_s * speedup
            busy_s += replica_s
    return round(weighted / busy_s, 4) if busy_s else None


def _mean_averages(fresh: Sequence[Snapshot]) -> dict[str, object]:
    """Return the mean over replicas of `ema_accept_len`, by batch-size slot."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for snapshot in fresh:
        for size in section(snapshot, "slots"):
            if section(snapshot, "slots", size).get("ema_accept_len") is not None:
                found[size].append(number(snapshot, "slots", size, "ema_accept_len"))
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
    return dict(sorted(Counter(str(value) for value in values if value is not None).items()))
