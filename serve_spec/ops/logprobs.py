"""Log-probabilities of tokens under the distribution they are drawn from.

The same pipeline as a draw (`ops/draw.py`), without its noise: tempered, filtered, normalised over
what is left. Rows of greedy sequences are the plain softmax. Logits come edited, as for a draw
(`ops/score_edits.py`). Nothing here asks the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from serve_spec.ops.draw import DrawParams, survivors, tempered

_NUMBERS_AT_ONCE = 2**23
"""Bounds the logits looked at together: 64 rows of a vocabulary of 128k are 32 MiB."""


def score_tokens(
    logits: Tensor, token_ids: Tensor, rows: DrawParams, num_top: int, *, has_filters: bool
) -> Tensor:
    """What is told of one token per row, as one tensor for one read-back.

    logits: float32 [R, V]; token_ids: int64 [R]; rows: the parameters of each row, [R].
    has_filters: whether any row may have filters.
    Returns int32 [R, 2 + 2·num_top] (num_top ≤ V): the token's log-probability (the bits of a
    float32), its rank (1: the likeliest; equals rank by id), the ids of the likeliest tokens, their
    log-probabilities. The token itself survives every filter, as whatever was drawn did.
    """
    scores = tempered(logits, rows.inverse_temperature)
    token = token_ids.unsqueeze(1)
    if has_filters:
        keep = survivors(scores, rows).scatter(1, token, True)
        scores = scores.masked_fill(~keep, float("-inf"))
    logprobs = scores.log_softmax(dim=-1)
    score = scores.gather(1, token)
    ids = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > score) | ((scores == score) & (ids < token))
    top = scores.topk(num_top, dim=-1).indices
    return torch.cat(
        [
            logprobs.gather(1, token).view(torch.int32),
            before.sum(dim=1, keepdim=True, dtype=torch.int32) + 1,
            top.to(torch.int32),
            logprobs.gather(1, top).view(torch.int32),
        ],
        dim=1,
    )


def score_rows(
    logits_of: Callable[[slice], Tensor],
    vocab_size: int,
    token_ids: Tensor,
    rows: DrawParams,
    num_top: int,
    *,
    has_filters: bool,
) -> Tensor:
    """`score_tokens` of any number of rows in bounded memory.

    logits_of: float32 [n, V] of the rows of a slice; V = vocab_size.
    """
    return torch.cat(
        [
            score_tokens(
                logits_of(piece),
                token_ids[piece],
                DrawParams(*(field[piece] for field in rows)),
                num_top,
                has_filters=has_filters,
            )
            for piece in pieces(len(token_ids), vocab_size)
        ]
    )


def pieces(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Slices of rows whose logits may be looked at together."""
    size = max(1, _NUMBERS_AT_ONCE // vocab_size)
    return (slice(first, first + size) for first in range(0, num_rows, size))
