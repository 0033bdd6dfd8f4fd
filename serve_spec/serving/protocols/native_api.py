"""Endpoints of vLLM and SGLang beside the OpenAI API: /generate, tokens, server state."""

# No `from __future__ import annotations` here: FastAPI reads the annotations of the routes.

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field
from typing_extensions import TypedDict

from serve_spec import __version__
from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason, SamplingParams, TokenDelta, TokenLogprob
from serve_spec.serving.events import event
from serve_spec.serving.protocols import fields
from serve_spec.serving.protocols.answers import (
    AnswerFormat,
    AnswerHead,
    JSONAnswer,
    JSONObject,
    Usage,
)
from serve_spec.serving.protocols.openai import ChatMessage, ChatRequest, CompletionRequest
from serve_spec.serving.protocols.validation import renamed, validated
from serve_spec.serving.router.admission import Admission

if TYPE_CHECKING:
    from serve_spec.serving.protocols.frontend import Frontend
    from serve_spec.serving.router.fleet import RayFleet


class GenerateBody(fields.StrictFields):
    """Body of POST /generate, as in SGLang. Unknown fields are those of the completions API."""

    text: fields.GivenPrompts = fields.about("One prompt or several.")
    input_ids: fields.GivenPrompts = fields.about("Token ids, instead of `text`.")
    sampling_params: dict[str, Any] | None = fields.about(
        "`max_new_tokens` (default 128; at most what fits), `min_new_tokens`, "
        "`sampling_seed`, and the fields of the completions API."
    )
    stream: bool | None = fields.about("Send server-sent events with the text so far.")
    return_logprob: bool | None = fields.about(
        "Return log-probabilities; of a stream, in its last event."
    )
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] | None = fields.about(
        "First prompt token with a log-probability; -1 (default): none."
    )
    top_logprobs_num: fields.NumLogprobs | None = fields.about(
        "Number of most likely tokens to return as well."
    )
    rid: fields.Name | None = fields.about("Id of the answer; default: random.")

    def completion(self) -> CompletionRequest:
        """Return the same request to the completions API; errors have the names of that."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("text", None, "give either text or input_ids")
        params = self.sampling_params or {}
        data = {
            **(self.model_extra or {}),
            "max_tokens": _DEFAULT_TOKENS,
            **{_NAMES.get(name, name): params[name] for name in params if params[name] is not None},
            "prompt": self.text if self.input_ids is None else self.input_ids,
            "request_id": self.rid,
            # The prompt's tokens are counted in every event.
            "return_token_ids": True,
        }
        if self.return_logprob:
            data["logprobs"] = self.top_logprobs_num or 0
            if self.first_scored is not None:
                data["prompt_logprobs"] = data["logprobs"]
        return validated(CompletionRequest, data)

    @property
    def has_list(self) -> bool:
        """Whether the prompts came as a list, so that the answer is one."""
        given = self.text if self.input_ids is None else self.input_ids
        return isinstance(given, list) and not isinstance(given[0], int)

    @property
    def first_scored(self) -> int | None:
        """The first prompt token with a log-probability; None: none has one."""
        start = -1 if self.logprob_start_len is None else self.logprob_start_len
        return start if self.return_logprob and start >= 0 else None


_DEFAULT_TOKENS = 128
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_FIELDS = {new: old for old, new in _NAMES.items()}


class GenerateFormat(AnswerFormat):
    """Format of SGLang's /generate: each event of a stream repeats the text so far.

    The last event of a choice also has its `output_ids`. prompts: token ids of each prompt.
    """

    kind = chunk_kind = "generate"

    def __init__(
        self, head: AnswerHead, body: GenerateBody, prompts: Sequence[list[int]], num_choices: int
    ) -> None:
        super().__init__(head)
        self._body = body
        self._prompts = prompts
        self._num_choices = num_choices
        self._deltas: dict[int, list[TokenDelta]] = {}
        self._texts: dict[int, str] = {}
        self._num_tokens: dict[int, int] = {}
        self._started = time.perf_counter()

    def complete(self, choices: Sequence[Sequence[TokenDelta]], counts: Usage) -> JSONAnswer:
        """Return the answer, a list if there are several."""
        answers = [self._choice(index, deltas) for index, deltas in enumerate(choices)]
        return answers if len(answers) > 1 or self._body.has_list else answers[0]

    def frame(self, index: int, delta: TokenDelta) -> bytes:
        """See `AnswerFormat.frame`."""
        chunk = self.chunk(index, delta)  # counts tokens without text, too
        return event(chunk) if delta.text or delta.finish_reason is not None else b""

    def chunk(self, index: int, delta: TokenDelta) -> JSONObject:
        """See `AnswerFormat.chunk`."""
        deltas = self._deltas.setdefault(index, [])
        deltas.append(delta)
        self._texts[index] = self._texts.get(index, "") + delta.text
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(delta.token_ids)
        if delta.finish_reason is not None:
            return {**self._choice(index, deltas), "index": index}
        info = self._info(index, deltas, self._num_tokens[index])
        return {"text": self._texts[index], "meta_info": info, "index": index}

    def _choice(self, index: int, deltas: Sequence[TokenDelta]) -> JSONObject:
        last = deltas[-1]
        token_ids = [token for delta in deltas for token in delta.token_ids]
        info = self._info(index, deltas, len(token_ids))
        if last.speculation is not None:
            info["spec_accept_length"] = last.speculation.accept_length
        if self._body.return_logprob:
            info |= self._logprobs(index, deltas)
        text = "".join(delta.text for delta in deltas)
        return {"text": text, "output_ids": token_ids, "meta_info": info}

    def _info(self, index: int, deltas: Sequence[TokenDelta], num_tokens: int) -> JSONObject:
        info: JSONObject = {
            "id": self.head.id,
            "finish_reason": _finish(deltas[-1], num_tokens),
            "prompt_tokens": len(self._prompts[index // self._num_choices]),
            "completion_tokens": num_tokens,
            "cached_tokens": deltas[0].num_cached_tokens,
            "e2e_latency": time.perf_counter() - self._started,
        }
        return {**info, "synthetic_acceptance": True} if self.head.synthetic_acceptance else info

    def _logprobs(self, index: int, deltas: Sequence[TokenDelta]) -> JSONObject:
        generated = [token for delta in deltas for token in delta.logprobs or ()]
        found: JSONObject = {"output_token_logprobs": [_scored(token) for token in generated]}
        if self._body.top_logprobs_num:
            found["output_top_logprobs"] = [_likely(token) for token in generated]
        start = self._body.first_scored
        if start is not None:
            first = self._prompts[index // self._num_choices][0]
            tokens = deltas[0].prompt_logprobs or ()
            scored = [[None, first, None] if token is None else _scored(token) for token in tokens]
            found["input_token_logprobs"] = scored[start:]
            if self._body.top_logprobs_num:
                likely = [None if token is None else _likely(token) for token in tokens]
                found["input_top_logprobs"] = likely[start:]
        return found


def _scored(token: TokenLogprob) -> list[object]:
    return [token.logprob, token.token_id, None]


def _likely(token: TokenLogprob) -> list[list[object]]:
    return [[logprob, token_id, None] for token_id, logprob in token.top]


def _finish(delta: TokenDelta, num_tokens: int) -> JSONObject | None:
    if delta.finish_reason is None:
        return None
    if delta.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": num_tokens}
    return {"type": delta.finish_reason.value}


class TokenizeBody(fields.StrictFields):
    """Body of POST /tokenize, as in vLLM: a prompt, or the messages of a chat."""

    model: fields.Name | None = None
    prompt: fields.Text | None = None
    messages: (
        Annotated[
            list[ChatMessage],
            Field(min_length=1, max_length=fields.MAX_MESSAGES, fail_fast=True),
        ]
        | None
    ) = fields.about("Instead of `prompt`; rendered with the chat template.")
    add_special_tokens: bool | None = fields.about("Default true for a prompt, false for messages.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: fields.Variables = None
    return_token_strs: bool | None = fields.about("Also return the tokens as text.")

    def chat(self) -> ChatRequest:
        """Return the chat of these messages."""
        names = set(type(self).model_fields) - {"prompt", "return_token_strs"}
        given = {name: getattr(self, name) for name in names}
        return ChatRequest.model_validate({**(self.model_extra or {}), **given})


class DetokenizeBody(fields.StrictFields):
    """Body of POST /detokenize, as in vLLM."""

    model: fields.Name | None = None
    tokens: fields.TokenIds


class Tokens(TypedDict):
    """Answer of POST /tokenize. `max_model_len`: the context length, in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """Answer of POST /detokenize."""

    prompt: str


