"""The Responses API: a chat whose request and answer have another form. Clients keep the state."""

# No `from __future__ import annotations` here: FastAPI reads the annotations of the routes.

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field, PlainValidator

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.serving.errors import ApiError
from serve_spec.serving.protocols.answers import (
    AnswerFormat,
    AnswerHead,
    ChatFormat,
    JSONAnswer,
    JSONObject,
    Usage,
)
from serve_spec.serving.protocols.fields import (
    FEW,
    IGNORED,
    MAX_MESSAGES,
    Int32,
    Label,
    NumLogprobs,
    Text,
    Unavailable,
    about,
    refuse_unavailable,
    unicode,
)
from serve_spec.serving.protocols.openai import BaseRequest, ChatRequest
from serve_spec.serving.protocols.validation import renamed, validated

if TYPE_CHECKING:
    from serve_spec.serving.protocols.frontend import Frontend

_NOT_STORED = "answers are not stored; send the whole conversation as input"
_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text")
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_NO_PLACE = "not supported here; use /v1/chat/completions"


def _items(value: object) -> str | list[dict[str, Any]]:
    """Validate `input`: a text, or up to `MAX_MESSAGES` items."""
    if isinstance(value, str):
        return unicode(value)
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise ValueError(f"give at most {MAX_MESSAGES} items, not {len(value)}")
    if not isinstance(value, list) or not value or not all(isinstance(i, dict) for i in value):
        raise ValueError("give a string or a list of items, not empty")
    return value


