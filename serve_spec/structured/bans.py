"""What else a request rules out, so far as a grammar leaves a choice."""

from __future__ import annotations

import numpy as np

from serve_spec.core.plan import ScheduledRequest
from serve_spec.structured.compiler import GrammarCompiler, Mask


class Bans:
    """`bad_token_ids`, `allowed_token_ids` and `min_tokens` of one request, as masks.

    A grammar is the stronger: where they rule out everything that it allows, they yield. So a text
    that is complete may end before `min_tokens`.
    """

    def __init__(self, compiler: GrammarCompiler, row: ScheduledRequest) -> None:
        params = row.params
        self._always = compiler.mask_of(params.bad_token_ids)
        if params.allowed_token_ids is not None:
            self._always |= ~compiler.mask_of(params.allowed_token_ids)
        self._held = compiler.mask_of(() if row.edited is None else row.edited.held_ids)
        self._min_tokens = params.min_tokens

    def off(self, mask: Mask, num_generated: int) -> Mask:
        """What is left of a mask after so many tokens: never nothing."""
        is_early = num_generated < self._min_tokens
        left = mask & ~(self._always | self._held if is_early else self._always)
        return left if np.any(left) else mask
