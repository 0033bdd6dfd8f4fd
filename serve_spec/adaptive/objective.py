"""The goodput of a round and the drafts that maximise it.

    Θ = batch_size · H / T        T = draft + verify + host, in ms

H is the mean number of tokens a row emits in a round, and it has to be the harmonic one. A request
needs so many tokens whatever its speed, so a batch is always short of easy requests, which are soon
done, and full of hard ones. Whoever maximises the tokens of the round at hand drafts for the easy
rows, empties the batch of them and is left with the others. Weighted by the speeds that made up
the present batch (`weights`), bs · H / T is the long-run throughput of the plan:

    H = sum(weights) / sum(weights / tokens per round)

With all rows alike, or one row, this is tokens per ms of the round, and the next draft pays while
its chance to be kept exceeds its share of the round's time.

Which drafts are verified follows from past rounds and costs alone, never from the value of a draft
of this round, so the text keeps its distribution (and here its very tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_MAX_POINTS = 65


@dataclass(frozen=True)
class RoundCosts:
    """What a round of one batch would cost, in ms.

    draft[n, k]: n rows draft k steps, [batch_size + 1, max_steps + 1], 0 where n or k is 0.
    verify[b]: the target verifies b drafts beside the batch's own rows.
    host: everything outside those two.
    """

    draft: Floats
    verify: Floats
    host: float

    @property
    def off(self) -> float:
        """A round without drafts."""
        return float(self.verify[0]) + self.host

    def round_ms(self, row_steps: Floats | NDArray[np.int64]) -> float:
        """A round in which row r drafts row_steps[r]; a row leaves the draft batch when done."""
        drafting = self._draft_ms([int((row_steps > step).sum()) for step in range(self.max_steps)])
        return drafting + float(self.verify[int(row_steps.sum())]) + self.host

    @property
    def max_steps(self) -> int:
        """Deepest draft priced."""
        return int(self.draft.shape[1]) - 1

    def _draft_ms(self, rows_by_step: list[int]) -> float:
        step_ms = np.diff(self.draft, axis=1)
        return float(sum(step_ms[n, step] for step, n in enumerate(rows_by_step)))


@dataclass(frozen=True)
class Choice:
    """The best a tier can do: drafts per row, what they are expected to bring, what they cost."""

    num_steps: int
    row_steps: NDArray[np.int64]
    tokens: float
    """Expected of the round at hand, all rows."""
    ms: float
    goodput: float
    """Θ, tokens per ms in the long run."""


def usable(survival: Floats, max_steps: NDArray[np.int64]) -> Floats:
    """survival [B, K] with 0 where a row can not use the draft (`max_steps` [B])."""
    return np.where(np.arange(survival.shape[1]) < max_steps[:, None], survival, 0.0)


def speeds(survival: Floats, num_steps: int) -> Floats:
    """Expected tokens per round of each row that drafts `num_steps`, [B]."""
    tokens: Floats = 1.0 + survival[:, :num_steps].sum(axis=1)
    return tokens


def plain(batch_size: int, costs: RoundCosts) -> Choice:
    """No drafts."""
    none = np.zeros(batch_size, dtype=np.int64)
    return Choice(0, none, float(batch_size), costs.off, batch_size / costs.off)


def best_uniform(
    survival: Floats, weights: Floats, num_steps: int, costs: RoundCosts, max_drafts: int
) -> Choice:
    """Every row drafts `num_steps`, or what it can use (entries > 0 of `survival`)."""
    wanted = survival[:, :num_steps]
    row_steps = (wanted > 0).sum(axis=1)
    if row_steps.sum() > max_drafts:
        row_steps = np.minimum(row_steps, max_drafts // len(row_steps))
    tokens = 1.0 + np.where(np.arange(num_steps) < row_steps[:, None], wanted, 0.0).sum(axis=1)
    harmonic_mean = weights.sum() / (weights / tokens).sum()
    ms = costs.round_ms(row_steps)
    goodput = float(len(survival) * harmonic_mean / ms)
    return Choice(num_steps, row_steps, float(tokens.sum()), ms, goodput)


def best_per_sequence(
    survival: Floats, weights: Floats, num_steps: int, costs: RoundCosts, max_drafts: int
) -> Choice:
    """The drafts that shorten the batch's work most, up to the number that pays best.

    Each draft of a row shortens it by less than the one before: survival falls, and tokens that
    are already expected make another one matter less. So a row's best drafts are its first ones.
    """
    batch_size = len(survival)
    wanted = survival[:, :num_steps]
    tokens = 1.0 + np.cumsum(wanted, axis=1)
    saved = (weights[:, None] * wanted / (tokens * (tokens - wanted))).ravel()
    order = np.argsort(-saved)[: min(max_drafts, np.count_nonzero(saved))]
    budgets = _grid(len(order))
    work = weights.sum() - np.concatenate([[0.0], np.cumsum(saved[order])])[budgets]
    ms = costs.verify[budgets] + costs.host + _ragged_draft_ms(order, budgets, num_steps, costs)
    best = int(np.argmin(work * ms))
    chosen = order[: budgets[best]]
    row_steps = np.bincount(chosen // num_steps, minlength=batch_size)
    return Choice(
        num_steps,
        row_steps,
        batch_size + float(wanted.ravel()[chosen].sum()),
        float(ms[best]),
        float(batch_size * weights.sum() / (work[best] * ms[best])),
    )


def _grid(most: int) -> NDArray[np.int64]:
    """Numbers of drafts to try, 0 .. most: costs are smooth or have few stairs."""
    return np.unique(np.linspace(0, most, min(most + 1, _MAX_POINTS)).astype(np.int64))


def _ragged_draft_ms(
    order: NDArray[np.int64], budgets: NDArray[np.int64], num_steps: int, costs: RoundCosts
) -> Floats:
    """Draft ms for each budget, when the drafts come in `order` (row · num_steps + step)."""
    step_ms = np.diff(costs.draft[:, : num_steps + 1], axis=1)
    step_of = order % num_steps
    total = np.zeros(len(budgets))
    for step in range(num_steps):
        rows = np.concatenate([[0], np.cumsum(step_of == step)])[budgets]
        total += step_ms[rows, step]
    return total
