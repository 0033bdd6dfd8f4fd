"""Log-probabilities computed once more, as plainly as possible.

The logits are transformers', of the whole text at once; the rest is a loop over sorted tokens in
float64. Independent of the package.
"""

import math

import pytest
import torch

Distribution = dict[int, float]
"""Log-probability of every token that is left, likeliest first."""


CLOSE = {"rel": 1e-5, "abs": 3e-5}
"""Rounding of float32 scores, which a temperature of 0.3 makes three times as large."""


class PlainLogprobs:
    """What a target thinks of a text."""

    def __init__(self, target):
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)

    def __call__(self, token_ids, params):
        """Of the token after each one of `token_ids`."""
        return [processed(row, params) for row in self.logits(token_ids)]

    def logits(self, token_ids):
        """The model's own, after each one of `token_ids`."""
        with torch.inference_mode():
            return self._model(torch.tensor([token_ids])).logits[0].tolist()


def processed(logits, params):
    """Temperature, top-k, top-p, min-p, and what is left normalised; greedy: the plain softmax."""
    greedy = params.temperature == 0.0
    scores = [x if greedy else x / params.temperature for x in logits]
    order = sorted(range(len(scores)), key=lambda v: (-scores[v], v))
    best = scores[order[0]]
    total = math.fsum(math.exp(s - best) for s in scores)
    left = []
    mass = 0.0
    for rank, v in enumerate(order):
        p = math.exp(scores[v] - best) / total
        inside = (params.top_k < 1 or rank < params.top_k) and (
            mass < params.top_p or params.top_p == 1.0
        )
        if greedy or rank == 0 or (inside and p >= params.min_p / total):
            left.append(v)
        mass += p
    norm = math.log(math.fsum(math.exp(scores[v] - best) for v in left))
    return {v: scores[v] - best - norm for v in left}


def close(found, expected):
    """Whether answers say the same, up to rounding."""
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.logprobs is None) == (other.logprobs is None)
        close_entries(one.logprobs or (), other.logprobs or ())
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        close_entries(one.prompt_logprobs or (), other.prompt_logprobs or ())


def close_entries(found, expected, **tolerance):
    """Whether log-probabilities are the same, up to rounding."""
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert [t for t, _ in one.top] == [t for t, _ in other.top]
        values = [one.logprob, *(p for _, p in one.top)]
        wanted = [other.logprob, *(p for _, p in other.top)]
        assert values == pytest.approx(wanted, **(tolerance or CLOSE))
