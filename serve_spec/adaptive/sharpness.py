"""How sharp drafts are drawn: their temperature over the request's, learnt while they are made.

A coupled draft takes its argmax under the target's own noise at temperature sharpness · T
(`ops/draw.py`). No sharpness changes a text, so each may be tried at any time; what differs is
how many drafts are kept, by a few in a hundred. Most rounds use the best one known, and a bounded
share tries the others in turn. One that surely keeps more takes over.

Only sampled rows count: greedy drafts are the same at every sharpness. Of a probe that reached n
drafts (those kept, and of each row the first that was not) one counts how many more were kept than
at the rate of the rounds since the probe before: near in time, for traffic changes more from minute
to minute than the sharpnesses differ. Whether the sum of these differences is more than chance is
judged by their own squares, whatever their distribution (a self-normalised sum).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serve_spec.core.round import DRAFT_SHARPNESS

SHARPNESSES = (0.7, DRAFT_SHARPNESS, 1.0)
"""What is tried; the middle one is where one starts."""

PROBE_EVERY_ROUNDS = 17
"""One round in so many tries another. Odd, so that it keeps no step with the powers of two by
which other policies count their rounds."""

STANDARD_ERRORS = 3.0
"""By how many it has to be better."""

FEWEST_PROBES = 32
"""Probes of one before it is judged at all."""

MEMORY_PROBES = 4096
"""Probes of one after which what they showed counts half."""


@dataclass
class _Drafts:
    """Drafts of a stretch of rounds."""

    reached: int = 0
    correct: int = 0


@dataclass
class _Challenger:
    """How many more drafts were kept in its probes than expected: the sum, and that of squares."""

    num_probes: float = 0
    excess: float = 0.0
    squares: float = 0.0

    def add(self, excess: float) -> None:
        """Takes in one probe."""
        if self.num_probes >= MEMORY_PROBES:
            self.num_probes, self.excess, self.squares = (
                self.num_probes / 2,
                self.excess / 2,
                self.squares / 4,  # of terms half as large
            )
        self.num_probes += 1
        self.excess += excess
        self.squares += excess**2

    @property
    def is_better(self) -> bool:
        """Whether chance would hardly explain it."""
        enough = self.num_probes >= FEWEST_PROBES
        return enough and self.excess > STANDARD_ERRORS * math.sqrt(self.squares)


class SharpnessPolicy:
    """Picks the sharpness of every drafting round with sampled rows; one choice alone is kept."""

    def __init__(self, choices: Sequence[float] = SHARPNESSES) -> None:
        """choices: the middle one is the first that is used."""
        self.choices = tuple(choices)
        self.num_rounds = 0
        self.num_probes = 0
        self.num_switches = 0
        self.best: float
        """The one in use but for probes."""
        self._since: _Drafts
        self._challengers: dict[float, _Challenger]
        self._use(self.choices[len(self.choices) // 2])

    def choose(self) -> float:
        """The sharpness of the next round that drafts for sampled rows."""
        self.num_rounds += 1
        if not self._challengers or self.num_rounds % PROBE_EVERY_ROUNDS:
            return self.best
        self.num_probes += 1
        return [*self._challengers][self.num_probes % len(self._challengers)]

    def observe(
        self, sharpness: float, row_steps: Sequence[int], num_correct_drafts: Sequence[int]
    ) -> None:
        """Learns from one round: drafts verified and kept, of its sampled rows."""
        rows = zip(row_steps, num_correct_drafts, strict=True)
        reached = sum(min(correct + 1, steps) for steps, correct in rows)
        correct = sum(num_correct_drafts)
        if sharpness == self.best:
            self._since.reached += reached
            self._since.correct += correct
        elif sharpness in self._challengers:
            since, self._since = self._since, _Drafts()
            if reached and since.reached:
                self._judge(sharpness, correct - reached * since.correct / since.reached)

    def snapshot(self) -> dict[str, object]:
        """What an operator should see of it, JSON-able."""
        return {
            "best": self.best,
            "num_rounds": self.num_rounds,
            "num_probes": self.num_probes,
            "num_switches": self.num_switches,
        }

    def _judge(self, sharpness: float, excess: float) -> None:
        challenger = self._challengers[sharpness]
        challenger.add(excess)
        if challenger.is_better:
            self.num_switches += 1
            self._use(sharpness)

    def _use(self, sharpness: float) -> None:
        """From now on; the others begin anew, for they are compared with this one."""
        self.best = sharpness
        self._since = _Drafts()
        self._challengers = {each: _Challenger() for each in self.choices if each != sharpness}
