"""Never slower than off: measured speculation against measured plain decoding."""

from __future__ import annotations

from math import sqrt

from serve_spec.adaptive.exploration import BackOff

SLOWEST_RATIO = 0.98
"""Speculation may run at this share of plain decoding's speed before it counts as slower."""

MIN_SAMPLES = 32
FIRST_CLOSED_ROUNDS = 128
LAST_CLOSED_ROUNDS = 4096
TRUSTED_AFTER_ROUNDS = 512
"""Open rounds after which the closings before them are forgiven."""

DOUBTED_EVERY_ROUNDS = 4
"""While in doubt, one plain round among so many: on a machine whose speed wanders, only rounds
that were close together can be compared."""

_DECAY = 0.98
_BASELINE_DECAY = 0.75
"""Plain rounds are few between, and all emit the same; the newest say most."""
_SIGNIFICANT = 2.0
"""Standard errors by which speculation must be slower: accept lengths scatter by half their mean,
and a guard without this closes by chance wherever the true gain is below ten percent."""


class MovingAverage:
    """A plain mean at first, then an exponential one."""

    def __init__(self, decay: float, mean: float = 0.0, count: int = 0) -> None:
        """mean, count: what to start from, and the values it stands for."""
        self.decay = decay
        self.count = count
        self.mean = mean
        self._variance = 0.0

    def observe(self, value: float) -> None:
        """Takes one more value."""
        self.count += 1
        weight = max(1 - self.decay, 1 / self.count)
        delta = value - self.mean
        self.mean += weight * delta
        self._variance = (1 - weight) * (self._variance + weight * delta**2)

    @property
    def standard_error(self) -> float:
        """Of the mean, as far as its values are independent."""
        effective = min(self.count, (1 + self.decay) / (1 - self.decay))
        return sqrt(self._variance / effective)


class SpeedGuard:
    """Watches the batches of one size range; closed, it allows no drafts for a while.

    Rounds differ in batch size and context, so both sides are measured in units of the cost
    table's plain round of the same batch (`unit_ms`); the table's level cancels, and only what was
    measured decides.
    """

    def __init__(self) -> None:
        self.closed_rounds_left = 0
        self.num_closings = 0
        self.is_in_doubt = False
        """Whether speculation looked slower than plain rounds of some time ago, and is compared
        with new ones before that counts."""
        self._off_units = MovingAverage(_BASELINE_DECAY)
        self._wait = BackOff(FIRST_CLOSED_ROUNDS, LAST_CLOSED_ROUNDS)
        self._forget_rounds()

    def _forget_rounds(self) -> None:
        self._tokens = MovingAverage(_DECAY)
        self._units = MovingAverage(_DECAY)
        self._lead = MovingAverage(_DECAY)

    @property
    def is_closed(self) -> bool:
        """Whether speculation is off here."""
        return self.closed_rounds_left > 0

    @property
    def speedup(self) -> float | None:
        """Measured speed over measured plain decoding; None before both were measured."""
        if not self._off_units.count or not self._tokens.count:
            return None
        return self._tokens.mean * self._off_units.mean / self._units.mean

    def observe_off(self, round_ms: float, unit_ms: float) -> None:
        """A plain round of this range took `round_ms`."""
        self._off_units.observe(round_ms / unit_ms)
        self.closed_rounds_left = max(0, self.closed_rounds_left - 1)

    def observe(self, num_tokens: int, batch_size: int, round_ms: float, unit_ms: float) -> None:
        """A speculating round took `round_ms` and emitted `num_tokens`; may close the guard."""
        tokens, units = num_tokens / batch_size, round_ms / unit_ms
        self._tokens.observe(tokens)
        self._units.observe(units)
        if self._tokens.count >= TRUSTED_AFTER_ROUNDS:
            self._wait.succeed()
        if self._off_units.count:
            # Tokens per row ahead of what plain decoding emits in the same time.
            self._lead.observe(tokens - SLOWEST_RATIO * units / self._off_units.mean)
            self._judge()

    def _judge(self) -> None:
        is_behind = self._is_behind()
        if is_behind and not self.is_in_doubt:
            self.is_in_doubt = True
            self._off_units = MovingAverage(_BASELINE_DECAY)
            self._forget_rounds()
        elif is_behind:
            self._close()
        elif self._lead.count >= MIN_SAMPLES:
            self.is_in_doubt = False

    def _is_behind(self) -> bool:
        lead = self._lead
        return lead.count >= MIN_SAMPLES and lead.mean < -_SIGNIFICANT * lead.standard_error

    def _close(self) -> None:
        self.closed_rounds_left = self._wait.rounds
        self.num_closings += 1
        self.is_in_doubt = False
        self._wait.fail()
        self._forget_rounds()

    def snapshot(self) -> dict[str, object]:
        """The guard as an operator sees it."""
        speedup = self.speedup
        return {
            "speedup": None if speedup is None else round(speedup, 4),
            "closed_rounds_left": self.closed_rounds_left,
            "num_closings": self.num_closings,
            "is_in_doubt": self.is_in_doubt,
        }
