"""A replica's decisions over time: its rounds by depth and by reason, and its budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from serve_spec.serving.statistics.snapshot import Snapshot, number, section

# Limit on depths or reasons of a snapshot; further ones are not kept.
_MOST_NAMES = 64


class _Point(NamedTuple):
    time_s: float
    budget: float | None
    shares: tuple[Mapping[str, float], ...]
    """Fractions of the rounds since the point before, by depth and by reason."""


class Decisions:
    """The last `history_s` seconds, from counters that snapshots have since the replica's start."""

    _COUNTERS = ("rounds_by_num_steps", "rounds_by_reason")

    def __init__(self, history_s: float, max_points: int) -> None:
        self._history_s = history_s
        self._points: deque[_Point] = deque(maxlen=max_points + 1)
        self._counted: list[Mapping[str, float]] = []

    def add(self, now_s: float, snapshot: Snapshot) -> None:
        """Add what a snapshot counted since the one before; the first one only begins."""
        counted: list[Mapping[str, float]]
        counted = [_counts(section(snapshot, name)) for name in self._COUNTERS]
        if self._counted:
            pairs = zip(self._counted, counted, strict=True)
            shares = tuple(_shares(before, now) for before, now in pairs)
            budget = number(snapshot, "speculation", "draft_budget") or None
            self._points.append(_Point(now_s, budget, shares))
        self._counted = counted

    def view(self, now_s: float) -> dict[str, object]:
        """Return columns: `time_s`, `budget` and fractions of rounds; None where none ran."""
        points = [each for each in self._points if each.time_s >= now_s - self._history_s]
        return {
            "time_s": [each.time_s for each in points],
            "budget": [each.budget for each in points],
            "by_num_steps": _columns([each.shares[0] for each in points]),
            "by_reason": _columns([each.shares[1] for each in points]),
        }


def _counts(counters: Snapshot) -> dict[str, float]:
    return {name: number(counters, name) for name in list(counters)[:_MOST_NAMES]}


def _shares(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return each counter's fraction of the growth of all; empty if nothing grew."""
    if any(now.get(name, 0.0) < count for name, count in before.items()):
        before = {}  # the replica has restarted
    grown = {name: count - before.get(name, 0.0) for name, count in now.items()}
    total = sum(grown.values())
    return {name: round(count / total, 4) for name, count in grown.items() if count > 0}


def _columns(shares: list[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """Return a column for each name, the most frequent first."""
    totals: dict[str, float] = {}
    for share in shares:
        for name, fraction in share.items():
            totals[name] = totals.get(name, 0.0) + fraction
    names = sorted(totals, key=lambda name: -totals[name])
    return {name: [share.get(name, 0.0) if share else None for share in shares] for name in names}
