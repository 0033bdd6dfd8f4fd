"""Losses of drafts, and training-time test: a draft unrolled as in inference.

Step k at row i stands for the k-th draft step of a round whose newest target feature is that of
position i (EAGLE-3, arXiv 2503.01840). Its input is token x_{i+1+k} and the state of step k-1
(step 0: the target's feature), its position is i+k, and it predicts x_{i+2+k}. Its attention sees
the keys of step 0 at rows 0..i and, at row i only, the keys of steps 1..k, as the draft's cache:

    row i = 2, step 2:   step-0 keys 0 1 2 | own keys of steps 1, 2   (positions 0 1 2 | 3 4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.training.causal import Rows, causal_context, row_positions
from recipes.training.loop import compiled
from serve_spec.core.context import ForwardContext, Rotation
from serve_spec.models.decoder import Decoder
from serve_spec.models.drafts.base import DraftHead
from serve_spec.models.drafts.eagle import Eagle
from serve_spec.models.drafts.eagle3 import Eagle3
from serve_spec.models.drafts.features import capture_layers
from serve_spec.models.interfaces import FeatureCapture
from serve_spec.models.shape import DecoderShape


class UnrollCache(NamedTuple):
    """Keys and values of an unroll: step 0 [B, kv_heads, T, D], steps 1.. [B, kv_heads, S, T, D].

    The newest step comes first in `own_k` and `own_v`; places of later steps are zero.
    """

    context_k: Tensor
    context_v: Tensor
    own_k: Tensor
    own_v: Tensor


class UnrolledAttention(Rows):
    """Attention of one unroll step of a one-layer draft; see above.

    `cache`: None at step 0; `run` replaces it. `live` [S]: the places of `own_k` in use.
    """

    def __init__(
        self, shape: DecoderShape, num_rows: int, cache: UnrollCache | None, live: Tensor
    ) -> None:
        super().__init__(num_rows, shape.caches)
        self.cache = cache
        self._live = live

    def run(
        self, layer: int, heads: Tensor, rotation: Rotation, sinks: Tensor | None = None
    ) -> Tensor:
        """Return [B·T, heads, D]; see `LayerAttention`."""
        assert layer == 0, "drafts trained here have one layer"
        assert sinks is None, "and no sinks"
        query, key, value = self.split(layer, heads, rotation)
        if self.cache is None:
            places = len(self._live)
            own_k, own_v = (x.new_zeros(x.shape).unsqueeze(2) for x in (key, value))
            own_k, own_v = own_k.repeat(1, 1, places, 1, 1), own_v.repeat(1, 1, places, 1, 1)
            self.cache = UnrollCache(key, value, own_k, own_v)
        else:
            context_k, context_v, own_k, own_v = self.cache
            own_k = torch.cat([key.unsqueeze(2), own_k[:, :, :-1]], dim=2)
            own_v = torch.cat([value.unsqueeze(2), own_v[:, :, :-1]], dim=2)
            self.cache = UnrollCache(context_k, context_v, own_k, own_v)
        return self.join(attend(query, *self.cache, self._live))


def attend(
    q: Tensor, context_k: Tensor, context_v: Tensor, own_k: Tensor, own_v: Tensor, live: Tensor
) -> Tensor:
    """Attend causally to the keys of step 0 and, per row, to its own drafted keys.

    q: queries [B, heads, T, D].
    context_k, context_v: step 0, [B, kv_heads, T, D].
    own_k, own_v: steps 1..S, [B, kv_heads, S, T, D]; unused places may hold anything.
    live: [S] bool, which of the S places are in use.
    Returns [B, heads, T, D]. Softmax in float32.
    """
    kv_heads, length, dim = context_k.shape[1], q.shape[2], q.shape[3]
    grouped = q.unflatten(1, (kv_heads, -1))
    rows = grouped.flatten(2, 3)
    scores = (rows @ context_k.mT).unflatten(2, (-1, length)).float() * dim**-0.5
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    own = (grouped.unsqueeze(3).float() * own_k.unsqueeze(2).float()).sum(-1) * dim**-0.5
    own = own.masked_fill(~live[:, None], -torch.inf)
    peak = torch.maximum(scores.amax(-1), own.amax(3)).detach()
    weights = (scores - peak.unsqueeze(-1)).exp()
    own_weights = (own - peak.unsqueeze(3)).exp()
    total = weights.sum(-1) + own_weights.sum(3)
    mixed = (weights.to(q.dtype).flatten(2, 3) @ context_v).unflatten(2, (-1, length)).float()
    mixed = mixed + (own_weights.unsqueeze(-1) * own_v.unsqueeze(2).float()).sum(3)
    attended: Tensor = mixed / total.unsqueeze(-1)
    return attended.to(q.dtype).flatten(1, 2)


Step = Callable[
    [Tensor, Tensor, Tensor, UnrollCache | None, Tensor], tuple[Tensor, UnrollCache | None]
]
"""(tokens [B, T], state [B·T, H], positions [B·T], cache, live) -> (state, cache)."""


def draft_loss(
    logits: Tensor, probs: Tensor, weight: Tensor, overlap_weight: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of a step and its expected acceptance, mean sum(min(p, q)); both 0-d.

    The loss is the cross-entropy towards the target's distribution plus `overlap_weight` times the
    total variation, which is one minus the best acceptance of any lossless verification.
    logits, probs: [B, T, V]; probs may sum to less than 1. weight: [T] or [B, T], 1 at valid
    positions, else 0.
    """
    log_q = logits.float().log_softmax(-1)
    p = probs.float()
    cross = -(p * log_q).sum(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    weight = weight.expand(logits.shape[:2])
    fraction = weight / weight.sum().clamp(min=1)
    loss = ((cross + overlap_weight * (1.0 - overlap)) * fraction).sum()
    return loss, (overlap.detach() * fraction).sum()


def unroll_step(head: DraftHead) -> Step:
    """Return one draft step of `head` as a compilable function of tensors."""
    assert isinstance(head, Eagle | Eagle3), "other heads draft without their own drafts"
    shape = head.shape

    def step(
        tokens: Tensor, state: Tensor, positions: Tensor, cache: UnrollCache | None, live: Tensor
    ) -> tuple[Tensor, UnrollCache | None]:
        attention = UnrolledAttention(shape, tokens.shape[0], cache, live)
        context = ForwardContext(positions, attention)
        return head.forward(tokens.flatten(), state, context), attention.cache

    return step


def features_of(head: DraftHead, lesson: Lesson) -> Tensor:
    """Return the target features [B·T, F] that `head` reads."""
    assert head.capture is not None, "a stand-alone draft reads no features"
    features = lesson.last if head.capture.layer_ids is None else lesson.captured
    return features.flatten(0, 1)


def unroll(step: Step, state: Tensor, lesson: Lesson, steps: int) -> Iterator[Tensor]:
    """Yield states [B·T, H] of steps 0..steps-1, for `head.logits`. state: encoded features."""
    num_rows, length = lesson.tokens.shape[0], lesson.row_tokens
    cache: UnrollCache | None = None
    for index in range(steps):
        positions = row_positions(num_rows, length, state.device, first=index)
        live = torch.arange(max(1, steps - 1), device=state.device) < index
        state, cache = step(lesson.tokens_from(1 + index), state, positions, cache, live)
        yield state


def sum_losses(parts: Iterable[tuple[Tensor, Tensor]], decay: float) -> tuple[Tensor, Tensor]:
    """Return the sum over steps k of decay^k · loss, and the overlaps [steps].

    parts: loss and overlap of each step.
    """
    losses, overlaps = zip(*parts, strict=True)
    total = torch.zeros((), device=losses[0].device)
    for step, loss in enumerate(losses):
        total = total + decay**step * loss
    return total, torch.stack(overlaps)


def medusa_loss(
    head: DraftHead, lesson: Lesson, decay: float, overlap_weight: float
) -> tuple[Tensor, Tensor]:
    """Return the sum over Medusa heads of decay^h times their loss, and overlaps [heads].

    Head h at position j predicts x_{j+2+h}; the target's distribution of that token is the one at
    position j+1+h of the same row.
    """
    assert head.max_steps is not None, "Medusa has a number of heads"
    state = head.encode(lesson.last.flatten(0, 1))
    parts = []
    for index in range(head.max_steps):
        logits = head.logits(state, index).unflatten(0, lesson.last.shape[:2])
        probs, weight = lesson.probs_from(1 + index), lesson.weight(index)
        parts.append(draft_loss(logits, probs, weight, overlap_weight))
    return sum_losses(parts, decay)


@dataclass(frozen=True)
class Lesson:
    """Output of the target for rows [B, T].

    `tokens` [B, T + S], `probs` [B, T + S, V] and `counted` [B, T + S] are padded with zeros by S
    places, so that a view shifted by up to S places has the same shape at every unroll step.
    """

    tokens: Tensor
    captured: Tensor  # [B, T, 3H], inputs of the three capture layers (pre-norm residual stream)
    last: Tensor  # [B, T, H], after the target's final norm
    probs: Tensor  # [B, T + S, V], next-token distribution at each position, of the ids drawn from
    row_tokens: int
    counted: Tensor | None = None  # bool [B, T + S], tokens whose drafts count; None: all

    def tokens_from(self, shift: int) -> Tensor:
        """Return token x_{j + shift} at place j: [B, T]; zero past the end."""
        return self.tokens.narrow(1, shift, self.row_tokens)

    def weight(self, step: int) -> Tensor:
        """Return 1 at the places whose draft of `step` counts, else 0: [T] or [B, T].

        The draft of a place is of a token inside the row, and of one that is counted.
        """
        place = torch.arange(self.row_tokens, device=self.last.device)
        # Row i of step k needs token x_{i+1+k}.
        inside = (place < self.row_tokens - 1 - step).float()
        if self.counted is None:
            return inside
        return inside * self.counted.narrow(1, 2 + step, self.row_tokens)

    def probs_from(self, shift: int) -> Tensor:
        """Return the distribution of x_{j + shift + 1} at place j: [B, T, V]; zero past the end."""
        return self.probs.narrow(1, shift, self.row_tokens)


class Teacher:
    """The target, run without gradients.

    padding: the largest shift that a lesson allows. ids: of the tokens whose probabilities a lesson
    has, int64 [V]; None: of all.
    """

    def __init__(
        self, model: Decoder, padding: int, fast: bool = True, ids: Tensor | None = None
    ) -> None:
        self.model, self.ids = model, ids
        self.padding = padding
        self.device = model.embed_tokens.weight.device
        self.capture = FeatureCapture(capture_layers(None, model.shape.num_layers))
        self._forward = compiled(self._teach, self.device) if fast else self._teach

    def _teach(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, captured = forward_rows(self.model, tokens, self.capture)
        assert captured is not None
        probs = self.model.logits(hidden.flatten(0, 1)).float().softmax(-1)
        if self.ids is not None:
            probs = probs[:, self.ids]
        probs = probs.to(hidden.dtype)
        padded = F.pad(probs.unflatten(0, tokens.shape), (0, 0, 0, self.padding))
        return captured, hidden, padded

    @torch.no_grad()
    def __call__(self, tokens: Tensor, counted: Tensor | None = None) -> Lesson:
        """Return the lesson of int64 rows [B, T]. counted: bool [B, T], see `Lesson`."""
        captured, last, probs = self._forward(tokens)
        padded = F.pad(tokens, (0, self.padding))
        marks = None if counted is None else F.pad(counted, (0, self.padding))
        return Lesson(padded, captured, last, probs, tokens.shape[1], marks)


def forward_rows(
    model: Decoder, tokens: Tensor, capture: FeatureCapture | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return post-norm hidden [B, T, H] and captured features [B, T, F] of rows [B, T]."""
    out = model.forward(tokens.flatten(), causal_context(model.rank_shape, tokens), capture)
    hidden, features = out.hidden.unflatten(0, tokens.shape), out.features
    return hidden, None if features is None else features.unflatten(0, tokens.shape)
