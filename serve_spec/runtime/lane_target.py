"""The target over lanes: the verification stage of a round that needs no host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve_spec.attention.lane_attention import LaneAttention
from serve_spec.core.context import ForwardContext
from serve_spec.ops import fast
from serve_spec.ops.layout import RowLayout
from serve_spec.runtime.lane_round import LaneRound
from serve_spec.runtime.target import TargetRunner


@dataclass(frozen=True)
class VerifiedRows:
    """What a verification leaves for the verdict.

    `token_ids` int64 [T]: the root, then the drafts of each sequence (-1: no token). `row_lanes`
    int32 [T]: each row's lane, -1 for padding. `logits` float32 [T, V].
    """

    token_ids: Tensor
    row_lanes: Tensor
    layout: RowLayout
    logits: Tensor


def verify_rows(
    target: TargetRunner, round: LaneRound, num_rows: int, max_query_len: int
) -> VerifiedRows:
    """Runs the target over the roots and drafts of a round, `num_rows` rows with padding.

    max_query_len: bounds each sequence's rows.
    """
    lanes = round.lanes
    batch_size = min(num_rows, round.max_batch_size)  # every sequence has a row at least
    members = round.members[:batch_size]
    query_lens = round.query_lens[:batch_size]
    tables = lanes.pages.index_select(0, members)
    starts = lanes.lengths.index_select(0, members) - 1
    layout = fast.lay_out_rows(
        query_lens,
        starts,
        torch.zeros_like(starts),
        tables,
        target.pool.page_size,
        num_rows=num_rows,
        scratch_slot=target.pool.scratch_slot,
    )
    attention = LaneAttention(
        target.pool,
        tables,
        layout.query_starts,
        starts + query_lens,
        layout.slots,
        max_query_len=max_query_len,
        window=target.model.shape.sliding_window,
    )
    owners = layout.owners.clamp_min(0)
    row_lanes = members.index_select(0, owners)
    roots = fast.ring_tokens(lanes.recent, row_lanes, layout.positions)
    token_ids = roots
    if round.drafts.shape[1]:
        drafts = round.drafts[owners.long(), (layout.offsets - 1).clamp_min(0).long()]
        token_ids = torch.where(layout.offsets > 0, drafts, roots)
    output = target.model.forward(
        token_ids.clamp_min(0), ForwardContext(layout.positions, attention), target.capture
    )
    if target.features is not None:
        assert output.features is not None, "a drafter waits for features"
        target.features.write(layout.slots, output.features)
    row_lanes = row_lanes.masked_fill(layout.owners < 0, -1)
    return VerifiedRows(token_ids, row_lanes, layout, target.model.logits(output.hidden))
