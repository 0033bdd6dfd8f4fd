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

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.noise import row_keys_of

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
    tokens, above, draws = row_tokens.tolist(), parents.tolist(), drawn.tolist()
    counts = None if forced is None else forced.tolist()
    emitted, paths = [], []
    for b, (first, end) in enumerate(pairwise(query_starts.tolist())):
        at = slice(first, end)
        count = None if counts is None else counts[b]
        path = _walk(tokens[at], above[at], draws[at], max_depth, count)
        kept = [tokens[first + row] for row in path[1:]]
        padding = [0] * (max_depth + 1 - len(path))
        emitted.append([*kept, *(draws[first + row] for row in path[-1:]), *padding])
        paths.append([len(path[1:]), *path, *padding])
    found = torch.tensor(paths, dtype=torch.int32).to(drawn.device)
    return AcceptedPath(torch.tensor(emitted).to(drawn.device), found[:, 0], found[:, 1:])


def _walk(
    tokens: list[int], parents: list[int], draws: list[int], max_depth: int, forced: int | None
) -> list[int]:
    """The rows of one sequence that are kept, the root first; none without rows."""
    path = [0][: len(tokens)]
    while path and len(path) <= max_depth:
        here = path[-1]
        if forced is not None and len(path) > forced:
            break
        for row in range(here + 1, len(tokens)):
            fits = forced is not None or tokens[row] == draws[here]
            if fits and parents[row] == here and tokens[row] >= 0:
                path.append(row)
                break
        else:
            break
    return path


@has_kernel
def accept_and_advance(
    row_tokens: Tensor,
    parents: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    recent: Tensor,
    lengths: Tensor,
    request_slots: Tensor,
    results: Tensor,
    forced: Tensor | None = None,
) -> AcceptedPath:
    """`accept_path`, `advance_requests` and `pack_results`, the last into `results`.

    results: int32 [B, D+3], written in place; its width says how deep the walk may go. One launch
    on a GPU.
    """
    max_depth = results.shape[1] - 3
    accepted = accept_path(row_tokens, parents, drawn, query_starts, max_depth, forced)
    advance_requests(recent, lengths, request_slots, accepted, query_starts)
    results.copy_(pack_results(row_tokens, accepted, query_starts))
    return accepted


def advance_requests(
    recent: Tensor,
    lengths: Tensor,
    request_slots: Tensor,
    accepted: AcceptedPath,
    query_starts: Tensor,
) -> None:
    """Appends what sequences emit to their request slots, in place.

    recent: int32 [L, W], the last tokens of each slot, that of position p in column p mod W (W a
    power of two above the depth). lengths: int32 [L], tokens of each slot. request_slots: int32
    [B], of the requests that have tokens; the others' are not looked at.

    A draw of -1 (no token could be drawn) is kept as 0: the next round may already be running with
    it, and must not look up a token that does not exist. The read-back says -1.
    """
    members, known, starts = request_slots.tolist(), lengths.tolist(), query_starts.tolist()
    rows = zip(members, accepted.token_ids.tolist(), accepted.num_correct.tolist(), strict=True)
    entries, grown = [], []
    for (request_slot, tokens, kept), first, end in zip(rows, starts, starts[1:], strict=False):
        if end > first:
            new = enumerate(tokens[: kept + 1], known[request_slot])
            entries += [(request_slot, at % recent.shape[1], max(token, 0)) for at, token in new]
            grown.append((request_slot, kept + 1))
    if entries:
        request_slot, column, token = torch.tensor(entries).to(recent.device).unbind(1)
        recent.index_put_((request_slot, column), token.to(recent.dtype))
        request_slot, count = torch.tensor(grown).to(recent.device).unbind(1)
        lengths.index_add_(0, request_slot, count.to(lengths.dtype))


def pack_results(row_tokens: Tensor, accepted: AcceptedPath, query_starts: Tensor) -> Tensor:
    """What the host reads of a round: int32 [B, D+3] = (num_correct, flags, tokens ...).

    flags: bit 0 is set where a draft of the sequence was -1. tokens: as in `AcceptedPath`, with -1
    where no token could be drawn.
    """
    tokens = row_tokens.tolist()
    broken = [
        int(any(token < 0 for token in tokens[first + 1 : end]))
        for first, end in pairwise(query_starts.tolist())
    ]
    rows = zip(accepted.num_correct.tolist(), broken, accepted.token_ids.tolist(), strict=True)
    packed = [[kept, flags, *token_ids] for kept, flags, token_ids in rows]
    return torch.tensor(packed, dtype=torch.int32).to(row_tokens.device)


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
