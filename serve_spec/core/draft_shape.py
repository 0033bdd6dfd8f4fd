"""The shape of the drafts of a request: a chain or a tree of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


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
            raise ValueError(
                f"size={self.size}: a chain of depth={self.depth} has {self.depth} draft tokens; "
                "give a tree topk > 1"
            )

    @classmethod
    def chain(cls, depth: int) -> DraftShape:
        """Return the chain of `depth` draft tokens; 0: no drafting."""
        return _chain(depth)

    @property
    def is_chain(self) -> bool:
        """Whether no draft token has siblings."""
        return self.topk == 1

    @property
    def tree_size(self) -> int:
        """Draft tokens of a tree; 0 for a chain."""
        return 0 if self.topk == 1 else self.size

    def size_at(self, depth: int) -> int:
        """Return the draft tokens of the shape cut to `depth` levels."""
        return min(self.size, most_drafts(self.topk, depth))

    @property
    def draft_slots(self) -> int:
        """KV slots past a request's length: the target's, or those of the draft model's beams."""
        return max(self.size, self.topk * (self.depth - 1))

    def __str__(self) -> str:
        return f"{self.depth}" if self.topk == 1 else f"{self.depth}x{self.size}"


def most_drafts(topk: int, depth: int) -> int:
    """Return the most draft tokens on `depth` levels: topk, then topk² a level."""
    return topk + (depth - 1) * topk * topk if depth else 0


@cache
def _chain(depth: int) -> DraftShape:
    return DraftShape(depth, depth)


PLAIN = DraftShape.chain(0)
"""No drafting."""
