"""The vocabulary of speculation. One word per quantity, everywhere.

num_steps            drafts asked for in a round (K); 0 means no drafting
num_draft_tokens     nodes the target verifies, root included (K+1 for a chain)
num_correct_drafts   drafts the target kept, without root and final token: 0..K
accept_length        tokens emitted: num_correct_drafts + 1
final_token          the token drawn after the last kept draft
accept_rate          chance that one draft is kept, 0..1
tier                 a `SpecRuntimeState`: everything shaped by one num_steps
draft / target       the two models
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftChain:
    """Drafts of one round. Row b of `token_ids` [B, K] holds `num_steps[b]` drafts, then padding.

    B counts the rows of the plan that sample; rows that do not draft have `num_steps[b] == 0`.
    """

    token_ids: Tensor
    num_steps: tuple[int, ...]


@dataclass(frozen=True)
class VerifyResult:
    """The verdict over the rows that sample, on the host.

    `token_ids[b]` is what row b emits: its kept drafts, then the final token.
    """

    token_ids: list[list[int]]

    @property
    def num_correct_drafts(self) -> list[int]:
        """Kept drafts per row."""
        return [len(tokens) - 1 for tokens in self.token_ids]
