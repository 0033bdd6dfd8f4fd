"""What strategy goodput chooses from: every shape that a batch may draft, weighed for a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from serve_spec.adaptive.drafts import DraftKnowledge
from serve_spec.adaptive.planner import Candidate, Planner
from serve_spec.adaptive.prompts import Load
from serve_spec.config.adaptive_file import slot_of
from serve_spec.core.draft import DraftShape
from serve_spec.core.round import DecodeBatch

SMALL_TREES = {1: (DraftShape(4, 15, 4), DraftShape(6, 31, 4)), 9: ()}
"""Trees that goodput may choose though none are configured, by the least batch size."""
DEFAULT_MAX_STEPS = 7


@dataclass(frozen=True)
class AllowedShapes:
    """Shapes that goodput may choose.

    `bounds`: most steps by the lower bound of a batch-size slot; empty: `max_steps` everywhere.
    `trees`: what a batch may draft instead of chains, by the same slots.
    """

    max_steps: int = DEFAULT_MAX_STEPS
    bounds: Mapping[int, int] = field(default_factory=dict)
    trees: Mapping[int, Sequence[DraftShape]] = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Every chain, then every tree."""
        branched = sorted({tree for shapes in self.trees.values() for tree in shapes})
        return (*map(DraftShape.chain, range(self.max_steps + 1)), *branched)

    def bound(self, batch_size: int) -> int:
        """Return the most steps of a batch."""
        if not self.bounds:
            return self.max_steps
        return min(self.max_steps, self.bounds[slot_of(self.bounds, batch_size)])

    def trees_of(self, batch_size: int) -> Sequence[DraftShape]:
        """Return the trees that a batch may draft."""
        return self.trees[slot_of(self.trees, batch_size)] if self.trees else ()


@dataclass(frozen=True)
class Candidates:
    """Weighs the allowed shapes by what is known of drafts and costs.

    has_budgets: whether requests may verify different numbers of drafts.
    """

    allowed: AllowedShapes
    planner: Planner
    drafts: DraftKnowledge
    has_budgets: bool

    def weighed(self, batch: DecodeBatch, load: Load, *, is_drafting: bool) -> list[Candidate]:
        """Return every shape with its best budget, plain rounds first.

        is_drafting: whether the last rounds were, so that each request has survivals of its own.
        """
        size, most, sampled = batch.size, batch.max_draft_tokens, load.work.sampled
        bound = min(self.allowed.bound(size), max(batch.max_steps))
        survivals = self.drafts.survivals(size if is_drafting else 1, sampled)
        survivals = survivals[:, : max(bound, 1)]
        weights = np.full(survivals.shape[1], size / len(survivals))
        if min(batch.max_steps) < bound:
            caps = np.asarray(batch.max_steps)
            weights *= (caps[:, None] > np.arange(len(weights))).mean(axis=0)
        found = self.planner.chains(
            load,
            survivals,
            np.maximum(weights, 1e-9),
            most if bound else 0,
            may_admit=self.drafts.has_logprobs and self.has_budgets,
        )
        for tree in self.allowed.trees_of(size):
            if tree.depth <= bound and tree.size * size <= most:
                rates = self.drafts.tree_rates(tree, size, sampled)
                found.append(self.planner.tree(load, tree, rates))
        return found
