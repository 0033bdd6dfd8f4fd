"""Masks of tokens that a grammar allows, applied to logits before tokens are drawn from them."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel

LEAST = -1e30
"""The score of a token that is allowed although other edits rule it out: they yield, see
`structured/bans.py`. Finite at every temperature, and below any real score."""


@has_kernel
def mask_scores(logits: Tensor, places: Tensor, words: Tensor) -> None:
    """Rules out, in place, what the masks do not allow.

    logits: float32 [T, V]. places: int32 [T or more], each row's mask, -1 for none.
    words: int32 [M, ceil(V / 32)], one bit per token id, the lowest first.
    """
    places = places[: len(logits)]
    if max(places.tolist(), default=-1) < 0:
        return
    rows = (places >= 0).nonzero().squeeze(1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = words[places[rows].long()][:, ids >> 5] >> (ids & 31).to(torch.int32) & 1
    scores = logits[rows]
    # Not a maximum: what is no number stays none.
    scores = torch.where(scores < LEAST, LEAST, scores)
    logits[rows] = scores.masked_fill_(bits == 0, float("-inf"))
