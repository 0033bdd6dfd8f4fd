"""What a replica sends to `SpecStats`: history's figures to be read at once, the rest on demand.

A large fleet's snapshots take much time and memory to read, and most are replaced unread. One may
come from another version of the program, so nothing in it is taken for granted.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from serve_spec.config.adaptive_file import MAX_STEPS

Snapshot: TypeAlias = Mapping[str, object]

_LOWEST_RATE, _HIGHEST_RATE = 0.001, 0.999
"""What `PositionRates` can hold: it does not start from certainty."""
_UNTRIED = (0.5, 0.0)
_MOST = 1e15
"""No count of trials, speed or speedup is higher."""
_MOST_SIZES = 64


class Speed(NamedTuple):
    """Decode tokens per ms in one range of batch sizes; 0: not measured yet."""

    off: float
    """In rounds without drafts."""
    speculating: float


class AcceptanceSummary(NamedTuple):
    """What a replica measured of acceptance, and how fast it is."""

    positions: list[tuple[float, float]]
    """Accept rate and trials, by position."""
    speeds: dict[int, Speed]
    """By the lower bound of a range of batch sizes."""


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
    """Sum by name, whole ones as integers."""
    totals = dict.fromkeys(names, 0.0)
    for snapshot in snapshots:
        for name in totals:
            totals[name] += number(snapshot, name)
    return {name: int(total) if total.is_integer() else total for name, total in totals.items()}


def drafted_steps(snapshot: Snapshot) -> int:
    """Return how deep a replica may draft; 0 where it does not say."""
    steps = snapshot.get("candidate_steps")
    known = [k for k in steps if isinstance(k, int)] if isinstance(steps, list) else []
    deepest = int(max(known, default=0))
    return deepest if 0 < deepest <= MAX_STEPS else 0


def acceptance_summary(snapshot: Snapshot, max_steps: int) -> AcceptanceSummary | None:
    """Return what a replica measured of acceptance and speed; None if a figure cannot be true.

    The rates are those of the policy's own estimate where it keeps one, else of the counts since
    start.
    """
    estimated = section(snapshot, "acceptance").get("positions")
    counted = section(snapshot, "speculation", "since_start").get("positions")
    try:
        if isinstance(estimated, list):
            known = _by_position(estimated, "trials")
        elif isinstance(counted, list):
            known = _by_position(counted, "reached")
        else:
            return None
        return AcceptanceSummary(
            [known.get(position, _UNTRIED) for position in range(1, max_steps + 1)],
            _speeds(section(snapshot, "speculation", "by_batch_size")),
        )
    except ValueError:
        return None


def _by_position(entries: list[object], trials: str) -> dict[int, tuple[float, float]]:
    found = {}
    for entry in entries:
        if isinstance(entry, Mapping) and entry.get("accept_rate") is not None:
            rate = min(max(_figure(entry, "accept_rate", 1.0), _LOWEST_RATE), _HIGHEST_RATE)
            found[int(_figure(entry, "position", MAX_STEPS))] = rate, _figure(entry, trials, _MOST)
    return found


def _speeds(by_batch_size: Snapshot) -> dict[int, Speed]:
    """Return plain speed as measured; drafting speed by the speedup, which compares like with like.

    Raises:
        ValueError: too many sizes, or a figure that cannot be true.
    """
    if len(by_batch_size) > _MOST_SIZES:
        raise ValueError(len(by_batch_size))
    speeds = {}
    for size, bucket in by_batch_size.items():
        if isinstance(bucket, Mapping):
            off = _figure(section(bucket, "tokens_per_ms"), "0", _MOST)
            speeds[int(str(size))] = Speed(off, off * _figure(bucket, "effective_speedup", _MOST))
    return speeds


def _figure(mapping: Snapshot, name: str, most: float) -> float:
    """Return a figure from 0 to `most`; 0 if it is missing.

    Raises:
        ValueError: anything else.
    """
    value = mapping.get(name)
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or not 0 <= value <= most:  # NaN compares false
        raise ValueError(f"{name}={value!r}")
    return float(value)


_CORES = 0.6
"""What reports may use of one; the rest is for those who ask, and for a busier hour."""
_FIRST_GUESS_S = 500e-6
_REPORTS_PER_LOOK = 200
_WEIGHT = 0.1


class ReportPace:
    """Learns what a report costs its process, all threads, and spreads the fleet's accordingly.

    Nearly all of it is Ray's price of a call, which depends on the machine and on who else uses
    it; hence it is measured where it is paid.

    cpu_s: CPU seconds that the process has used so far.
    longest_s: no interval is longer, or replicas would seem silent.
    """

    def __init__(self, cpu_s: Callable[[], float], *, longest_s: float) -> None:
        self._cpu_s = cpu_s
        self._longest_s = longest_s
        self._report_s = _FIRST_GUESS_S
        self._num_unseen = 0
        self._seen_s = cpu_s()

    def count(self, num_reports: int) -> None:
        """So many reports have been taken."""
        self._num_unseen += num_reports
        if self._num_unseen >= _REPORTS_PER_LOOK:
            now_s = self._cpu_s()
            cost_s = (now_s - self._seen_s) / self._num_unseen
            self._report_s += _WEIGHT * (cost_s - self._report_s)
            self._num_unseen, self._seen_s = 0, now_s

    def interval_s(self, num_replicas: int) -> float:
        """Seconds that each of them should wait at least; next to nothing in an ordinary fleet."""
        return min(self._longest_s, num_replicas * self._report_s / _CORES)


_SUMMED_FIELDS = (
    "batch_size", "num_running", "num_waiting", "num_preemptions", "speculative_num_steps",
    "last_reason", "switches", "kv", "counters",
)  # fmt: skip


class Figures(NamedTuple):
    """What history keeps of a snapshot; 0 where a replica does not say it."""

    num_steps: float
    batch_size: float
    tokens_per_step: float
    decode_tokens: float
    draft_budget: float
    """0 if every draft is verified."""
    observed_to_expected: float
    """Accepted drafts over expected ones,"""
    measured_to_predicted: float
    """and time of steps over predicted time; of the snapshot's window."""
    num_waiting: float
    free_pages: float
    speedup: float
    busy_s: float

    @classmethod
    def of(cls, snapshot: Snapshot) -> Figures:
        """Those of an engine's snapshot."""
        speculation = section(snapshot, "speculation")
        window = section(speculation, "window")
        return cls(
            number(snapshot, "speculative_num_steps"),
            number(snapshot, "batch_size"),
            number(window, "tokens_per_step"),
            number(section(snapshot, "counters"), "decode_tokens"),
            number(speculation, "draft_budget"),
            number(window, "observed_to_expected_drafts"),
            number(window, "measured_to_predicted_ms"),
            number(snapshot, "num_waiting"),
            number(section(snapshot, "kv"), "free_pages"),
            number(speculation, "effective_speedup"),
            number(window, "busy_s"),
        )


