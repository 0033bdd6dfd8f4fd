"""The rows of a round's trees: what each draft follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve_spec.core.draft import DraftTrees
from serve_spec.ops import acceptance
from serve_spec.ops.acceptance import num_bits


@dataclass(frozen=True)
class TreeRows:
    """The R rows that draw: of every sequence its root, then its drafts. Tensors on the device.

    `token_ids` int64 [R]: the drafts, -1 for no token, and anything at roots. `parents` int32 [R]:
    the row before each, counted in its sequence; -1 for roots. `query_starts` int32 [B+1]: see
    `ops.acceptance.accept_path`. `owners` int64 [R]: the sequence of each. `masks` int64 [R]: the
    rows on each one's path. `depths` int64 [R]: drafts on it.
    """

    token_ids: Tensor
    parents: Tensor
    query_starts: Tensor
    owners: Tensor
    masks: Tensor
    depths: Tensor

    @property
    def backs(self) -> Tensor:
        """How many rows before each the one is that it follows: int32 [R], 0 for roots."""
        rows = torch.arange(len(self.parents), dtype=torch.int32, device=self.parents.device)
        offsets = rows - self.query_starts[self.owners]
        return (offsets - self.parents).where(self.parents >= 0, 0)


def tree_rows(drafts: DraftTrees) -> TreeRows:
    """Sequences after each other, without padding."""
    device = drafts.token_ids.device
    counts = torch.tensor(drafts.num_draft_tokens, device=device)
    starts = torch.nn.functional.pad((counts + 1).cumsum(0), (1, 0)).to(torch.int32)
    rows = [(b, i) for b, n in enumerate(drafts.num_draft_tokens) for i in range(n + 1)]
    owners, offsets = torch.tensor(rows, device=device).unbind(1)
    column = (offsets - 1).clamp(min=0)
    parents = drafts.parents[owners, column].where(offsets > 0, -1).to(torch.int32)
    masks = acceptance.tree_masks(parents, starts)
    return TreeRows(
        token_ids=drafts.token_ids[owners, column],
        parents=parents,
        query_starts=starts,
        owners=owners,
        masks=masks,
        depths=num_bits(masks) - 1,
    )
