"""Responses that run their request, and send what it generates in the format of their endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from serve_spec.core.request import TokenDelta
from serve_spec.log import get_logger
from serve_spec.serving.errors import ApiError, ascii_json, defect
from serve_spec.serving.events import STREAM_HEADERS, STREAM_TYPE, event
from serve_spec.serving.messages import GenerateRequest
from serve_spec.serving.protocols.answers import AnswerFormat, JSONAnswer, usage
from serve_spec.serving.protocols.middleware import CLIENT
from serve_spec.serving.router.completions import CompletionRunner, RunningAnswer

logger = get_logger(__name__)

_SLICE_BYTES = 2**20
# Time for the error of a timed-out request to reach its client.
_ERROR_MARGIN_S = 1.0


class CompletionAnswer(Response):
    """A response that runs its request: when the client disconnects, both are cancelled."""

    def __init__(
        self,
        runner: CompletionRunner,
        choices: Sequence[GenerateRequest],
        form: AnswerFormat,
        *,
        num_prompts: int = 1,
        is_prompt_only: bool = False,
        stream: bool,
    ) -> None:
        super().__init__()
        self._run = partial(
            runner.run,
            choices,
            num_prompts,
            is_prompt_only=is_prompt_only,
            end_finder=form.end_finder,
        )
        self._trace_id = choices[0].trace_id
        self._form = form
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; raise errors before the first tokens, so that they set the status."""
        async with self._run(client=CLIENT.get()) as running:
            answer: Response
            if self._stream:
                frames = stream_frames(running, self._form, self._trace_id)
                answer = StreamingResponse(frames, media_type=STREAM_TYPE, headers=STREAM_HEADERS)
            else:
                answer = await _json_answer(await complete_answer(running, self._form))
            try:
                # A client that does not read must not hold its slots forever.
                async with asyncio.timeout_at(running.deadline.at + _ERROR_MARGIN_S):
                    await answer(scope, receive, send)
            except TimeoutError:
                logger.warning("request %s: the client does not read", self._trace_id)


async def complete_answer(answer: RunningAnswer, form: AnswerFormat) -> JSONAnswer:
    """Return the body of a response without `stream`; raise ApiError if a choice fails."""
    choices: list[list[TokenDelta]] = [[] for _ in range(answer.num_choices)]
    async for index, delta in answer.deltas():
        choices[index].append(delta)
    form.describe(answer.counts.speculation)
    # In a thread, because formatting many log-probabilities would delay other streams.
    return await asyncio.to_thread(form.complete, choices, usage(*answer.counts))


async def stream_frames(
    answer: RunningAnswer, form: AnswerFormat, trace_id: str
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a request with `stream`.

    A failure becomes an error event, without [DONE] after it: status 200 has been sent.
    """
    try:
        if beginning := form.beginning(answer.num_choices):
            yield beginning
        async for index, delta in answer.deltas():
            if events := _events(answer, form, index, delta):
                yield events
        form.describe(answer.counts.speculation)
        yield form.ending(usage(*answer.counts))
    except ApiError as error:
        logger.warning("request %s (%s) failed: %s", form.head.id, trace_id, error.message)
        yield form.failure(error)
    except Exception as error:
        logger.exception("request %s (%s) failed", form.head.id, trace_id)
        yield form.failure(defect(error))


def _events(answer: RunningAnswer, form: AnswerFormat, index: int, delta: TokenDelta) -> bytes:
    if not form.head.has_continuous_usage:
        return form.frame(index, delta)
    chunks = form.chunks(index, delta)
    return b"".join(event({**chunk, "usage": usage(*answer.counts)}) for chunk in chunks)


async def _json_answer(content: JSONAnswer) -> Response:
    """Return a complete answer as a response; encode it in a thread, as it may be long."""
    body = await asyncio.to_thread(encode_by_items, content)
    headers = {"content-length": str(len(body))}
    return StreamingResponse(_slices(body), media_type="application/json", headers=headers)


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _SLICE_BYTES):
        yield body[start : start + _SLICE_BYTES]


def encode_by_items(content: Mapping[str, object] | Sequence[object]) -> bytes:
    """Return JSON in ASCII; list items are encoded separately so that other threads can run."""

    def encode(value: object) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(ascii_json, value))}]"
        return ascii_json(value)

    if not isinstance(content, Mapping):
        return encode(content).encode("ascii")
    fields = (f"{ascii_json(name)}:{encode(value)}" for name, value in content.items())
    return f"{{{','.join(fields)}}}".encode("ascii")
