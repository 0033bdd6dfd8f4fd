"""Acceptance by target draws: a draft is accepted if the target draws the same token.

The target draws a token at every verified token; a draft is accepted if its parent is and drew it.
All emitted tokens are draws, so their distribution is that of plain decoding for any draft.

Chains and trees share one layout. Offset 0 of a sequence is its root, the last committed token;
offset i is a draft, and `parents` holds the offset of the token before it, i - 1 in a chain:

    offset   0    1    2    3
    token    x    5    8    2        parents  -1  0  1  2
    drawn    5    8    9    4        -> 2 correct; emitted 5 8 9; path 0 1 2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from serve_spec.core.draft import MAX_TREE_TOKENS
from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.noise import noise_keys


class AcceptedPath(NamedTuple):
    """What B sequences emit, at most D drafts each; tensors on the device.

    token_ids: int64 [B, D+1], the accepted drafts and the bonus token, then zeros.
    num_correct: int32 [B], accepted drafts.
    path: int32 [B, D+1], offsets of the root and the accepted drafts, then zeros.
    """

    token_ids: Tensor
    num_correct: Tensor
    path: Tensor


def accept_path(
    input_ids: Tensor,
    parents: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    max_depth: int,
    forced: Tensor | None = None,
) -> AcceptedPath:
    """Accept drafts from each root on: always the child that equals the draw, until there is none.

    input_ids: int64 [T], roots and drafts; a draft of -1 is broken and never accepted.
    parents: int32 [T], the offset in its sequence of the token before each; -1 for roots.
    drawn: int64 [T], the token the target drew after each.
    query_starts: int32 [B+1]: sequence b has tokens query_starts[b] .. query_starts[b+1] - 1, at
        most `MAX_TREE_TOKENS`. One without tokens emits nothing.
    max_depth: D, most accepted drafts.
    forced: int32 [B]: accept so many drafts whatever was drawn, along first children, fewer if the
        tree ends; the bonus token is the draw after the last one.

    Of several equal children, the one of the smallest offset is accepted.
    """
    tokens, above, draws = input_ids.tolist(), parents.tolist(), drawn.tolist()
    counts = None if forced is None else forced.tolist()
    emitted, paths = [], []
    for b, (first, end) in enumerate(pairwise(query_starts.tolist())):
        at = slice(first, end)
        count = None if counts is None else counts[b]
        path = _accepted_offsets(tokens[at], above[at], draws[at], max_depth, count)
        kept = [tokens[first + offset] for offset in path[1:]]
        padding = [0] * (max_depth + 1 - len(path))
        emitted.append([*kept, *(draws[first + offset] for offset in path[-1:]), *padding])
        paths.append([len(path[1:]), *path, *padding])
    found = torch.tensor(paths, dtype=torch.int32).to(drawn.device)
    return AcceptedPath(torch.tensor(emitted).to(drawn.device), found[:, 0], found[:, 1:])


def _accepted_offsets(
    tokens: list[int], parents: list[int], draws: list[int], max_depth: int, forced: int | None
) -> list[int]:
    """Return the accepted offsets of one sequence, root first; none without tokens."""
    path = [0][: len(tokens)]
    while path and len(path) <= max_depth:
        here = path[-1]
        if forced is not None and len(path) > forced:
            break
        for offset in range(here + 1, len(tokens)):
            fits = forced is not None or tokens[offset] == draws[here]
            if fits and parents[offset] == here and tokens[offset] >= 0:
                path.append(offset)
                break
        else:
            break
    return path


class RequestTokens(NamedTuple):
    """The last tokens of L request slots, and the slots of B sequences.

    recent: int32 [L, W]; the token of position p is in column p mod W, W a power of two above the
        depth.
    lengths: int32 [L], tokens of each slot.
    request_slots: int32 [B], of sequences that have tokens; other values are ignored.
    """

    recent: Tensor
    lengths: Tensor
    request_slots: Tensor


@has_kernel
def accept_and_advance(
    input_ids: Tensor,
    parents: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    known: RequestTokens,
    results: Tensor,
    forced: Tensor | None = None,
) -> AcceptedPath:
    """Run `accept_path`, append the emitted tokens to request slots, write results: one launch.

    results: int32 [B, D+3] for the host: (num_correct, flags, tokens ...). Bit 0 of the flags is
    set if a draft of the sequence was -1. tokens: as in `AcceptedPath`, with -1 if no token could
    be drawn. Request slots hold 0 there, because a step in flight may look it up.
    """
    max_depth = results.shape[1] - 3
    accepted = accept_path(input_ids, parents, drawn, query_starts, max_depth, forced)
    recent, lengths, request_slots = known
    tokens, counts, members = input_ids.tolist(), lengths.tolist(), request_slots.tolist()
    kept_drafts, token_ids = accepted.num_correct.tolist(), accepted.token_ids.tolist()
    packed, written, grown = [], [], []
    for b, (first, end) in enumerate(pairwise(query_starts.tolist())):
        kept, emitted = kept_drafts[b], token_ids[b]
        is_broken = any(token < 0 for token in tokens[first + 1 : end])
        packed.append([kept, int(is_broken), *emitted])
        if end > first:
            slot = members[b]
            new = enumerate(emitted[: kept + 1], counts[slot])
            written += [(slot, at % recent.shape[1], max(token, 0)) for at, token in new]
            grown.append((slot, kept + 1))
    results.copy_(torch.tensor(packed, dtype=torch.int32))
    if written:
        slots, columns, values = torch.tensor(written).to(recent.device).unbind(1)
        recent.index_put_((slots, columns), values.to(recent.dtype))
        slots, added = torch.tensor(grown).to(recent.device).unbind(1)
        lengths.index_add_(0, slots, added.to(lengths.dtype))
    return accepted


@has_kernel
def forced_counts(seeds: Tensor, positions: Tensor, num_steps: Tensor, survival: Tensor) -> Tensor:
    """Return how many drafts of each sequence are accepted at random, for `forced`.

    seeds: int32 [B, 2]; positions: int64 [B], of the root's draw; num_steps: int32 [B].
    survival: float64 [K+1, K]; row n holds the probabilities that the first 1, 2, ... n of n drafts
    are all accepted, then zeros. Returns int32 [B], 0..num_steps.
    """
    uniform = noise_keys(seeds, positions)[:, 1].double() / 2**32 + 0.5
    probabilities = survival[num_steps.clamp(0, len(survival) - 1).long()]
    return (uniform.unsqueeze(1) < probabilities).sum(dim=1, dtype=torch.int32)


@has_kernel
def tree_masks(parents: Tensor, query_starts: Tensor) -> Tensor:
    """Return the tree attention mask of each token: its ancestors in the tree and itself.

    parents, query_starts: as for `accept_path`. Returns int64 [T]; bit i stands for offset i, and
    padding has 0.
    """
    offsets, index, inside = _index_of(query_starts, len(parents))
    above = parents[index].long().where(inside, -1)
    masks = torch.ones_like(above) << offsets
    # Each iteration joins a path to the one above it: after n of them, 2^n tokens.
    for _ in range(MAX_TREE_TOKENS.bit_length() - 1):
        has_above = above >= 0
        joint = above.clamp(min=0)
        masks = masks | masks.gather(1, joint).where(has_above, 0)
        above = above.gather(1, joint).where(has_above, -1)
    # Added, not assigned: indices outside a sequence point at tokens of others.
    return torch.zeros(len(parents), dtype=torch.int64, device=parents.device).index_add_(
        0, index.flatten(), masks.where(inside, 0).flatten()
    )


def num_bits(masks: Tensor) -> Tensor:
    """Return the number of set bits of each mask [T]: int64 [T]."""
    bits = torch.arange(MAX_TREE_TOKENS, device=masks.device)
    return (masks.unsqueeze(1) >> bits & 1).sum(dim=1)


def _index_of(query_starts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets [M], their token indices [B, M] and which exist; M = MAX_TREE_TOKENS."""
    offsets = torch.arange(MAX_TREE_TOKENS, device=query_starts.device)
    index = query_starts[:-1].long().unsqueeze(1) + offsets
    inside = index < query_starts[1:].unsqueeze(1)
    return offsets, index.clamp(max=num_tokens - 1), inside


@has_kernel
def move_accepted(
    pools: Sequence[Tensor], slots: Tensor, query_starts: Tensor, path: Tensor, num_correct: Tensor
) -> None:
    """Move the row of token path[j] of each sequence to the slot of its token j, in place.

    pools: contiguous tensors, [num_slots, F] or [num_layers, num_slots, ...].
    slots: int64 [T], the slot of each token; query_starts: int32 [B+1].
    path: int32 [B, D+1] and num_correct: int32 [B], as in `AcceptedPath`: j = 1 .. num_correct.

    A token comes after its path, so path[j] ≥ j. In a chain nothing moves.
    """
    column = torch.arange(path.shape[1], device=path.device)
    moves = (column > 0) & (column <= num_correct.unsqueeze(1))
    first = query_starts[:-1].long().unsqueeze(1)
    # All other rows copy the first token, a root, onto itself: no move ends there.
    source = slots[(first + path).where(moves, 0)].flatten()
    target = slots[(first + column).where(moves, 0)].flatten()
    for pool in pools:
        layers = pool.unsqueeze(0) if pool.dim() == 2 else pool
        layers[:, target] = layers[:, source]
