"""The depth and the budget of drafts that promise most tokens per millisecond.

    argmax over depth D and budget M of  (B + A_D(M)) / T(D, B, B + M)

A_D(M) is the sum of the M largest survivals of all drafts of depth D, T the predicted time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serve_spec.adaptive.calibration import Floats
from serve_spec.adaptive.costs import Costs
from serve_spec.core.draft_shape import PLAIN, DraftShape

BUDGETS = 16
"""Budgets that are weighed per depth where no graphs are captured."""
ALL_IS_BEST = 0.995
"""Share of the best budget's speed from which all drafts are verified: admission costs nothing."""


@dataclass(frozen=True)
class Load:
    """What decides the time of a round beside its drafts."""

    size: int
    context: float
    sampled: float = 0.0
    """Share of the requests that sample."""
    prompts: float = 0.0
    """Prompt tokens that a mixed round computes for every token it emits: the sooner requests
    end, the sooner others begin,"""
    mixed: float = 0.0
    """and the share of rounds that are mixed."""
    begin_ms: float = 0.0
    """Time per token and request that missing draft KV entries take."""


@dataclass(frozen=True)
class Candidate:
    """A shape with its best budget."""

    shape: DraftShape
    budget: int | None
    """None: all drafts are verified."""
    drafts: float
    """Drafts that are verified,"""
    expected: float
    """and that are expected to be accepted."""
    ms: float
    """Time of a round without prompts."""
    tokens_per_ms: float
    """Of a usual round."""


class Planner:
    """Weighs every depth and budget for a load."""

    def __init__(self, costs: Costs, token_counts: Sequence[int] = ()) -> None:
        """token_counts: tokens that a captured graph verifies, ascending; empty: any number."""
        self.costs = costs
        self.token_counts = list(token_counts)

    def chains(
        self,
        load: Load,
        survivals: Floats,
        weights: Floats,
        *,
        most_drafts: int,
        may_admit: bool,
    ) -> list[Candidate]:
        """Return the best candidate of each depth from 0 on.

        survivals: [R, K] of drafts of some requests like those of the batch. weights: [K], requests
        of the batch that each of them stands for, by position. most_drafts: of the whole round.
        may_admit: whether budgets may be chosen.
        """
        width = survivals.shape[1]
        flat = survivals.ravel()
        order = np.argsort(-flat, kind="stable")
        place, ranked = order % width, flat[order]
        found = [self.plain(load)]
        for depth in range(1, width + 1):
            members = place < depth
            share = weights[place[members]]
            drafts, accepted = np.cumsum(share), np.cumsum(share * ranked[members])
            total = float(drafts[-1])
            budgets = self._budgets(load.size, total, most_drafts, may_admit=may_admit)
            if not len(budgets):
                break
            expected = np.interp(budgets, drafts, accepted)
            found.append(self._best(load, DraftShape.chain(depth), budgets, expected, total))
        return found

    def plain(self, load: Load) -> Candidate:
        """Return the round without drafts."""
        return self._best(load, PLAIN, np.zeros(1), np.zeros(1), 0.0)

    def tree(self, load: Load, shape: DraftShape, rates: Sequence[float]) -> Candidate:
        """Return a tree that is verified whole, by the chance that a level is accepted."""
        expected = load.size * float(np.cumprod(rates[: shape.depth]).sum())
        drafts = float(load.size * shape.size)
        return self._best(load, shape, np.array([drafts]), np.array([expected]), drafts)

    def scaled(self, budget: int, planned_size: int, size: int) -> int:
        """Return the budget of a batch of another size that fills a captured graph."""
        tokens = size + round(budget * size / planned_size)
        counts = self.token_counts
        if not counts:
            return tokens - size
        at = min(bisect_left(counts, tokens), len(counts) - 1)
        return max(1, counts[at] - size)

    def _budgets(self, size: int, total: float, most: int, *, may_admit: bool) -> Floats:
        """Return the budgets that are weighed, the last of them all drafts if they fit."""
        whole = [total] if total <= most else []
        if not may_admit:
            return np.array(whole)
        counts = self.token_counts
        if counts:
            low = bisect_right(counts, size)
            high = bisect_left(counts, size + min(total, most))
            return np.array([*(count - size for count in counts[low:high]), *whole])
        steps = np.unique(np.linspace(0.0, min(total, most), BUDGETS + 1)[1:].round())
        return np.array([*(steps[steps < total]), *whole])

    def _best(
        self, load: Load, shape: DraftShape, budgets: Floats, expected: Floats, total: float
    ) -> Candidate:
        size, context = load.size, load.context
        ms = self.costs.ms(size, shape, budgets, context, load.sampled)
        tokens, usual_ms = size + expected, ms
        if load.mixed:
            prompts = load.prompts * tokens
            beside = self.costs.prompt_ms(size, budgets, prompts, context, drafts=shape.depth > 0)
            usual_ms = ms + load.mixed * beside
        if load.begin_ms and shape.depth:
            usual_ms = usual_ms + load.begin_ms * tokens
        speeds = tokens / usual_ms
        at = int(speeds.argmax())
        if budgets[-1] >= total and speeds[-1] >= ALL_IS_BEST * speeds[at]:
            at = len(speeds) - 1
        is_whole = budgets[at] >= total
        return Candidate(
            shape,
            None if is_whole else int(budgets[at]),
            float(budgets[at]),
            float(expected[at]),
            float(ms[at]),
            float(speeds[at]),
        )
