"""All that a batch may do next: chains of every depth, trees of every shape, and their goodput."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.objective import (
    Choice,
    Counts,
    Floats,
    Menu,
    RoundCosts,
    branched,
    from_zero,
    per_sequence,
    speeds,
    uniform,
)
from serve_spec.adaptive.prompt_load import PromptLoad, lost_at_an_end
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.round import DecodeBatch

APART_GAIN = 1.02
"""Predicted gain over the same steps for all that makes it plan for every sequence. Picking the
best rows by estimates promises more than it keeps, for it also picks the luckiest estimates."""


@dataclass(frozen=True)
class Worths:
    """Survival of chains [B, K], and of every shape of trees by level; 0 where a row has none."""

    chains: Floats
    trees: Mapping[DraftShape, Floats]

    def each(self, applied: Callable[[Floats], Floats]) -> Worths:
        """The same of what `applied` makes of each."""
        trees = {tree: applied(levels) for tree, levels in self.trees.items()}
        return Worths(applied(self.chains), trees)

    def speeds(self, shape: DraftShape) -> Floats:
        """Return the expected tokens per round of each row that drafts a shape, [B]."""
        return speeds(self.chains if shape.is_chain else self.trees[shape], shape.depth)


@dataclass(frozen=True)
class Options:
    """Of one batch. `trees`: the round and the goodput of each shape. `are_apart`: whether rows of
    chains draft differently deep."""

    worths: Worths
    chains: Menu
    trees: Mapping[DraftShape, tuple[Choice, float]]
    are_apart: bool

    @classmethod
    def of(
        cls,
        batch: DecodeBatch,
        worths: Worths,
        weights: Floats,
        costs: RoundCosts,
        model: CostModel,
        *,
        may_differ: bool,
    ) -> Options:
        """weights, costs: see `objective`. may_differ: whether rows may draft differently deep."""
        chains = uniform(worths.chains, weights, costs, batch.max_draft_tokens)
        are_apart = False
        if may_differ and batch.size > 1:
            apart = per_sequence(worths.chains, weights, costs, batch.max_draft_tokens)
            if apart.goodput.max() >= APART_GAIN * chains.goodput.max():
                chains, are_apart = apart, True
        trees = {
            tree: branched(tree, levels, weights, costs, _tree_ms(tree, levels, batch, model))
            for tree, levels in worths.trees.items()
        }
        return cls(worths, chains, trees, are_apart)

    def shares_of_prompts(self, load: PromptLoad, model: CostModel, context: float) -> Floats:
        """What ends of requests take, and the prompts after them, as shares of each round's time.

        Of chains by depth, then of trees. Of prompts, what they take longer beside drafts than
        without any. What they take beside plain rounds everybody's tokens bear alike; counted in,
        it would make all tiers look the same.
        """
        batch_size = len(self.worths.chains)
        rounds = [choice for choice, _ in self.trees.values()]
        tokens = np.array([*self.chains.tokens, *(choice.tokens for choice in rounds)])
        ms = np.array([*self.chains.ms, *(choice.ms for choice in rounds)])
        num_rows = np.array([*self.chains.num_rows, *map(_rows_of_trees, rounds)])
        of_chains = lost_at_an_end(self.chains.tokens / batch_size)
        by_level = [1.0 + from_zero(self.worths.trees[t].mean(axis=0)) for t in self.trees]
        of_trees = [lost_at_an_end(speeds)[-1] for speeds in by_level]
        lost = np.array([*of_chains, *of_trees])

        def prompt_ms(num_prompt_rows: Floats, num_rows: Counts) -> Floats:
            return model.prompt_ms(num_prompt_rows, context, num_rows, batch_size)

        added_ms = load.added_ms(tokens, ms, self.chains, prompt_ms)
        added_ms -= added_ms[0] / tokens[0] * tokens
        shares: Floats = added_ms / ms + load.idle_share(lost, ms, num_rows, prompt_ms)
        return shares

    def slowed(self, shares: Floats) -> Options:
        """The same where rounds of each option take so much more, as a share of their time."""
        num_tiers = len(self.chains.ms)
        with_shares = zip(self.trees.items(), shares[num_tiers:].tolist(), strict=True)
        trees = {
            tree: (choice, goodput / (1.0 + share))
            for (tree, (choice, goodput)), share in with_shares
        }
        return replace(self, chains=self.chains.slowed(shares[:num_tiers]), trees=trees)

    @property
    def goodput(self) -> dict[DraftShape, float]:
        """Tokens per ms in the long run, by shape."""
        chains = enumerate(self.chains.goodput.tolist())
        of_chains: dict[DraftShape, float] = {DraftShape.chain(k): goodput for k, goodput in chains}
        return of_chains | {tree: goodput for tree, (_, goodput) in self.trees.items()}

    def chain(self, shape: DraftShape) -> Choice:
        """Return the round of a chain; instead of a tree, the best one of chains."""
        best = shape.depth if shape.is_chain else int(self.chains.goodput.argmax())
        return self.chains.choice(best)


def _rows_of_trees(choice: Choice) -> int:
    """Rows that a round of full trees verifies: of each request one, and its drafts."""
    drafting = int(np.count_nonzero(choice.row_steps))
    return len(choice.row_steps) + drafting * choice.shape.size


def _tree_ms(tree: DraftShape, levels: Floats, batch: DecodeBatch, model: CostModel) -> float:
    """A round in which all rows with `levels` draft it; infinite if there is no room."""
    num_drafting = int(np.count_nonzero(levels[:, 0]))
    if num_drafting * tree.size > batch.max_draft_tokens:
        return math.inf
    size = batch.size
    num_drafts = model.drafts_of_trees(tree, num_drafting)
    stages_ms = model.stages_ms(
        tree, size, num_drafting, num_drafts, batch.context, batch.num_sampled
    )
    return sum(stages_ms) + model.host_ms(size)
