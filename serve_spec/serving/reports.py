"""Reports of replicas to `SpecStats`: a few numbers, and snapshots that are decoded on demand.

Decoding the snapshots of a large fleet is slow, and most are replaced unread. A snapshot may come
from another version of the program, so every field is optional and checked.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from serve_spec.config.adaptive_file import MAX_STEPS

Snapshot: TypeAlias = Mapping[str, object]

_LOWEST_RATE, _HIGHEST_RATE = 0.001, 0.999
"""Limits of `PositionRates`, which cannot start at 0 or 1."""
_UNTRIED = (0.5, 0.0)
_MOST = 1e15
"""Upper limit for counts of trials, speeds and speedups."""
_MOST_SIZES = 64


class Speed(NamedTuple):
    """Decode tokens/ms in a range of batch sizes; 0: not measured yet."""

    off: float
    """Without speculation."""
    speculating: float


class AcceptanceSummary(NamedTuple):
    """Acceptance rates and speeds measured by a replica."""

    positions: list[tuple[float, float]]
    """(accept rate, trials) by position."""
    speeds: dict[int, Speed]
    """Speeds by the lower bound of the range of batch sizes."""


def section(snapshot: Snapshot, *path: str) -> Snapshot:
    """Return a nested mapping of a snapshot; empty if it is missing."""
    for name in path:
        inner = snapshot.get(name)
        if not isinstance(inner, Mapping):
            return {}
        snapshot = inner
    return snapshot


def number(snapshot: Snapshot, name: str) -> float:
    """Return a number of a snapshot; 0 if it is missing."""
    value = snapshot.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def sums(snapshots: Iterable[Snapshot], names: Iterable[str]) -> dict[str, float]:
    """Return sums over snapshots by name; whole numbers as integers."""
    totals = dict.fromkeys(names, 0.0)
    for snapshot in snapshots:
        for name in totals:
            totals[name] += number(snapshot, name)
    return {name: int(total) if total.is_integer() else total for name, total in totals.items()}


def drafted_steps(snapshot: Snapshot) -> int:
    """Return the maximum speculation depth of a replica; 0 if it is missing."""
    steps = snapshot.get("candidate_steps")
    known = [k for k in steps if isinstance(k, int)] if isinstance(steps, list) else []
    deepest = int(max(known, default=0))
    return deepest if 0 < deepest <= MAX_STEPS else 0


def acceptance_summary(snapshot: Snapshot, max_steps: int) -> AcceptanceSummary | None:
    """Return the acceptance and speed measured by a replica; None if a value is impossible.

    The rates come from the policy's estimate if there is one, else from the counts since start.
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
    """Return speeds by batch size; the speculating one is derived from the speedup.

    Raises:
        ValueError: there are too many sizes, or a value is impossible.
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
    """Return a number in [0, `most`]; 0 if it is missing.

    Raises:
        ValueError: it is not a number in that range.
    """
    value = mapping.get(name)
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or not 0 <= value <= most:  # NaN compares false
        raise ValueError(f"{name}={value!r}")
    return float(value)


_CORES = 0.6
"""CPU cores that reports may use; the rest is left for queries and peaks."""
_FIRST_GUESS_S = 500e-6
_REPORTS_PER_UPDATE = 200
_WEIGHT = 0.1


class ReportPace:
    """Sets the interval of reports by their measured CPU cost.

    Most of the cost is Ray's overhead per call, which depends on the machine and its load.

    cpu_s: returns the CPU seconds used by the process, all threads.
    longest_s: maximum interval, so that replicas do not become stale.
    """

    def __init__(self, cpu_s: Callable[[], float], *, longest_s: float) -> None:
        self._cpu_s = cpu_s
        self._longest_s = longest_s
        self._report_s = _FIRST_GUESS_S
        self._num_unmeasured = 0
        self._measured_cpu_s = cpu_s()

    def count(self, num_reports: int) -> None:
        """Count reports; update the estimated cost from time to time."""
        self._num_unmeasured += num_reports
        if self._num_unmeasured >= _REPORTS_PER_UPDATE:
            now_s = self._cpu_s()
            cost_s = (now_s - self._measured_cpu_s) / self._num_unmeasured
            self._report_s += _WEIGHT * (cost_s - self._report_s)
            self._num_unmeasured, self._measured_cpu_s = 0, now_s

    def interval_s(self, num_replicas: int) -> float:
        """Return the minimum seconds between reports of a replica; near 0 for a small fleet."""
        return min(self._longest_s, num_replicas * self._report_s / _CORES)


_SUMMED_FIELDS = (
    "batch_size", "num_running", "num_waiting", "num_preemptions", "speculative_num_steps",
    "last_reason", "switches", "kv", "counters",
)  # fmt: skip


class Figures(NamedTuple):
    """The numbers of a snapshot that history keeps; 0 if missing."""

    num_steps: float
    batch_size: float
    tokens_per_step: float
    decode_tokens: float
    draft_budget: float
    """0: all drafts are verified."""
    observed_to_expected: float
    """Accepted drafts over expected ones, in the snapshot's window."""
    measured_to_predicted: float
    """Step time over predicted time, in the snapshot's window."""
    num_waiting: float
    free_pages: float
    speedup: float
    busy_s: float

    @classmethod
    def of(cls, snapshot: Snapshot) -> Figures:
        """Return the figures of an engine's snapshot."""
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
    """A replica's snapshot for `SpecStats`: its figures and two encoded parts."""

    replica: str
    figures: Figures
    summary: bytes
    """The fields that the fleet's totals need, encoded."""
    whole: bytes
    """The whole snapshot, encoded."""

    @classmethod
    def of(cls, replica: str, snapshot: Snapshot) -> Report:
        """Return the report of a snapshot."""
        return cls(replica, Figures.of(snapshot), _encode(_summary(snapshot)), _encode(snapshot))

    @classmethod
    def unpacked(cls, packed: bytes) -> Report:
        """Decode the result of `packed`, which may come from another version."""
        replica, figures, *parts = pickle.loads(packed)
        return cls(replica, Figures(*[number(figures, name) for name in Figures._fields]), *parts)

    def packed(self) -> bytes:
        """Encode the report as one bytes object, which is the cheapest argument for Ray."""
        parts = (self.replica, self.figures._asdict(), self.summary, self.whole)
        return pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)


def decode_part(part: bytes) -> dict[str, object]:
    """Decode a part of a report."""
    content: dict[str, object] = pickle.loads(part)
    return content


def _encode(content: Snapshot) -> bytes:
    return pickle.dumps(dict(content), pickle.HIGHEST_PROTOCOL)


def _summary(snapshot: Snapshot) -> dict[str, object]:
    """Return the fields for the fleet's totals; of each slot only its average."""
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
