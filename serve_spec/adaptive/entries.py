"""What it takes rows to begin to draft, and whether it pays in the rounds they have left.

A draft needs an entry for every token before it. Of a row that drafts they are made along the way;
a row that has not drafted yet lacks its whole prompt, one that paused lacks the pause. To make them
up is paid once and serves until the row ends, so it is spread over the rounds that are left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from serve_spec.adaptive.objective import Flags, Floats, RoundCosts
from serve_spec.core.round import DecodeBatch


@dataclass(frozen=True)
class Entries:
    """Rows that begin, or go on, because drafts will pay what it takes; the others stay off.

    pays: [B]. ms: of the rows that pay, spread over their rounds, in ms per round. longest: of a
        row like those of the batch, most entries to make up per token it has left.
    """

    pays: Flags | None
    ms: float
    longest: float

    @classmethod
    def of(
        cls, batch: DecodeBatch, worth: Floats, num_steps: int, off_ms: float, entry_ms: float
    ) -> Entries:
        """Weighs the rows of a batch.

        worth: survival [B, K]. num_steps: the tier whose speed the rows would have, at least 1.
        off_ms: a round without drafts. entry_ms: of one entry.
        """
        if not batch.backlogs or not entry_ms:
            return cls(None, 0.0, float("inf"))
        tokens = 1.0 + worth[:, : max(1, num_steps)].sum(axis=1)
        rounds = np.maximum(1.0, np.asarray(batch.num_remaining) / tokens)
        # What a round makes by the way is no backlog.
        backlogs = np.maximum(0, np.asarray(batch.backlogs) - worth.shape[1] - 1)
        ms = entry_ms * backlogs / rounds
        # A token more of one row is worth a round's time over the rows that share it.
        gained = (tokens - 1.0) * off_ms / batch.size
        pays: Flags = ms <= gained
        longest = float((gained / tokens).mean()) / entry_ms
        return cls(pays, float(ms[pays].sum()), longest)

    def applied(self, worth: Floats, costs: RoundCosts) -> tuple[Floats, RoundCosts]:
        """Without drafts for rows that do not pay; what the others take is part of the costs."""
        if self.pays is None:
            return worth, costs
        return self.of_rows_that_pay(worth), replace(costs, entry=self.ms)

    def of_rows_that_pay(self, worth: Floats) -> Floats:
        """`worth` [B, K] without drafts for rows that do not."""
        return worth if self.pays is None else np.where(self.pays[:, None], worth, 0.0)

    def pays_for_another(self, batch: DecodeBatch, row: int) -> bool:
        """Whether a row that joins after the plan was made begins to draft at once."""
        if self.pays is None or not batch.backlogs:
            return True
        return batch.backlogs[row] <= self.longest * batch.num_remaining[row]
