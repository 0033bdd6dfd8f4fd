"""Grammar masks, applied to logits before a draw."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel

LEAST = -1e30
"""Score of a token that the grammar allows and other edits mask; see `structured/bans.py`. It is
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
