"""Everything a verified row can show: so many drafts, so many of them correct. Each has a code.

Rows of a round differ in little else, so what is learned from hundreds of them is learned from how
often each code occurs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.intp]


class Observations:
    """Rows of 0 .. max_steps drafts, by code; the tables are [num_codes, max_steps], 0 or 1.

    A draft is *reached* when every draft before it was accepted. A row of 3 drafts with 1 correct:
    drafted 1 1 1, reached 1 1 0, accepted 1 0 0.
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        every_steps = range(max_steps + 1)
        shown = [(steps, correct) for steps in every_steps for correct in range(steps + 1)]
        self.num_codes = len(shown)
        steps, correct = np.array(shown, dtype=np.intp).T[:, :, None]
        position = np.arange(max_steps)
        self.drafted: Indices = (position < steps).astype(np.intp)
        self.reached: Indices = (position < np.minimum(correct + 1, steps)).astype(np.intp)
        self.accepted: Indices = (position < correct).astype(np.intp)
        self._code_of = {pair: code for code, pair in enumerate(shown)}
        # A row of k drafts with m correct has code first[k] + m.
        self._first = np.array([steps * (steps + 1) // 2 for steps in every_steps], dtype=np.intp)

    def codes(self, row_steps: Sequence[int], num_correct_drafts: Sequence[int]) -> Indices:
        """The code of each row of a round, [rows].

        Raises:
            ValueError: columns of different lengths, steps outside 0..max_steps, or a count outside
                0..its steps.
        """
        try:
            # The quickest way from a list of small integers to an array.
            steps = np.frombuffer(bytes(row_steps), np.uint8)
            correct = np.frombuffer(bytes(num_correct_drafts), np.uint8)
            first = self._first.take(steps)
        except (TypeError, ValueError, IndexError):
            raise self._refused(row_steps, num_correct_drafts) from None
        if len(steps) != len(correct) or (correct > steps).any():
            raise self._refused(row_steps, num_correct_drafts)
        return first + correct

    def codes_of(self, shown: Collection[tuple[int, int]]) -> list[int]:
        """The code of each pair of drafts and correct ones.

        Raises:
            ValueError: steps outside 0..max_steps, or a count outside 0..its steps.
        """
        try:
            return [self._code_of[pair] for pair in shown]
        except KeyError:
            steps, correct = zip(*shown, strict=True)
            raise self._refused(steps, correct) from None

    def _refused(self, row_steps: Sequence[int], num_correct_drafts: Sequence[int]) -> ValueError:
        allowed = range(self.max_steps + 1)
        for steps, correct in zip(row_steps, num_correct_drafts, strict=True):
            if steps not in allowed:
                fix = f"must be an integer in 0..{self.max_steps}"
                return ValueError(f"row_steps={steps!r}: {fix}")
            if correct not in range(steps + 1):
                fix = f"must be an integer in 0..{steps}, the drafts of its row"
                return ValueError(f"num_correct_drafts={correct!r}: {fix}")
        return ValueError(f"row_steps={row_steps!r}: give lists of integers")