class Report(NamedTuple):
    """A replica's snapshot on its way: its figures, and two closed parcels."""

    replica: str
    figures: Figures
    summary: bytes
    """What the fleet's sums need."""
    whole: bytes
    """Everything."""

    @classmethod
    def of(cls, replica: str, snapshot: Snapshot) -> Report:
        """The report that a replica makes of its engine's snapshot."""
        return cls(replica, Figures.of(snapshot), _closed(_summary(snapshot)), _closed(snapshot))

    @classmethod
    def unpacked(cls, packed: bytes) -> Report:
        """What `packed` made, perhaps in another version: figures go by their names."""
        replica, figures, *parcels = pickle.loads(packed)
        return cls(replica, Figures(*[number(figures, name) for name in Figures._fields]), *parcels)

    def packed(self) -> bytes:
        """As one value of bytes: Ray charges for every argument, and walks through dicts."""
        parts = (self.replica, self.figures._asdict(), self.summary, self.whole)
        return pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)


def opened(parcel: bytes) -> dict[str, object]:
    """What is in a parcel of a report."""
    content: dict[str, object] = pickle.loads(parcel)
    return content


def _closed(content: Snapshot) -> bytes:
    return pickle.dumps(dict(content), pickle.HIGHEST_PROTOCOL)


def _summary(snapshot: Snapshot) -> dict[str, object]:
    """The fields that are summed; of a slot, its average."""
    slots = section(snapshot, "slots")
    averages = {size: section(slots, size).get("ema_accept_len") for size in slots}
    return {
        **{name: snapshot[name] for name in _SUMMED_FIELDS if name in snapshot},
        "slots": {
            size: {"ema_accept_len": average}
            for size, average in averages.items()
            if average is not None
        },
    }
