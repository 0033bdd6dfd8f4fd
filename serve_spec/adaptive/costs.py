"""Milliseconds of rounds: a measured table, corrected by what rounds really took.

    round ms = (draft ms + verify ms) · exp(drift + residual of the cell)

A cell is a bucket of batch sizes, a shape and how full the budget is. Its residual fades with its
age: one spike does not make a cell unattractive for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from serve_spec.adaptive.calibration import Floats
from serve_spec.adaptive.cost_surface import CostSurface
from serve_spec.config.cost_table import CostTable, Grid
from serve_spec.core.draft_shape import DraftShape

DRIFT_GAIN = 0.04
"""Share of a round's error that is taken for a change of the machine."""
LEAST_GAIN = 0.02
"""Least share of a round's error that a cell takes over."""
TABLE_ROUNDS = 4.0
"""Rounds that the cells nearby, or the table, are worth."""
STALE_ROUNDS = 1024.0
"""Rounds after which a cell's older ones weigh 1/e."""
_MOST_RESIDUAL, _MOST_DRIFT = 0.7, 2.0
_ABSURD_RATIO = 20.0
_NUM_BUCKETS = 24
_FILLS = 4
_DECAY = 0.97


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
        self.drift = 0.0
        width = 1 + self.max_steps * _FILLS + len(table.trees)
        self._residuals = [[0.0] * width for _ in range(_NUM_BUCKETS)]
        self._rounds = [[0.0] * width for _ in range(_NUM_BUCKETS)]
        # Of prompts beside rounds without and with drafts: ms taken, ms of the table.
        self._prompts = [[10.0, 10.0], [10.0, 10.0]]
        self.entry_ms = 0.0
        """One missing draft KV entry."""

    def _surface(self, ms: Grid, num_steps: Sequence[int]) -> CostSurface:
        table = self.table
        return CostSurface(
            ms, contexts=table.contexts, batch_sizes=table.batch_sizes, num_steps=num_steps
        )

    def knows(self, shape: DraftShape) -> bool:
        """Whether rounds of this shape were measured."""
        return shape.is_chain or (shape.depth, shape.size) in self._trees

    def table_ms(
        self, size: int, shape: DraftShape, drafts: Floats, context: float, sampled: float = 0.0
    ) -> Floats:
        """Return the table's ms of rounds that verify so many drafts.

        sampled: share of the requests that sample.
        """
        noise = self.table.sampled_row_ms * sampled * (size + drafts)
        if shape.is_chain:
            curve = self._verify.curve(size, context)
            verify = np.interp(drafts / size, np.arange(len(curve)), curve)
            chain: Floats = self._draft.curve(size, context)[shape.depth] + verify + noise
            return chain
        stages = self._trees[shape.depth, shape.size]
        tree: Floats = sum(stage.curve(size, context)[0] for stage in stages) + noise
        return tree

    def ms(
        self, size: int, shape: DraftShape, drafts: Floats, context: float, sampled: float = 0.0
    ) -> Floats:
        """Return the corrected ms of rounds that verify so many drafts."""
        at, fills = bucket(size), self._fills(size, shape, drafts)
        levels = np.array([self._residual(at, self._column(shape, i)) for i in range(_FILLS)])
        # Interpolated between the middles of two fills, or budgets would gather at an edge.
        middles = (np.arange(_FILLS) + 0.5) / _FILLS
        factor = np.exp(self.drift + np.interp(fills, middles, levels))
        corrected: Floats = self.table_ms(size, shape, drafts, context, sampled) * factor
        return corrected

    def _fills(self, size: int, shape: DraftShape, drafts: Floats) -> Floats:
        fills: Floats = np.minimum(drafts / max(1, size * shape.size), 1.0)
        return fills

    def _column(self, shape: DraftShape, fill: int) -> int:
        if not shape.depth:
            return 0
        if shape.is_chain:
            return 1 + (shape.depth - 1) * _FILLS + fill
        trees = list(self._trees)
        return 1 + self.max_steps * _FILLS + trees.index((shape.depth, shape.size))

    def _residual(self, at: int, column: int) -> float:
        """Return a cell's residual; of a cell that hardly ran, that of its neighbours."""
        n, own = self._rounds[at][column], self._residuals[at][column]
        if n >= TABLE_ROUNDS:
            return own
        others = [b for b in range(_NUM_BUCKETS) if self._rounds[b][column] >= TABLE_ROUNDS]
        if others:
            prior = self._residuals[min(others, key=lambda b: abs(b - at))][column]
        else:
            cells = zip(self._residuals[at], self._rounds[at], strict=True)
            known = [residual for residual, rounds in cells if rounds >= TABLE_ROUNDS]
            prior = sum(known) / len(known) if known else 0.0
        return (n * own + (TABLE_ROUNDS - n) * prior) / TABLE_ROUNDS

    def learn(
        self, size: int, shape: DraftShape, drafts: int, context: float, sampled: float, ms: float
    ) -> bool:
        """Learn from a round; return False if the time cannot be that of a round."""
        number = np.array([float(drafts)])
        table_ms = float(self.table_ms(size, shape, number, context, sampled)[0])
        expected = table_ms * math.exp(self.drift)
        if not 0.0 < ms < _ABSURD_RATIO * expected:
            return False
        fill = min(int(self._fills(size, shape, number)[0] * _FILLS), _FILLS - 1)
        at, column = bucket(size), self._column(shape, fill)
        rounds, residuals = self._rounds[at], self._residuals[at]
        error = min(max(math.log(ms / expected), -_MOST_RESIDUAL), _MOST_RESIDUAL)
        if rounds[column] >= TABLE_ROUNDS:
            moved = self.drift + DRIFT_GAIN * (error - residuals[column])
            self.drift = min(max(moved, -_MOST_DRIFT), _MOST_DRIFT)
        rounds[column] += 1.0
        gain = max(LEAST_GAIN, 1.0 / rounds[column])
        residuals[column] += gain * (error - residuals[column])
        return True

    def age(self, size: int, num_rounds: int) -> None:
        """Let what the cells of a batch size know fade by some rounds."""
        at, fade = bucket(size), math.exp(-num_rounds / STALE_ROUNDS)
        self._rounds[at] = [n * fade for n in self._rounds[at]]

    def prompt_ms(
        self, size: int, drafted: Floats, prompts: Floats, context: float, *, drafts: bool
    ) -> Floats:
        """Return the ms that prompt tokens add to rounds that verify so many drafts.

        drafts: whether the rounds draft, so that prompts also need draft KV.
        """
        rows = size + drafted
        more = self._verify.deepest(rows + prompts, context) - self._verify.deepest(rows, context)
        taken, of_table = self._prompts[drafts]
        added: Floats = taken / of_table * np.maximum(more, 0.0)
        return added

    def learn_prompt(
        self, size: int, shape: DraftShape, drafts: int, context: float, prompts: int, ms: float
    ) -> None:
        """Learn from a round with prompt tokens that took so long without missing draft KV."""
        number, is_drafting = np.array([float(drafts)]), shape.depth > 0
        alone = float(self.ms(size, shape, number, context)[0])
        known = self._prompts[is_drafting]
        given = np.array([float(prompts)])
        found = self.prompt_ms(size, number, given, context, drafts=is_drafting)
        expected = float(found[0]) * known[1] / known[0]
        taken = min(max(ms - alone, 0.0), 3.0 * expected + alone)
        self._prompts[is_drafting] = [_DECAY * known[0] + taken, _DECAY * known[1] + expected]

    def learn_entries(self, more_ms: float, num_entries: int, round_ms: float) -> None:
        """Learn from a round that made missing draft KV entries and took so much longer."""
        each = min(max(more_ms, 0.0) / num_entries, 0.1 * round_ms)
        self.entry_ms += 0.1 * (each - self.entry_ms)

    def snapshot(self) -> dict[str, object]:
        """Return the corrections, JSON-able."""
        return {
            "drift": round(math.exp(self.drift), 4),
            "prompt_ratios": [round(taken / given, 4) for taken, given in self._prompts],
            "entry_ms": round(self.entry_ms, 6),
            "factors": {
                str(1 << at): round(math.exp(self._residuals[at][0]), 4)
                for at in range(_NUM_BUCKETS)
                if self._rounds[at][0] >= 1.0
            },
        }
