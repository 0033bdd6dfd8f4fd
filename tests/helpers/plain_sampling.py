"""Sampling and verification done once more, as plainly as possible: one row at a time in float64.

Independent of the code under test; `draw_params` alone puts parameters into the form it takes.
"""

import numpy as np
import torch

from serve_spec.ops.draw import DrawParams
from serve_spec.ops.noise import seed_words

_WORD = 2**32 - 1


def draw_params(params, seeds, device):
    """Return the parameters and seeds of requests as tensors on a device."""

    def tensor(values, dtype):
        return torch.tensor(values, dtype=dtype, device=device)

    return DrawParams(
        tensor([0.0 if p.is_greedy else 1.0 / p.temperature for p in params], torch.float32),
        tensor([seed_words(seed) for seed in seeds], torch.int32),
        tensor([p.top_k for p in params], torch.int32),
        tensor([p.top_p for p in params], torch.float32),
        tensor([p.min_p for p in params], torch.float32),
    )


def _mix(x):  # an unsigned word, or uint64 words
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def row_key(seed, position):
    """Return the two words from which the noise of a position is made."""
    low, high = seed & _WORD, (seed >> 32) & _WORD
    first = _mix(low ^ _mix(position & _WORD))
    return first, _mix(first ^ _mix(high ^ 0x9E3779B9) ^ 0x85EBCA6B)


def stream_key(stream, seed, root, position):
    """Return those of another stream, in a round that decides `root` first."""
    low = _mix((seed & _WORD) ^ _mix(root & _WORD))
    high = _mix(low ^ ((seed >> 32) & _WORD) ^ _mix(int(stream)))
    return row_key((high << 32) | _mix(low ^ high ^ 0x85EBCA6B), position)


def coin(key):
    """Return the number in (0, 1) of a key."""
    return ((key[1] + 2**31) % 2**32 + 0.5) / 2**32


def gumbel(key, num_ids):
    """Return the noise of every token id."""
    ids = np.arange(num_ids, dtype=np.uint64)
    words = _mix(_mix((ids * 0x9E3779B9 + key[0]) & _WORD) ^ np.uint64(key[1]))
    uniform = np.minimum((words + 0.5) / 2**32, 1 - 2**-24)
    return -np.log(-np.log1p(-uniform))


def processed(logits, params):
    """Return tempered scores, -inf for what the filters remove; those of greedy requests as is."""
    scores = np.array(logits, dtype=np.float64)
    if params.is_greedy:
        return scores
    scores /= params.temperature
    order = np.argsort(-scores, kind="stable")
    probs = np.exp(scores - scores.max())[order]
    probs /= probs.sum()
    rank = np.arange(len(scores))
    keep = (rank < params.top_k) | (params.top_k < 1)
    keep &= (probs.cumsum() - probs < params.top_p) | (params.top_p == 1)
    keep &= probs >= params.min_p * probs[0]
    scores[order[~keep & (rank > 0)]] = -np.inf
    return scores


def softmax(scores):
    """Return the distribution; NaN if a score is."""
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def values(logits, params, seed, position):
    """Return the numbers whose largest is the token at `position`."""
    scores = processed(logits, params)
    return scores if params.is_greedy else scores + gumbel(row_key(seed, position), len(scores))


def draft_values(logits, params, seed, position, sharpness, target_ids):
    """Return the numbers whose largest is the draft for `position`, by draft id."""
    scores = np.array(logits, dtype=np.float64)
    if params.is_greedy:
        return scores
    ids = range(len(scores)) if target_ids is None else target_ids
    noise = gumbel(row_key(seed, position), max(ids) + 1)[list(ids)]
    return scores / (params.temperature * sharpness) + noise


def assert_largest(found, values):
    """Assert that each token found has the largest value, up to the rounding of float32."""
    for token, row in zip(found, values, strict=True):
        best = float(row.max())
        assert token >= 0, "a token can be drawn"
        assert best - row[token] <= 1e-5 * max(1.0, abs(best)), (token, int(row.argmax()))


def verify_chain(method, drafts, draft_probs, target_probs, coins, recover_key):
    """Return how many sampled drafts are accepted, and the token in place of the first rejected.

    `target_probs` has one distribution more than `draft_probs`. The token is None if none is
    rejected.
    """
    weights, accepted = [1.0], 0
    is_open = True
    for i, draft in enumerate(drafts):
        p, q = target_probs[i][draft], draft_probs[i][draft]
        ratio = p / q if q > 0 else 0.0
        if method == "standard":
            is_open = is_open and coins[i] < ratio
            accepted += is_open
            weights.append(1.0)
            continue
        weights.append(min(1.0, weights[i] * ratio))
        probability = weights[-1]
        if i + 1 < len(drafts):
            left = np.maximum(probability * target_probs[i + 1] - draft_probs[i + 1], 0).sum()
            missing = left + 1 - probability
            probability = left / missing if missing > 0 else 1.0
        if coins[i] < probability:
            accepted = i + 1
    if accepted == len(drafts):
        return accepted, None
    left = np.maximum(weights[accepted] * target_probs[accepted] - draft_probs[accepted], 0)
    if left.sum() <= 0:
        left = target_probs[accepted]
    with np.errstate(divide="ignore"):
        return accepted, int((np.log(left) + gumbel(recover_key, len(left))).argmax())
