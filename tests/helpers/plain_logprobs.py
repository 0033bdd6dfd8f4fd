"""Log-probabilities computed once more, as plainly as possible.

The logits are transformers', of the whole text at once; the rest is float64.
"""

import numpy as np
import pytest
import torch

from tests.helpers import plain_sampling

CLOSE = {"rel": 1e-5, "abs": 3e-5}
"""Rounding of float32 scores, which a temperature of 0.3 makes three times as large."""


class PlainLogprobs:
    """The logits and log-probabilities of a target after every token of a text."""

    def __init__(self, target):
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)

    def __call__(self, token_ids, params):
        """Return those of the token after each one of `token_ids`."""
        return [processed(row, params) for row in self.logits(token_ids)]

    def logits(self, token_ids):
        """Return the logits after each one of `token_ids`."""
        with torch.inference_mode():
            return self._model(torch.tensor([token_ids])).logits[0].tolist()


def processed(logits, params):
    """Return the log-probabilities of tokens that can be drawn, the likeliest first."""
    scores = plain_sampling.processed(logits, params)
    logprobs = scores - np.logaddexp.reduce(scores)
    order = np.argsort(-scores, kind="stable").tolist()
    return {token: float(logprobs[token]) for token in order if scores[token] > -np.inf}


def close(found, expected):
    """Assert that outputs are the same, up to rounding."""
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.logprobs is None) == (other.logprobs is None)
        close_logprobs(one.logprobs or (), other.logprobs or ())
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        close_logprobs(one.prompt_logprobs or (), other.prompt_logprobs or ())


def close_logprobs(found, expected, **tolerance):
    """Assert that log-probabilities are the same, up to rounding."""
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert [t for t, _ in one.top] == [t for t, _ in other.top]
        values = [one.logprob, *(p for _, p in one.top)]
        wanted = [other.logprob, *(p for _, p in other.top)]
        assert values == pytest.approx(wanted, **(tolerance or CLOSE))
