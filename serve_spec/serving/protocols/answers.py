"""Response formats of the OpenAI API, complete and as server-sent events."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from math import inf
from statistics import fmean
from typing import ClassVar, NotRequired, TypeAlias, cast

from typing_extensions import TypedDict  # Python 3.11's own is not enough for FastAPI's schema

from serve_spec.core.request import TokenDelta
from serve_spec.core.stats import SpeculationStats
from serve_spec.serving.errors import ApiError
from serve_spec.serving.events import DONE, event
from serve_spec.serving.protocols.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    EchoOffsets,
    PromptLogprob,
    TextOffsets,
    TokenBytesLookup,
    aligned_logprobs,
    chat_logprobs,
    completion_logprobs,
    joined,
    prompt_logprobs,
)
from serve_spec.serving.protocols.request_metrics import sglang_speculation, vllm_speculation


def encode_text(text: str) -> bytes:
    """Encode a text as in an `event`."""
    return encode_basestring_ascii(text).encode("ascii")


@dataclass(frozen=True)
class Echo:
    """A prompt that precedes a choice (`echo`); its tokens if log-probabilities are requested."""

    text: str
    token_ids: list[int] = field(default_factory=list)


TEXT_MARK = "\0the text\0"
"""Placeholder for a chunk's text. It follows every other client-chosen text in the JSON."""


class PromptTokensDetails(TypedDict):
    """`cached_tokens`: found in the prefix cache by every choice."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """`reasoning_tokens`: up to the end of the reasoning, of all choices."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts over all choices; a prompt counts once. `speculation` is summed over choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]
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
    """The text of a choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class Completion(_Head):
    """A completion.

    With `synthetic_acceptance`, acceptance is forced for a load test: the text is not the model's.
    """

    choices: list[Choice]


class ChatCalledFunction(TypedDict):
    """A called function. arguments: a JSON object as a string."""

    name: str
    arguments: str


class ChatToolCall(TypedDict):
    """A call of a function."""

    id: str
    type: str
    function: ChatCalledFunction


class ChatAnswerMessage(TypedDict):
    """The assistant's message. `reasoning` repeats `reasoning_content`, for newer clients."""

    role: str
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCall]]


class ChatChoice(TypedDict):
    """One answer to a conversation."""

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(_Head):
    """Answers to a conversation; `synthetic_acceptance` as for `Completion`."""

    choices: list[ChatChoice]


JSONObject: TypeAlias = dict[str, object]
JSONAnswer: TypeAlias = JSONObject | list[JSONObject]


