"""Tokens that a request bans, as masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serve_spec.core.request import SamplingParams
from serve_spec.structured.compiler import GrammarCompiler, Mask


class Bans:
    """`bad_token_ids`, `bad_words`, `allowed_token_ids` and `min_tokens` of a request, as masks.

    They do not apply if they forbid every token that a grammar allows. So a complete text may end
    before `min_tokens`.
    """

    def __init__(
        self, compiler: GrammarCompiler, params: SamplingParams, held_ids: Sequence[int]
    ) -> None:
        self._always = compiler.mask_of(params.bad_token_ids)
        if params.allowed_token_ids is not None:
            self._always |= ~compiler.mask_of(params.allowed_token_ids)
        self._held = compiler.mask_of(held_ids)
        self.ends = compiler.ends
        self._params = params

    def off(self, mask: Mask, generated: Sequence[int], path: Sequence[int]) -> Mask:
        """Return what is left of a mask after the tokens generated: at least one token."""
        is_early = len(generated) + len(path) < self._params.min_tokens
        left = mask & ~(self._always | self._held if is_early else self._always)
        for token in completions(self._params, generated, path):
            left[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        return left if np.any(left) else mask


def completions(params: SamplingParams, generated: Sequence[int], path: Sequence[int]) -> list[int]:
    """Return the tokens that would complete one of `bad_words`, by token ids, after the tokens."""
    before = [
        (tuple(word[:-1]), word[-1]) for word in params.bad_words if not isinstance(word, str)
    ]
    longest = max((len(start) for start, _ in before), default=0)
    text = (*generated[max(0, len(generated) - longest) :], *path)
    return [last for start, last in before if text[len(text) - len(start) :] == start]
