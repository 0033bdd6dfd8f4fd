"""Which trees a policy may draft: the configured one and smaller ones, or those the user lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serve_spec.config.adaptive_file import SlotConfig, slot_of
from serve_spec.core.draft import DraftShape

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


def ladder(tree: DraftShape) -> tuple[DraftShape, ...]:
    """Return `tree`, half its drafts and a level less, and so on while it branches; ascending."""
    shapes = [tree]
    while len(shapes) < 3:  # each has to be built and measured
        depth = shapes[-1].depth - 1
        size = min(shapes[-1].size // 2, shapes[-1].size_at(depth))
        if not 1 <= depth < size:
            break
        shapes.append(DraftShape(depth, size, tree.topk))
    return tuple(sorted(shapes))


def of_depth(tree: DraftShape, depth: int) -> DraftShape:
    """Return the tree of another depth: as many drafts as `tree`, or all its beam makes."""
    return DraftShape(depth, max(tree.size_at(depth), depth), tree.topk)


def candidates(tree: DraftShape, slot: SlotConfig) -> tuple[DraftShape, ...]:
    """Return the trees a slot lists, or else the ladder from `tree` within the slot's depth."""
    if slot.candidate_trees is not None:
        return tuple(
            DraftShape(depth, tokens - 1, tree.topk) for depth, tokens in slot.candidate_trees
        )
    depth = min(tree.depth, slot.candidate_steps[-1])
    return ladder(of_depth(tree, depth)) if depth else ()


def by_depth(tree: DraftShape, slot: SlotConfig) -> tuple[DraftShape, ...]:
    """Return a tree for each number of steps: the largest a slot lists, or else one like `tree`."""
    if slot.candidate_trees is None:
        return tuple(of_depth(tree, steps) for steps in slot.candidate_steps if steps)
    largest = {listed.depth: listed for listed in candidates(tree, slot)}
    return tuple(largest[steps] for steps in slot.candidate_steps if steps in largest)