class Model(TypedDict):
    """One model of GET /v1/models."""

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

    created: seconds since 1970. include_usage: whether a stream ends with a usage chunk.
    has_continuous_usage: whether all chunks have `usage`.
    """

    id: str
    model: str
    created: int
    system_fingerprint: str
    include_usage: bool = False
    has_continuous_usage: bool = False
    synthetic_acceptance: bool = False

    def fields(self, kind: str) -> JSONObject:
        """Return the first fields of a response whose `object` is `kind`."""
        head: JSONObject = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        return {**head, "synthetic_acceptance": True} if self.synthetic_acceptance else head


@dataclass(frozen=True)
class Details:
    """Additions to an answer, as in vLLM. Prompts have `num_choices` choices each.

    prompt_token_ids: of each prompt, to return with the token ids of every choice; None: neither.
    num_prompt_logprobs: most likely tokens of `prompt_logprobs`; None: no log-probabilities.
    token_bytes: the tokenizer's, for `prompt_logprobs`.
    has_metrics, has_sglext: whether there are `metrics.speculative_decoding` and `sglext`; depth:
    the most drafts of a round.
    """

    num_choices: int = 1
    prompt_token_ids: Sequence[list[int]] | None = None
    num_prompt_logprobs: int | None = None
    token_bytes: TokenBytesLookup | None = None
    has_metrics: bool = False
    has_sglext: bool = False
    depth: int = 0

    def of_request(self, stats: SpeculationStats) -> JSONObject:
        """Return the fields about the speculation of the whole request."""
        fields: JSONObject = {}
        if self.has_metrics:
            fields["metrics"] = {"speculative_decoding": vllm_speculation(stats, self.depth)}
        if self.has_sglext:
            fields["sglext"] = {"spec_tokens_details": sglang_speculation(stats, self.depth)}
        return fields

    def of_prompt(self, index: int, first: TokenDelta) -> JSONObject:
        """Return the fields about the prompt of choice `index`, whose first delta is `first`."""
        fields: JSONObject = {}
        if self.prompt_token_ids is not None:
            fields["prompt_token_ids"] = self.prompt_token_ids[index // self.num_choices]
        if self.num_prompt_logprobs is not None and self.token_bytes is not None:
            tokens = first.prompt_logprobs or ()
            fields["prompt_logprobs"] = prompt_logprobs(
                tokens, self.num_prompt_logprobs, self.token_bytes
            )
        return fields

    def of_choice(self, deltas: Sequence[TokenDelta]) -> JSONObject:
        """Return the fields about the new tokens of a choice."""
        if self.prompt_token_ids is None:
            return {}
        return {"token_ids": [token for delta in deltas for token in delta.token_ids]}


class AnswerFormat(ABC):
    """Base class that turns the deltas of a request into a response body or stream chunks.

    token_bytes: the tokenizer's; None if no log-probabilities are requested.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    has_one_prompt: ClassVar[bool] = False
    """Details of the prompt belong to the answer, not to its choices."""

    def __init__(self, head: AnswerHead, token_bytes: TokenBytesLookup | None = None) -> None:
        self.head = head
        self.details = Details()
        self._of_request: JSONObject = {}
        self._begun: set[int] = set()
        """Choices whose prompt has been described."""
        self._token_bytes = token_bytes
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def frame(self, index: int, delta: TokenDelta) -> bytes:
        """Return `chunk` as an event, if it shows anything.

        The bytes around the text are encoded once per choice.
        """
        if self.sends_tokens or delta.finish_reason is not None or not delta.text:
            return b"".join(map(event, self.chunks(index, delta)))
        around = self._around.get(index)
        if around is not None:
            return around[0] + encode_text(delta.text) + around[1]
        first = event(self.chunk(index, delta))  # with the echo, if there is one
        marked = event(self.chunk(index, TokenDelta("", (), TEXT_MARK)))
        before, _, after = marked.rpartition(encode_text(TEXT_MARK))
        self._around[index] = before, after
        return first

    def describe(self, stats: SpeculationStats) -> None:
        """Take the speculation of the request, which has ended, for the details."""
        self._of_request = self.details.of_request(stats)

    def complete(self, choices: Sequence[Sequence[TokenDelta]], counts: Usage) -> JSONAnswer:
        """Return the complete response from all deltas of each choice."""
        answers = [self._choice(index, deltas) for index, deltas in enumerate(choices)]
        body = {**self.head.fields(self.kind), "choices": answers, "usage": counts}
        body |= self._of_request
        for index, answer in enumerate(answers):
            self._detail(body, answer, index, choices[index])
        return body

    def end_finder(self) -> Callable[[str], bool] | None:
        """Return what reads a choice's text as it grows and tells whether it has ended; or None."""
        return None

    @property
    def sends_tokens(self) -> bool:
        """Whether chunks hold more about their tokens than the text."""
        return self._token_bytes is not None or self.details.prompt_token_ids is not None

    def chunks(self, index: int, delta: TokenDelta) -> list[JSONObject]:
        """Return the chunks of a delta, with the request's details; none if it shows nothing."""
        is_shown = delta.text or (self.sends_tokens and delta.token_ids)
        if not is_shown and delta.finish_reason is None:
            return []
        chunk = self.chunk(index, delta)
        choices = cast(list[JSONObject], chunk["choices"])
        self._detail(chunk, choices[0], index, [delta])
        return [chunk]

    def _detail(
        self, body: JSONObject, choice: JSONObject, index: int, deltas: Sequence[TokenDelta]
    ) -> None:
        choice.update(self.details.of_choice(deltas))
        first = 0 if self.has_one_prompt else index
        if first not in self._begun:
            self._begun.add(first)
            place = body if self.has_one_prompt else choice
            place.update(self.details.of_prompt(index, deltas[0]))

    def beginning(self, num_choices: int) -> bytes:
        """Return the events before the first delta: the `opening` of every choice."""
        openings = (self.opening(index) for index in range(num_choices))
        return b"".join(event(opening) for opening in openings if opening is not None)

    def opening(self, index: int) -> JSONObject | None:
        """Return the chunk that precedes a choice's first delta, if there is one."""
        return None

    def ending(self, counts: Usage) -> bytes:
        """Return the events after the last delta."""
        return (event(self.usage_chunk(counts)) if self.head.include_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        return event(error.body())

    def chunk(self, index: int, delta: TokenDelta) -> JSONObject:
        """Return the next chunk of a choice's stream."""
        return self._chunk(self._choice(index, [delta]))

    def usage_chunk(self, counts: Usage) -> JSONObject:
        """Return the last chunk of a stream with `include_usage`; it has no choices."""
        return {**self._chunk(), "usage": counts, **self._of_request}

    def _chunk(self, *choices: JSONObject) -> JSONObject:
        """Return a chunk; `usage` is null if the last chunk holds it."""
        head = self.head.fields(self.chunk_kind)
        usage = {"usage": None} if self.head.include_usage else {}
        return {**head, **usage, "choices": [*choices]}

    @abstractmethod
    def _choice(self, index: int, deltas: Sequence[TokenDelta]) -> JSONObject:
        """Return the next part of a choice."""


class CompletionFormat(AnswerFormat):
    """Format of the completions API.

    echo: what to repeat before each choice. num_candidates: choices per prompt; the best are shown.
    """

    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        head: AnswerHead,
        echo: Sequence[Echo] = (),
        token_bytes: TokenBytesLookup | None = None,
        num_candidates: int = 1,
    ) -> None:
        super().__init__(head, token_bytes)
        self._num_candidates = num_candidates
        self._echo = dict(enumerate(echo))
        """Prompts that have not been repeated yet, by choice."""
        self._offsets: dict[int, TextOffsets] = {}

    def complete(self, choices: Sequence[Sequence[TokenDelta]], counts: Usage) -> JSONAnswer:
        """See `AnswerFormat.complete`."""
        most = self._num_candidates
        if most > self.details.num_choices:
            groups = (choices[at : at + most] for at in range(0, len(choices), most))
            ranked = (sorted(group, key=_mean_logprob, reverse=True) for group in groups)
            choices = [each for group in ranked for each in group[: self.details.num_choices]]
        return super().complete(choices, counts)

    def _choice(self, index: int, deltas: Sequence[TokenDelta]) -> JSONObject:
        echo = self._echo.pop(index, None)
        before = echo.text if echo else ""
        logprobs = None
        if self._token_bytes is not None:
            offsets = self._offsets.setdefault(index, TextOffsets(len(before)))
            tokens = [token for delta in deltas for token in delta.logprobs or ()]
            logprobs = completion_logprobs(tokens, self._token_bytes, offsets)
            if echo is not None:
                scored = deltas[0].prompt_logprobs or ()
                of_prompt = zip(echo.token_ids, scored, strict=True)
                of_echo = aligned_logprobs(of_prompt, self._token_bytes, EchoOffsets(before))
                logprobs = joined(of_echo, logprobs)
        return {
            "index": index,
            "text": before + _text(deltas),
            "logprobs": logprobs,
            "finish_reason": _reason(deltas),
        }


