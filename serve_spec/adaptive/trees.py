"""Which trees a policy may draft: the configured one and smaller ones, or those the user lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from serve_spec.config.adaptive_file import SlotConfig
from serve_spec.core.draft_shape import DraftShape

LADDER_SHAPES = 3
"""Each has to be built, measured and tried."""


def ladder(tree: DraftShape) -> tuple[DraftShape, ...]:
    """Return `tree`, half its drafts and a level less, and so on while it branches; ascending."""
    shapes = [tree]
    while len(shapes) < LADDER_SHAPES:
        depth = shapes[-1].depth - 1
        size = min(shapes[-1].size // 2, shapes[-1].size_at(depth))
        if not 1 <= depth < size:
            break
        shapes.append(DraftShape(depth, size, tree.topk))
    return tuple(sorted(shapes))


def of_depth(tree: DraftShape, depth: int) -> DraftShape:
    """Return the tree of another depth: as many drafts as `tree`, or all its beam makes."""
    return DraftShape(depth, max(tree.size_at(depth), depth), tree.topk)


def cut(tree: DraftShape, max_depth: int) -> DraftShape:
    """Return `tree` with at most `max_depth` levels, 1 or more."""
    return tree if tree.depth <= max_depth else of_depth(tree, max_depth)


def by_slot(
    tree: DraftShape, slots: Mapping[int, SlotConfig], *, of_each_depth: bool = False
) -> dict[int, tuple[DraftShape, ...]]:
    """Return what batches of each slot may draft: its list, or trees like `tree` within its bound.

    of_each_depth: those are one of each number of steps, as large as `tree`; else the ladder.
    """

    def shapes(slot: SlotConfig) -> Iterable[DraftShape]:
        steps = [depth for depth in slot.candidate_steps if depth]
        if slot.candidate_trees is not None:
            return (DraftShape(depth, rows - 1, tree.topk) for depth, rows in slot.candidate_trees)
        if of_each_depth:
            return (of_depth(tree, depth) for depth in steps)
        return ladder(cut(tree, steps[-1])) if steps else ()

    return {key: tuple(sorted(shapes(slot))) for key, slot in slots.items()}
