"""Tools of a chat request, formats of calls and reasoning, and chat answers in these formats."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, cast

from pydantic import Field, PlainValidator

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import CallsForm, Grammar
from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.serving.events import event
from serve_spec.serving.protocols import answers, parsers
from serve_spec.serving.protocols.fields import Name, StrictFields, Text, about, closed
from serve_spec.serving.protocols.logprobs import TokenBytesLookup

MAX_TOOLS = 1024
_CHOICE = 'use "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'


class Function(StrictFields):
    """A function that the model may call."""

    name: Annotated[Name, Field(min_length=1)]
    description: Text | None = None
    parameters: dict[str, Any] | None = about("JSON Schema of the arguments; default: none.")
    strict: bool | None = about(
        "Calls that the model chooses conform to the schema if they are JSON after a "
        "marker; required and named ones always do."
    )

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments, without properties that it does not name."""
        given = self.parameters or {"properties": {}}
        return cast(dict[str, Any], closed({"type": "object", **given}))


class Tool(StrictFields):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates read it, with the fields that are given."""
        given = self.function.model_fields_set & Function.model_fields.keys()
        names = [name for name in Function.model_fields if name in given]
        function = {name: getattr(self.function, name) for name in names}
        return {"type": self.type, "function": function}


class CalledFunction(StrictFields):
    """The function of an earlier call."""

    name: Name
    arguments: Any = Field(description="A JSON object, as a string or not.")


class ToolCall(StrictFields):
    """A call in an earlier answer."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self, field: str) -> dict[str, Any]:
        """Return the call with its arguments as an object; an error names its place, `field`."""
        arguments = self.function.arguments
        try:
            found = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            shown = f"<{type(arguments).__name__}>"
            raise InvalidRequest(f"{field}.function.arguments", shown, "give a JSON object")
        identity = {} if self.id is None else {"id": self.id}
        function = {"name": self.function.name, "arguments": found}
        return {**identity, "type": self.type, "function": function}


class ToolChoice(NamedTuple):
    """`tool_choice`: whether functions may or must be called, and which (None: any)."""

    mode: str
    name: str | None = None


def tool_choice(value: object) -> ToolChoice | None:
    """Validate `tool_choice`."""
    if value is None:
        return None
    if value in ("none", "auto", "required"):
        return ToolChoice(str(value))
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(name, str):
        raise ValueError(_CHOICE)
    return ToolChoice("required", name)


class _NamedFunction(StrictFields):
    name: Name


class _NamedChoice(StrictFields):
    type: Literal["function"]
    function: _NamedFunction


Choice: TypeAlias = Annotated[
    ToolChoice | None,
    PlainValidator(
        tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | _NamedChoice | None,
    ),
]
Tools: TypeAlias = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolCalls: TypeAlias = Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)]


