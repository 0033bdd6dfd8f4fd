"""Which trees a policy may draft: the configured one and smaller ones, or those the user lists."""

from __future__ import annotations

from collections.abc import Mapping

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


def by_slot(tree: DraftShape, slots: Mapping[int, SlotConfig]) -> dict[int, tuple[DraftShape, ...]]:
    """Return what batches of each slot may draft: its list, or the ladder within its bound."""

    def of_slot(slot: SlotConfig) -> tuple[DraftShape, ...]:
        if slot.candidate_trees is not None:
            return _listed(tree, slot)
        deepest = slot.candidate_steps[-1]
        return ladder(cut(tree, deepest)) if deepest else ()

    return {key: of_slot(slot) for key, slot in slots.items()}


def by_depth(tree: DraftShape, slots: Mapping[int, SlotConfig]) -> dict[int, dict[int, DraftShape]]:
    """Return the tree of every depth of a slot: the largest it lists, or as large as `tree`."""
    found = {}
    for key, slot in slots.items():
        steps = [depth for depth in slot.candidate_steps if depth]
        is_free = slot.candidate_trees is None
        shapes = [of_depth(tree, k) for k in steps] if is_free else _listed(tree, slot)
        found[key] = {shape.depth: shape for shape in shapes if shape.depth in steps}
    return found


def _listed(tree: DraftShape, slot: SlotConfig) -> tuple[DraftShape, ...]:
    """Return the shapes a slot lists, ascending."""
    listed = slot.candidate_trees or ()
    return tuple(sorted(DraftShape(depth, rows - 1, tree.topk) for depth, rows in listed))
