"""Which trees a policy may draft: the configured one and smaller ones, or those the user lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_spec.config.adaptive_file import SlotConfig
from serve_spec.core.draft_shape import DraftShape

LADDER_SHAPES = 3
"""Each is a tier of its own, to be built, measured and tried."""


def ladder(tree: DraftShape) -> tuple[DraftShape, ...]:
    """`tree`, then half its drafts and a level less, and so on while that branches; ascending."""
    shapes = [tree]
    while len(shapes) < LADDER_SHAPES:
        last = shapes[-1]
        depth = last.depth - 1
        size = min(last.size // 2, last.size_at(depth))
        if not 1 <= depth < size:
            break
        shapes.append(DraftShape(depth, size, tree.topk))
    return tuple(sorted(shapes))


def of_depth(tree: DraftShape, depth: int) -> DraftShape:
    """The tree of another depth: as many drafts as `tree`, or all its beam makes."""
    return DraftShape(depth, max(tree.size_at(depth), depth), tree.topk)


def cut(tree: DraftShape, max_depth: int) -> DraftShape | None:
    """`tree` with at most `max_depth` levels; None if that is none."""
    if not max_depth:
        return None
    return tree if tree.depth <= max_depth else of_depth(tree, max_depth)


def listed(slot: SlotConfig, topk: int) -> tuple[DraftShape, ...] | None:
    """The shapes a slot lists, ascending; None: it leaves them to the policy."""
    if slot.candidate_trees is None:
        return None
    return tuple(sorted(DraftShape(depth, rows - 1, topk) for depth, rows in slot.candidate_trees))


def by_slot(tree: DraftShape, slots: Mapping[int, SlotConfig]) -> dict[int, tuple[DraftShape, ...]]:
    """What batches of each slot may draft: its list, or the ladder within its bound."""
    shapes: dict[int, tuple[DraftShape, ...]] = {}
    for key, slot in slots.items():
        own, within = listed(slot, tree.topk), cut(tree, slot.candidate_steps[-1])
        shapes[key] = own if own is not None else () if within is None else ladder(within)
    return shapes


def by_depth(tree: DraftShape, slots: Mapping[int, SlotConfig]) -> dict[int, dict[int, DraftShape]]:
    """The tree of every depth of every slot: of a list the largest of that depth, if it has one."""
    return {
        key: {
            depth: shape
            for depth in slot.candidate_steps
            if (shape := _at_depth(tree, depth, listed(slot, tree.topk))) is not None
        }
        for key, slot in slots.items()
    }


def _at_depth(tree: DraftShape, depth: int, own: Sequence[DraftShape] | None) -> DraftShape | None:
    if not depth:
        return None
    if own is None:
        return of_depth(tree, depth)
    return max((shape for shape in own if shape.depth == depth), default=None)
