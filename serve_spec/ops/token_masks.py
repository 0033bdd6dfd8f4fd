"""Grammar masks, applied to logits before a draw."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel

LEAST = -1e30
"""Score of a token that the grammar allows and other edits mask; see `structured/bans.py`. It is
finite at every temperature, and below any real score."""


@has_kernel
def mask_scores(logits: Tensor, places: Tensor, words: Tensor) -> None:
    """Mask tokens that the grammar forbids, in place.

    logits: float32 [T, V]. places: int32 [T or more], each token's row of `words`, -1 for none.
    words: int32 [M, ceil(V / 32)], one bit per token id, the lowest first.
    """
    places = places[: len(logits)]
    if max(places.tolist(), default=-1) < 0:
        return
    rows = (places >= 0).nonzero().squeeze(1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = words[places[rows].long()][:, ids >> 5] >> (ids & 31).to(torch.int32) & 1
    scores = logits[rows]
    # Not a maximum, so that NaN stays NaN.
    scores = torch.where(scores < LEAST, LEAST, scores)
    logits[rows] = scores.masked_fill_(bits == 0, float("-inf"))
