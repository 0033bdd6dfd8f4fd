"""The vocabulary of speculation. One word per quantity, everywhere.

num_steps            draft steps of a round (K); 0 means no drafting
num_draft_tokens     drafts the target verified, root excluded (K for a full chain); SGLang's flag
                     `speculative_num_draft_tokens` alone counts the root too
num_correct_drafts   drafts the target accepted, without root and bonus token: 0..K
accept_length        tokens emitted: num_correct_drafts + 1
steps_per_req        per request of a batch: its drafts (of trees, levels)
correct_per_req      per request: the drafts the target accepted, before any stop
bonus token          the token drawn after the last accepted draft
accept_rate          probability that one draft is accepted, 0..1
shape                depth, size and topk of what a request drafts: a chain or a tree
parents              of the drafts of a tree: the draft before each, counted from 1; 0 is the root.
                     A parent comes before its children
draft / target       the two models
topk                 children of a drafted token; 1 makes a chain of it, more a tree
grammar drafts       the usual tokens of text that a grammar forces; counted apart from all others
beam                 the topk tokens of a tree's level that have children
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

MAX_TREE_TOKENS = 64
"""Most tokens of a request in a round: a root and its drafts, or all beams. A mask has 64 bits."""


@dataclass(frozen=True, slots=True, order=True)
class DraftShape:
    """`size` draft tokens on `depth` levels: one per level of a chain, up to topk² of a tree.

    The committed root is not counted; SGLang's `speculative_num_draft_tokens` counts it.
    """

    depth: int
    size: int
    topk: int = 1
    """Children of a draft token; 1: a chain."""

    def __post_init__(self) -> None:
        if self.topk == 1 and self.size != self.depth:
            why = f"size={self.size}: a chain of depth={self.depth} has {self.depth} draft tokens"
            raise ValueError(f"{why}; give a tree topk > 1")

    @staticmethod
    @cache
    def chain(depth: int) -> DraftShape:
        """Return the chain of `depth` draft tokens; 0: no drafting."""
        return DraftShape(depth, depth)

    @property
    def is_chain(self) -> bool:
        """Return whether no draft token has siblings."""
        return self.topk == 1

    @property
    def tree_size(self) -> int:
        """Draft tokens of a tree; 0 for a chain."""
        return 0 if self.topk == 1 else self.size

    def size_at(self, depth: int, trunk: int = 0) -> int:
        """Return the draft tokens of the shape cut to `depth` levels, the first of one draft each.

        trunk: those first levels.
        """
        return min(self.size, trunk + most_drafts(self.topk, depth - trunk))

    def __str__(self) -> str:
        return f"{self.depth}" if self.topk == 1 else f"{self.depth}x{self.size}"


def most_drafts(topk: int, depth: int) -> int:
    """Return the most draft tokens on `depth` levels: topk, then topk² a level."""
    return topk + (depth - 1) * topk * topk if depth else 0


PLAIN = DraftShape.chain(0)
"""No drafting."""


class GrammarLimits(NamedTuple):
    """Grammar drafts that the steps of a worker have room for.

    steps: most of a request. steps_with_prompts: most in a step with prefill chunks. tokens: most
    roots and drafts of a step with any; None: no limit.
    """

    steps: int = 0
    steps_with_prompts: int = 0
    tokens: int | None = None


class NgramDrafts(NamedTuple):
    """N-gram or grammar drafts of one request; `parents` only if they form a tree.

    match: tokens of the text before them that were found elsewhere, 0 if unknown.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...] = ()
    match: int = 0

    def after(self, token_ids: tuple[int, ...]) -> NgramDrafts:
        """Return these drafts behind a chain of others."""
        num = len(token_ids)
        parents = (*range(num), *(place + num for place in self.parents)) if self.parents else ()
        return NgramDrafts((*token_ids, *self.token_ids), parents, self.match)

    @property
    def probability(self) -> float:
        """Return how likely each draft seems if the one before is accepted, by the match."""
        return (self.match + 1) / (self.match + 2)


class ModelDrafts(NamedTuple):
    """What a scheduler knows of the draft model.

    slots_past: returns the KV slots past a request's length that drafting and verifying a shape
    takes; see `Drafter.slots_past`. first_entry: number of each text's first draft KV entry.
    """

    slots_past: Callable[[DraftShape], int]
    first_entry: int = 0


class NgramDrafter(Protocol):
    """Proposes n-gram drafts on the host, before a step is planned."""

    def learn(self, request_id: str, token_ids: Sequence[int], most: int) -> int:
        """Read at most `most` new tokens of the committed `token_ids`; return their number."""

    def propose(
        self, request_id: str, token_ids: Sequence[int], most: int, first: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return up to `most` tokens that may follow the committed `token_ids`; often none.

        None before all of them are read. first: drafts that stand between.
        """

    def propose_tree(
        self,
        request_id: str,
        token_ids: Sequence[int],
        shape: DraftShape,
        first: Sequence[int] = (),
    ) -> NgramDrafts:
        """Return a tree of at most this shape, which begins with the chain of `propose`."""

    def match_length(self, request_id: str) -> int:
        """Return the tokens of the match that gave the last drafts; 0 if unknown."""

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has left the batch."""
