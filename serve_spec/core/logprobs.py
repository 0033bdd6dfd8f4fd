"""What is reported of a token's likelihood."""

from __future__ import annotations

from typing import NamedTuple

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for, as in the OpenAI API and in vLLM."""


class TokenLogprob(NamedTuple):
    """A token, its natural log-probability at its place, and the likeliest tokens there.

    `rank` is 1 for the likeliest token; equals rank by token id. `top` holds (token id,
    log-probability), likeliest first, as many as were asked for, or as many as the filters leave;
    the token itself is among them where its rank says so.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
