"""A stand-in for `EngineLoop` that obeys the sampling law: a token is a function of text and seed,
and, as where a request edits its scores, of how much of the text is generated.

Log-probabilities are a function of the text too. Rounds bring one to three tokens, different ones
on different replicas, as speculation does. Text is made by the engine's own `OutputText`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

from serve_spec.core.request import FinishReason, SamplingParams, SpeculationStats, TokenDelta
from serve_spec.core.sequence import Sequence
from serve_spec.engine.output import OutputText
from tests.serving.lawful_logprobs import entries_of, prompt_entries

EOS = 0
_ALPHABET = "\x00ab é"


class BytesTokenizer:
    """A byte is a token, so that é is two of them."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


@dataclass
class LawfulStream:
    """The deltas of one request."""

    sequence: Sequence
    text: OutputText
    rounds: random.Random
    cancelled: set[str]

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequence.num_prompt_tokens

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        request_id = self.sequence.request_id
        while not self.text.finish_reason:
            if request_id in self.cancelled:
                stats = SpeculationStats(num_rounds=1)
                yield TokenDelta(request_id, (), "", FinishReason.ABORT, stats)
                return
            new: list[int] = []
            for _ in range(self.rounds.randint(1, 3)):
                new.append(_draw([*self.sequence.token_ids, *new], self.sequence))
            new = new[: self.text.push(new)]
            yield self._delta(new)

    def _delta(self, new: list[int]) -> TokenDelta:
        before, params = list(self.sequence.token_ids), self.sequence.params
        self.sequence.token_ids += new
        reason = self.text.finish_reason
        is_first = len(before) == self.num_prompt_tokens
        return TokenDelta(
            self.sequence.request_id,
            tuple(new),
            self.text.take(),
            reason,
            SpeculationStats(num_rounds=1) if reason else None,
            entries_of(before, new, params.logprobs),
            prompt_entries(before, params.prompt_logprobs) if is_first else None,
        )


class LawfulLoop:
    """`EngineLoop`'s protocol; `replica` decides how many tokens its rounds bring."""

    tokenizer = BytesTokenizer()

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.cancelled: set[str] = set()

    async def encode(self, prompt: str) -> list[int]:
        return self.tokenizer.encode(prompt)

    async def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str,
        emitted: tuple[int, ...] = (),
    ) -> LawfulStream:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        assert params.seed is not None, "the router fixes the seed"
        sequence = Sequence(request_id, params, [*ids, *emitted], len(ids), params.seed)
        text = OutputText(self.tokenizer, sequence, () if params.ignore_eos else (EOS,))
        return LawfulStream(sequence, text, random.Random(self.replica), self.cancelled)

    def cancel(self, request_id: str) -> None:
        self.cancelled.add(request_id)


def _draw(prefix: list[int], sequence: Sequence) -> int:
    """A byte of the alphabet; é stays whole, and the end comes seldom."""
    if prefix[-1] == "é".encode()[0]:
        return "é".encode()[1]
    law = random.Random(f"{sequence.seed} {sequence.num_prompt_tokens} {prefix}")
    letters = _ALPHABET if law.random() < 0.1 else _ALPHABET[1:]
    return law.choice(letters).encode()[0]
