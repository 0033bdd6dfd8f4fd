"""The acceptance walk: which drafts the target's own draws confirm.

Each verified row draws its token from the sampling law; a draft is kept while it equals the draw
of the row before it. The emitted tokens are always the draws, so the rule is exact for any draft
("Speculative sampling" by target draws and walk: the law of plain decoding itself).

Chains and trees share one layout. Row 0 of a sequence is its root, the last committed token; row i
holds a draft, and `parents` names the row before it. In a chain that is row i - 1:

    row      0    1    2    3
    token    x    5    8    2        parents  -1  0  1  2
    drawn    5    8    9    4        -> 2 correct; emitted 5 8 9; path 0 1 2
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.draw import row_keys_of

MAX_ROWS = 64
"""Rows a sequence may verify in one round: the bits of a tree mask."""


class AcceptedPath(NamedTuple):
    """What B sequences emit: tensors on the device, D drafts deep at most.

    token_ids: int64 [B, D+1], the kept drafts and the final token, then zeros.
    num_correct: int32 [B], drafts kept.
    path: int32 [B, D+1], the rows the walk went through, root first, as offsets in the sequence;
        then zeros.
    """

    token_ids: Tensor
    num_correct: Tensor
    path: Tensor


@has_kernel
def accept_path(
    row_tokens: Tensor,
    parents: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    max_depth: int,
    forced: Tensor | None = None,
) -> AcceptedPath:
    """Walks each sequence from its root to the child that holds the token drawn, until none does.

    row_tokens: int64 [T], the token each row holds; a draft of -1 is broken and never kept.
    parents: int32 [T], the row before each, as an offset in its sequence; -1 for roots.
    drawn: int64 [T], the token the target drew at each row.
    query_starts: int32 [B+1]: sequence b has rows query_starts[b] .. query_starts[b+1] - 1, at most
        `MAX_ROWS`. One without rows emits nothing and has 0 correct.
    max_depth: D, drafts kept at most.
    forced: int32 [B], for load tests: so many drafts are kept whatever was drawn, along first
        children, fewer where the tree ends; the final token is the draw of the last kept row.

    Of several children that fit, the one of the smallest offset is taken.
    """
    offsets, rows, inside = _rows_of(query_starts, len(row_tokens))
    tokens = row_tokens[rows].where(inside & (offsets > 0), -1)
    above = parents[rows]
    draws = drawn[rows]
    going = inside[:, 0]
    path = [torch.zeros_like(query_starts[1:], dtype=torch.int64)]
    kept = path[0]
    for step in range(max_depth):
        current = path[-1].unsqueeze(1)
        fits = (above == current) & (tokens >= 0)
        fits &= tokens == draws.gather(1, current) if forced is None else step < forced.unsqueeze(1)
        going = going & fits.any(dim=1)
        kept = kept + going
        path.append(fits.long().argmax(dim=1).where(going, path[-1]))
    return _emitted(tokens, draws, torch.stack(path, dim=1), kept, inside[:, :1])


@has_kernel
def accept_and_advance(
    row_tokens: Tensor,
    parents: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    recent: Tensor,
    lengths: Tensor,
    lanes: Tensor,
    verdicts: Tensor,
    forced: Tensor | None = None,
) -> AcceptedPath:
    """`accept_path`, `advance_lanes` and `pack_verdicts`, the last into `verdicts`.

    verdicts: int32 [B, D+3], written in place; its width says how deep the walk may go. One launch
    on a GPU.
    """
    max_depth = verdicts.shape[1] - 3
    accepted = accept_path(row_tokens, parents, drawn, query_starts, max_depth, forced)
    advance_lanes(recent, lengths, lanes, accepted, query_starts)
    verdicts.copy_(pack_verdicts(row_tokens, accepted, query_starts))
    return accepted


def advance_lanes(
    recent: Tensor, lengths: Tensor, lanes: Tensor, accepted: AcceptedPath, query_starts: Tensor
) -> None:
    """Appends what sequences emit to their lanes, in place.

    recent: int32 [L, W], the last tokens of each lane, that of position p in column p mod W (W a
    power of two above the depth). lengths: int32 [L], tokens of each lane. lanes: int32 [B], the
    lane of each sequence that has rows; the others' are not looked at.

    A draw of -1 (no token could be drawn) is kept as 0: the next round may already be running with
    it, and must not look up a token that does not exist. The read-back says -1.
    """
    has_rows = query_starts[1:] > query_starts[:-1]
    lanes = lanes.long().where(has_rows, 0)
    emitted = (accepted.num_correct + 1).where(has_rows, 0)
    column = torch.arange(accepted.token_ids.shape[1], device=recent.device)
    at = (lengths[lanes].unsqueeze(1) + column) & (recent.shape[1] - 1)
    lane = lanes.unsqueeze(1).expand_as(at)
    # Adding the difference, not assigning: sequences without rows share lane 0 with its owner.
    change = accepted.token_ids.clamp(min=0).to(torch.int32) - recent[lane, at]
    change = change.where(column < emitted.unsqueeze(1), 0)
    recent.index_put_((lane, at), change, accumulate=True)
    lengths.index_add_(0, lanes, emitted.to(lengths.dtype))


def pack_verdicts(row_tokens: Tensor, accepted: AcceptedPath, query_starts: Tensor) -> Tensor:
    """What the host reads of a round: int32 [B, D+3] = (num_correct, flags, tokens ...).

    flags: bit 0 is set where a draft of the sequence was -1. tokens: as in `AcceptedPath`, with -1
    where no token could be drawn.
    """
    offsets, rows, inside = _rows_of(query_starts, len(row_tokens))
    broken = (inside & (offsets > 0) & (row_tokens[rows] < 0)).any(dim=1)
    head = torch.stack([accepted.num_correct, broken.to(torch.int32)], dim=1)
    return torch.cat([head, accepted.token_ids.to(torch.int32)], dim=1)


@has_kernel
def forced_counts(seeds: Tensor, positions: Tensor, num_steps: Tensor, survival: Tensor) -> Tensor:
    """Return how many drafts of each sequence are kept by chance, for `forced`.

    seeds: int32 [B, 2]; positions: int64 [B], what the root's draw decides; num_steps: int32 [B].
    survival: float64 [K+1, K]; row n holds the chances that the first 1, 2, ... n of n drafts are
    all kept, then zeros. Returns int32 [B], 0..num_steps.
    """
    uniform = row_keys_of(seeds, positions)[:, 1].double() / 2**32 + 0.5
    chances = survival[num_steps.clamp(0, len(survival) - 1).long()]
    return (uniform.unsqueeze(1) < chances).sum(dim=1, dtype=torch.int32)


@has_kernel
def tree_masks(parents: Tensor, query_starts: Tensor) -> Tensor:
    """The rows each row attends to within its sequence: itself and all before it on its path.

    parents, query_starts: as for `accept_path`. Returns int64 [T]; bit i stands for offset i, and
    padding rows hold 0.
    """
    offsets, rows, inside = _rows_of(query_starts, len(parents))
    above = parents[rows].long().where(inside, -1)
    masks = torch.ones_like(above) << offsets
    # Each turn joins a path to the path above it: after n turns, 2^n rows.
    for _ in range(MAX_ROWS.bit_length() - 1):
        has_above = above >= 0
        joint = above.clamp(min=0)
        masks = masks | masks.gather(1, joint).where(has_above, 0)
        above = above.gather(1, joint).where(has_above, -1)
    # Not assigned: places outside a sequence point at rows of others.
    return torch.zeros(len(parents), dtype=torch.int64, device=parents.device).index_add_(
        0, rows.flatten(), masks.where(inside, 0).flatten()
    )


def num_bits(masks: Tensor) -> Tensor:
    """How many rows each mask [T] names: int64 [T]."""
    bits = torch.arange(MAX_ROWS, device=masks.device)
    return (masks.unsqueeze(1) >> bits & 1).sum(dim=1)


def _rows_of(query_starts: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets [MAX_ROWS], row of each offset [B, MAX_ROWS], and which belong to the sequence."""
    offsets = torch.arange(MAX_ROWS, device=query_starts.device)
    rows = query_starts[:-1].long().unsqueeze(1) + offsets
    inside = rows < query_starts[1:].unsqueeze(1)
    return offsets, rows.clamp(max=num_rows - 1), inside


def _emitted(
    tokens: Tensor, draws: Tensor, path: Tensor, kept: Tensor, has_rows: Tensor
) -> AcceptedPath:
    """Kept drafts, then the draw of the last kept row. path: [B, D+1], its last row repeated."""
    column = torch.arange(path.shape[1], device=path.device)
    kept_column = kept.unsqueeze(1)
    drafts = tokens.gather(1, path).roll(-1, dims=1)
    final = draws.gather(1, path[:, -1:])
    token_ids = drafts.where(column < kept_column, final.where(column == kept_column, 0))
    return AcceptedPath(
        token_ids=token_ids.where(has_rows, 0),
        num_correct=kept.to(torch.int32),
        path=path.where(column <= kept_column, 0).to(torch.int32),
    )
