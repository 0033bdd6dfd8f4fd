"""Teacher: the frozen target as the draft heads see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.training.compiling import compiled
from serve_spec.training.llama import Llama


@dataclass(frozen=True)
class Lesson:
    """What the target says about rows [B, T].

    `tokens` [B, T + S] and `probs` [B, T + S, V] are padded with zeros by S places, so that a view
    shifted by up to S places has the same shape at every unroll step.
    """

    tokens: Tensor
    captured: Tensor  # [B, T, 3H], inputs of the three capture layers (pre-norm residual stream)
    last: Tensor  # [B, T, H], after the target's final norm
    probs: Tensor  # [B, T + S, V], next-token law at each position
    row_tokens: int

    def tokens_from(self, shift: int) -> Tensor:
        """Token x_{j + shift} at place j: [B, T]; zero past the end."""
        return self.tokens.narrow(1, shift, self.row_tokens)

    def probs_from(self, shift: int) -> Tensor:
        """Law of token x_{j + shift + 1} at place j: [B, T, V]; zero past the end."""
        return self.probs.narrow(1, shift, self.row_tokens)


class Teacher:
    """Runs the target without gradients. `padding` is the largest shift a lesson allows."""

    def __init__(self, model: Llama, padding: int, fast: bool = True) -> None:
        self.model = model
        self.padding = padding
        self.device = model.embedding.device
        self._forward = compiled(self._teach, self.device) if fast else self._teach

    def _teach(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.model(tokens, self.model.shape.captures)
        probs = self.model.logits(hidden.last).float().softmax(-1).to(hidden.last.dtype)
        padded = F.pad(probs, (0, 0, 0, self.padding))
        return torch.cat(hidden.captured, dim=-1), hidden.last, padded

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Lesson:
        """Lesson for int64 rows [B, T]."""
        captured, last, probs = self._forward(tokens)
        padded = F.pad(tokens, (0, self.padding))
        return Lesson(padded, captured, last, probs, tokens.shape[1])

    def embed(self, tokens: Tensor) -> Tensor:
        """Target embedding of tokens [B, T]: [B, T, H]."""
        return F.embedding(tokens, self.model.embedding)
