"""Figures over time in little memory: a few columns, bounded in time and in number."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class Series:
    """Points of several columns, oldest first.

    Thinned: a point that follows the one before it too soon is dropped, so that `history_s` seconds
    never take more than about `max_points` points, however often they come. Times are seconds of
    the caller's clock.
    """

    def __init__(self, columns: Sequence[str], *, history_s: float, max_points: int) -> None:
        self.columns = tuple(columns)
        self._width = 1 + len(self.columns)
        self._history_s = history_s
        self._interval_s = history_s / max_points
        self._max_values = self._width * (max_points + 1)
        self._values = array("d")

    def is_due(self, now_s: float) -> bool:
        """Whether a point would be kept now."""
        return not self._values or now_s - self._values[-self._width] >= self._interval_s

    def add(self, now_s: float, point: Sequence[float]) -> None:
        """Takes a point, one number per column, if one is due."""
        if self.is_due(now_s):
            self._values.extend((now_s, *point))
            del self._values[: max(0, len(self._values) - self._max_values)]

    def view(self, now_s: float) -> dict[str, list[float]]:
        """Columns of the last `history_s` seconds, and `time_s`; JSON-able."""
        start = 0
        while start < len(self._values) and self._values[start] < now_s - self._history_s:
            start += self._width
        names = ("time_s", *self.columns)
        return {
            name: self._values[start + offset :: self._width].tolist()
            for offset, name in enumerate(names)
        }
