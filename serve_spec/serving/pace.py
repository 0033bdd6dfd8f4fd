"""How often the replicas of a large fleet may report, by what their reports cost."""

from __future__ import annotations

from collections.abc import Callable

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
