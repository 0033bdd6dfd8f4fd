"""Layout of the tokens of a forward: sequence, position and KV slot of each, on the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel


class TokenLayout(NamedTuple):
    """T tokens of B sequences, one sequence after another, then padding; tensors on the device.

    owners: int32 [T], the sequence of each token, -1 for padding.
    offsets: int32 [T], its index among the tokens of its sequence.
    positions: int64 [T], absolute, never negative.
    slots: int64 [T], KV slots.
    query_starts: int32 [B+1], the first token of each sequence, and the end of the last.
    """

    owners: Tensor
    offsets: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor

    def first(self, num_tokens: int, num_sequences: int) -> TokenLayout:
        """Return the layout of the first tokens, which are those of the first sequences."""
        if len(self.owners) == num_tokens and len(self.query_starts) == num_sequences + 1:
            return self
        query_starts = self.query_starts[: num_sequences + 1]
        return TokenLayout._make([*(x[:num_tokens] for x in self[:4]), query_starts])


@has_kernel
def lay_out_tokens(
    query_lens: Tensor,
    starts: Tensor,
    first_valid: Tensor,
    tables: Tensor,
    page_size: int,
    num_tokens: int,
    scratch_slot: int,
) -> TokenLayout:
    """Lay out `query_lens[b]` tokens of sequence b, at positions `starts[b]`, `starts[b] + 1`, ...

    query_lens: int32 [B]; starts: [B], any integers, may be negative; first_valid: [B].
    tables: int32 [B, P], the pages of positions 0 .. P · page_size - 1.
    num_tokens: T; tokens past the sequences' are padding, at position 0.

    Padding, positions below `first_valid[b]` and positions past the table get `scratch_slot`, which
    is never read. Positions below 0 become 0.
    """
    lens, begin, valid, pages = map(on_host, (query_lens, starts, first_valid, tables))
    query_starts = np.zeros(len(lens) + 1, np.int32)
    np.minimum(lens.cumsum(), num_tokens, out=query_starts[1:], casting="unsafe")
    owned = int(query_starts[-1])
    owners, offsets = np.full(num_tokens, -1, np.int32), np.zeros(num_tokens, np.int32)
    positions, slots = np.zeros(num_tokens, np.int64), np.full(num_tokens, scratch_slot, np.int64)
    owner = np.arange(len(lens)).repeat(lens)[:owned]
    owners[:owned] = owner
    offsets[:owned] = np.arange(owned) - query_starts[owner]
    position = begin[owner] + offsets[:owned]
    positions[:owned] = np.maximum(position, 0)
    page = positions[:owned] // page_size
    is_valid = (position >= np.maximum(valid, 0)[owner]) & (page < pages.shape[1])
    slot = pages[owner, np.minimum(page, pages.shape[1] - 1)] * page_size
    np.copyto(slots[:owned], slot + positions[:owned] % page_size, where=is_valid)
    columns = owners, offsets, positions, slots, query_starts
    return TokenLayout(*(torch.from_numpy(x).to(query_lens.device) for x in columns))


@has_kernel
def ring_tokens(recent: Tensor, request_slots: Tensor, positions: Tensor) -> Tensor:
    """Return the tokens at `positions` [T] of `request_slots` [T] (-1: padding, token 0).

    recent: int32 [L, W], the last tokens of each slot, that of position p in column p mod W, W a
    power of two. Returns int64 [T].
    """
    ring, slot, at = map(on_host, (recent, request_slots, positions))
    tokens = ring[slot, at & (ring.shape[1] - 1)].astype(np.int64)
    tokens[slot < 0] = 0
    return torch.from_numpy(tokens).to(recent.device)


def on_host(x: Tensor) -> np.ndarray:
    """Return x as a NumPy array, which is several times faster than torch for a few numbers."""
    return x.cpu().numpy()
