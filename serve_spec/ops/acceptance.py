"""The acceptance walk: which drafts the target's own draws confirm.

Each verified row draws its token from the sampling law; a draft is kept while it equals the draw
of the row before it. The emitted tokens are always the draws, so the rule is exact for any draft
("Speculative sampling" by target draws and walk: the law of plain decoding itself).
"""

from __future__ import annotations

from torch import Tensor


def accept_chain(draft_ids: Tensor, drawn_ids: Tensor, num_steps: Tensor) -> Tensor:
    """Number of correct drafts per row.

    draft_ids: [B, K] drafts, padded past `num_steps`; drawn_ids: [B, K+1], column i drawn at the
    row of draft i-1 (column 0 at the root); num_steps: [B]. Returns int64 [B], 0..num_steps.

        drafts [5 8 2]   drawn [5 8 9 4]   -> 2 correct; emitted 5 8 9
    """
    depth = draft_ids.shape[1]
    steps = num_steps.new_ones(depth).cumsum(0)
    equal = (draft_ids == drawn_ids[:, :depth]) & (steps <= num_steps.unsqueeze(1))
    return equal.long().cumprod(dim=1).sum(dim=1)
