"""Response formats of the OpenAI API, whole and as server-sent events."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import NotRequired, TypeAlias

from typing_extensions import TypedDict  # Python 3.11's own is not enough for FastAPI's schema

from serve_spec.core.request import SpeculationStats, TokenDelta
from serve_spec.serving.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    TextOffsets,
    TokenBytesLookup,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
)

STREAM_TYPE = "text/event-stream"
STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    # nginx and other proxies buffer small chunks by default.
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"


def event(payload: Mapping[str, object]) -> bytes:
    """Encode an event as ASCII, as some clients treat U+2028 or U+0085 as line ends."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode("ascii") + b"\n\n"


def encode_text(text: str) -> bytes:
    """Encode a text as in an `event`."""
    return encode_basestring_ascii(text).encode("ascii")


@dataclass(frozen=True)
class Echo:
    """A prompt that precedes a choice (`echo`); its tokens if log-probabilities are requested."""

    text: str
    token_ids: list[int] = field(default_factory=list)


class ChoiceText:
    """Text and log-probabilities of one choice, each part returned once.

    token_bytes: the tokenizer's; None if no log-probabilities are requested.
    """

    def __init__(self, echo: Echo | None, token_bytes: TokenBytesLookup | None) -> None:
        self._echo = echo
        self._token_bytes = token_bytes
        self._offsets = TextOffsets(len(echo.text) if echo else 0)

    def next(self, deltas: Sequence[TokenDelta]) -> tuple[str, CompletionLogprobs | None]:
        """Return text and log-probabilities of at least one delta; the first call adds the echo."""
        echo, self._echo = self._echo, None
        text = "".join(delta.text for delta in deltas)
        if echo is not None:
            text = echo.text + text
        if self._token_bytes is None:
            return text, None
        entries = [entry for delta in deltas for entry in delta.logprobs or ()]
        shown = completion_logprobs(entries, self._token_bytes, self._offsets)
        if echo is not None:
            scored = deltas[0].prompt_logprobs or ()
            shown = joined(
                echoed_logprobs(echo.text, echo.token_ids, scored, self._token_bytes), shown
            )
        return text, shown


_MARK = "\0the text\0"
"""Placeholder for a chunk's text. It follows every other client-chosen text in the JSON."""


class PromptTokensDetails(TypedDict):
    """`cached_tokens`: prompt tokens found in the prefix cache by every choice."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts over all choices; a prompt counts once, however many choices it has.

    `speculation` holds the counts of `RequestOutput.speculation`, summed over the choices.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    speculation: dict[str, object]


class _Head(TypedDict):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: NotRequired[Usage | None]
    synthetic_acceptance: NotRequired[bool]


class Choice(TypedDict):
    """The text of a choice, or its next part in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(_Head):
    """A completion, or one chunk of its stream.

    `synthetic_acceptance` is present and true if acceptance is forced for a load test; the text is
    then not the model's.
    """

    choices: list[Choice]


class ChatAnswerMessage(TypedDict):
    """The assistant's message."""

    role: str
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One answer to a conversation."""

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(_Head):
    """Answers to a conversation; `synthetic_acceptance` as for `Completion`."""

    choices: list[ChatChoice]


class ChatDelta(TypedDict):
    """The role in the first chunk, then parts of the text."""

    role: NotRequired[str]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """The next part of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(_Head):
    """One chunk of a stream of answers to a conversation."""

    choices: list[ChatChunkChoice]


Answer: TypeAlias = Completion | ChatCompletion
Chunk: TypeAlias = Completion | ChatChunk


class Model(TypedDict):
    """One entry of GET /v1/models."""

    id: str
    object: str
    created: int
    owned_by: str


class ModelList(TypedDict):
    """Body of GET /v1/models."""

    object: str
    data: list[Model]


class ErrorObject(TypedDict):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """Body of every response with a status of 400 or more."""

    error: ErrorObject


def usage(
    num_prompt_tokens: int,
    num_tokens: int,
    speculation: SpeculationStats,
    num_cached_tokens: int = 0,
) -> Usage:
    """Return the `usage` object of a finished answer."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        "speculation": speculation.as_dict(),
    }


@dataclass(frozen=True)
class AnswerHead:
    """Fields shared by all chunks of a response.

    created: seconds since 1970. system_fingerprint: see `fingerprint`. include_usage: whether a
    stream ends with a usage chunk. synthetic_acceptance: see `Completion`.
    """

    id: str
    model: str
    created: int
    system_fingerprint: str
    include_usage: bool = False
    synthetic_acceptance: bool = False

    def fields(self, kind: str) -> _Head:
        """Return the first fields of a response whose `object` is `kind`."""
        head: _Head = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        return {**head, "synthetic_acceptance": True} if self.synthetic_acceptance else head

    def chunk_fields(self, kind: str) -> _Head:
        """Return `fields` for a chunk; `usage` is null if the last chunk holds it."""
        head = self.fields(kind)
        return {**head, "usage": None} if self.include_usage else head


class AnswerFormat(ABC):
    """Base class that turns the deltas of a request into a response body or stream chunks.

    token_bytes: the tokenizer's; None if no log-probabilities are requested.
    """

    def __init__(self, head: AnswerHead, token_bytes: TokenBytesLookup | None = None) -> None:
        self.head = head
        self._token_bytes = token_bytes
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def frame(self, index: int, delta: TokenDelta) -> bytes:
        """Return `chunk` as the bytes of a server-sent event.

        Most chunks differ only in their text, so the bytes around it are encoded once per choice.
        """
        if self._token_bytes is not None or delta.finish_reason is not None or not delta.text:
            return event(self.chunk(index, delta))
        around = self._around.get(index)
        if around is not None:
            return around[0] + encode_text(delta.text) + around[1]
        first = event(self.chunk(index, delta))  # with the echo, if there is one
        marked = event(self.chunk(index, TokenDelta("", (), _MARK)))
        before, _, after = marked.rpartition(encode_text(_MARK))
        self._around[index] = before, after
        return first

    @abstractmethod
    def whole(self, choices: Sequence[Sequence[TokenDelta]], counts: Usage) -> Answer:
        """Return the whole response from all deltas of each choice."""

    @abstractmethod
    def opening(self, index: int) -> Chunk | None:
        """Return the chunk that precedes a choice's first delta, if there is one."""

    @abstractmethod
    def chunk(self, index: int, delta: TokenDelta) -> Chunk:
        """Return the next chunk of a choice's stream."""

    @abstractmethod
    def usage_chunk(self, counts: Usage) -> Chunk:
        """Return the last chunk of a stream with `include_usage`; it has no choices."""


