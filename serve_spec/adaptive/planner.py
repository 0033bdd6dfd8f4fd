"""The depth and the budget of drafts that promise most tokens per millisecond.

    argmax over depth D and budget M of  (B + A_D(M)) / T(D, B, B + M + P)

A_D(M) is the sum of the M largest survivals of all drafts of depth D, T the predicted time, P the
prompt tokens that come with so many emitted tokens. A small round computes them nearly for free, a
large one does not.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from serve_spec.adaptive.costs import Costs, Work
from serve_spec.adaptive.curves import Floats
from serve_spec.adaptive.prompts import Load
from serve_spec.core.draft import DraftShape

# Of a step with grammars. The table does not know what each step's masks cost the host.
_TABLE_SHARE = 0.9


@dataclass(frozen=True)
class Candidate:
    """A shape with its best budget."""

    shape: DraftShape
    budget: int | None  # None: all drafts are verified
    expected: float  # drafts that are expected to be accepted
    ms: float  # time of a round without prompts
    tokens_per_ms: float  # with new prompts and their draft KV


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
        most: int,
        *,
        may_admit: bool,
    ) -> list[Candidate]:
        """Return the best candidate of each depth from 0 on.

        survivals: [R, K], survival of the drafts of R sampled requests. weights: [K], number of
        requests of the batch per sampled request, by position. most: maximum drafts of the round.
        may_admit: whether budgets may be chosen.
        """
        size, width = load.work.size, survivals.shape[1]
        order = np.argsort(-survivals, axis=None, kind="stable")
        place, ranked = order % width, survivals.ravel()[order]
        members = place < np.arange(width + 1)[:, None]
        drafts = np.cumsum(members * weights[place], axis=1)
        accepted = np.cumsum(members * (weights[place] * ranked), axis=1)
        all_drafts = drafts[:, -1]
        budgets = (
            self._budgets(size, min(float(all_drafts[-1]), most)) if may_admit else np.empty(0)
        )
        # A column for every budget, and a last one for all drafts of a depth.
        columns = np.append(budgets, 0.0)
        rows = np.broadcast_to(columns, (width + 1, len(columns))).copy()
        rows[:, -1] = all_drafts
        expected = np.array([np.interp(*x) for x in zip(rows, drafts, accepted, strict=True)])
        ms = self.costs.chains_ms(load.work, np.append(budgets, all_drafts))[: width + 1]
        all_ms = np.diagonal(ms[:, len(budgets) :])
        ms = np.concatenate([ms[:, : len(budgets)], all_ms[:, None]], axis=1)
        speeds = self._speeds(load, expected, rows, ms)
        speeds[(rows > most) | (rows[:, -1:] < rows)] = 0.0
        found = []
        for depth, row in enumerate(speeds):
            at = int(row.argmax())
            if row[-1] >= 0.995 * row[at]:  # choosing among drafts takes time, too
                at = len(row) - 1
            if row[at] > 0.0:
                budget = None if at == len(row) - 1 else int(budgets[at])
                figures = expected[depth, at], ms[depth, at], row[at]
                found.append(Candidate(DraftShape.chain(depth), budget, *map(float, figures)))
        return found

    def tree(self, load: Load, shape: DraftShape, rates: Floats) -> Candidate:
        """Return a tree, verified in full. rates: probability that a level is accepted."""
        size = load.work.size
        expected = size * float(np.cumprod(rates[: shape.depth]).sum())
        drafts = size * shape.size
        ms = self.costs.ms(load.work._replace(shape=shape, drafts=drafts))
        # As a round that drafts: entry 1 of two.
        x, y, z = (np.full((2, 1), float(figure)) for figure in (expected, drafts, ms))
        speeds = self._speeds(load, x, y, z)
        return Candidate(shape, None, expected, ms, float(speeds[1, 0]))

    def scaled(self, budget: int, planned_size: int, size: int) -> int:
        """Return the budget of a batch of another size that fills a captured graph."""
        tokens = size + round(budget * size / planned_size)
        counts = self.token_counts or [tokens]
        at = min(bisect_left(counts, tokens), len(counts) - 1)
        return max(1, counts[at] - size)

    def ngram_steps(self, load: Load, chosen: Candidate, rates: Sequence[float]) -> int:
        """Return how many n-gram drafts a request verifies that has some.

        rates: probability by position that they are accepted.
        """
        size = load.work.size
        expected = size * (np.cumsum(np.cumprod([1.0, *rates])) - 1.0)
        drafts = size * np.arange(float(len(expected)))
        ms = self.costs.chains_ms(load.work, drafts)[:1]
        speeds = self._speeds(load, expected[None], drafts[None], ms)[0]
        best = int(speeds.argmax())
        return best if speeds[best] >= chosen.tokens_per_ms else 0

    def grammar_steps(self, load: Load, rates: Sequence[float], survival: float = 1.0) -> int:
        """Return how many grammar drafts a request verifies at most.

        Those that survive more often than the time of their verification makes tokens otherwise.
        rates: probability by position that they are accepted. survival: of the drafts before them.
        """
        size, num = load.work.size, len(rates)
        none, every = self.costs.chains_ms(load.work, np.array([0.0, size * num]))[0]
        price = _TABLE_SHARE * (every - none) / (num * none)
        return int((survival * np.cumprod(rates) >= price).sum())

    def marginal_ms(
        self, work: Work, rates: Sequence[float], bound: Callable[[int], int]
    ) -> dict[str, float]:
        """Return the ms per token of one more request, by requests there are: 0, 1, 2, 4, ..

        rates: acceptance by position. bound: most steps of a batch size.

        Taken over doublings, because one request more is free between two captured sizes; never
        less than in a smaller batch, where such a value in the table is noise.
        """
        of_one = np.cumsum(np.cumprod([1.0, *rates]))
        found, least, speed, before = {}, 0.0, 0.0, 0
        for size in (1 << k for k in range(self.costs.table.batch_sizes[-1].bit_length())):
            drafts = size * np.arange(bound(size) + 1.0)
            ms = self.costs.chains_ms(work._replace(size=size), drafts)
            new = float((size * of_one[: len(drafts)] / np.diagonal(ms)).max())
            least = max(least, (size - before) / max(1e-6, new - speed))
            found[str(before)] = round(least, 4)
            speed, before = new, size
        return found

    def break_even(self, load: Load, found: Mapping[DraftShape, Candidate]) -> dict[str, object]:
        """Return predicted time and speed of the chains among `found`, JSON-able."""
        size = load.work.size
        chains = {str(shape): each for shape, each in found.items() if shape.is_chain}
        return {
            "batch_size": size,
            "draft_ms": round(self.costs.draft_ms(load.work), 5),
            "round_ms": {k: round(x.ms, 5) for k, x in chains.items()},
            "tokens_per_ms": {k: round((size + x.expected) / x.ms, 5) for k, x in chains.items()},
        }

    def _budgets(self, size: int, most: float) -> Floats:
        """Return the budgets that are weighed, fewer than `most`."""
        if counts := self.token_counts:
            low, high = bisect_right(counts, size), bisect_left(counts, size + most)
            return np.array(counts[low:high], dtype=float) - size
        steps = np.unique(np.linspace(0.0, most, 17)[1:].round())
        return steps[(steps > 0) & (steps < most)]

    def _speeds(self, load: Load, expected: Floats, drafts: Floats, ms: Floats) -> Floats:
        """Return tokens per ms [K + 1, M]; the first entry does not draft.

        Only plans that draft make draft KV of prompts.
        """
        size, tokens = load.work.size, load.work.size + expected
        prompts = load.prompts * tokens
        usual = np.array(ms)
        if load.chunk:
            chunks = np.maximum(np.maximum(prompts, load.chunk), 1.0)
            usual += prompts / chunks * self.costs.prompts_ms(size, drafts, ms, chunks, load.pairs)
        usual[1:] += prompts[1:] * self.costs.prompts.entry_ms
        return np.asarray(tokens / usual)
