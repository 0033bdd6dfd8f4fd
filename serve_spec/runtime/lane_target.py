"""The target over lanes: the verification stage of a round that needs no host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from serve_spec.attention.lane_attention import LaneAttention
from serve_spec.core.context import ForwardContext
from serve_spec.ops import acceptance
from serve_spec.ops.acceptance import num_bits
from serve_spec.ops.layout import RowLayout, lay_out_rows, ring_tokens
from serve_spec.runtime.lane_round import LaneRound
from serve_spec.runtime.pieces import PIECE_ROWS
from serve_spec.runtime.target import TargetRunner


@dataclass(frozen=True)
class VerifiedRows:
    """What a verification leaves for the verdict: T rows of those that draw, then padding.

    `token_ids` int64 [T]: the root, then the drafts of each sequence (-1: no token). `row_lanes`
    int32 [T]: each row's lane, -1 for padding. `logits` float32 [T, V]. Where drafts branch, rows
    stand at the positions of their depth; `parents` int32 [T]: see `accept_path`, and `depths`
    int32 [T]: drafts on each row's path, its own included.
    """

    token_ids: Tensor
    row_lanes: Tensor
    layout: RowLayout
    logits: Tensor
    parents: Tensor | None = None
    depths: Tensor | None = None


def verify_rows(
    target: TargetRunner,
    round: LaneRound,
    num_rows: int,
    max_query_len: int,
    *,
    beside_prompts: bool = False,
    trees: bool = False,
) -> VerifiedRows:
    """Runs the target over the roots and drafts of a round, `num_rows` rows with padding.

    max_query_len: bounds the rows of each sequence that draws. beside_prompts: over the round's
    pieces, too, which come last, and of which it wants keys, values and features alone. (The last
    token of a prompt, which draws, is a root.) trees: drafts may branch.
    """
    lanes, pieces = round.lanes, round.pieces
    batch_size = min(num_rows, round.max_batch_size)  # every sequence has a row at least
    members = round.members[:batch_size]
    query_lens = round.query_lens[:batch_size]
    starts = lanes.lengths.index_select(0, members) - 1
    groups: tuple[tuple[int, int], ...] = ((batch_size, max_query_len),)
    if beside_prompts:
        room = pieces.room(num_rows)
        members = torch.cat([members, pieces.lanes[:room]])
        query_lens = torch.cat([query_lens, pieces.lens[:room]])
        starts = torch.cat([starts, pieces.starts[:room]])
        groups += ((room, PIECE_ROWS),)
    tables = lanes.pages.index_select(0, members)
    layout = lay_out_rows(
        query_lens,
        starts,
        torch.zeros_like(starts),
        tables,
        target.pool.page_size,
        num_rows=num_rows,
        scratch_slot=target.pool.scratch_slot,
    )
    tree = None
    if trees:
        tree = _tree_layout(round, layout, starts, batch_size)
        layout = layout._replace(positions=tree.positions)
    attention = LaneAttention(
        target.pool,
        tables,
        layout.query_starts,
        starts + query_lens,
        layout.slots,
        max_query_len=max(most for _, most in groups),
        groups=groups,
        window=target.model.shape.sliding_window,
        tree_mask=None if tree is None else tree.masks,
    )
    row_lanes = members.index_select(0, layout.owners.clamp_min(0))
    token_ids = _row_tokens(round, layout, row_lanes)
    if beside_prompts:
        given = pieces.tokens(layout.owners - batch_size, layout.offsets)
        token_ids = torch.where(layout.owners < batch_size, token_ids, given)
    output = target.model.forward(
        token_ids.clamp_min(0), ForwardContext(layout.positions, attention), target.capture
    )
    if target.features is not None:
        assert output.features is not None, "a drafter waits for features"
        target.features.write(layout.slots, output.features)
    # A sequence draws from its rows alone, and those are the first.
    num_drawn = min(num_rows, round.max_batch_size * (round.max_drafts + 1))
    drawn = layout.first(num_drawn, batch_size)
    draws = (drawn.owners >= 0) & (drawn.owners < batch_size)
    return VerifiedRows(
        token_ids[:num_drawn],
        row_lanes[:num_drawn].where(draws, -1),
        drawn,
        target.model.logits(output.hidden[:num_drawn]),
        None if tree is None else tree.parents[:num_drawn],
        None if tree is None else tree.depths[:num_drawn],
    )


class _TreeLayout(NamedTuple):
    """What follows of rows from what they follow; each [T], see `VerifiedRows`."""

    parents: Tensor
    masks: Tensor
    depths: Tensor
    positions: Tensor


def _tree_layout(
    round: LaneRound, layout: RowLayout, starts: Tensor, batch_size: int
) -> _TreeLayout:
    """starts: where each sequence's rows begin. Texts behind the first `batch_size` are chains."""
    assert round.parents is not None, "a round in which nothing branches verifies chains"
    drafts = _of_drafts(round.parents, layout)
    is_draft = (layout.offsets > 0) & (layout.owners < batch_size)
    parents = drafts.where(is_draft, layout.offsets - 1)
    masks = acceptance.tree_masks(parents, layout.query_starts)
    depths = num_bits(masks).to(torch.int32) - 1
    owned = layout.owners >= 0
    positions = starts[layout.owners.clamp_min(0).long()].long() + depths
    positions = positions.clamp_min(0).where(owned, layout.positions)
    return _TreeLayout(parents, masks, depths.where(owned, 0), positions)


def _row_tokens(round: LaneRound, layout: RowLayout, row_lanes: Tensor) -> Tensor:
    """Roots and drafts of a round's sequences, int64 [T]; other rows' are anything."""
    roots = ring_tokens(round.lanes.recent, row_lanes, layout.positions)
    if not round.max_drafts:
        return roots
    return torch.where(layout.offsets > 0, _of_drafts(round.drafts, layout), roots)


def _of_drafts(table: Tensor, layout: RowLayout) -> Tensor:
    """What a table [B, N] of drafts says of rows [T]; of roots and others' rows anything."""
    most, width = table.shape
    owners = layout.owners.clamp(0, most - 1)
    return table[owners.long(), (layout.offsets - 1).clamp(0, width - 1).long()]