class CompletionFormat(AnswerFormat):
    """Format of the completions API. echo: the prompt to repeat before each choice."""

    def __init__(
        self,
        head: AnswerHead,
        echo: Sequence[Echo] = (),
        token_bytes: TokenBytesLookup | None = None,
    ) -> None:
        super().__init__(head, token_bytes)
        self._echo = echo
        self._streams: dict[int, ChoiceText] = {}

    def whole(self, choices: Sequence[Sequence[TokenDelta]], counts: Usage) -> Completion:
        """See `AnswerFormat.whole`."""
        answers = [
            _choice(index, self._text_of(index), deltas) for index, deltas in enumerate(choices)
        ]
        return {**self.head.fields("text_completion"), "choices": answers, "usage": counts}

    def opening(self, index: int) -> None:
        """See `AnswerFormat.opening`."""

    def chunk(self, index: int, delta: TokenDelta) -> Completion:
        """See `AnswerFormat.chunk`."""
        if index not in self._streams:
            self._streams[index] = self._text_of(index)
        return self._chunk([_choice(index, self._streams[index], [delta])])

    def usage_chunk(self, counts: Usage) -> Completion:
        """See `AnswerFormat.usage_chunk`."""
        return {**self._chunk([]), "usage": counts}

    def _text_of(self, index: int) -> ChoiceText:
        return ChoiceText(self._echo[index] if self._echo else None, self._token_bytes)

    def _chunk(self, choices: list[Choice]) -> Completion:
        return {**self.head.chunk_fields("text_completion"), "choices": choices}


class ChatFormat(AnswerFormat):
    """Format of the chat API."""

    def whole(self, choices: Sequence[Sequence[TokenDelta]], counts: Usage) -> ChatCompletion:
        """See `AnswerFormat.whole`."""
        answers: list[ChatChoice] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": _text(deltas), "refusal": None},
                "logprobs": self._logprobs(deltas),
                "finish_reason": _reason(deltas),
            }
            for index, deltas in enumerate(choices)
        ]
        return {**self.head.fields("chat.completion"), "choices": answers, "usage": counts}

    def opening(self, index: int) -> ChatChunk:
        """See `AnswerFormat.opening`."""
        return self._chunk(
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        )

    def chunk(self, index: int, delta: TokenDelta) -> ChatChunk:
        """See `AnswerFormat.chunk`."""
        return self._chunk(
            {
                "index": index,
                "delta": {"content": delta.text} if delta.text else {},
                "logprobs": self._logprobs([delta]),
                "finish_reason": _reason([delta]),
            }
        )

    def usage_chunk(self, counts: Usage) -> ChatChunk:
        """See `AnswerFormat.usage_chunk`."""
        head = self.head.chunk_fields("chat.completion.chunk")
        return {**head, "choices": [], "usage": counts}

    def _logprobs(self, deltas: Sequence[TokenDelta]) -> ChatLogprobs | None:
        if self._token_bytes is None:
            return None
        entries = (entry for delta in deltas for entry in delta.logprobs or ())
        return chat_logprobs(entries, self._token_bytes)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return {**self.head.chunk_fields("chat.completion.chunk"), "choices": [choice]}


def _choice(index: int, choice_text: ChoiceText, deltas: Sequence[TokenDelta]) -> Choice:
    text, logprobs = choice_text.next(deltas)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": _reason(deltas)}


def _text(deltas: Sequence[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def _reason(deltas: Sequence[TokenDelta]) -> str | None:
    reason = deltas[-1].finish_reason
    return None if reason is None else reason.value


def model_entry(name: str, created: int) -> Model:
    """Return the entry of GET /v1/models for one served model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "serve_spec"}


def fingerprint(version: str, model: Mapping[str, object]) -> str:
    """Return `system_fingerprint`: equal fingerprints and seeds give equal text.

    model: the settings that the text depends on. Speculation is not one of them.
    """
    settings = json.dumps([version, model], sort_keys=True, default=str)
    return f"fp_{hashlib.blake2b(settings.encode(), digest_size=5).hexdigest()}"
