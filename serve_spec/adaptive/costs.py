"""Milliseconds of rounds: a measured table, corrected by what rounds really took.

    round ms = (draft ms + verify ms) · exp(residual of the cell)

A cell is a bucket of batch sizes and a shape. Its residual is shrunk to that of its bucket, and
that one to the mean of all, and fades with its age: one spike does not make a cell unattractive
for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from serve_spec.adaptive.calibration import Floats
from serve_spec.adaptive.cost_surface import CostSurface
from serve_spec.config.cost_table import CostTable, Grid
from serve_spec.core.draft_shape import DraftShape

TABLE_ROUNDS = 4.0
"""Rounds that the table, or what is known of other cells, is worth."""
COST_ROUNDS = 50.0
"""Rounds of a cell after which an older one weighs 1/e."""
STALE_ROUNDS = 1024.0
"""Rounds of a bucket after which one of a cell that does not run weighs 1/e."""
MOST_RESIDUAL = 0.7
"""Largest logarithm of a round's time over the table's that is believed."""
_NUM_BUCKETS = 24


def bucket(batch_size: int) -> int:
    """Return the exponent of the power of two nearest to a batch size."""
    return min((batch_size * batch_size).bit_length() // 2, _NUM_BUCKETS - 1)


class Costs:
    """Predicts and learns the time of rounds."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.max_steps = table.num_steps[-1]
        self._draft = self._surface(table.draft_ms, table.num_steps)
        self._verify = self._surface(table.verify_ms, table.num_steps)
        self._trees = {
            tree.shape: tuple(
                self._surface(tuple(tuple((ms,) for ms in row) for row in grid), (0,))
                for grid in (tree.draft_ms, tree.verify_ms)
            )
            for tree in table.trees
        }
        num_columns = self.max_steps + 1 + len(self._trees)
        self._rounds, self._errors = (np.zeros((_NUM_BUCKETS, num_columns)) for _ in range(2))
        # Of prompts in rounds without and with drafts: weighted factors, weights in rounds.
        self._prompts: Floats = np.full((2, 2), TABLE_ROUNDS)
        self._entries: Floats = np.zeros(2)  # ms and number

    def _surface(self, ms: Grid, num_steps: Sequence[int]) -> CostSurface:
        table = self.table
        return CostSurface(
            ms, contexts=table.contexts, batch_sizes=table.batch_sizes, num_steps=num_steps
        )

    def chains_ms(self, size: int, drafts: Floats, context: float, sampled: float) -> Floats:
        """Return the ms of rounds that verify `drafts` [M] drafts of chains: [max_steps + 1, M].

        sampled: share of the requests that sample.
        """
        verify = self._verify_ms(size, drafts, context, sampled)
        chains = slice(self.max_steps + 1)
        ms: Floats = self._draft.curve(size, context)[:, None] + verify
        return ms * np.exp(self._residuals(size)[chains, None])

    def ms(
        self, size: int, shape: DraftShape, drafts: float, context: float, sampled: float = 0.0
    ) -> float:
        """Return the ms of a round that verifies so many drafts."""
        residual = self._residuals(size)[self._column(shape)]
        return self.table_ms(size, shape, drafts, context, sampled) * math.exp(residual)

    def table_ms(
        self, size: int, shape: DraftShape, drafts: float, context: float, sampled: float
    ) -> float:
        """Return the ms of the table."""
        if shape.is_chain:
            verify = self._verify_ms(size, np.array([drafts]), context, sampled)
            return float(self._draft.curve(size, context)[shape.depth] + verify[0])
        stages = self._trees[shape.depth, shape.size]
        noise = self.table.sampled_row_ms * sampled * (size + drafts)
        return float(sum(stage.curve(size, context)[0] for stage in stages) + noise)

    def _verify_ms(self, size: int, drafts: Floats, context: float, sampled: float) -> Floats:
        curve = self._verify.curve(size, context)
        verify: Floats = np.interp(drafts / size, np.arange(len(curve)), curve)
        return verify + self.table.sampled_row_ms * sampled * (size + drafts)

    def _column(self, shape: DraftShape) -> int:
        if shape.is_chain:
            return shape.depth
        return self.max_steps + 1 + list(self._trees).index((shape.depth, shape.size))

    def _residuals(self, size: int) -> Floats:
        """Return the residual of every shape."""
        at = bucket(size)
        rounds, errors = self._rounds[at], self._errors[at]
        prior = self._errors.sum() / (self._rounds.sum() + TABLE_ROUNDS)
        prior = (errors.sum() + TABLE_ROUNDS * prior) / (rounds.sum() + TABLE_ROUNDS)
        found: Floats = (errors + TABLE_ROUNDS * prior) / (rounds + TABLE_ROUNDS)
        return found

    def learn(
        self, size: int, shape: DraftShape, drafts: float, context: float, sampled: float, ms: float
    ) -> None:
        """Learn from a round without prompts."""
        error = math.log(max(ms, 1e-9) / self.table_ms(size, shape, drafts, context, sampled))
        at, column, fade = bucket(size), self._column(shape), 1.0 - 1.0 / COST_ROUNDS
        limited = min(max(error, -MOST_RESIDUAL), MOST_RESIDUAL)
        self._rounds[at, column] = fade * self._rounds[at, column] + 1.0
        self._errors[at, column] = fade * self._errors[at, column] + limited

    def age(self, size: int, num_rounds: int) -> None:
        """Let what the cells of a batch size know fade by some rounds."""
        fade = math.exp(-num_rounds / STALE_ROUNDS)
        for sums in (self._rounds, self._errors):
            sums[bucket(size)] *= fade
        self._prompts += (1.0 - fade) * (TABLE_ROUNDS - self._prompts)

    @property
    def entry_ms(self) -> float:
        """Return the ms of one missing draft KV entry."""
        ms, number = self._entries
        return float(ms / max(number, 1.0))

    def prompt_ms(
        self, size: int, drafted: Floats, prompts: Floats | float, context: float, *, drafts: bool
    ) -> Floats:
        """Return the ms that prompt tokens add to rounds that verify so many drafts.

        drafts: whether the rounds draft, so that prompts also need draft KV.
        """
        rows = size + drafted
        more = self._verify.of_rows(rows + prompts, context) - self._verify.of_rows(rows, context)
        factors, rounds = self._prompts[int(drafts)]
        added: Floats = factors / rounds * np.maximum(more, 0.0)
        return added

    def learn_prompt(
        self, size: int, shape: DraftShape, drafts: float, context: float, prompts: int, ms: float
    ) -> None:
        """Learn from a round with prompt tokens that took so long without missing draft KV."""
        alone, known = self.ms(size, shape, drafts, context), self._prompts[int(shape.depth > 0)]
        expected = self._one_prompt_ms(size, shape, drafts, context, prompts) * known[1] / known[0]
        if expected > 0.0:
            most = math.exp(MOST_RESIDUAL)
            factor = min(max((ms - alone) / expected, 1.0 / most), most)
            known *= 1.0 - 1.0 / COST_ROUNDS
            known += expected / alone * np.array([factor, 1.0])

    def learn_entries(
        self, size: int, shape: DraftShape, drafts: float, context: float, prompts: int,
        num_entries: int, ms: float,
    ) -> None:  # fmt: skip
        """Learn from a round that made many missing draft KV entries."""
        ms -= self.ms(size, shape, drafts, context)
        ms -= self._one_prompt_ms(size, shape, drafts, context, prompts)
        most = float(self._draft.curve(size, context)[1]) * num_entries
        self._entries *= 1.0 - 1.0 / COST_ROUNDS
        self._entries += min(max(ms, 0.0), most), num_entries

    def _one_prompt_ms(
        self, size: int, shape: DraftShape, drafts: float, context: float, prompts: int
    ) -> float:
        drafted, is_drafting = np.array([drafts]), shape.depth > 0
        return float(self.prompt_ms(size, drafted, prompts, context, drafts=is_drafting)[0])

    def snapshot(self) -> dict[str, object]:
        """Return the corrections, JSON-able."""
        return {
            "prompt_factors": (self._prompts[:, 0] / self._prompts[:, 1]).round(4).tolist(),
            "entry_ms": round(self.entry_ms, 6),
            "factors": {
                str(1 << at): np.exp(self._residuals(1 << at)).round(4).tolist()
                for at in range(_NUM_BUCKETS)
                if self._rounds[at].sum() >= 1.0
            },
        }
