"""From the deltas of a prompt's texts to what Python callers receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_spec.core.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Prompt,
    RequestOutput,
    TokenDelta,
    TokenLogprob,
)
from serve_spec.core.stats import SpeculationStats
from serve_spec.engine.tokenizer import Tokenizer


@dataclass
class _Text:
    """What has come of one text."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, delta: TokenDelta) -> None:
        self.token_ids += delta.token_ids
        self.pieces.append(delta.text)
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        self.finish_reason = delta.finish_reason
        self.speculation = delta.speculation or self.speculation


class Answer:
    """The texts of one prompt, grown delta by delta.

    prompt: as it was given; token_ids: as the engine reads it.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        token_ids: Sequence[int],
        num_texts: int,
        tokenizer: Tokenizer,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt if isinstance(prompt, str) else None
        self._prompt_token_ids = tuple(token_ids)
        self._tokenizer = tokenizer
        self._texts = [_Text() for _ in range(num_texts)]
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._num_cached_tokens = 0

    def add(self, index: int, delta: TokenDelta) -> None:
        """Add what came of text `index`."""
        self._texts[index].add(delta)
        if index == 0:
            self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
            self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)

    @property
    def finished(self) -> bool:
        """Return whether all texts have ended."""
        return all(text.finish_reason is not None for text in self._texts)

    def output(self) -> RequestOutput:
        """Return everything that has come so far."""
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=tuple(self._completion(i, text) for i, text in enumerate(self._texts)),
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
        )

    def take(self) -> RequestOutput:
        """Return what has come since the last call."""
        output = self.output()
        for text in self._texts:
            text.token_ids, text.pieces = [], []
            text.logprobs = None if text.logprobs is None else []
        return output

    def _completion(self, index: int, text: _Text) -> CompletionOutput:
        found = text.logprobs
        return CompletionOutput(
            index=index,
            text="".join(text.pieces),
            token_ids=tuple(text.token_ids),
            finish_reason=text.finish_reason,
            speculation=text.speculation,
            logprobs=None if found is None else tuple(map(self._by_id, found)),
            token_logprobs=None if found is None else tuple(found),
        )

    def _by_id(self, token: TokenLogprob) -> dict[int, Logprob]:
        ranked = [(token.token_id, token.logprob, token.rank)]
        ranked += [(top, logprob, rank) for rank, (top, logprob) in enumerate(token.top, 1)]
        return {
            token_id: Logprob(logprob, rank, self._name(token_id))
            for token_id, logprob, rank in ranked
        }

    def _name(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