def offered(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> list[Function]:
    """Return the functions that may be called; raise InvalidRequest for a wrong choice."""
    mode, name = choice or ToolChoice("auto")
    if not tools and mode == "required":
        raise InvalidRequest("tool_choice", mode, "allowed only with tools")
    if not tools or mode == "none":
        return []
    functions = [tool.function for tool in tools if name in (None, tool.function.name)]
    if not functions:
        fix = "give the name of one of the tools"
        raise InvalidRequest("tool_choice.function.name", str(name)[:80], fix)
    for index, tool in enumerate(tools):
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            field = f"tools.{index}.function.parameters.type"
            raise InvalidRequest(field, str(kind)[:80], 'use "object": arguments have names')
    return functions


def call_id(request_id: str, index: int, call: int, syntax: parsers.AnswerSyntax) -> str:
    """Return the id of a call of choice `index`; it is the same when a request is resumed.

    Mistral's templates accept only 9 letters and digits.
    """
    digest = hashlib.blake2b(f"{request_id} {index} {call}".encode(), digest_size=12).hexdigest()
    return digest[:9] if syntax.calls == "mistral" else f"call_{digest}"


CALL_PARSERS: Mapping[str, parsers.CallFormat | None] = {
    "none": None,
    **dict.fromkeys(("hermes", "qwen", "qwen25", "qwen3_coder", "glm45"), "hermes"),
    **dict.fromkeys(("llama3_json", "llama3"), "llama3_json"),
    "mistral": "mistral",
    **dict.fromkeys(("openai", "gpt-oss"), "openai"),
}
"""Formats of calls by `router.tool_call_parser`, with the names that vLLM and SGLang use."""

REASONING_PARSERS: Mapping[str, parsers.ReasoningFormat | None] = {
    "none": None,
    **dict.fromkeys(("qwen3", "glm45", "deepseek_r1", "deepseek-r1"), "think"),
    "mistral": "mistral",
    **dict.fromkeys(("openai_gptoss", "gpt-oss"), "openai"),
}
"""Formats of reasoning by `router.reasoning_parser`."""


# In templates that write arguments as XML.
_XML = ("<function=", "<arg_key>")
_ANY = {"type": "object"}


@dataclass(frozen=True)
class Formats:
    """Formats in which a checkpoint writes calls and reasoning; None: none, or unknown.

    has_names_first: Mistral's newer form of calls, `[TOOL_CALLS]name[ARGS]{...}`.
    space: what Mistral's older form has before the list of calls.
    is_single: the template renders only one call of an answer, as Llama 3's.
    always_reasons: answers begin within their reasoning although no prompt opens it.
    marks_json: a call is a marker and then JSON, so a grammar may leave the text before it free.
    """

    calls: parsers.CallFormat | None = None
    reasoning: parsers.ReasoningFormat | None = None
    has_names_first: bool = False
    space: str = ""
    is_single: bool = False
    always_reasons: bool = False
    marks_json: bool = False

    @classmethod
    def of(
        cls, template: str, call_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> Formats:
        """Return the formats that a chat template writes, or those of the named parsers."""
        calls = _calls_in(template) if call_parser == "auto" else CALL_PARSERS[call_parser]
        return cls(
            calls,
            _reasoning_in(template)
            if reasoning_parser == "auto"
            else REASONING_PARSERS[reasoning_parser],
            has_names_first="[ARGS]" in template,
            space=" " if "[TOOL_CALLS] [" in template else "",
            is_single="single tool-calls" in template,
            always_reasons=reasoning_parser in ("deepseek_r1", "deepseek-r1"),
            marks_json=calls in ("hermes", "mistral") and not any(xml in template for xml in _XML),
        )

    def is_reasoning(self, prompt: str) -> bool:
        """Return whether an answer to the rendered conversation begins within its reasoning."""
        begin, end = self._markers
        is_closed = not begin or prompt.rstrip().endswith(end)
        return not is_closed and (self.always_reasons or prompt.rstrip().endswith(begin))

    @property
    def reasoning_end(self) -> str:
        """The text that ends reasoning; empty if there is none."""
        return "<|end|>" if self.reasoning == "openai" else self._markers[1]

    @property
    def _markers(self) -> tuple[str, str]:
        return parsers.THOUGHTS.get(self.reasoning or "openai", ("", ""))

    def of_json(self, grammar: Grammar, prompt: str) -> Grammar:
        """Return the grammar of answers to `prompt` that are JSON of a schema after reasoning."""
        try:
            schema = json.loads(grammar.text)
        except (ValueError, RecursionError):
            return grammar
        if not isinstance(schema, dict):
            return grammar
        before = ["<|channel|>", "final", "<|message|>"] if self.reasoning == "openai" else []
        form = CallsForm([(before, schema, [])], is_single=True, thought=self._thought(prompt))
        return Grammar.calls(form, grammar.source)

    def of_calls(
        self,
        functions: Sequence[Function],
        syntax: parsers.AnswerSyntax,
        prompt: str,
        *,
        is_free: bool = False,
    ) -> Grammar:
        """Return the grammar of answers to `prompt` that are calls after any reasoning.

        is_free: they may be text, too; only arguments of strict functions conform to their schema.
        """
        pieces = [self._call(function.name, syntax.calls) for function in functions]
        calls = [
            (before, function.arguments_schema if function.strict or not is_free else _ANY, after)
            for function, (before, after) in zip(functions, pieces, strict=True)
        ]
        is_list = syntax.calls == "json" or (syntax.calls == "mistral" and not self.has_names_first)
        opening = ["[TOOL_CALLS]", f"{self.space}["] if syntax.calls == "mistral" else ["["]
        between = {"hermes": ["\n"], "llama3_json": ["; "]}.get(syntax.calls or "", [])
        form = CallsForm(
            calls,
            opening=opening if is_list else [],
            between=[", "] if is_list else between,
            ending=["]"] if is_list else [],
            is_single=syntax.calls == "openai" or not syntax.is_parallel,
            thought=self._thought(prompt),
            is_free=is_free,
        )
        return Grammar.calls(form)

    def _call(self, name: str, calls: parsers.CallFormat | None) -> tuple[list[str], list[str]]:
        """Return the text before and after the arguments of a call."""
        quoted = json.dumps(name, ensure_ascii=False)
        if calls == "hermes":
            return ["<tool_call>", f'\n{{"name": {quoted}, "arguments": '], ["}\n", "</tool_call>"]
        if calls == "openai":
            recipient = f"commentary to=functions.{name} "
            return ["<|channel|>", recipient, "<|constrain|>", "json", "<|message|>"], []
        if calls == "mistral" and self.has_names_first:
            return ["[TOOL_CALLS]", name, "[ARGS]"], []
        key = "arguments" if calls == "mistral" else "parameters"
        return [f'{{"name": {quoted}, "{key}": '], ["}"]

    def _thought(self, prompt: str) -> tuple[list[str], list[str], bool] | None:
        if self.reasoning == "openai":
            analysis = ["<|channel|>", "analysis", "<|message|>"]
            return analysis, ["<|end|>", "<|start|>", "assistant"], False
        begin, end = self._markers
        if not begin or prompt.rstrip().endswith(end):
            return None
        return [begin], [end], self.is_reasoning(prompt)


def _calls_in(template: str) -> parsers.CallFormat | None:
    if "<|channel|>" in template:
        return "openai"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    is_llama = "<|python_tag|>" in template or '{"name": function name, "parameters"' in template
    return "llama3_json" if is_llama else None


def _reasoning_in(template: str) -> parsers.ReasoningFormat | None:
    if "<|channel|>" in template:
        return "openai"
    if "[THINK]" in template:
        return "mistral"
    return "think" if "</think>" in template else None


class ParsedChatFormat(answers.ChatFormat):
    """Format of parsed chat answers; a chunk has the log-probabilities of the tokens it begins."""

    def __init__(
        self,
        head: answers.AnswerHead,
        syntax: parsers.AnswerSyntax,
        token_bytes: TokenBytesLookup | None = None,
    ) -> None:
        super().__init__(head, token_bytes)
        self._syntax = syntax
        self._parsers: dict[int, parsers.AnswerParser] = {}
        self._num_reasoning_tokens: dict[int, tuple[int, bool]] = {}
        """Tokens of each choice up to the end of its reasoning, and whether it has ended."""
        self._around_parts: dict[tuple[int, str, int], list[bytes]] = {}

    def frame(self, index: int, delta: TokenDelta) -> bytes:
        """Return the events of the parts that `delta` completes; there may be none."""
        if self.sends_tokens or delta.finish_reason is not None:
            return b"".join(event(chunk) for chunk in self.chunks(index, delta))
        return b"".join(self._event(index, part) for part in self._parts(index, delta))

    def end_finder(self) -> Callable[[str], bool] | None:
        """See `AnswerFormat.end_finder`."""
        if self._syntax.is_parallel or self._syntax.ends_itself or not self._syntax.calls:
            return None
        parser = parsers.AnswerParser(self._syntax)

        def has_ended(text: str) -> bool:
            parser.feed(text)
            return parser.is_complete

        return has_ended

    def chunks(self, index: int, delta: TokenDelta) -> list[answers.JSONObject]:
        """See `AnswerFormat.chunks`."""
        texts = [self._delta(index, part) for part in self._parts(index, delta)]
        is_last = delta.finish_reason is not None
        if is_last or (not texts and self.sends_tokens):
            texts.append({})
        choices = [answers.choice_of(index, text) for text in texts]
        chunks = [self._chunk(choice) for choice in choices]
        if chunks:
            ending = self._ending([delta])
            choices[0]["logprobs"] = ending["logprobs"]
            choices[-1]["finish_reason"] = _reason(ending, self._parsers[index].num_calls)
            self._detail(chunks[0], choices[0], index, [delta])
        return chunks

    def complete(
        self, choices: Sequence[Sequence[TokenDelta]], counts: answers.Usage
    ) -> answers.JSONObject:
        """See `AnswerFormat.complete`."""
        body = super().complete(choices, counts)
        assert isinstance(body, dict), "one answer"
        return {**body, "usage": self._detailed(counts)}

    def usage_chunk(self, counts: answers.Usage) -> answers.JSONObject:
        """See `AnswerFormat.usage_chunk`."""
        return super().usage_chunk(self._detailed(counts))

    def _detailed(self, counts: answers.Usage) -> answers.Usage:
        """Return the counts with those of reasoning tokens, if they are known."""
        if self._syntax.reasoning_end is None:
            return counts
        num_tokens = sum(
            num_tokens
            for index, (num_tokens, _) in self._num_reasoning_tokens.items()
            if self._parsers[index].has_reasoned
        )
        return {**counts, "completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def _count(self, index: int, token_ids: Sequence[int]) -> None:
        num_tokens, has_ended = self._num_reasoning_tokens.get(index, (0, False))
        if not has_ended:
            end = self._syntax.reasoning_end
            has_ended = end in token_ids
            num_tokens += token_ids.index(end) + 1 if end in token_ids else len(token_ids)
            self._num_reasoning_tokens[index] = num_tokens, has_ended

    def _parts(self, index: int, delta: TokenDelta) -> list[parsers.Part]:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = parsers.AnswerParser(self._syntax)
        self._count(index, delta.token_ids)
        return parser.feed(delta.text, is_last=delta.finish_reason is not None)

    def _event(self, index: int, part: parsers.Part) -> bytes:
        """Return a part as an event. The bytes around its text are encoded once."""
        if part.kind == "name":
            return event(self._chunk(answers.choice_of(index, self._delta(index, part))))
        key = index, part.kind, part.call
        around = self._around_parts.get(key)
        if around is None:
            marked = self._delta(index, part._replace(text=answers.TEXT_MARK))
            mark = answers.encode_text(answers.TEXT_MARK)
            num_places = 2 if part.kind == "reasoning" else 1
            chunk = event(self._chunk(answers.choice_of(index, marked)))
            around = self._around_parts[key] = chunk.rsplit(mark, num_places)
        return answers.encode_text(part.text).join(around)

    def _choice(self, index: int, deltas: Sequence[TokenDelta]) -> answers.JSONObject:
        parser = self._parsers[index] = parsers.AnswerParser(self._syntax)
        self._count(index, [token for delta in deltas for token in delta.token_ids])
        parts = parser.feed("".join(delta.text for delta in deltas), is_last=True)
        content = "".join(part.text for part in parts if part.kind == "content")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        calls = [self._call(index, part) for part in parts if part.kind == "name"]
        for part in parts:
            if part.kind == "arguments":
                calls[part.call]["function"]["arguments"] += part.text
        message: answers.JSONObject = {
            "role": "assistant",
            "content": content or (None if calls or reasoning else ""),
            "refusal": None,
        }
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        ending = self._ending(deltas)
        reason = _reason(ending, len(calls))
        return {"index": index, "message": message, **ending, "finish_reason": reason}

    def _delta(self, index: int, part: parsers.Part) -> answers.JSONObject:
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text, "reasoning": part.text}
        if part.kind == "name":
            return {"tool_calls": [{"index": part.call, **self._call(index, part)}]}
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}

    def _call(self, index: int, part: parsers.Part) -> dict[str, Any]:
        return {
            "id": call_id(self.head.id, index, part.call, self._syntax),
            "type": "function",
            "function": {"name": part.text, "arguments": ""},
        }


def _reason(ending: answers.JSONObject, num_calls: int) -> object:
    is_stop = ending["finish_reason"] == FinishReason.STOP.value
    return "tool_calls" if num_calls and is_stop else ending["finish_reason"]
