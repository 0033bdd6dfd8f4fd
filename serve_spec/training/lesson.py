"""Outputs of the frozen target for training drafts: features and next-token distributions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.models import FeatureCapture, Llama
from serve_spec.models.draft_shape import capture_layers
from serve_spec.training.attention import causal_context
from serve_spec.training.loop import compiled


@dataclass(frozen=True)
class Lesson:
    """Output of the target for rows [B, T].

    `tokens` [B, T + S] and `probs` [B, T + S, V] are padded with zeros by S places, so that a view
    shifted by up to S places has the same shape at every unroll step.
    """

    tokens: Tensor
    captured: Tensor  # [B, T, 3H], inputs of the three capture layers (pre-norm residual stream)
    last: Tensor  # [B, T, H], after the target's final norm
    probs: Tensor  # [B, T + S, V], next-token distribution at each position
    row_tokens: int

    def tokens_from(self, shift: int) -> Tensor:
        """Return token x_{j + shift} at place j: [B, T]; zero past the end."""
        return self.tokens.narrow(1, shift, self.row_tokens)

    def probs_from(self, shift: int) -> Tensor:
        """Return the distribution of x_{j + shift + 1} at place j: [B, T, V]; zero past the end."""
        return self.probs.narrow(1, shift, self.row_tokens)


class Teacher:
    """The target, run without gradients. `padding` is the maximum shift of a lesson."""

    def __init__(self, model: Llama, padding: int, fast: bool = True) -> None:
        self.model = model
        self.padding = padding
        self.device = model.embed_tokens.weight.device
        self.capture = FeatureCapture(capture_layers(None, model.shape.num_layers))
        self._forward = compiled(self._teach, self.device) if fast else self._teach

    def _teach(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, captured = forward_rows(self.model, tokens, self.capture)
        assert captured is not None
        probs = self.model.logits(hidden.flatten(0, 1)).float().softmax(-1).to(hidden.dtype)
        padded = F.pad(probs.unflatten(0, tokens.shape), (0, 0, 0, self.padding))
        return captured, hidden, padded

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Lesson:
        """Return the lesson of int64 rows [B, T]."""
        captured, last, probs = self._forward(tokens)
        padded = F.pad(tokens, (0, self.padding))
        return Lesson(padded, captured, last, probs, tokens.shape[1])


def forward_rows(
    model: Llama, tokens: Tensor, capture: FeatureCapture | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return post-norm hidden [B, T, H] and captured features [B, T, F] of rows [B, T]."""
    out = model.forward(tokens.flatten(), causal_context(model.rank_shape, tokens), capture)
    features = None if out.features is None else out.features.unflatten(0, tokens.shape)
    return out.hidden.unflatten(0, tokens.shape), features
