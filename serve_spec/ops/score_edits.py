"""Edits of logits before a draw: bias, penalties, masks.

    logit bias → penalties (repetition, then frequency and presence) → masks

Temperature, filters and noise follow in `ops/draw.py`. Penalties count the tokens generated before
a draw: the committed ones, which a table counts, and the drafts on its path. So edits depend on the
logits, the request and the text before only, with and without speculation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel

IN_PROMPT = 1
HELD_BACK = 2
GENERATED_ONCE = 4


class ScoreEdits(NamedTuple):
    """Score edits of S request slots over V token ids; device tensors.

    is_on: int32 [S], 0 for requests without edits, whose rows below may hold anything.
    bias: float32 [S, V], added to the logits; -inf for tokens that may never be drawn.
    marks: int32 [S, V], the sum of IN_PROMPT, HELD_BACK and GENERATED_ONCE per occurrence.
    repetition, frequency, presence: float32 [S], the penalties.
    min_lengths: int32 [S]; tokens marked HELD_BACK are masked at positions below it.
    """

    is_on: Tensor
    bias: Tensor
    marks: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    min_lengths: Tensor

    @classmethod
    def create(cls, num_sequences: int, vocab_size: int, device: torch.device) -> ScoreEdits:
        """Return edits of requests that edit nothing."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(num_sequences, *shape, dtype=dtype, device=device)

        return cls(
            is_on=zeros(dtype=torch.int32),
            bias=zeros(vocab_size),
            marks=zeros(vocab_size, dtype=torch.int32),
            repetition=zeros(),
            frequency=zeros(),
            presence=zeros(),
            min_lengths=zeros(dtype=torch.int32),
        )


@has_kernel
def edit_scores(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    depths: Tensor,
    edits: ScoreEdits,
    backs: Tensor | None = None,
) -> None:
    """Edit the logits of requests with edits, in place.

    logits: float32 [T, V].
    owners: int32 [T], the request slot of each token, -1 for none; its tokens are contiguous.
    positions: int64 [T], the position of each drawn token.
    token_ids: int64 [T], roots and drafts; -1, a broken draft, is not counted.
    depths: int32 [T], drafts on each token's path, its own included.
    backs: int32 [T], distance from each draft to its parent; None: 1.
    """
    if not any(edits.is_on.index_select(0, owners.clamp(min=0)).tolist()):
        return
    is_on = (owners >= 0) & (edits.is_on[owners.clamp(min=0).long()] > 0)
    for owner in owners[is_on].unique().tolist():
        rows = (owners == owner).nonzero().squeeze(1)
        together = slice(int(rows[0]), int(rows[-1]) + 1)
        of = ScoreEdits(*(field[owner] for field in edits))
        paths = _paths(rows, token_ids, depths, backs)
        _edit_rows(logits[together], positions[together], paths, of)


def penalized(scores: Tensor, is_seen: Tensor, counts: Tensor, of: ScoreEdits) -> Tensor:
    """Return the scores of some tokens after the penalties of a request.

    is_seen: bool, whether a token is in prompt or output. counts: int, how often it was generated.
    """
    repeated = torch.where(scores > 0, scores / of.repetition, scores * of.repetition)
    scores = torch.where(is_seen, repeated, scores)
    return scores - of.frequency * counts - of.presence * (counts > 0)


@has_kernel
def count_tokens(request_slots: Tensor, results: Tensor, edits: ScoreEdits) -> None:
    """Count emitted tokens for the penalties of later steps, in place.

    request_slots: int32 [B], distinct for requests with edits.
    results: int32 [B, K + 3], accepted drafts, flags, then the tokens; see `ops.acceptance`.
    """
    if not any(edits.is_on.index_select(0, request_slots).tolist()):
        return
    tokens = results[:, 2:]
    column = torch.arange(tokens.shape[1], device=tokens.device)
    emitted = (column <= results[:, :1]) & (tokens >= 0)
    emitted &= edits.is_on[request_slots.long()].unsqueeze(1) > 0
    request_slots = request_slots.long().unsqueeze(1).expand_as(tokens)[emitted]
    once = torch.full_like(request_slots, GENERATED_ONCE, dtype=torch.int32)
    edits.marks.index_put_((request_slots, tokens[emitted].long()), once, accumulate=True)


def _edit_rows(logits: Tensor, positions: Tensor, paths: Tensor, of: ScoreEdits) -> None:
    """Edit the logits [R, V] of one request. paths: the drafts on each token's path, [R, depth]."""
    logits += of.bias
    is_touched = of.marks > 0  # only the bias changes the others
    is_touched[paths[paths >= 0]] = True
    ids = is_touched.nonzero().squeeze(1)
    marks = of.marks[ids]
    counts = marks // GENERATED_ONCE + (paths.unsqueeze(2) == ids).sum(dim=1)
    is_seen = ((marks & IN_PROMPT) > 0) | (counts > 0)
    scores = penalized(logits[:, ids], is_seen, counts, of)
    is_held = ((marks & HELD_BACK) > 0) & (positions < of.min_lengths).unsqueeze(1)
    logits[:, ids] = scores.masked_fill_(is_held, float("-inf"))


def _paths(rows: Tensor, token_ids: Tensor, depths: Tensor, backs: Tensor | None) -> Tensor:
    """Return the drafts on each token's path: int64 [R, depth], -1 for none."""
    drafts = []
    at = rows
    for step in range(int(depths[rows].max())):
        drafts.append(token_ids[at].where(step < depths[rows], -1))
        at = (at - (1 if backs is None else backs[at])).clamp(min=0)
    return torch.stack(drafts, dim=1) if drafts else token_ids.new_empty(len(rows), 0)


LEAST = -1e30
"""Score of a token that the grammar allows and other edits mask; see `structured/masks.py`. It is
finite at every temperature, and below any real score."""


@has_kernel
def mask_scores(
    logits: Tensor, owners: Tensor, offsets: Tensor, places: Tensor, words: Tensor
) -> None:
    """Mask tokens that the grammar forbids, in place.

    logits: float32 [T, V] of tokens that have `owners` and `offsets`, see `TokenLayout`.
    places: int32 [B, N + 1], the row of `words` for each owner and offset, -1 for none. Tokens past
        the table have no mask.
    words: int32 [M, ceil(V / 32)], one bit per token id, the lowest first.
    """
    if int(places.amax()) < 0:
        return
    is_owned = (owners >= 0) & (owners < len(places)) & (offsets < places.shape[1])
    places = places[owners.where(is_owned, 0).long(), offsets.where(is_owned, 0).long()]
    places = places.where(is_owned, -1)
    rows = (places >= 0).nonzero().squeeze(1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = words[places[rows].long()][:, ids >> 5] >> (ids & 31).to(torch.int32) & 1
    scores = logits[rows]
    # Not a maximum, so that NaN stays NaN.
    scores = torch.where(scores < LEAST, LEAST, scores)
    logits[rows] = scores.masked_fill_(bits == 0, float("-inf"))
