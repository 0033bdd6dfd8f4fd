"""Log-probabilities of tokens under the distribution they are drawn from.

The same pipeline as a draw (`ops/draw.py`) of edited logits, without noise: tempered, filtered,
normalised. Greedy rows are the plain softmax. The host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from serve_spec.ops.draw import DrawParams, survivors, tempered

_MAX_LOGITS = 2**23
"""Most logits at once: 64 rows of a vocabulary of 128k are 32 MiB."""


def score_tokens(
    logits: Tensor, token_ids: Tensor, rows: DrawParams, num_top: int, *, has_filters: bool
) -> Tensor:
    """Return log-probability, rank and top tokens for one token per row, in one tensor.

    logits: float32 [R, V]; token_ids: int64 [R]; rows: the parameters of each row, [R].
    has_filters: False if no row has filters.
    Returns int32 [R, 2 + 2·num_top] (num_top ≤ V): the token's log-probability (the bits of a
    float32), its rank (1: the likeliest; ties rank by id), the ids of the likeliest tokens, their
    log-probabilities. The token itself survives every filter.
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


def score_in_slices(
    logits_of: Callable[[slice], Tensor],
    vocab_size: int,
    token_ids: Tensor,
    rows: DrawParams,
    num_top: int,
    *,
    has_filters: bool,
) -> Tensor:
    """Run `score_tokens` on any number of rows in bounded memory.

    logits_of: float32 [n, V] of the rows of a slice; V = vocab_size.
    """
    size = max(1, _MAX_LOGITS // vocab_size)
    parts = (slice(first, first + size) for first in range(0, len(token_ids), size))
    return torch.cat(
        [
            score_tokens(
                logits_of(part),
                token_ids[part],
                DrawParams(*(field[part] for field in rows)),
                num_top,
                has_filters=has_filters,
            )
            for part in parts
        ]
    )
