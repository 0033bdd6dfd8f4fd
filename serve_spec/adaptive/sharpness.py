"""How sharp drafts are drawn: their temperature over the request's, learned while they are made.

No sharpness changes a text (`ops/draw.py`); only how many drafts are accepted differs. Most rounds
use the best one known, a bounded share tries the others in turn. Of a probe that reached n drafts
one counts how many more were accepted than at the rate of the rounds since the probe before, as
traffic changes more than the sharpnesses differ. Whether the sum of these differences is more than
chance is judged by their own squares (a self-normalised sum).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from serve_spec.core.round import DRAFT_SHARPNESS

SHARPNESSES = (0.7, DRAFT_SHARPNESS, 1.0)
"""What is tried; the middle one comes first."""
PROBE_EVERY_ROUNDS = 17
"""One round in so many tries another: odd, as other policies count rounds in powers of two."""
STANDARD_ERRORS = 3.0  # by how many it has to be better
FEWEST_PROBES = 32  # of one before it is judged at all
MEMORY_PROBES = 4096  # of one after which what they showed counts half


class SharpnessPolicy:
    """Picks the sharpness of every drafting round with sampled rows; one choice alone is kept."""

    def __init__(self, choices: Sequence[float] = SHARPNESSES) -> None:
        self._choices = tuple(choices)
        self.num_rounds = self.num_probes = self.num_switches = 0
        self._use(self._choices[len(self._choices) // 2])

    def _use(self, sharpness: float) -> None:
        """Use it from now on; the others begin anew, for they are compared with this one."""
        self.best = sharpness
        self._reached = self._correct = 0  # drafts since the last probe
        # Of each other: probes, drafts they accepted beyond what was expected, and the squares.
        self._others = {each: (0.0, 0.0, 0.0) for each in self._choices if each != sharpness}

    def choose(self) -> float:
        """Return the sharpness of the next round that drafts for sampled rows."""
        self.num_rounds += 1
        if not self._others or self.num_rounds % PROBE_EVERY_ROUNDS:
            return self.best
        self.num_probes += 1
        return [*self._others][self.num_probes % len(self._others)]

    def observe(self, sharpness: float, drafts: Sequence[tuple[int, int]]) -> None:
        """Learn from one round: drafts verified and accepted, of each of its sampled rows."""
        reached = sum([min(correct + 1, steps) for steps, correct in drafts])
        correct = sum([correct for _, correct in drafts])
        if sharpness == self.best:
            self._reached += reached
            self._correct += correct
        elif sharpness in self._others:
            if reached and self._reached:
                self._judge(sharpness, correct - reached * self._correct / self._reached)
            self._reached = self._correct = 0

    def _judge(self, sharpness: float, excess: float) -> None:
        probes, total, squares = self._others[sharpness]
        if probes >= MEMORY_PROBES:
            probes, total, squares = probes / 2, total / 2, squares / 4
        probes, total, squares = probes + 1, total + excess, squares + excess**2
        self._others[sharpness] = probes, total, squares
        if probes >= FEWEST_PROBES and total > STANDARD_ERRORS * math.sqrt(squares):
            self.num_switches += 1
            self._use(sharpness)

    def snapshot(self) -> dict[str, object]:
        """Return what an operator should see of it, JSON-able."""
        shown = ("best", "num_rounds", "num_probes", "num_switches")
        return {name: getattr(self, name) for name in shown}
