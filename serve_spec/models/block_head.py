"""The interface of block heads: a draft model that computes all drafts in one forward.

DFlash (arXiv 2602.06036), DSpark (2607.05147), P-EAGLE (2602.01469) and their relatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from serve_spec.core.context import ForwardContext
from serve_spec.models.interfaces import DraftModel


class BlockHead(DraftModel, Protocol):
    """A head over blocks of `block_size` tokens: the anchor, then `mask_id` for every token.

    The anchor is the newest token of a text, at position S; the target has not computed it. The
    block is at positions S .. S + block_size - 1, also past the end of a text at its longest, so
    tables of rotations must reach that far. Its tokens attend to the context, which is made of the
    target's features of positions 0 .. S - 1, and to each other. `B`: requests.

    All tensors are on the target's device, and of `dtype` unless stated. A CUDA graph captures all
    methods; see `Drafter` in `worker/drafters/base.py` for what they must not do.
    """

    hidden_size: int
    """Width of its hidden states, H."""
    max_steps: int
    """Drafts of a block: block_size - first_row."""
    block_size: int
    """Tokens of a block. It is never shortened: that would change all its drafts."""
    first_row: int
    """The first token of a block that predicts a draft: 0 if the anchor does, too, else 1."""
    is_causal: Sequence[bool]
    """By layer: whether a token of a block sees only itself and those before, or all of them."""

    def enter(self, features: Tensor, ctx: ForwardContext) -> None:
        """Write the keys and values of context tokens in all layers; no token attends.

        features: [T, F], the target's. ctx: their positions [T], and no queries.
        """

    def block(self, anchors: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [B, block_size, H] of blocks.

        anchors: int64 [B]. ctx: positions [B · block_size], one block after another.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 [B, N, Vd] of hidden [B, N, H], which do not depend on drafts."""

    def step_logits(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """Return the logits float32 [B, Vd] of the next draft, given those before it.

        logits: [B, N, Vd]. hidden: [B, N, H]. before: int64 [B, k + 1], the anchor and the first k
        drafts as target ids; 0 stands for a draft that could not be drawn. Without a dependence
        between drafts this is `logits[:, k]`.
        """

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """Return how likely each draft is accepted if those before it are, or None: by its logits.

        hidden: [B, N, H]. before: int64 [B, N + 1], the anchor and all drafts. Returns
        probabilities, float32 [B, N].
        """
