"""Which trees a policy may draft: the configured one and smaller ones, or those the user lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_spec.config.adaptive_file import SlotConfig
from serve_spec.core.round import TreeShape, most_tree_drafts

LADDER_SHAPES = 3
"""Each is a tier of its own, to be built, measured and tried."""


def ladder(tree: TreeShape, topk: int) -> tuple[TreeShape, ...]:
    """`tree`, then half its drafts and a level less, and so on while that branches; ascending."""
    shapes = [tree]
    while len(shapes) < LADDER_SHAPES:
        last = shapes[-1]
        depth = last.num_steps - 1
        most = min(last.num_draft_tokens // 2, most_tree_drafts(topk, depth))
        smaller = TreeShape(depth, most)
        if not 1 <= smaller.num_steps < smaller.num_draft_tokens:
            break
        shapes.append(smaller)
    return tuple(sorted(shapes))


def of_depth(tree: TreeShape, topk: int, num_steps: int) -> TreeShape:
    """The tree of another depth: as many drafts as `tree`, or all its beam makes."""
    most = min(tree.num_draft_tokens, most_tree_drafts(topk, num_steps))
    return TreeShape(num_steps, max(most, num_steps))


def cut(tree: TreeShape, topk: int, max_steps: int) -> TreeShape | None:
    """`tree` with at most `max_steps` levels; None if that is none."""
    if not max_steps:
        return None
    return tree if tree.num_steps <= max_steps else of_depth(tree, topk, max_steps)


def listed(slot: SlotConfig) -> tuple[TreeShape, ...] | None:
    """The shapes a slot lists, ascending; None: it leaves them to the policy."""
    if slot.candidate_trees is None:
        return None
    return tuple(sorted(TreeShape(steps, rows - 1) for steps, rows in slot.candidate_trees))


def by_slot(
    tree: TreeShape, topk: int, slots: Mapping[int, SlotConfig]
) -> dict[int, tuple[TreeShape, ...]]:
    """What batches of each slot may draft: its list, or the ladder within its bound."""
    shapes: dict[int, tuple[TreeShape, ...]] = {}
    for key, slot in slots.items():
        own, within = listed(slot), cut(tree, topk, slot.candidate_steps[-1])
        shapes[key] = own if own is not None else () if within is None else ladder(within, topk)
    return shapes


def by_depth(
    tree: TreeShape, topk: int, slots: Mapping[int, SlotConfig]
) -> dict[int, dict[int, TreeShape]]:
    """The tree of every tier of every slot: of a list the largest of that depth, if it has one."""
    return {
        key: {
            steps: shape
            for steps in slot.candidate_steps
            if (shape := _of_tier(tree, topk, steps, listed(slot))) is not None
        }
        for key, slot in slots.items()
    }


def _of_tier(
    tree: TreeShape, topk: int, num_steps: int, own: Sequence[TreeShape] | None
) -> TreeShape | None:
    if not num_steps:
        return None
    if own is None:
        return of_depth(tree, topk, num_steps)
    return max((shape for shape in own if shape.num_steps == num_steps), default=None)
