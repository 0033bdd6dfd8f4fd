"""Rounds spent on learning rather than earning, within a fixed share of the time."""

from __future__ import annotations

EXPLORATION_SHARE = 0.005
"""Most of the time that may be lost to probes and baseline rounds."""

DEEPER_EVERY_ROUNDS = 64
"""While drafting, one position deeper than pays, to notice when it starts to."""

OTHER_EVERY_ROUNDS = 64
"""While drafting chains, one round of trees, and the other way round, where it could win at all."""

BASELINE_EVERY_ROUNDS = 128
"""While drafting, one plain round, to know what speculation is measured against."""
FIRST_BASELINE_ROUNDS = 8
NUM_FIRST_BASELINES = 4
"""At batches of a size that is new: the first plain round after 8, the next ones after 16, 32, 64,
if drafting is not clearly ahead."""
CLEAR_LEAD = 1.25
LONG_BASELINE_ROUNDS = 2
"""Plain rounds in a row, where the first of them waits for what the host does after drafts."""

PROBED_ROWS_SHARE = 16
"""One row in so many takes part in a probe, at least one."""

RETRY_ROUNDS = 32
"""Rounds after which a probe that the budget refused asks again; asking takes 0.15 ms on a CPU."""

TRIAL_ROUNDS = 4
"""While off, so many rounds in a row in which some rows draft: to begin takes a row its whole text,
and a round its draft steps, however few rows take part. A single row in a single round would pay
for both and tell one hit or miss."""
TRIAL_ROWS_SHARE = 4
"""One row in so many takes part, and so many at least."""
TRIAL_STEPS = 1
FIRST_WAIT_ROUNDS = 32
LAST_WAIT_ROUNDS = 256
"""Between trials, which wait twice as long each time."""
PROMISING_GAIN = 1.02
"""A trial that raises what drafting would gain by so much is followed up soon."""


class ExplorationBudget:
    """Lets a probe through only while all of them together stay within their share of the time.

    So the share is a law, not an average: at the start, too, a probe waits until it is paid for.
    """

    def __init__(self, share: float = EXPLORATION_SHARE) -> None:
        self.share = share
        self.total_ms = 0.0
        self.spent_ms = 0.0

    def pass_time(self, round_ms: float) -> None:
        """Counts a round that was executed."""
        self.total_ms += round_ms

    def spend(self, ms: float) -> bool:
        """Takes `ms` of expected loss from the budget; False, and nothing taken, if too much."""
        if self.spent_ms + ms > self.share * self.total_ms:
            return False
        self.spent_ms += ms
        return True

    @property
    def spent_share(self) -> float:
        """Time lost to exploration over all time."""
        return self.spent_ms / self.total_ms if self.total_ms else 0.0


class BackOff:
    """A wait in rounds that doubles after each failure and starts over after a success."""

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self.rounds = first

    def fail(self) -> None:
        """The next wait is twice as long."""
        self.rounds = min(2 * self.rounds, self.last)

    def succeed(self) -> None:
        """The next wait is the shortest again."""
        self.rounds = self.first
