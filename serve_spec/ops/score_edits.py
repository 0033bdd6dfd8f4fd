"""Edits of a round's logits before tokens are drawn from them: bias, penalties, masks.

    logit bias → penalties (repetition, then frequency and presence) → masks

What follows (temperature, filters, noise) is `ops/draw.py`. Penalties count what was generated
up to a row: the committed tokens, of which a table keeps count, and the drafts on the row's own
path, which in a chain are the rows before it. So an edited row is a function of its logits, the
request and the text before it: the same for plain decoding and for every verified row.
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
    """How each of S sequences edits its scores over V token ids; device tensors.

    is_on: int32 [S], 0 for sequences that edit nothing, whose rows below may hold anything.
    bias: float32 [S, V], added to the logits; -inf for tokens that may never be drawn.
    marks: int32 [S, V], the sum of IN_PROMPT, HELD_BACK, and GENERATED_ONCE for every time.
    repetition, frequency, presence: float32 [S], the penalties.
    min_lengths: int32 [S]; a token that is held back decides no position below it.
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
        """For sequences that edit nothing."""

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
    """Edits the rows of sequences that ask for it, in place.

    logits: float32 [T, V].
    owners: int32 [T], the sequence of each row, -1 for none; its rows stand together.
    positions: int64 [T], the position each row's draw decides.
    token_ids: int64 [T], what each row computes; -1, a draft without a token, counts for nothing.
    depths: int32 [T], how many of the rows up to and with this one are drafts on its path.
    backs: int32 [T], how many rows before each draft the one is that it follows; None: one.
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
    """Scores of some tokens after the penalties of a sequence.

    is_seen: bool, whether a token is in prompt or text. counts: int, how often it was generated.
    """
    repeated = torch.where(scores > 0, scores / of.repetition, scores * of.repetition)
    scores = torch.where(is_seen, repeated, scores)
    return scores - of.frequency * counts - of.presence * (counts > 0)


@has_kernel
def count_tokens(members: Tensor, results: Tensor, edits: ScoreEdits) -> None:
    """Counts what sequences emit, so that the next round's rows see it; in place.

    members: int32 [B], which sequence each is, no one that edits twice.
    results: int32 [B, K + 3], drafts kept, flags, then the tokens; see `ops.acceptance`.
    """
    if not any(edits.is_on.index_select(0, members).tolist()):
        return
    tokens = results[:, 2:]
    column = torch.arange(tokens.shape[1], device=tokens.device)
    emitted = (column <= results[:, :1]) & (tokens >= 0)
    emitted &= edits.is_on[members.long()].unsqueeze(1) > 0
    members = members.long().unsqueeze(1).expand_as(tokens)[emitted]
    once = torch.full_like(members, GENERATED_ONCE, dtype=torch.int32)
    edits.marks.index_put_((members, tokens[emitted].long()), once, accumulate=True)


def _edit_rows(logits: Tensor, positions: Tensor, paths: Tensor, of: ScoreEdits) -> None:
    """Edits the rows [R, V] of one sequence; paths: the drafts that lead to each, [R, depth]."""
    logits += of.bias
    is_touched = of.marks > 0  # nothing but the bias changes the others
    is_touched[paths[paths >= 0]] = True
    ids = is_touched.nonzero().squeeze(1)
    marks = of.marks[ids]
    counts = marks // GENERATED_ONCE + (paths.unsqueeze(2) == ids).sum(dim=1)
    is_seen = ((marks & IN_PROMPT) > 0) | (counts > 0)
    scores = penalized(logits[:, ids], is_seen, counts, of)
    is_held = ((marks & HELD_BACK) > 0) & (positions < of.min_lengths).unsqueeze(1)
    logits[:, ids] = scores.masked_fill_(is_held, float("-inf"))


def _paths(rows: Tensor, token_ids: Tensor, depths: Tensor, backs: Tensor | None) -> Tensor:
    """The drafts that lead to each row and to its draw: int64 [R, depth], -1 for none."""
    drafts = []
    at = rows
    for step in range(int(depths[rows].max())):
        drafts.append(token_ids[at].where(step < depths[rows], -1))
        at = (at - (1 if backs is None else backs[at])).clamp(min=0)
    return torch.stack(drafts, dim=1) if drafts else token_ids.new_empty(len(rows), 0)
