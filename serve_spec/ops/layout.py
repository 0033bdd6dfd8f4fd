"""Layout of the tokens of a forward: sequence, position and KV slot of each, on the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel

_NEVER = 2**31 - 1


class Sequences(NamedTuple):
    """B sequences of new tokens.

    request_slots: int32 [B].
    starts: int32 [B], or by request slot if `by_slot`. The first token of a sequence is at position
    start + `offset`, which may be negative.
    query_lens: number of new tokens of each sequence, int32 [B], or of every sequence.
    """

    request_slots: Tensor
    starts: Tensor
    query_lens: Tensor | int
    offset: int = 0
    by_slot: bool = False


class Extended(NamedTuple):
    """The tokens are the last entries of their request's draft KV; some may be there already.

    made: int32 by request slot, the number of entries. It becomes that with the new tokens.
    shift: position of the first entry.

    Entries that are there are not written. If the tokens would leave a gap, none is.
    """

    made: Tensor
    shift: int


class Followed(NamedTuple):
    """The tokens are drafts of level `level`.

    depths: int32 [B]. Requests of no more levels than `level` write nothing: they have no pages for
    it, and stale ids of their page tables may belong to other requests.
    """

    depths: Tensor
    level: int


class TokenLayout(NamedTuple):
    """T tokens of B sequences, one sequence after another, then padding; tensors on the device.

    owners: int32 [T], the sequence of each token, -1 for padding.
    offsets: int32 [T], its index among the tokens of its sequence.
    request_slots: int32 [T], the slot of its sequence, -1 for padding.
    positions: int64 [T], absolute, never negative.
    slots: int64 [T], KV slots.
    query_starts: int32 [B+1], the first token of each sequence, and the end of the last.
    kv_lens: int32 [B], the position after the last token of each sequence.
    tables: int32 [B, P], its page table; ids past its last token are undefined.
    """

    owners: Tensor
    offsets: Tensor
    request_slots: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    tables: Tensor

    def first(self, num_tokens: int, num_sequences: int) -> TokenLayout:
        """Return the layout of the first tokens, which are those of the first sequences."""
        if len(self.owners) == num_tokens and len(self.kv_lens) == num_sequences:
            return self
        sizes = *(5 * [num_tokens]), num_sequences + 1, num_sequences, num_sequences
        return TokenLayout._make(x[:size] for x, size in zip(self, sizes, strict=True))


@has_kernel
def lay_out_tokens(
    pages: Tensor,
    page_size: int,
    scratch_slot: int,
    sequences: Sequences,
    num_tokens: int,
    drafted: Extended | Followed | None = None,
) -> TokenLayout:
    """Lay out the tokens of sequences.

    pages: int32 [L, P], by request slot the pages of positions 0 .. P · page_size - 1.
    num_tokens: T; tokens past the sequences' are padding, at position 0.
    drafted: which draft KV entries are written; None: all that are laid out.

    Padding, positions that are not written, below 0 or past the table get `scratch_slot`, which is
    never read. Positions below 0 become 0.
    """
    request_slots, tables = on_host(sequences.request_slots), on_host(pages)
    starts = on_host(sequences.starts)
    begin = (starts[request_slots] if sequences.by_slot else starts) + sequences.offset
    given = sequences.query_lens
    lens = np.full(len(begin), given) if isinstance(given, int) else on_host(given)
    query_starts = np.zeros(len(lens) + 1, np.int32)
    np.minimum(lens.cumsum(), num_tokens, out=query_starts[1:], casting="unsafe")
    owned = int(query_starts[-1])
    owners, offsets = np.full(num_tokens, -1, np.int32), np.zeros(num_tokens, np.int32)
    positions, slots = np.zeros(num_tokens, np.int64), np.full(num_tokens, scratch_slot, np.int64)
    token_slots = np.full(num_tokens, -1, np.int32)
    owner = np.arange(len(lens)).repeat(lens)[:owned]
    owners[:owned], token_slots[:owned] = owner, request_slots[owner]
    offsets[:owned] = np.arange(owned) - query_starts[owner]
    position = begin[owner] + offsets[:owned]
    positions[:owned] = np.maximum(position, 0)
    page = positions[:owned] // page_size
    first = np.maximum(_first_written(drafted, request_slots, begin, begin + lens), 0)
    is_written = (position >= first[owner]) & (page < tables.shape[1])
    slot = tables[token_slots[:owned], np.minimum(page, tables.shape[1] - 1)] * page_size
    np.copyto(slots[:owned], slot + positions[:owned] % page_size, where=is_written)
    kv_lens = (begin + lens).astype(np.int32)
    columns = owners, offsets, token_slots, positions, slots, query_starts, kv_lens
    on_device = [torch.from_numpy(x).to(pages.device) for x in columns]
    return TokenLayout._make([*on_device, pages.index_select(0, sequences.request_slots)])


def _first_written(
    drafted: Extended | Followed | None,
    request_slots: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
) -> np.ndarray:
    """Return the first position of each sequence that is written, [B]; advance `made`."""
    if drafted is None:
        return np.zeros_like(begin)
    if isinstance(drafted, Followed):
        return np.where(on_host(drafted.depths) <= drafted.level, _NEVER, 0)
    made, shift = on_host(drafted.made), drafted.shift
    known = made[request_slots] + shift
    has_gap = begin > known
    made[request_slots] = np.where(has_gap, known, end) - shift
    drafted.made.copy_(torch.from_numpy(made))
    return np.where(has_gap, _NEVER, known)


@has_kernel
def read_tokens(
    recent: Tensor, layout: TokenLayout, ahead: int = 0, drafts: Tensor | None = None
) -> Tensor:
    """Return the tokens int64 [T] of a layout; 0 for padding.

    recent: int32 [L, W], the last tokens of each request slot, that of position p in column
    p mod W, W a power of two. ahead: is added to each position.
    drafts: int64 [N, D], those of the first N sequences, from their second token on. Tokens past
    the D-th draft, and all but the first of other sequences, are undefined.
    """
    ring, slot, at = map(on_host, (recent, layout.request_slots, layout.positions))
    tokens = ring[slot, (at + ahead) & (ring.shape[1] - 1)].astype(np.int64)
    tokens[slot < 0] = 0
    if drafts is not None:
        table, owners, offsets = map(on_host, (drafts, layout.owners, layout.offsets))
        is_draft = (offsets > 0) & (offsets <= table.shape[1]) & (owners < len(table))
        tokens[is_draft] = table[owners[is_draft], offsets[is_draft] - 1]
    return torch.from_numpy(tokens).to(recent.device)


def on_host(x: Tensor) -> np.ndarray:
    """Return x as a NumPy array, which is several times faster than torch for a few numbers."""
    return x.cpu().numpy()
