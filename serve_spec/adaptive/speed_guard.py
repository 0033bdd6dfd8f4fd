"""Insurance: rounds that draft are compared with plain rounds of about the same batch size."""

from __future__ import annotations

from serve_spec.adaptive.costs import STALE_ROUNDS

GUARD_ROUNDS = 64
"""Drafting rounds before a comparison, after which an older one weighs 1/e. Also the rounds off
after a first loss: each further loss doubles them, as many rounds without a loss reset them."""
LEAST_SPEEDUP = 0.98
"""Measured speed over plain rounds below which drafting loses."""


class SpeedGuard:
    """Measured speed of one bucket. Times are in units of the table's plain round."""

    def __init__(self) -> None:
        self.plain: float | None = None  # units that a plain round takes
        self.rounds_left = 0  # rounds that it keeps speculation off; the policy counts them down
        self._closed_rounds = GUARD_ROUNDS
        self._num = 0
        self._tokens = self._units = 0.0

    def observe_plain(self, units: float) -> None:
        """Take in a plain round."""
        self.plain = units if self.plain is None else 0.5 * (self.plain + units)

    def observe(self, tokens: float, units: float) -> None:
        """Take in a round that drafted and emitted so many tokens per request."""
        fade = 1.0 - 1.0 / GUARD_ROUNDS
        self._num += 1
        self._tokens, self._units = fade * self._tokens + tokens, fade * self._units + units
        speedup = self.speedup
        if speedup is None or self._num < GUARD_ROUNDS:
            return
        if speedup < LEAST_SPEEDUP:
            self.rounds_left = self._closed_rounds
            self._closed_rounds = min(2 * self._closed_rounds, STALE_ROUNDS)
            self._num, self._tokens, self._units = 0, 0.0, 0.0
        elif self._num >= self._closed_rounds:
            self._closed_rounds = GUARD_ROUNDS

    @property
    def speedup(self) -> float | None:
        """Measured speed over plain rounds; None before both ran."""
        return self._tokens / self._units * self.plain if self.plain and self._units else None

    def snapshot(self) -> dict[str, object]:
        """Return its state, JSON-able. Speeds are tokens per request and plain round."""
        speedup = self.speedup
        return {
            "guard_rounds_left": self.rounds_left,
            "plain_speed": None if self.plain is None else round(1.0 / self.plain, 4),
            "drafting_speed": round(self._tokens / self._units, 4) if self._units else None,
            "measured_speedup": None if speedup is None else round(speedup, 4),
        }