class Load(TypedDict):
    """Answer of GET /load: requests that run or wait in this router."""

    server_load: int


class Version(TypedDict):
    """Answer of GET /version."""

    version: str


def add_generate(api: FastAPI, frontend: "Frontend") -> None:
    """Add SGLang's /generate."""

    @api.post("/generate", response_model=None)
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Complete prompts, as SGLang does; with `stream`, as server-sent events."""
        own_names = {**_FIELDS, "prompt": "input_ids" if body.text is None else "text"}
        with renamed(lambda field: own_names.get(field, field)):
            asked = body.completion()
            frontend.admit(asked, len(asked.prompt))
            params = await frontend.text.params(asked)
            prompts = await frontend.text.token_ids(asked, params.max_tokens)
        head = frontend.head("gen", asked)
        head = replace(head, id=body.rid or head.id)
        # As in SGLang, the context limits the answer; a prompt without room is refused.
        room = await frontend.text.max_model_len() - max(map(len, prompts))
        params = replace(params, max_tokens=max(1, min(params.max_tokens, room)))
        choices = frontend.choices(head, request, prompts, params, asked.num_choices)
        form = GenerateFormat(head, body, prompts, asked.num_choices)
        return frontend.answer(choices, form, num_prompts=len(prompts), stream=bool(body.stream))


def add_tokens(api: FastAPI, frontend: "Frontend") -> None:
    """Add /tokenize and /detokenize."""

    @api.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Tokens:
        """Return the tokens of a prompt or of a chat."""
        frontend.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("prompt", None, "give either prompt or messages")
        if body.prompt is not None:
            adds = body.add_special_tokens is not False
            ids = await frontend.text.encode(body.prompt, add_special_tokens=adds)
        else:
            ids = (await frontend.text.conversation(body.chat(), SamplingParams())).token_ids
        token_bytes = await frontend.text.token_bytes()
        names = [token_bytes(token).data.decode(errors="replace") for token in ids]
        return {
            "count": len(ids),
            "max_model_len": await frontend.text.max_model_len(),
            "tokens": ids,
            "token_strs": names if body.return_token_strs else None,
        }

    @api.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Detokenized:
        """Return tokens as text (`prompt`), with the names of special tokens."""
        frontend.check_model(body.model)
        return {"prompt": await frontend.text.text(body.tokens, skip_special_tokens=False)}


def add_state(
    api: FastAPI, config: ServeSpecConfig, fleet: "RayFleet", admission: Admission
) -> None:
    """Add the endpoints of vLLM and SGLang that report on the server, and /flush_cache."""

    @api.get("/version")
    async def version() -> Version:
        """Return the version of serve_spec."""
        return {"version": __version__}

    @api.get("/load")
    async def load() -> Load:
        """Return the number of requests that run or wait in this router."""
        return {"server_load": admission.in_flight + admission.queue_len}

    @api.get("/get_model_info")
    @api.get("/model_info", include_in_schema=False)
    async def model_info() -> dict[str, object]:
        """Return the model, as SGLang does."""
        return {
            "model_path": config.model.path,
            "tokenizer_path": config.model.tokenizer_path or config.model.path,
            "served_model_name": config.model.names[0],
            "is_generation": True,
            "preferred_sampling_params": None,
        }

    @api.post("/reset_prefix_cache", include_in_schema=False)
    @api.api_route("/flush_cache", methods=["GET", "POST"], include_in_schema=False)
    async def flush_cache() -> Response:
        """Drop the cached prefixes that no request uses."""
        fleet.flush_cache()
        return PlainTextResponse("Cache flushed.\n")
