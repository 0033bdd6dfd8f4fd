"""EAGLE chains over lanes: the draft stages of a round that needs no host.

See `drafters.eagle` for what entries are; here every shape is fixed, so that a stage can be
recorded once and replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve_spec.attention.lane_attention import LaneAttention
from serve_spec.core.context import ForwardContext
from serve_spec.kvcache.pool import FeaturePool, PagedKVPool
from serve_spec.models.draft import DraftHead
from serve_spec.ops import fast
from serve_spec.ops.layout import RowLayout
from serve_spec.runtime.lane_round import LaneRound
from serve_spec.runtime.pieces import PIECE_ROWS

_NEVER = torch.iinfo(torch.int32).max - 1


class EagleLaneDrafter:
    """Catches up, then drafts, with an EAGLE or EAGLE-3 head over its own paged cache."""

    def __init__(self, head: DraftHead, pool: PagedKVPool, features: FeaturePool) -> None:
        self.head = head
        self.pool = pool
        self.features = features

    def make_up(self, round: LaneRound, num_rows: int) -> None:
        """Makes the entries of `round.pieces`, `num_rows` rows with padding.

        A piece's tokens are those after its positions. For prompts and long pauses: what a head
        says of them is not asked.
        """
        pieces = round.pieces
        lanes, lens, starts = (x[:num_rows] for x in (pieces.lanes, pieces.lens, pieces.starts))
        layout, context = self._context(
            round, lanes, lens, starts, num_rows=num_rows, max_query_len=PIECE_ROWS
        )
        hidden = self.head.encode(self.features.read(layout.slots))
        self.head.forward(pieces.tokens(layout.owners, layout.offsets), hidden, context)

    def extend(self, round: LaneRound, batch_size: int, extend_len: int) -> None:
        """Makes each sequence's missing entries, up to `extend_len`; leaves `round.hidden`.

        Every sequence gets `extend_len` rows that end at its last entry. Rows of entries it has
        go nowhere, and so do all rows of one that lacks more: it does not draft this round.
        """
        assert round.hidden is not None, "a round without a draft head can not catch up"
        lanes = round.lanes
        members = round.members[:batch_size]
        ends = lanes.lengths.index_select(0, members) - 1
        made = lanes.draft_lengths.index_select(0, members)
        lacks_more = ends - made > extend_len
        starts = ends - extend_len
        layout, context = self._context(
            round,
            members,
            torch.full_like(starts, extend_len),
            starts,
            num_rows=batch_size * extend_len,
            max_query_len=extend_len,
            first_valid=made.masked_fill(lacks_more, _NEVER),
        )
        rows = members.repeat_interleave(extend_len)
        tokens = fast.ring_tokens(lanes.recent, rows, layout.positions + 1 - self.head.shift)
        hidden = self.head.encode(self.features.read(layout.slots))
        hidden = self.head.forward(tokens, hidden, context)
        last = hidden.view(batch_size, extend_len, -1)[:, -1]
        round.hidden[:batch_size].copy_(last)
        lanes.draft_lengths.index_copy_(0, members.long(), torch.where(lacks_more, made, ends))

    def draft(self, round: LaneRound, batch_size: int, num_steps: int) -> None:
        """Drafts `num_steps` tokens of each sequence from `round.hidden`; leaves `round.drafts`."""
        assert round.hidden is not None, "a round without a draft head can not draft"
        members = round.members[:batch_size]
        lengths = round.lanes.lengths.index_select(0, members)
        hidden = round.hidden[:batch_size]
        for step in range(num_steps):
            tokens = fast.draw_drafts(
                self.head.logits(hidden, step),
                members,
                lengths.long() + step,
                round.lanes.params,
                round.sharpness,
                self.head.target_ids,
            )
            round.drafts[:batch_size, step] = tokens
            if step + 1 < num_steps:
                starts = lengths - 1 + step
                one_row = torch.ones_like(starts)
                _, context = self._context(
                    round, members, one_row, starts, num_rows=batch_size, max_query_len=1
                )
                hidden = self.head.forward(tokens.clamp_min(0), hidden, context)

    def _context(
        self,
        round: LaneRound,
        members: Tensor,
        query_lens: Tensor,
        starts: Tensor,
        *,
        num_rows: int,
        max_query_len: int,
        first_valid: Tensor | None = None,
    ) -> tuple[RowLayout, ForwardContext]:
        """`query_lens` [B] rows of the lanes `members` [B], of entries from `starts` [B] on."""
        shift = self.head.shift
        starts = starts + shift
        tables = round.lanes.pages.index_select(0, members)
        layout = fast.lay_out_rows(
            query_lens,
            starts,
            torch.zeros_like(starts) if first_valid is None else first_valid + shift,
            tables,
            self.pool.page_size,
            num_rows=num_rows,
            scratch_slot=self.pool.scratch_slot,
        )
        attention = LaneAttention(
            self.pool,
            tables,
            layout.query_starts,
            starts + query_lens,
            layout.slots,
            max_query_len=max_query_len,
            window=self.head.shape.sliding_window,
        )
        return layout, ForwardContext(layout.positions, attention)
