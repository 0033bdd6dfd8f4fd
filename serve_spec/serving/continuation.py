"""The second half of an answer whose first half another replica gave.

For the engine, tokens that exist already are those of a request that was preempted. The text is
another matter: a stop string, or a character of several tokens, may begin before the seam and end
after it. So the text is made here, from the first token on, and the engine is not told of stop
strings.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.core.sequence import Sequence
from serve_spec.engine.output import OutputText
from serve_spec.serving.messages import GenerateRequest


class ContinuedStream:
    """What is still to come of a request: the deltas after `request.emitted`."""

    def __init__(self, loop: Any, stream: Any, text: OutputText, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self._loop = loop
        self._stream = stream
        self._text = text

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        last: TokenDelta | None = None
        async for delta in self._stream:
            if last is not None:
                if delta.finish_reason is not None:
                    yield last._replace(speculation=delta.speculation)
                continue
            said = self._with_text(delta)
            if said.finish_reason is None or delta.finish_reason is not None:
                yield said
            else:  # a stop string, of which the engine does not know; it has the counts
                last = said
                self._loop.cancel(delta.request_id)

    def _with_text(self, delta: TokenDelta) -> TokenDelta:
        """The same tokens, cut where the text ends, with the text they complete."""
        token_ids = list(delta.token_ids)
        ends_with_token = delta.finish_reason is FinishReason.STOP
        count = self._text.push(token_ids[:-1] if ends_with_token else token_ids)
        if self._text.finish_reason is None and ends_with_token:
            count = len(token_ids)
            self._text.finish_reason = FinishReason.STOP
        reason = self._text.finish_reason or delta.finish_reason
        return delta._replace(
            token_ids=tuple(token_ids[:count]),
            text=self._text.take(),
            finish_reason=reason,
            logprobs=None if delta.logprobs is None else delta.logprobs[:count],
        )


async def continue_request(loop: Any, request: GenerateRequest) -> ContinuedStream:
    """Submits a request that another replica began to `loop`, an `EngineLoop`.

    Raises:
        As `EngineLoop.submit`.
    """
    prompt, params = request.prompt, request.params
    prompt_ids = await loop.encode(prompt) if isinstance(prompt, str) else list(prompt)
    sequence = Sequence(request.request_id, params, prompt_ids, len(prompt_ids), seed=0)
    # The engine knows which tokens end a text, and that those that were emitted did not.
    text = OutputText(loop.tokenizer, sequence, eos_token_ids=())
    text.push(list(request.emitted))
    text.take()  # the caller has it
    rest = replace(
        params,
        stop=(),
        prompt_logprobs=None,  # they came with the first token
    )
    stream = await loop.submit(prompt_ids, rest, request.request_id, request.emitted)
    return ContinuedStream(loop, stream, text, len(prompt_ids))
