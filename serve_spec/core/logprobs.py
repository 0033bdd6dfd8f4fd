"""Log-probabilities as they are reported."""

from __future__ import annotations

from typing import NamedTuple

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for, as in the OpenAI API and vLLM."""


class TokenLogprob(NamedTuple):
    """A token, its natural log-probability, and the likeliest tokens at its position.

    `rank` is 1 for the likeliest token; ties rank by token id. `top` holds (token id,
    log-probability), likeliest first: as many as requested, or as the filters leave.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
