"""Attention of a few rows per sequence over a paged pool, with all lengths on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel

MAX_TREE_ROWS = 64
"""Rows of one sequence that a tree mask has bits for."""


@dataclass(frozen=True)
class PagedLayout:
    """Where the rows and the cache of B sequences are. Tensors on the device, dense, int32.

    `tables` [B, P]: page ids of positions `0 ..`. Sequence b owns rows `query_starts[b] ..
    query_starts[b + 1] - 1` ([B + 1]; none, if it is padding), at most `max_query_len` of them.
    `kv_lens` [B]: its cache entries with these rows; its row i is at position kv_len - rows + i.
    Entries past the table are not seen.
    `window`: a row sees itself and the `window - 1` entries before it.
    `tree_mask` int64 [T]: bit j says that a row sees entry j of its sequence's tree, itself
    included. The tree is the last `tree_len` entries of every sequence (None: its rows). All
    entries before it are seen; a row's depth is the number of its other bits, and a window is
    counted from there. Trees lie within a window (engines see to it). None: a chain.
    `groups`: sequences of about the same width, in order: how many, and the most rows of each; all
    are one where none is named. They change how work is cut, not what comes out.
    """

    tables: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    page_size: int
    max_query_len: int
    window: int | None = None
    tree_mask: Tensor | None = None
    tree_len: int | None = None
    groups: tuple[tuple[int, int], ...] = ()

    def parts(self) -> Iterator[PagedLayout]:
        """The layout of each group; rows are those of all."""
        if not self.groups:
            yield self
        begin = 0
        for num_sequences, max_query_len in self.groups:
            end = begin + num_sequences
            yield replace(
                self,
                tables=self.tables[begin:end],
                query_starts=self.query_starts[begin : end + 1],
                kv_lens=self.kv_lens[begin:end],
                max_query_len=max_query_len,
                groups=(),
            )
            begin = end


@has_kernel
def paged_attention(query: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout) -> Tensor:
    """Softmax attention of query [T, heads, d] over one layer's pool, scaled by 1 / sqrt(d).

    keys, values: [num_slots, kv_heads, d]; slot = page · page_size + offset. Returns
    [T, heads, d]. Rows that no sequence owns, or that see nothing, get anything finite. Nothing
    beyond a sequence's length is read, neither pages nor entries.
    """
    out = query.new_zeros(query.shape)
    query_lens = layout.query_starts.diff().long()
    live = ((query_lens > 0) & (layout.kv_lens > 0)).nonzero().squeeze(1)
    if not len(live):
        return out
    starts, query_lens = layout.query_starts[live].long(), query_lens[live]
    kv_lens = layout.kv_lens[live].long()
    steps = torch.arange(int(query_lens.max()), device=query.device)
    owned = steps < query_lens.unsqueeze(1)
    rows = starts.unsqueeze(1) + torch.where(owned, steps, 0)
    longest = min(int(kv_lens.max()), layout.tables.shape[1] * layout.page_size)
    positions = torch.arange(longest, device=query.device)
    seen = _seen(layout, rows, steps, query_lens, kv_lens, positions)
    inside = torch.minimum(positions, kv_lens.unsqueeze(1) - 1)
    pages = layout.tables[live].long().gather(1, inside // layout.page_size)
    slots = pages * layout.page_size + inside % layout.page_size
    grouped = query[rows].float().unflatten(2, (keys.shape[1], -1))
    scores = torch.einsum("bqhgd,blhd->bqhgl", grouped, keys[slots].float())
    scores = scores / math.sqrt(query.shape[2])
    hidden = ~seen[:, :, None, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)
    attended = torch.einsum("bqhgl,blhd->bqhgd", weights, values[slots].float()).flatten(2, 3)
    out[rows[owned]] = attended[owned].to(out.dtype)
    return out


def _seen(
    layout: PagedLayout,
    rows: Tensor,
    steps: Tensor,
    query_lens: Tensor,
    kv_lens: Tensor,
    positions: Tensor,
) -> Tensor:
    """Which of `positions` [L] each of `rows` [B, Q] sees: bool [B, Q, L]."""
    newest = query_lens if layout.tree_len is None else torch.full_like(kv_lens, layout.tree_len)
    first = (kv_lens - newest).view(-1, 1, 1)
    if layout.tree_mask is None:
        own = first + steps.unsqueeze(1)
        return (positions <= own) & _in_window(layout, positions, own)
    bits = torch.arange(MAX_TREE_ROWS, device=rows.device)
    masks = layout.tree_mask[rows].unsqueeze(2)
    own = first + ((masks >> bits) & 1).sum(dim=2, keepdim=True) - 1
    draft = positions - first
    is_ancestor = ((masks >> draft.clamp(0, MAX_TREE_ROWS - 1)) & 1).bool()
    is_draft = (draft >= 0) & (draft < newest.view(-1, 1, 1))
    return torch.where(draft < 0, _in_window(layout, positions, own), is_draft & is_ancestor)


def _in_window(layout: PagedLayout, positions: Tensor, own: Tensor) -> Tensor:
    """Whether rows at positions `own` still see `positions`."""
    return positions >= 0 if layout.window is None else positions > own - layout.window
