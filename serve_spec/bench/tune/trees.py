"""Which trees a sweep measures beside chains."""

from __future__ import annotations

from collections.abc import Sequence

from serve_spec.adaptive import PolicySettings
from serve_spec.adaptive.trees import ladder
from serve_spec.config import ConfigError, SpeculativeConfig
from serve_spec.config.speculative import MAX_TREE_ROWS, most_tree_rows
from serve_spec.core.draft import DraftShape


def swept_trees(
    wanted: Sequence[tuple[int, int]] | None, speculative: SpeculativeConfig
) -> list[DraftShape]:
    """The trees, ascending: those that are wanted; None: what a policy may draft unasked.

    wanted: depth and size of each.

    Raises:
        ConfigError: a server of this configuration could not draft what is wanted.
    """
    configured, topk = PolicySettings.of(speculative).tree, speculative.topk
    if wanted is None:
        return [] if configured is None else list(ladder(configured))
    if configured is None:
        fix = (
            f"speculative_eagle_topk={topk} with speculative_num_steps="
            f"{speculative.speculative_num_steps} drafts chains alone; raise them to 2 and 1 at "
            "least, or leave --trees out"
        )
        raise ConfigError(f"trees={[f'{depth}x{size}' for depth, size in wanted]}: {fix}")
    trees = sorted({DraftShape(depth, size, topk) for depth, size in wanted})
    for tree in trees:
        _refuse_impossible(tree, topk)
    return trees


def _refuse_impossible(tree: DraftShape, topk: int) -> None:
    levels, deepest = tree.depth, MAX_TREE_ROWS // topk + 1
    makes = f"trees={tree}: speculative_eagle_topk={topk} makes trees of"
    if not 1 <= levels <= deepest:
        raise ConfigError(f"{makes} 1 to {deepest} levels; give one of those")
    most = most_tree_rows(topk, levels) - 1
    if not levels <= tree.size <= most:
        raise ConfigError(f"{makes} {levels} levels with {levels} to {most} drafts; give as many")
