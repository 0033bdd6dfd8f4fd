"""From a `StepPlan` and its drafts to the tensors of the target's forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from serve_spec.core.context import RaggedBatch
from serve_spec.core.draft import DraftChain, DraftTrees
from serve_spec.core.plan import StepPlan
from serve_spec.runtime.layout import ragged_batch, slot_table
from serve_spec.runtime.trees import TreeRows, tree_rows


@dataclass(frozen=True)
class VerifyInputs:
    """`token_ids` [T], their layout, and `draw_rows` [R]: the rows whose logits are drawn from.

    `trees`: what those rows are, where drafts branch.
    """

    token_ids: Tensor
    batch: RaggedBatch
    draw_rows: Tensor
    trees: TreeRows | None = None


def verify_inputs(
    plan: StepPlan, drafts: DraftChain | DraftTrees, page_size: int, device: torch.device
) -> VerifyInputs:
    """Lays out the rows of a round: committed tokens, then drafts, sequence after sequence.

    row A  decode, 2 drafts   [x, d1, d2]   draws at rows 0 1 2
    row B  prefill chunk      [p0 p1 p2]    draws at none (more prompt to come)
    row C  last chunk         [q0 q1]       draws at row 7
    """
    token_ids: list[int] = []
    draw_rows: list[int] = []
    draft_at: list[int] = []
    draft_of: list[int] = []
    width = drafts.token_ids.shape[1]
    sampling_row = 0
    for row in plan.rows:
        token_ids += row.token_ids
        if row.samples:
            root = len(token_ids) - 1
            draw_rows += range(root, root + row.num_draft_tokens + 1)
            draft_at += range(root + 1, root + 1 + row.num_draft_tokens)
            first = sampling_row * width
            draft_of += range(first, first + row.num_draft_tokens)
            token_ids += [0] * row.num_draft_tokens
            sampling_row += 1
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=device)
    if draft_at:
        # The drafts stay on the device: reading them back would stall the host mid-round.
        source = torch.tensor(draft_of, device=device)
        tokens[torch.tensor(draft_at, device=device)] = drafts.token_ids.reshape(-1)[source].clamp_(
            min=0
        )
    slots = slot_table([row.page_ids for row in plan.rows], page_size, device)
    batch = ragged_batch(
        slots, [row.start for row in plan.rows], [row.query_len for row in plan.rows]
    )
    draws = torch.tensor(draw_rows, dtype=torch.int64, device=device)
    if isinstance(drafts, DraftChain):
        return VerifyInputs(tokens, batch, draws)
    trees = tree_rows(drafts)
    return VerifyInputs(tokens, _with_trees(plan, batch, draws, trees), draws, trees)


def _with_trees(
    plan: StepPlan, batch: RaggedBatch, draw_rows: Tensor, trees: TreeRows
) -> RaggedBatch:
    """The same rows, drafts at their depth below the root. Prompts before it stay chains."""
    positions, masks = batch.positions.clone(), torch.zeros_like(batch.positions)
    roots = positions[draw_rows[trees.query_starts[:-1].long()]]
    positions[draw_rows] = roots[trees.owners] + trees.depths
    masks[draw_rows] = trees.masks
    tree_lens = tuple(row.tree_drafts + 1 if row.tree_drafts else 0 for row in plan.rows)
    return replace(batch, positions=positions, tree_mask=masks, tree_lens=tree_lens)