class ChatFormat(AnswerFormat):
    """Format of the chat API."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    has_one_prompt = True

    def opening(self, index: int) -> JSONObject:
        """See `AnswerFormat.opening`."""
        return self._chunk(choice_of(index, {"role": "assistant", "content": ""}))

    def chunk(self, index: int, delta: TokenDelta) -> JSONObject:
        """See `AnswerFormat.chunk`."""
        part = {"content": delta.text} if delta.text else {}
        return self._chunk({"index": index, "delta": part, **self._ending([delta])})

    def _choice(self, index: int, deltas: Sequence[TokenDelta]) -> JSONObject:
        message = {"role": "assistant", "content": _text(deltas), "refusal": None}
        return {"index": index, "message": message, **self._ending(deltas)}

    def _ending(self, deltas: Sequence[TokenDelta]) -> JSONObject:
        logprobs = None
        if self._token_bytes is not None:
            tokens = (token for delta in deltas for token in delta.logprobs or ())
            logprobs = chat_logprobs(tokens, self._token_bytes)
        return {"logprobs": logprobs, "finish_reason": _reason(deltas)}


def choice_of(index: int, delta: JSONObject) -> JSONObject:
    """Return a choice of a chat's chunk that neither has log-probabilities nor ends."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _mean_logprob(deltas: Sequence[TokenDelta]) -> float:
    """Return the log-probability per token, so that long answers are not less likely for it."""
    logprobs = [token.logprob for delta in deltas for token in delta.logprobs or ()]
    return fmean(logprobs) if logprobs else -inf


def _text(deltas: Sequence[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def _reason(deltas: Sequence[TokenDelta]) -> str | None:
    reason = deltas[-1].finish_reason
    return None if reason is None else reason.value


def fingerprint(version: str, model: Mapping[str, object]) -> str:
    """Return `system_fingerprint`: equal fingerprints and seeds give equal text.

    model: its settings.
    """
    settings = json.dumps([version, model], sort_keys=True, default=str)
    return f"fp_{hashlib.blake2b(settings.encode(), digest_size=5).hexdigest()}"
