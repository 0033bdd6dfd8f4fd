"""The OpenAI completions API: what answers look like."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict  # Python 3.11's own is not enough for FastAPI's schema

from serve_spec.core.request import FinishReason, SpeculationStats


class Usage(TypedDict):
    """Token counts; `speculation` holds the counts of `RequestOutput.speculation`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    speculation: dict[str, object]


class Choice(TypedDict):
    """The text, or in a stream the next piece of it."""

    index: int
    text: str
    logprobs: None
    finish_reason: str | None


class Completion(TypedDict):
    """A completion, or one chunk of its stream.

    `synthetic_acceptance` is there, and true, where acceptance is forced for a load test: the text
    is not the model's then.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: NotRequired[Usage | None]
    synthetic_acceptance: NotRequired[bool]


class Model(TypedDict):
    """One entry of GET /v1/models."""

    id: str
    object: str
    created: int
    owned_by: str


class ErrorObject(TypedDict):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """The body of every answer with a status of 400 or more."""

    error: ErrorObject


def usage(num_prompt_tokens: int, num_tokens: int, speculation: SpeculationStats) -> Usage:
    """The `usage` object of a finished completion."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "speculation": speculation.as_dict(),
    }


class CompletionFormat:
    """Answers to one request: the fields they share, and the three shapes they take."""

    def __init__(
        self,
        completion_id: str,
        model: str,
        created: int,
        *,
        include_usage: bool = False,
        synthetic_acceptance: bool = False,
    ) -> None:
        self.id = completion_id
        self.model = model
        self.created = created
        self.include_usage = include_usage
        self.synthetic_acceptance = synthetic_acceptance

    def completion(self, text: str, finish_reason: FinishReason, counts: Usage) -> Completion:
        """The whole answer at once."""
        return {**self._answer([_choice(text, finish_reason)]), "usage": counts}

    def chunk(self, text: str, finish_reason: FinishReason | None) -> Completion:
        """The next piece of a stream; `usage` is there and null if its last chunk will hold it."""
        answer = self._answer([_choice(text, finish_reason)])
        return {**answer, "usage": None} if self.include_usage else answer

    def usage_chunk(self, counts: Usage) -> Completion:
        """The last chunk of a stream that was asked to include usage; it has no choices."""
        return {**self._answer([]), "usage": counts}

    def _answer(self, choices: list[Choice]) -> Completion:
        answer: Completion = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.synthetic_acceptance:
            answer["synthetic_acceptance"] = True
        return answer


def _choice(text: str, finish_reason: FinishReason | None) -> Choice:
    reason = None if finish_reason is None else finish_reason.value
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def model_entry(name: str, created: int) -> Model:
    """The entry of GET /v1/models for one served model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "serve_spec"}
