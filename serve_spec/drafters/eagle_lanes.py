"""EAGLE chains and trees over lanes: the draft stages of a round that needs no host.

See `drafters.eagle` for what entries are; here every shape is fixed, so that a stage can be
recorded once and replayed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from serve_spec.attention.lane_attention import LaneAttention
from serve_spec.core.context import ForwardContext
from serve_spec.core.draft_shape import DraftShape
from serve_spec.kvcache.pool import FeaturePool, PagedKVPool
from serve_spec.models.draft import DraftHead
from serve_spec.ops import draft_tree, draw
from serve_spec.ops.draft_tree import Beam, root_beam
from serve_spec.ops.layout import RowLayout, lay_out_rows, ring_tokens
from serve_spec.runtime.lane_round import LaneRound
from serve_spec.runtime.pieces import PIECE_ROWS

_NEVER = torch.iinfo(torch.int32).max - 1


class EagleLaneDrafter:
    """Catches up, then drafts, with an EAGLE or EAGLE-3 head over its own paged cache.

    topk: children of a draft in a tree.
    """

    def __init__(
        self, head: DraftHead, pool: PagedKVPool, features: FeaturePool, *, topk: int = 1
    ) -> None:
        self.head = head
        self.pool = pool
        self.features = features
        self.topk = topk

    def make_up(self, round: LaneRound, num_rows: int) -> None:
        """Makes the entries of `round.pieces`, `num_rows` rows with padding.

        A piece's tokens are those after its positions. For prompts and long pauses: what a head
        says of them is not asked.
        """
        pieces = round.pieces
        room = pieces.room(num_rows)
        lanes, lens, starts = (x[:room] for x in (pieces.lanes, pieces.lens, pieces.starts))
        layout, context = self._context(
            round,
            lanes,
            lens,
            starts,
            num_rows=num_rows,
            max_query_len=PIECE_ROWS,
            asked=slice(0, 0) if self.head.ends_early else None,
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
        last = slice(extend_len - 1, None, extend_len)
        layout, context = self._context(
            round,
            members,
            torch.full_like(starts, extend_len),
            starts,
            num_rows=batch_size * extend_len,
            max_query_len=extend_len,
            first_valid=made.masked_fill(lacks_more, _NEVER),
            asked=last if self.head.ends_early else None,
        )
        rows = members.repeat_interleave(extend_len)
        tokens = ring_tokens(lanes.recent, rows, layout.positions + 1 - self.head.shift)
        hidden = self.head.encode(self.features.read(layout.slots))
        hidden = self.head.forward(tokens, hidden, context)
        round.hidden[:batch_size].copy_(hidden if self.head.ends_early else hidden[last])
        lanes.draft_lengths.index_copy_(0, members.long(), torch.where(lacks_more, made, ends))

    def draft(self, round: LaneRound, batch_size: int, num_steps: int) -> None:
        """Drafts `num_steps` tokens of each sequence from `round.hidden`; leaves `round.drafts`.

        Of sequences that verify fewer, the others are anything. Where drafts are sampled, leaves
        `round.draft_logits`, too.
        """
        assert round.hidden is not None, "a round without a draft head can not draft"
        members = round.members[:batch_size]
        lengths = round.lanes.lengths.index_select(0, members)
        hidden = round.hidden[:batch_size]
        one_row = torch.ones_like(lengths)
        for step in range(num_steps):
            tokens = self._draw(
                round, self.head.logits(hidden, step), members, lengths.long(), step
            )
            round.drafts[:batch_size, step] = tokens
            if step + 1 < num_steps:
                _, context = self._context(
                    round,
                    members,
                    one_row,
                    lengths - 1 + step,
                    num_rows=batch_size,
                    max_query_len=1,
                    first_valid=self._first_valid(round, members, step),
                )
                hidden = self.head.forward(tokens.clamp_min(0), hidden, context)

    def _draw(
        self, round: LaneRound, logits: Tensor, members: Tensor, roots: Tensor, step: int
    ) -> Tensor:
        """Draft number `step` of each sequence, int64 [B]; logits: float32 [B, Vd]."""
        params, target_ids = round.lanes.params, self.head.target_ids
        if round.draft_logits is None:
            return draw.draw_drafts(
                logits, members, roots + step, params, round.sharpness, target_ids
            )
        round.draft_logits.logits[: len(members), step].copy_(logits)
        return draw.sample_drafts(logits, members, roots + step, roots, params, target_ids)

    def draft_trees(self, round: LaneRound, batch_size: int, shape: DraftShape) -> None:
        """Drafts a tree of each sequence from `round.hidden`; leaves `round.drafts`, `.parents`.

        Sequences of fewer steps or drafts get smaller trees.
        """
        assert round.hidden is not None, "a round without a draft head can not draft"
        assert round.parents is not None, "a round in which nothing branches drafts chains"
        members, num_steps = round.members[:batch_size], round.num_steps[:batch_size]
        lengths = round.lanes.lengths.index_select(0, members)
        hidden = round.hidden[:batch_size].unsqueeze(1)
        beam = root_beam(batch_size, members.device)
        levels = []
        for step in range(shape.depth):
            width = hidden.shape[1]
            children, likely = draw.draw_children(
                self.head.logits(hidden.flatten(0, 1), step),
                members.repeat_interleave(width),
                (lengths.long() + step).repeat_interleave(width),
                round.lanes.params,
                round.sharpness,
                self.head.target_ids,
                self.topk,
            )
            by_place = (batch_size, width, self.topk)
            level, beam = draft_tree.grow_beam(
                beam, children.view(by_place), likely.view(by_place), step
            )
            levels.append(level)
            if step + 1 < shape.depth:
                hidden = self._feed(round, beam, hidden, members, lengths, step)
        counts = round.query_lens[:batch_size] - 1
        most = shape.size
        token_ids, parents = draft_tree.choose_drafts(levels, num_steps, counts, most)
        round.drafts[:batch_size, :most] = token_ids
        round.parents[:batch_size, :most] = parents

    def _feed(
        self,
        round: LaneRound,
        beam: Beam,
        hidden: Tensor,
        members: Tensor,
        lengths: Tensor,
        step: int,
    ) -> Tensor:
        """Hidden states [B, topk, H] after the beam of level `step`, [B, W, H] before it."""
        starts = lengths - 1 + step * self.topk
        depth = lengths.long() - 1 + self.head.shift + step
        _, context = self._context(
            round,
            members,
            torch.full_like(starts, self.topk),
            starts,
            num_rows=len(members) * self.topk,
            max_query_len=self.topk,
            first_valid=self._first_valid(round, members, step),
            tree_mask=beam.masks.flatten(),
            tree_len=(step + 1) * self.topk,
        )
        context = replace(context, positions=depth.repeat_interleave(self.topk))
        before = beam.befores.unsqueeze(2).expand(-1, -1, hidden.shape[2])
        fed = self.head.forward(
            beam.token_ids.clamp_min(0).flatten(), hidden.gather(1, before).flatten(0, 1), context
        )
        return fed.view(len(members), self.topk, -1)

    @staticmethod
    def _first_valid(round: LaneRound, members: Tensor, step: int) -> Tensor:
        """From where on sequences leave entries after draft or level `step`, [B].

        Those whose drafts end there leave none: they have no pages for it, and what their lanes
        still name may be another's.
        """
        return (round.num_steps[: len(members)] <= step + 1) * _NEVER

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
        asked: slice | None = None,
        tree_mask: Tensor | None = None,
        tree_len: int | None = None,
    ) -> tuple[RowLayout, ForwardContext]:
        """`query_lens` [B] rows of the lanes `members` [B], of entries from `starts` [B] on.

        asked: the rows that attend, the last of each sequence, or none of all; None: all of them.
        """
        shift = self.head.shift
        starts = starts + shift
        tables = round.lanes.pages.index_select(0, members)
        layout = lay_out_rows(
            query_lens,
            starts,
            torch.zeros_like(starts) if first_valid is None else first_valid + shift,
            tables,
            self.pool.page_size,
            num_rows=num_rows,
            scratch_slot=self.pool.scratch_slot,
        )
        query_starts = layout.query_starts
        if asked is not None:
            query_starts = torch.arange(len(query_starts), out=torch.empty_like(query_starts))
            max_query_len = 1
        attention = LaneAttention(
            self.pool,
            tables,
            query_starts,
            starts + query_lens,
            layout.slots,
            max_query_len=max_query_len,
            asked=asked,
            window=self.head.shape.sliding_window,
            tree_mask=tree_mask,
            tree_len=tree_len,
        )
        return layout, ForwardContext(layout.positions, attention, asked)
