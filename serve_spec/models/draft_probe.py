"""Measure what a draft's config may give wrongly, by drafting a text with each candidate.

The official EAGLE-3 trainer used the rotary base 10000 even if the config names another; a wrong
base costs a few percent of the drafts and no error. Reading layer ids as outputs where the trainer
meant inputs costs between a tenth of a token a round and nearly all drafts. Probes run only on
request (`probe` in the configuration), because most configs are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from serve_spec.layers.module import tensor_defaults
from serve_spec.log import get_logger
from serve_spec.models.decoder import causal_context
from serve_spec.models.draft import DraftHead
from serve_spec.models.eagle import Eagle, Eagle3
from serve_spec.models.llama import FeatureCapture, Llama

_log = get_logger(__name__)

TRAINER_THETA = 10000.0
"""What the official EAGLE-3 trainer always used."""

NUM_TOKENS = 1024
"""Length of the drafted text; a wrong base shows at distance."""

_ROWS_AT_ONCE = 128


def probe_text() -> str:
    """Return English and Python of this package, enough for any tokenizer."""
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text() for name in ("shape.py", "weights.py"))


def choose_theta(head: DraftHead, target: Llama, token_ids: Sequence[int]) -> float:
    """Set the rotary base of `head` to the one that drafts `token_ids` best; return it.

    Candidates are the head's own, the trainer's and the target's; the first of equals wins.
    Reads no more than `NUM_TOKENS`, and needs three.
    """
    assert isinstance(head, Eagle | Eagle3), "only these rotate"
    draft_overlap = overlap_measure(head, target, _probed(target, token_ids))
    scores: dict[float, float] = {}
    for theta in (head.shape.rope_theta, TRAINER_THETA, target.shape.rope_theta):
        if theta not in scores:
            set_theta(head, theta)
            scores[theta] = draft_overlap()
    best = max(scores, key=lambda theta: scores[theta])
    set_theta(head, best)
    _log.info(
        "draft rope theta %g: acceptance of a text by theta: %s",
        best, ", ".join(f"{theta:g}: {value:.4f}" for theta, value in scores.items()),
    )  # fmt: skip
    return best


def choose_layers(
    head: DraftHead, target: Llama, token_ids: Sequence[int], readings: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """Set the layers that `head` reads to those that draft `token_ids` best; return them.

    readings: candidates, each with as many layers as the head reads. Its own win a tie.
    """
    assert isinstance(head, Eagle3), "only these read layers"
    assert head.capture is not None
    own = head.capture.layer_ids
    assert own is not None, "such a head names layers"
    ids, scores = _probed(target, token_ids), {}
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


def _probed(target: Llama, token_ids: Sequence[int]) -> Tensor:
    ids = torch.tensor(token_ids[: min(NUM_TOKENS, target.max_model_len)])
    return ids.to(target.embed_tokens.weight.device)


def set_theta(head: Eagle | Eagle3, theta: float) -> None:
    """Set the rotary base of `head`."""
    shape = head.shape = replace(head.shape, rope_theta=theta)
    with tensor_defaults(head.dtype, head.fc.weight.device):
        head.rope = shape.rotary()


def overlap_measure(head: Eagle | Eagle3, target: Llama, token_ids: Tensor) -> Callable[[], float]:
    """Return a function that measures the mean of Σ min(p, q) of `head` over `token_ids` [n > 2].

    p is the target's distribution at temperature 1, q the draft's first step from the target's own
    features: the share of first drafts that an exact rule could accept. The target runs once.
    """
    with torch.no_grad():
        output = target.forward(
            token_ids, causal_context(target.rank_shape, token_ids[None]), head.capture
        )
    features = output.features
    assert features is not None, "a head captures something"
    encoded, following = features[:-1], token_ids[1:]

    def measure() -> float:
        with torch.no_grad():
            states = head.encode(encoded)
            out = head.forward(following, states, causal_context(head.shape, following[None]))
            return _overlap(head, target, output.hidden[1:], out)

    return measure


def _overlap(head: Eagle | Eagle3, target: Llama, hidden: Tensor, drafted: Tensor) -> float:
    total = 0.0
    for theirs, ours in zip(hidden.split(_ROWS_AT_ONCE), drafted.split(_ROWS_AT_ONCE), strict=True):
        p, q = target.logits(theirs).softmax(dim=1), head.logits(ours).softmax(dim=1)
        if head.target_ids is not None:
            p = p.index_select(1, head.target_ids)
        total += float(torch.minimum(p, q).sum())
    return total / len(hidden)
