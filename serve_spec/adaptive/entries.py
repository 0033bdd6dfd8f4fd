"""What it takes rows to begin to draft, and whether it pays in the rounds they have left.

A draft needs an entry for every token before it. Of a row that drafts they are made along the way;
a row that has not drafted yet lacks its whole prompt, one that paused lacks the pause. To make them
up is paid once and serves until the row ends, so it is spread over the rounds that are left; and it
has to be paid from what drafts bring beyond what they take themselves. Rows that draft have paid:
weighed without that, a batch whose rows come and go would draft on at a loss, for every row that
comes would begin because the others do.

Where rows come and go, a batch without drafts is full of rows that no longer begin, and will soon
be full of others. A tier is chosen for what a batch is and becomes, within some rounds: a row that
does not begin counts as the one that takes its place, from when it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from serve_spec.adaptive.objective import Flags, Floats, RoundCosts
from serve_spec.core.round import DecodeBatch

FORESEEN_ROUNDS = 128
"""Rounds that a tier is chosen for, where rows come and go."""


@dataclass(frozen=True)
class Entries:
    """Rows that begin, or go on, because drafts will pay what it takes; the others stay off.

    pays: [B]. ms: of the rows that pay, spread over their rounds, in ms per round. longest: of a
        row like those of the batch, most entries to make up per token it has left. rounds: [B] that
        each row has left.
    """

    pays: Flags | None
    ms: float
    longest: Callable[[], float]
    rounds: Floats | None = None

    @classmethod
    def of(cls, batch: DecodeBatch, worth: Floats, costs: RoundCosts, entry_ms: float) -> Entries:
        """Weighs the rows of a batch, each at the depth that suits it.

        worth: survival [B, K]. costs: of the batch. entry_ms: of one entry.
        """
        if not batch.backlogs or not entry_ms:
            return cls(None, 0.0, lambda: math.inf)

        def gained_and_tokens() -> tuple[Floats, Floats]:
            # A token more of one row is worth a round's time over the rows that share it; its
            # drafts take its share of what those of all rows take.
            by_depth = np.cumsum(worth, axis=1)
            gains = (by_depth * costs.off - costs.added[: worth.shape[1]]) / batch.size
            row, best = np.arange(batch.size), gains.argmax(axis=1)
            return gains[row, best], 1.0 + by_depth[row, best]

        @cache
        def longest() -> float:
            gained, tokens = gained_and_tokens()
            return max(0.0, float((gained / tokens).mean()) / entry_ms)

        # What a round makes by the way is no backlog.
        by_the_way = worth.shape[1] + 1
        if max(batch.backlogs) <= by_the_way:  # as a rule
            return cls(None, 0.0, longest)
        gained, tokens = gained_and_tokens()
        rounds = np.maximum(1.0, np.asarray(batch.num_remaining) / tokens)
        backlogs = np.maximum(0, np.asarray(batch.backlogs) - by_the_way)
        ms = entry_ms * backlogs / rounds
        pays: Flags = (backlogs == 0) | (ms <= gained)
        return cls(pays, float(ms[pays].sum()), longest, rounds)

    def of_rows_that_pay(self, worth: Floats) -> Floats:
        """`worth` [B, K] without drafts for rows that do not."""
        return worth if self.pays is None else np.where(self.pays[:, None], worth, 0.0)

    @property
    def all_pay(self) -> bool:
        """Whether no row stays off."""
        return self.pays is None or bool(self.pays.all())

    def of_rows_to_come(self, worth: Floats) -> Floats:
        """`worth` [B, K] as far as there will be drafts, by these rows or those in their place."""
        if self.pays is None or self.rounds is None:
            return worth
        share = np.where(self.pays, 1.0, np.maximum(0.0, 1.0 - self.rounds / FORESEEN_ROUNDS))
        return worth * share[:, None]

    def pays_for_another(self, batch: DecodeBatch, row: int) -> bool:
        """Whether a row that joins after the plan was made begins to draft at once."""
        if not batch.backlogs:
            return True
        return batch.backlogs[row] <= self.longest() * batch.num_remaining[row]