class ResponsesRequest(BaseRequest):
    """Body of POST /v1/responses."""

    input: Annotated[
        str | list[dict[str, Any]],
        PlainValidator(_items, json_schema_input_type=Text | list[dict[str, Any]]),
    ] = Field(description="A message of the user, or the items of the conversation, oldest first.")
    instructions: Text | None = about("A message of the system, before `input`.")
    max_output_tokens: Int32 | None = about("Maximum output tokens; default: what fits.")
    text: dict[str, Any] | None = about("`format`: the required format.")
    reasoning: dict[str, Any] | None = about("`effort`: see reasoning_effort.")
    tools: Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = about(
        "Functions that the model may call."
    )
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Label], Field(max_length=64)] | None = about(
        f'Additions to the answer; "{_LOGPROBS}" is supported.'
    )
    top_logprobs: NumLogprobs | None = about("Only with log-probabilities.")

    max_tool_calls: Annotated[Int32 | None, IGNORED] = None
    prompt_cache_key: Annotated[Label | None, IGNORED] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, FEW, IGNORED] = None
    prompt_cache_retention: Annotated[Label | None, IGNORED] = None
    safety_identifier: Annotated[Label | None, IGNORED] = None
    service_tier: Annotated[Label | None, IGNORED] = None

    background: Annotated[bool | None, Unavailable(False)] = None
    context_management: Annotated[list[Any] | None, Unavailable([])] = None
    conversation: Annotated[Text | dict[str, Any] | None, Unavailable(instead=_NOT_STORED)] = None
    moderation: Annotated[dict[str, Any] | None, Unavailable()] = None
    previous_response_id: Annotated[Text | None, Unavailable(instead=_NOT_STORED)] = None
    prompt: Annotated[dict[str, Any] | None, Unavailable()] = None
    store: Annotated[bool | None, Unavailable(False, instead=_NOT_STORED)] = None
    truncation: Annotated[Text | None, Unavailable("disabled")] = None

    def refuse_absent(self) -> None:
        """Raise InvalidRequest for a field that this API does not have."""
        refuse_unavailable(self)
        for name, is_given, fix in (
            ("n", self.num_choices > 1, "send several requests"),
            ("response_format", self.response_format is not None, "use text.format"),
            ("return_token_ids", self.return_token_ids, _NO_PLACE),
            ("prompt_logprobs", self.prompt_logprobs is not None, _NO_PLACE),
        ):
            if is_given:
                raise InvalidRequest(name, "<given>", fix)

    def chat(self, messages: Sequence[JSONObject]) -> ChatRequest:
        """Return the chat of `messages` with this request's fields; errors have a chat's names."""
        shared = set(BaseRequest.model_fields) - {"stream_options"}
        data = self.model_dump(include=shared, exclude_none=True)
        if self.logit_bias is not None:
            data["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        has_logprobs = _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        effort = (self.reasoning or {}).get("effort")
        more = {
            "messages": [*messages],
            "max_completion_tokens": self.max_output_tokens,
            "response_format": _response_format((self.text or {}).get("format")),
            "verbosity": (self.text or {}).get("verbosity"),
            "reasoning_effort": effort,
            "tools": [_chat_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": has_logprobs or None,
            "top_logprobs": self.top_logprobs,
        }
        given = {name: value for name, value in more.items() if value is not None}
        return validated(ChatRequest, {**data, **given})


def messages_of(body: ResponsesRequest) -> tuple[list[JSONObject], list[str]]:
    """Return the messages of a chat, and the field that each of them comes from."""
    messages: list[JSONObject] = []
    places: list[str] = []

    def add(place: str, message: JSONObject) -> None:
        messages.append(message)
        places.append(place)

    if body.instructions is not None:
        add("instructions", {"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        add("input", {"role": "user", "content": body.input})
        return messages, places
    for index, item in enumerate(body.input):
        place, kind = f"input.{index}", item.get("type", "message")
        if kind == "message":
            content = _content(f"{place}.content", item.get("content"))
            add(place, {"role": item.get("role"), "content": content})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                add(place, {"role": "assistant", "content": None})
            cast(list[object], messages[-1].setdefault("tool_calls", [])).append(call)
        elif kind == "function_call_output":
            output = _content(f"{place}.output", item.get("output"))
            add(place, {"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":  # reasoning of earlier answers is not read again
            fix = "use message, function_call, function_call_output or reasoning"
            raise InvalidRequest(f"{place}.type", str(kind)[:80], fix)
    return messages, places


def _content(place: str, content: object) -> object:
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise InvalidRequest(place, str(kind)[:80], "this model accepts only text")
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _response_format(given: object) -> object:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    schema = {name: value for name, value in given.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


def _chat_tool(tool: Mapping[str, Any]) -> object:
    if tool.get("type") != "function":
        return tool
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _chat_choice(choice: object) -> object:
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


class _Item:
    """An item of the output while it grows; text: its text or arguments so far."""

    def __init__(self, number: int, kind: str, head_id: str, call: Mapping[str, Any]) -> None:
        self.number = number
        self.kind = kind
        self.text = ""
        self.logprobs: list[object] = []
        self.call = call
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self.id = f"{prefix}_{head_id.partition('_')[2]}_{number}"

    @property
    def part(self) -> JSONObject | None:
        """The content of the item; None: a call, which has none."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        if self.kind == "message":
            logprobs = [*self.logprobs]
            return {
                "type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs,
            }  # fmt: skip
        return None

    def shown(self, status: str) -> JSONObject:
        """Return the item; while it is in progress, without its content."""
        item: JSONObject = {"type": self.kind, "id": self.id, "status": status}
        if self.kind == "function_call":
            function = self.call["function"]
            return {
                **item,
                "call_id": self.call["id"],
                "name": function["name"],
                "arguments": self.text,
            }
        content = [] if status == "in_progress" else [self.part]
        if self.kind == "reasoning":
            return {**item, "summary": [], "content": content, "encrypted_content": None}
        return {**item, "role": "assistant", "content": content}


class ResponsesFormat(AnswerFormat):
    """Format of the Responses API over that of a chat with one choice."""

    kind = chunk_kind = "response"

    def __init__(self, head: AnswerHead, body: ResponsesRequest, chat: ChatFormat) -> None:
        super().__init__(head)
        self._body = body
        self._chat = chat
        self._items: list[_Item] = []
        self._num_events = 0
        self._finish_reason: object = None
        self._held: list[object] = []

    @property
    def sends_tokens(self) -> bool:
        """See `AnswerFormat.sends_tokens`."""
        return self._chat.sends_tokens

    def end_finder(self) -> Callable[[str], bool] | None:
        """See `AnswerFormat.end_finder`."""
        return self._chat.end_finder()

    def complete(self, choices: Sequence[Sequence[TokenDelta]], counts: Usage) -> JSONAnswer:
        """See `AnswerFormat.complete`."""
        body = cast(JSONObject, self._chat.complete(choices, counts))
        (choice,) = cast(list[dict[str, Any]], body["choices"])
        message = choice["message"]
        logprobs = (choice["logprobs"] or {}).get("content", [])
        for _ in (*self._grow(message, logprobs), *self._end()):
            pass
        self._finish_reason = choice["finish_reason"]
        return self._response(cast(Usage, body["usage"]))

    def beginning(self, num_choices: int) -> bytes:
        """See `AnswerFormat.beginning`."""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._response()) for kind in kinds)

    def frame(self, index: int, delta: TokenDelta) -> bytes:
        """See `AnswerFormat.frame`."""
        events: list[bytes] = []
        for chunk in self._chat.chunks(index, delta):
            (choice,) = cast(list[dict[str, Any]], chunk["choices"])
            logprobs = (choice["logprobs"] or {}).get("content", [])
            events += self._grow(choice["delta"], logprobs)
            self._finish_reason = choice["finish_reason"]
        return b"".join(events)

    def ending(self, counts: Usage) -> bytes:
        """See `AnswerFormat.ending`."""
        usage = cast(Usage, self._chat.usage_chunk(counts)["usage"])
        events = [*self._end()]
        response = self._response(usage)
        return b"".join([*events, self._event(f"response.{response['status']}", response=response)])

    def failure(self, error: ApiError) -> bytes:
        """See `AnswerFormat.failure`."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _choice(self, index: int, deltas: Sequence[TokenDelta]) -> JSONObject:
        raise NotImplementedError("a response has items instead")

    def _grow(self, delta: Mapping[str, Any], logprobs: Sequence[object]) -> Iterator[bytes]:
        """Add the delta of a chat, or its message; yield the events."""
        reasoning, calls = delta.get("reasoning_content"), delta.get("tool_calls") or ()
        if reasoning:
            yield from self._add("reasoning", reasoning)
        # Tokens without text, as parts of a character or a mark, belong to what follows them.
        self._held = [] if reasoning or calls else [*self._held, *logprobs]
        if delta.get("content"):
            yield from self._add("message", delta["content"], self._held or logprobs)
            self._held = []
        for call in calls:
            if "id" in call:
                yield from self._open("function_call", call)
            yield from self._add("function_call", call["function"].get("arguments", ""))

    def _add(self, kind: str, text: str, logprobs: Sequence[object] = ()) -> Iterator[bytes]:
        if self._last_kind != kind:
            yield from self._open(kind, {})
        item = self._items[-1]
        item.text += text
        item.logprobs += logprobs
        name, place = _delta_of(item)
        more = {"logprobs": [*logprobs]} if kind == "message" else {}
        if text or logprobs:
            yield self._event(f"response.{name}.delta", **place, delta=text, **more)

    @property
    def _last_kind(self) -> str | None:
        return self._items[-1].kind if self._items else None

    def _open(self, kind: str, call: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        item = _Item(len(self._items), kind, self.head.id, call)
        self._items.append(item)
        shown = item.shown("in_progress")
        yield self._event("response.output_item.added", output_index=item.number, item=shown)
        if item.part is not None:
            yield self._event("response.content_part.added", **_delta_of(item)[1], part=item.part)

    def _end(self) -> Iterator[bytes]:
        """Yield the last events of the last item; an empty answer is an empty message."""
        if not self._items or (self._held and self._last_kind == "message"):
            yield from self._add("message", "", self._held)
        yield from self._close()

    def _close(self) -> Iterator[bytes]:
        """Yield the last events of the open item."""
        if not self._items:
            return
        item = self._items[-1]
        name, place = _delta_of(item)
        ended: JSONObject = {"text": item.text}
        if item.kind == "message":
            ended["logprobs"] = [*item.logprobs]
        elif item.kind == "function_call":
            ended = {"name": item.call["function"]["name"], "arguments": item.text}
        yield self._event(f"response.{name}.done", **place, **ended)
        if item.part is not None:
            yield self._event("response.content_part.done", **place, part=item.part)
        shown = item.shown(self._status(item))
        yield self._event("response.output_item.done", output_index=item.number, item=shown)

    def _event(self, kind: str, **fields: object) -> bytes:
        payload = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        data = json.dumps(payload, separators=(",", ":")).encode("ascii")
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _status(self, item: _Item) -> str:
        is_last = item is self._items[-1]
        return "incomplete" if is_last and self._is_cut else "completed"

    @property
    def _is_cut(self) -> bool:
        return self._finish_reason == FinishReason.LENGTH.value

    def _response(self, counts: Usage | None = None) -> JSONObject:
        """Return the response; without counts, one in progress."""
        body = self._body
        status = "in_progress"
        if counts is not None:
            status = "incomplete" if self._is_cut else "completed"
        text = {"format": {"type": "text"}, **(body.text or {})}
        cut = {"reason": "max_output_tokens"}
        head = self.head.fields(self.kind)
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": cut if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.head.model,
            "output": [] if counts is None else [i.shown(self._status(i)) for i in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": text,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if counts is None else _usage(counts),
            "user": body.user,
            "metadata": body.metadata or {},
            **{name: head[name] for name in ("synthetic_acceptance",) if name in head},
        }


def _delta_of(item: _Item) -> tuple[str, JSONObject]:
    """Return the name of the events of an item's text, and where that text belongs."""
    place: JSONObject = {"item_id": item.id, "output_index": item.number}
    if item.kind == "function_call":
        return "function_call_arguments", place
    name = "output_text" if item.kind == "message" else "reasoning_text"
    return name, {**place, "content_index": 0}


def _usage(counts: Usage) -> JSONObject:
    details = counts.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": details,
        "total_tokens": counts["total_tokens"],
        "speculation": counts["speculation"],
    }


def add_responses(api: FastAPI, frontend: "Frontend") -> None:
    """Add the Responses API."""

    @api.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation; with `stream`, as server-sent events."""
        frontend.admit(body, 1)
        body.refuse_absent()
        messages, places = messages_of(body)

        def own_name(field: str) -> str:
            name, *rest = field.replace(".json_schema", "").replace(".function", "").split(".")
            own = (
                places[int(rest.pop(0))] if name == "messages" and rest else _NAMES.get(name, name)
            )
            return ".".join([own, *rest])

        with renamed(own_name):
            chat = body.chat(messages)
            head = frontend.head("resp", chat, separator="_")
            choices, form = await frontend.chat(chat, head, request)
        return frontend.answer(choices, ResponsesFormat(head, body, form), stream=bool(body.stream))
