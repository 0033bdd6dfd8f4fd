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

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from serve_spec.core.draft_shape import DraftShape

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

STAIRS_PER_DRAFT = 2
"""Verification is corrected by the half draft per row: a round in which few rows draft costs far
more than a straight line from a plain one says, and says nothing of one in which all do."""

_MAX_POINTS = 65
"""Numbers of drafts tried: costs are smooth or have few stairs, so a grid of them is enough."""


@dataclass(frozen=True)
class RoundCosts:
    """What a round of one batch would cost, in ms.

    step[n, k]: a draft step taken by n rows that draft k+1 deep, [batch_size + 1, max_steps].
    verify[k]: the target verifies k drafts for each row; a straight line between two k, for rows
        that draft differently.
    factors[i]: what corrects `verify` for more than (i - 1) / 2 and up to i / 2 drafts per row.
    host: everything outside those two.
    entry: what rows take to catch up before they draft, spread over the rounds they have left; paid
        by every plan that drafts at all.
    """

    batch_size: int
    step: Floats
    verify: Floats
    factors: Floats
    host: float
    entry: float = 0.0

    @property
    def off(self) -> float:
        """A round without drafts."""
        return float(self.verify[0] * self.factors[0]) + self.host

    @property
    def added(self) -> Floats:
        """What a round takes beyond a plain one if all rows draft 1, 2, ... steps, [max_steps]."""
        drafts = self.batch_size * np.arange(self.step.shape[1] + 1)
        verify_ms = self.verify_ms(drafts)
        added: Floats = np.cumsum(self.step[self.batch_size]) + verify_ms[1:] - verify_ms[0]
        return added

    def verify_ms(self, num_drafts: Counts) -> Floats:
        """The target's share of rounds with so many drafts in all."""
        known = self.batch_size * np.arange(len(self.verify))
        stairs = -(-STAIRS_PER_DRAFT * num_drafts // self.batch_size)
        ms: Floats = np.interp(num_drafts, known, self.verify) * self.factors[stairs]
        return ms

    def round_ms(self, row_steps: Counts) -> float:
        """A round in which row r drafts row_steps[r]; a row leaves the draft batch when done."""
        steps = np.arange(self.step.shape[1])
        rows = (row_steps[:, None] > steps).sum(axis=0)
        verify_ms = self.verify_ms(np.array([row_steps.sum()]))
        return float(self.step[rows, steps].sum() + verify_ms[0] + self.host)


@dataclass(frozen=True)
class Choice:
    """A round: its shape, its drafts per row, what they are expected to bring, what they cost.

    Of trees, `row_steps` are levels.
    """

    shape: DraftShape
    row_steps: Counts
    tokens: float
    """Expected of the round at hand, all rows."""
    ms: float

    @property
    def most_tokens(self) -> int:
        """Tokens if every draft were kept."""
        return len(self.row_steps) + int(self.row_steps.sum())


def usable(survival: Floats, max_steps: Counts) -> Floats:
    """survival [B, K] with 0 where a row can not use the draft (`max_steps` [B])."""
    return np.where(np.arange(survival.shape[1]) < max_steps[:, None], survival, 0.0)


def speeds(survival: Floats, num_steps: int) -> Floats:
    """Expected tokens per round of each row that drafts `num_steps`, [B]."""
    tokens: Floats = 1.0 + survival[:, :num_steps].sum(axis=1)
    return tokens


@dataclass(frozen=True)
class Menu:
    """The best of every tier, 0 .. max_steps: one entry each, but for `row_steps`."""

    tokens: Floats
    """Expected of the round at hand, all rows."""
    num_rows: Counts
    """Verified: one of each request, and the drafts."""
    ms: Floats
    """Infinite where a tier needs more drafts than the round affords."""
    goodput: Floats
    """Θ, tokens per ms in the long run."""
    row_steps: Callable[[int], Counts]
    """Drafts per row of a tier, [B]."""

    def slowed(self, shares: Floats) -> Menu:
        """The same where rounds of each tier take so much more, as a share of their time."""
        return replace(self, goodput=self.goodput / (1.0 + shares))

    def choice(self, num_steps: int) -> Choice:
        """One tier's entry; of a tier that can not be afforded, the deepest below that can."""
        while not np.isfinite(self.ms[num_steps]):
            num_steps -= 1
        return Choice(
            DraftShape.chain(num_steps),
            self.row_steps(num_steps),
            float(self.tokens[num_steps]),
            float(self.ms[num_steps]),
        )


def uniform(survival: Floats, weights: Floats, costs: RoundCosts, max_drafts: int) -> Menu:
    """Every row drafts the tier's steps, or what it can use (entries > 0 of `survival`)."""
    batch_size, max_steps = survival.shape
    steps = np.arange(max_steps)
    rows = np.count_nonzero(survival, axis=0)
    drafts = from_zero(rows)
    ms = np.full(max_steps + 1, np.inf)
    affordable = drafts <= max_drafts
    total_ms = from_zero(costs.step[rows, steps]) + costs.verify_ms(drafts) + costs.host
    ms[affordable] = total_ms[affordable]
    tokens = np.ones((batch_size, max_steps + 1))
    np.cumsum(survival, axis=1, out=tokens[:, 1:])
    tokens[:, 1:] += 1.0
    harmonic_mean = weights.sum() / (weights @ (1.0 / tokens))
    return Menu(
        tokens.sum(axis=0),
        batch_size + drafts,
        ms,
        batch_size * harmonic_mean / (ms + costs.entry * (drafts > 0)),
        lambda num_steps: np.count_nonzero(survival[:, :num_steps], axis=1),
    )


def per_sequence(survival: Floats, weights: Floats, costs: RoundCosts, max_drafts: int) -> Menu:
    """The drafts that shorten the batch's work most, up to the number that pays best.

    Each draft of a row shortens it by less than the one before: survival falls, and tokens that
    are already expected make another one matter less. So a row's best drafts are its first ones.
    """
    batch_size, max_steps = survival.shape
    tokens = 1.0 + np.cumsum(survival, axis=1)
    saved = (weights[:, None] * survival / (tokens * (tokens - survival))).ravel()
    order = np.argsort(-saved)[: np.count_nonzero(saved)]
    ends, first_end = _grid(len(order))
    cell = order % max_steps * len(ends) + first_end

    def totals(values: Floats | None) -> Any:
        """Sums over the first `ends` drafts, of each step alone, [max_steps, ends]."""
        sums = np.bincount(cell, values, minlength=max_steps * len(ends))
        return np.cumsum(sums.reshape(max_steps, -1), axis=1)

    def by_tier(sums: Any) -> Any:
        """What a tier counts of them: steps up to its own, [max_steps + 1, ends]."""
        return np.concatenate([np.zeros((1, len(ends)), sums.dtype), np.cumsum(sums, axis=0)])

    rows = totals(None)
    drafts = by_tier(rows)
    draft_ms = by_tier(costs.step[rows, np.arange(max_steps)[:, None]])
    ms = draft_ms + costs.verify_ms(drafts) + costs.host
    ms[drafts > max_drafts] = np.inf
    work = weights.sum() - by_tier(totals(saved[order]))
    time = work * (ms + costs.entry * (drafts > 0))
    best = np.argmin(time, axis=1)
    tiers = np.arange(max_steps + 1)

    def row_steps(num_steps: int) -> Counts:
        chosen = order[: ends[best[num_steps]]]
        chosen = chosen[chosen % max_steps < num_steps]
        return np.bincount(chosen // max_steps, minlength=batch_size)

    return Menu(
        batch_size + by_tier(totals(survival.ravel()[order]))[tiers, best],
        batch_size + drafts[tiers, best],
        ms[tiers, best],
        batch_size * weights.sum() / time[tiers, best],
        row_steps,
    )


def branched(
    tree: DraftShape, survival: Floats, weights: Floats, costs: RoundCosts, ms: float
) -> tuple[Choice, float]:
    """Every row that can (entries > 0 of `survival`, by level) drafts a tree, and the goodput.

    costs: of the batch, beside the round itself. ms: the round; infinite where it can not be had.
    """
    tokens = 1.0 + survival.sum(axis=1)
    row_steps = np.count_nonzero(survival, axis=1)
    harmonic_mean = weights.sum() / (weights @ (1.0 / tokens))
    choice = Choice(tree, row_steps, float(tokens.sum()), ms)
    return choice, float(costs.batch_size * harmonic_mean / (ms + costs.entry))


def depth_beside_prompts(
    choice: Choice,
    survival: Floats,
    costs: RoundCosts,
    prompt_ms: Callable[[Counts], Floats],
    least_ms: float = 0.0,
    worth: float = 1.0,
) -> int:
    """Most drafts per row of `choice` that pay in a round that computes prompts, too.

    Rows that would have been free cost something beside those of prompts. The prompts have to be
    computed sooner or later and are no part of the bargain: what a draft brings are tokens, each
    worth the time it takes without prompts, and what it costs is the time it adds to this round.

    survival, costs: those `choice` was made with. prompt_ms: what the prompts add to verifications
    of so many rows. least_ms: what a cut has to save beyond its tokens' worth, or there is none.
    worth: of a token, over what it is worth to the batch as it is. In a batch that fills up a token
        that is not emitted now will take less time later.
    """
    depths, steps = choice.shape.depth + 1, np.arange(survival.shape[1])
    is_drafted = choice.row_steps[:, None] > steps
    rows = is_drafted.sum(axis=0)
    drafts = from_zero(rows)[:depths]
    tokens = from_zero(np.where(is_drafted, survival, 0.0).sum(axis=0))[:depths]
    added_ms = from_zero(costs.step[rows, steps])[:depths] + costs.verify_ms(drafts)
    added_ms += prompt_ms(costs.batch_size + drafts)
    token_ms = worth * (choice.ms + costs.entry) / choice.tokens
    saved_ms = tokens * token_ms - added_ms
    best = int(np.argmax(saved_ms))
    return best if saved_ms[best] - saved_ms[-1] >= least_ms else choice.shape.depth


@lru_cache(maxsize=64)
def _grid(most: int) -> tuple[Counts, Counts]:
    """Numbers of drafts to try, 0 .. most, and of each draft the first of them that has it.

    Both are shared between calls, not to be written.
    """
    ends = np.unique(np.linspace(0, most, min(most + 1, _MAX_POINTS)).astype(np.int64))
    return ends, np.searchsorted(ends, np.arange(most), side="right")


def from_zero(values: Floats | Counts) -> Any:
    """Sums of the first 0, 1, .. of n values, [n + 1]."""
    return np.concatenate([[0], np.cumsum(values)])
