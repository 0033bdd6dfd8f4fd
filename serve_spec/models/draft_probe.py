"""What a draft's config may say wrongly or not at all, found by drafting a text with each answer.

The official EAGLE-3 trainer used the rotary base 10000 whatever the config says, and some published
configs say otherwise; a wrong base costs a few percent of the drafts and no error. Nor does one if
the target's layers are counted by their outputs where the trainer meant inputs: that costs between
a tenth of a token a round and nearly all drafts. The probes run only when asked for
(`speculative_draft_rope_theta: probe`, `speculative_draft_aux_layers_mean: probe`): a config that
gives a base is right more often than not, one that gives none is of the trainer that used 10000,
most ids tell by themselves how they are counted, and a start should not depend on a measurement
that nobody wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.core.context import ForwardContext, Rotation
from serve_spec.layers.module import tensor_defaults
from serve_spec.layers.rope import RotaryTable
from serve_spec.log import get_logger
from serve_spec.models.draft import DraftHead
from serve_spec.models.eagle import Eagle, Eagle3
from serve_spec.models.llama import FeatureCapture, Llama
from serve_spec.models.shape import ModelShape

_log = get_logger(__name__)

TRAINER_THETA = 10000.0
"""What the official EAGLE-3 trainer always used."""

NUM_TOKENS = 1024
"""Of the text that is drafted; a wrong base shows at distance."""

_ROWS_AT_ONCE = 128


def probe_text() -> str:
    """A text long enough for any tokenizer: English and Python, this package's own."""
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text() for name in ("shape.py", "weights.py"))


def settle_theta(head: DraftHead, target: Llama, token_ids: Sequence[int]) -> float:
    """Gives `head` the rotary base with which it drafts `token_ids` best; returns it.

    Candidates are the head's own, the trainer's, and the target's, in this order where equal.
    Reads no more than `NUM_TOKENS`, and needs three.
    """
    assert isinstance(head, Eagle | Eagle3), "only these rotate"
    ids = torch.tensor(token_ids[: min(NUM_TOKENS, target.max_model_len)])
    draft_overlap = overlap_measure(head, target, ids.to(target.embed_tokens.weight.device))
    scores: dict[float, float] = {}

    def score(theta: float) -> float:
        set_theta(head, theta)
        scores[theta] = draft_overlap()
        return scores[theta]

    best = best_theta((head.shape.rope_theta, TRAINER_THETA, target.shape.rope_theta), score)
    set_theta(head, best)
    _log.info(
        "draft rope theta %g: acceptance of a text by theta: %s",
        best, ", ".join(f"{theta:g}: {value:.4f}" for theta, value in scores.items()),
    )  # fmt: skip
    return best


def settle_layers(
    head: DraftHead,
    target: Llama,
    token_ids: Sequence[int],
    readings: Sequence[tuple[int, ...]],
) -> tuple[int, ...]:
    """Gives `head` the layers of the target with which it drafts `token_ids` best; returns them.

    readings: the candidates, of as many layers as the head reads; it keeps its own where they draft
    as well. `token_ids` as for `settle_theta`.
    """
    assert isinstance(head, Eagle3), "only these read layers"
    own = head.capture.layer_ids
    assert own is not None, "such a head names layers"
    ids = torch.tensor(token_ids[: min(NUM_TOKENS, target.max_model_len)])
    ids = ids.to(target.embed_tokens.weight.device)
    scores = {}
    for layers in dict.fromkeys((own, *readings)):
        head.capture = FeatureCapture(layers)
        scores[layers] = overlap_measure(head, target, ids)()
    best = max(scores, key=lambda layers: scores[layers])
    head.capture = FeatureCapture(best)
    _log.info(
        "draft reads the inputs of layers %s: acceptance of a text by layers: %s",
        list(best), ", ".join(f"{list(each)}: {value:.4f}" for each, value in scores.items()),
    )  # fmt: skip
    return best


def best_theta(candidates: Iterable[float], score: Callable[[float], float]) -> float:
    """The candidate of the highest score, the first of equals. Each is scored once."""
    return max(dict.fromkeys(candidates), key=score)


def set_theta(head: Eagle | Eagle3, theta: float) -> None:
    """Makes `head` rotate by another base."""
    shape = head.shape = replace(head.shape, rope_theta=theta)
    with tensor_defaults(head.dtype, head.fc.weight.device):
        head.rope = RotaryTable(
            shape.head_dim, theta, shape.rope_scaling, shape.max_position_embeddings
        )


def overlap_measure(head: Eagle | Eagle3, target: Llama, token_ids: Tensor) -> Callable[[], float]:
    """A measure of `head` as it is when called: mean of Σ min(p, q) over `token_ids` [n], n ≥ 3.

    p is the target's distribution at temperature 1, q the draft's first step from the target's own
    features: the share of first drafts that an exact rule could keep. The target runs once.
    """
    with torch.no_grad():
        hidden, features = target.forward(
            token_ids, _whole_text(target.rank_shape, token_ids), head.capture
        )
    assert features is not None, "a head captures something"
    encoded, following = features[:-1], token_ids[1:]

    def measure() -> float:
        with torch.no_grad():
            states = head.encode(encoded)
            out = head.forward(following, states, _whole_text(head.shape, following))
            return _overlap(head, target, hidden[1:], out)

    return measure


def _overlap(head: Eagle | Eagle3, target: Llama, hidden: Tensor, drafted: Tensor) -> float:
    total = 0.0
    for theirs, ours in zip(hidden.split(_ROWS_AT_ONCE), drafted.split(_ROWS_AT_ONCE), strict=True):
        p, q = target.logits(theirs).softmax(dim=1), head.logits(ours).softmax(dim=1)
        if head.target_ids is not None:
            p = p.index_select(1, head.target_ids)
        total += float(torch.minimum(p, q).sum())
    return total / len(hidden)


def _whole_text(shape: ModelShape, token_ids: Tensor) -> ForwardContext:
    positions = torch.arange(len(token_ids), device=token_ids.device)
    return ForwardContext(positions, _WholeText(shape, positions))


class _WholeText:
    """Causal attention of one text computed at once; nothing is kept (`LayerAttention`)."""

    def __init__(self, shape: ModelShape, positions: Tensor) -> None:
        self._num_heads, self._num_kv_heads = shape.num_heads, shape.num_kv_heads
        distance = positions.unsqueeze(1) - positions
        self._is_seen = distance >= 0
        if shape.sliding_window is not None:
            self._is_seen &= distance < shape.sliding_window

    def run(self, layer: int, heads: Tensor, rotation: Rotation) -> Tensor:
        """[T, num_heads + 2·kv_heads, d] -> [T, num_heads, d]."""
        num_kv = self._num_kv_heads
        query, key, value = heads.split((self._num_heads, num_kv, num_kv), dim=1)
        attended = F.scaled_dot_product_attention(
            self._spread(_rotated(query, rotation)),
            self._spread(_rotated(key, rotation)),
            self._spread(value),
            attn_mask=self._is_seen,
        )
        return attended.transpose(0, 1)

    def _spread(self, heads: Tensor) -> Tensor:
        """[T, any number, d] -> [num_heads, T, d]: what each query head meets."""
        return heads.repeat_interleave(self._num_heads // heads.shape[1], dim=1).transpose(0, 1)


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    x = heads.float()
    turned = x * rotation.cos + x.roll(x.shape[-1] // 2, dims=-1) * rotation.sin
    return turned.to(heads.dtype)
