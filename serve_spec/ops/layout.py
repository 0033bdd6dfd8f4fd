"""Where the rows of a round are: whose, at which position, in which slot. All on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel


class RowLayout(NamedTuple):
    """T rows of B sequences, one after another, then padding; tensors on the device.

    owners: int32 [T], the sequence of each row, -1 for padding.
    offsets: int32 [T], its place among the sequence's rows.
    positions: int64 [T], absolute, never negative.
    slots: int64 [T], where its key and value go.
    query_starts: int32 [B+1], the first row of each sequence, and the end of the last.
    """

    owners: Tensor
    offsets: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor

    def first(self, num_rows: int, num_sequences: int) -> RowLayout:
        """The first rows, as if the others, of which none is theirs, were padding."""
        return RowLayout(
            self.owners[:num_rows],
            self.offsets[:num_rows],
            self.positions[:num_rows],
            self.slots[:num_rows],
            self.query_starts[: num_sequences + 1],
        )


@has_kernel
def lay_out_rows(
    query_lens: Tensor,
    starts: Tensor,
    first_valid: Tensor,
    tables: Tensor,
    page_size: int,
    num_rows: int,
    scratch_slot: int,
) -> RowLayout:
    """Gives sequence b `query_lens[b]` rows, at positions `starts[b]`, `starts[b] + 1`, ...

    query_lens: int32 [B]; starts: [B], any integers, may be negative; first_valid: [B].
    tables: int32 [B, P], the pages of positions 0 .. P · page_size - 1.
    num_rows: T; rows past the sequences' are padding, at position 0.

    Padding, rows at positions below `first_valid[b]` and rows past the table get `scratch_slot`,
    which nobody reads: they are computed, and harm nothing. Positions below 0 become 0.
    """
    ends = query_lens.cumsum(0).clamp(max=num_rows).to(torch.int32)
    query_starts = torch.cat([ends.new_zeros(1), ends])
    rows = torch.arange(num_rows, dtype=torch.int32, device=ends.device)
    owners = torch.searchsorted(ends, rows, right=True)
    has_owner = owners < len(ends)
    owners = owners.clamp(max=len(ends) - 1)
    offsets = rows - query_starts[owners]
    positions = starts[owners].long() + offsets
    page = positions.clamp(min=0) // page_size
    is_valid = has_owner & (positions >= first_valid[owners].clamp(min=0))
    is_valid &= page < tables.shape[1]
    positions = positions.clamp(min=0).where(has_owner, 0)
    slots = tables[owners, page.clamp(max=tables.shape[1] - 1)].long() * page_size
    return RowLayout(
        owners=owners.to(torch.int32).where(has_owner, -1),
        offsets=offsets.where(has_owner, 0),
        positions=positions,
        slots=(slots + positions % page_size).where(is_valid, scratch_slot),
        query_starts=query_starts,
    )


@has_kernel
def ring_tokens(recent: Tensor, lanes: Tensor, positions: Tensor) -> Tensor:
    """The tokens at `positions` [T] of lanes `lanes` [T] (-1: padding, token 0).

    recent: int32 [L, W], the last tokens of each lane, that of position p in column p mod W, W a
    power of two. Returns int64 [T].
    """
    tokens = recent[lanes.clamp(min=0).long(), positions & (recent.shape[1] - 1)]
    return tokens.long().where(lanes >= 0, 0)
