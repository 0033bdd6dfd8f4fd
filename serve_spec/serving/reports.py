"""What a replica sends to `SpecStats`: history's figures to be read at once, the rest on demand.

A large fleet's snapshots take more time to read, and far more memory, than anybody who looks at
them needs; most are replaced unread.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import NamedTuple

from serve_spec.serving.snapshots import Snapshot, number, section

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
