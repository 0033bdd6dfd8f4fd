"""What the worker asks of any drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from serve_spec.core.draft import DraftLaws, DraftTrees
from serve_spec.core.plan import RowPlan
from serve_spec.ops.sampling import SamplingRows
from serve_spec.runtime.spec_state import SpecRuntimeState


@dataclass(frozen=True)
class Proposal:
    """The drafts of the rows that speculate, and what they were drawn from, if that is kept."""

    token_ids: Tensor
    laws: DraftLaws | None = None


class Drafter(Protocol):
    """Proposes chains, or trees. Drafts decide how many tokens a round commits, never which."""

    topk: int
    """Children of a draft in its trees."""

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        ...

    def propose(
        self,
        rows: Sequence[RowPlan],
        root_draws: Sequence[int],
        sampling: SamplingRows,
        tier: SpecRuntimeState,
    ) -> Proposal:
        """Draft tokens int64 [B, K] for rows with `num_steps >= 1`, K the largest of them.

        root_draws: for each row, its root's index in `sampling`; draft s of the row is decided by
        the draw `root_draws[b] + s`. Entries past a row's own num_steps are padding; -1 stands for
        a draft that gave no usable token.
        """
        ...

    def propose_trees(
        self,
        rows: Sequence[RowPlan],
        root_draws: Sequence[int],
        sampling: SamplingRows,
        tier: SpecRuntimeState,
    ) -> DraftTrees:
        """Trees of `tree_drafts` >= 1 drafts and at most `num_steps` levels for each row.

        Else as for `propose`: a draft s levels below the root's children is decided by the draw
        `root_draws[b] + s`.
        """
        ...
