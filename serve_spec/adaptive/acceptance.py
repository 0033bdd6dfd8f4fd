"""What was drafted, reached and accepted, by position in the chain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class PositionCounters:
    """Sums over verified rows. A draft is *reached* when every draft before it was accepted.

    accepted / reached is the chance that a draft is kept where it matters; dividing by rounds
    instead would blame deep positions for the rejections before them. A row of 3 drafts with 1
    correct: drafted 1 1 1, reached 1 1 0, accepted 1 0 0.
    """

    def __init__(self, max_steps: int) -> None:
        # Fixed length: another thread may read while a round is counted.
        self.drafted = [0] * max_steps
        self.reached = [0] * max_steps
        self.accepted = [0] * max_steps
        self.num_rows = 0

    def observe(self, num_correct_drafts: Sequence[int], row_steps: Sequence[int]) -> None:
        """Counts the rows of one round: drafts kept and drafts verified, per row.

        A row without drafts is not counted: it says nothing about drafts.

        Raises:
            ValueError: a row kept more than it had.
        """
        rows = Counter(zip(num_correct_drafts, row_steps, strict=True))
        for correct, steps in rows:
            if not 0 <= correct <= steps:
                raise ValueError(
                    f"num_correct_drafts={correct}: must lie in 0..{steps}, the drafts of its "
                    "row, without the final token"
                )
        for (correct, steps), count in rows.items():
            self.num_rows += count * (steps > 0)
            for position in range(steps):
                self.drafted[position] += count
                self.reached[position] += count * (correct >= position)
                self.accepted[position] += count * (correct > position)

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that were verified."""
        return sum(self.drafted)

    @property
    def num_correct_drafts(self) -> int:
        """Drafts that were kept."""
        return sum(self.accepted)

    @property
    def accept_rate(self) -> float | None:
        """Kept drafts per draft verified, at whatever tier; None before the first."""
        return self.num_correct_drafts / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def accept_length(self) -> float:
        """Tokens per drafting row and round: correct drafts and the final token; 1.0 before any."""
        return 1.0 + self.num_correct_drafts / self.num_rows if self.num_rows else 1.0

    def snapshot(self) -> list[dict[str, object]]:
        """One entry per position that was ever drafted, first position 1."""
        columns = zip(self.drafted, self.reached, self.accepted, strict=True)
        return [
            {
                "position": position,
                "drafted": drafted,
                "reached": reached,
                "accepted": accepted,
                "accept_rate": round(accepted / reached, 4) if reached else None,
            }
            for position, (drafted, reached, accepted) in enumerate(columns, start=1)
            if drafted
        ]
