"""What one choice of the completions API says, piece after piece: echo, text, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_spec.core.request import TokenDelta
from serve_spec.serving.logprobs import (
    CompletionLogprobs,
    Spell,
    TextOffsets,
    completion_logprobs,
    echoed_logprobs,
    joined,
)


@dataclass(frozen=True)
class Echo:
    """A prompt as it is said before a choice; its tokens, where log-probabilities are asked for."""

    text: str
    token_ids: list[int] = field(default_factory=list)


class ChoiceText:
    """Says every character, and every token's log-probability, once.

    spell: the tokenizer's; None where nobody asked for log-probabilities.
    """

    def __init__(self, echo: Echo | None, spell: Spell | None) -> None:
        self._echo = echo
        self._spell = spell
        self._offsets = TextOffsets(len(echo.text) if echo else 0)

    def next(self, deltas: Sequence[TokenDelta]) -> tuple[str, CompletionLogprobs | None]:
        """What the next deltas add, at least one; the first ones add the echo too."""
        echo, self._echo = self._echo, None
        text = "".join(delta.text for delta in deltas)
        if echo is not None:
            text = echo.text + text
        if self._spell is None:
            return text, None
        entries = [entry for delta in deltas for entry in delta.logprobs or ()]
        shown = completion_logprobs(entries, self._spell, self._offsets)
        if echo is not None:
            scored = deltas[0].prompt_logprobs or ()
            shown = joined(echoed_logprobs(echo.text, echo.token_ids, scored, self._spell), shown)
        return text, shown
