"""The vocabulary of speculation. One word per quantity, everywhere.

num_steps            drafts asked for in a round (K); 0 means no drafting
num_draft_tokens     drafts the target verified, root excluded (K for a full chain); SGLang's flag
                     `speculative_num_draft_tokens` alone counts the root too
num_correct_drafts   drafts the target kept, without root and final token: 0..K
accept_length        tokens emitted: num_correct_drafts + 1
final_token          the token drawn after the last kept draft
accept_rate          chance that one draft is kept, 0..1
shape                depth, size and topk of what a request drafts: a chain or a tree
tier                 a `SpecRuntimeState`: everything built for one shape
draft / target       the two models
topk                 children of a drafted token; 1 makes a chain of it, more a tree
beam                 the topk tokens of a tree's level that have children
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from serve_spec.core.draft_shape import DraftShape


@dataclass(frozen=True)
class DraftLaws:
    """From what drafts were drawn: softmax of `scores`, float32 [D, K, Vd], over draft ids.

    D counts the rows that draft, in order.
    `target_ids` int64 [Vd]: the target's id of each; None where they are the same.
    """

    scores: Tensor
    target_ids: Tensor | None


@dataclass(frozen=True)
class DraftChain:
    """Drafts of one round. Row b of `token_ids` [B, K] holds `num_steps[b]` drafts, then padding.

    B counts the rows of the plan that sample; rows that do not draft have `num_steps[b] == 0`. A
    draft of -1 is no token (NaN, or none of the vocabulary) and never kept. `laws` are known of
    drafts that are to be judged by them.
    """

    token_ids: Tensor
    num_steps: tuple[int, ...]
    laws: DraftLaws | None = None


@dataclass(frozen=True)
class DraftTrees:
    """Drafts of one round that branch. Row b of `token_ids` [B, N] holds `num_draft_tokens[b]`.

    `parents` int32 [B, N]: the draft before each, counted from 1; 0 stands for the root. It comes
    before its children. Everything else as in `DraftChain`.
    """

    token_ids: Tensor
    parents: Tensor
    num_draft_tokens: tuple[int, ...]


@dataclass(frozen=True)
class VerifyResult:
    """The verdict over the rows that sample, on the host.

    `token_ids[b]` is what row b emits: its kept drafts, then the final token. `broken_drafts` are
    the rows with a draft of -1. `paths[b]`: in a round of trees, the root (0) and the drafts that
    row b kept; each drew the token of the same place.
    """

    token_ids: list[list[int]]
    broken_drafts: tuple[int, ...] = ()
    paths: list[list[int]] | None = None


def padded_drafts(drafts: Iterable[Sequence[int]], width: int) -> list[list[int]]:
    """What the host made of each row's drafts, all `width` long: what follows is no draft's."""
    return [[*entries, *[0] * (width - len(entries))] for entries in drafts]


class TextDrafts(NamedTuple):
    """Drafts of one row that the host found; of a tree with parents as in `DraftTrees`."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...] = ()


class TextDrafter(Protocol):
    """Finds drafts in the text, on the host, before a round is planned."""

    def propose(self, request_id: str, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow the committed text `token_ids`; often none."""
        ...

    def propose_tree(
        self, request_id: str, token_ids: Sequence[int], shape: DraftShape
    ) -> TextDrafts:
        """A tree of at most this shape; first in it, from the root down, what `propose` says.

        Asked after it, of rows for which it found so many levels.
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request has left."""
        ...
