"""Parse the text of an answer, as it arrives, into reasoning, content and tool calls.

`transformers.utils.chat_parsing.ResponseParser` returns the arguments of a call when the call is
complete, and raises for broken JSON. Clients expect arguments as they are written, and broken JSON
as content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

PartKind: TypeAlias = Literal["reasoning", "content", "name", "arguments"]
CallFormat: TypeAlias = Literal["hermes", "llama3_json", "mistral", "openai", "json"]
ReasoningFormat: TypeAlias = Literal["think", "mistral", "openai"]

THOUGHTS: Mapping[ReasoningFormat, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
"""Texts around reasoning; the format openai has channels instead."""

_MARKERS: Mapping[CallFormat, tuple[str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>", ""),
    "mistral": ("[TOOL_CALLS]", ""),
}
"""Texts around calls. An answer in the other formats, and in llama3_json, may begin with JSON."""

# The start of a call up to its arguments, which can be passed on while they are written.
_JSON_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.){1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME_HEAD = re.compile(r"\s*([\w.-]{1,256})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
# Qwen3-Coder's format, and GLM's.
_XML_NAME = re.compile(r"\s*(?:<function=([^>\n]+)>|([\w.-]+)\s*(?=<|$))")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_decode = json.JSONDecoder().raw_decode

_Steps: TypeAlias = Generator[None, None, None]
_Found: TypeAlias = Generator[None, None, str]


class Part(NamedTuple):
    """A piece of an answer. `call`: the index of the call that it names or has arguments of."""

    kind: PartKind
    text: str
    call: int = 0


@dataclass(frozen=True)
class AnswerSyntax:
    """The format of one answer.

    tools: the JSON Schemas of the arguments of the functions that may be called, by name.
    is_reasoning: whether the answer begins within its reasoning, because the prompt has opened it.
    is_parallel: whether more than one call is returned.
    shows_reasoning: whether reasoning is returned.
    reasoning_end: the token that ends the reasoning, if it is one.
    """

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_reasoning: bool = False
    is_parallel: bool = True
    shows_reasoning: bool = True
    reasoning_end: int | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser needs, some of which are special tokens."""
        channels = ("<|channel|>",) if "openai" in (self.calls, self.reasoning) else ()
        thoughts = THOUGHTS.get(self.reasoning or "openai", ())
        return tuple(filter(None, (*channels, *thoughts, *_MARKERS.get(self.calls or "json", ()))))


class AnswerParser:
    """Parser of one answer. Text that is not yet part of the answer is held back.

    is_whole: the answer is passed at once, so a call with broken arguments becomes content.
    """

    def __init__(self, syntax: AnswerSyntax, *, is_whole: bool = False) -> None:
        self._syntax = syntax
        self._is_whole = is_whole
        self._text = ""
        self._has_ended = False
        self._parts: list[Part] = []
        self.num_calls = 0
        """Calls so far."""
        self.has_reasoned = False
        self._space = ""
        """Whitespace before the last marker, which is content if no call follows."""
        has_channels = "<|channel|>" in syntax.markers
        self._steps = self._channels() if has_channels else self._answer()

    def feed(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Return the parts that `text` completes. is_last: the answer ends with it."""
        self._text += text
        self._has_ended = is_last
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def _emit(self, kind: PartKind, text: str) -> None:
        is_call = kind in ("name", "arguments")
        self.has_reasoned |= kind == "reasoning"
        is_shown = is_call or kind == "content" or self._syntax.shows_reasoning
        if is_call and self.num_calls > 1:
            is_shown = self._syntax.is_parallel
        if text and is_shown:
            self._parts.append(Part(kind, text, self.num_calls - 1 if is_call else 0))

    def _answer(self) -> _Steps:
        """Parse reasoning at the start, and calls between markers; the rest is content."""
        begin, end = THOUGHTS.get(self._syntax.reasoning or "openai", ("", ""))
        marker, close = _MARKERS.get(self._syntax.calls or "json", ("", ""))
        may_be_bare = self._syntax.calls in ("llama3_json", "json")
        trims = False
        if self._syntax.is_reasoning or (yield from self._skip(begin)):
            yield from self._until("reasoning", end)
            trims = True
        while True:
            if may_be_bare and (yield from self._next("{", "[")):
                may_be_bare = yield from self._calls("", "")
                trims |= may_be_bare
            found = yield from self._until("content", marker, trims=trims)
            if not found:
                return
            trims = yield from self._calls(found, close)

    def _calls(self, opening: str, close: str) -> Generator[None, None, bool]:
        """Parse calls, or a list of them. If the first is none, return False with it left over."""
        in_list = yield from self._next("[")
        text = self._text
        self._skip_now(in_list)
        opening += text[: len(text) - len(self._text)]
        num_calls = self.num_calls
        while (yield from self._call(close)):
            if not (yield from self._skip(",", ";")):
                yield from self._skip("]" if in_list else "")
                yield from self._skip(close)
                return True
        if self.num_calls > num_calls:
            return True
        self._emit("content", self._space + opening)
        return False

    def _call(self, close: str) -> Generator[None, None, bool]:
        # JSON without a marker is a call only if it names a function.
        is_known = self._syntax.calls in ("llama3_json", "json")
        while True:
            name, start, is_json = self._head()
            if name and is_known and name not in self._syntax.tools:
                return False
            if name and not self._is_whole:
                self._begin(name)
                self._text = self._text[start:]
                yield from self._value()
                if is_json and (yield from self._skip("}", ",")) == ",":
                    yield from self._until(None, "}")
                return True
            if (call := self._complete(close)) and (not is_known or call[0] in self._syntax.tools):
                self._begin(call[0])
                self._emit("arguments", call[1])
                self._text = self._text[call[2] :]
                return True
            if self._has_ended or (close and close in self._text):
                return False
            yield

    def _head(self) -> tuple[str, int, bool]:
        """Return the name of the call that the text begins with, and where its arguments do."""
        if found := _JSON_HEAD.match(self._text):
            try:
                return json.loads(f'"{found[1]}"'), found.end(), True
            except ValueError:
                return "", 0, True
        found = _NAME_HEAD.match(self._text)
        return (found[1], found.end(), False) if found else ("", 0, False)

    def _complete(self, close: str) -> tuple[str, str, int] | None:
        """Return name and arguments of the call that the text begins with, and where it ends."""
        end = self._text.find(close) if close else -1
        if end < 0 and not self._has_ended and self._text.rstrip()[-1:] != "}":
            return None
        name, start, is_json = self._head()
        try:
            if name:
                arguments = self._text[start : (stop := _decode(self._text, start)[1])]
                return name, arguments, self._end_of_object() if is_json else stop
            if self._text.lstrip().startswith("{"):
                return *_called(_decode(self._text.lstrip())[0]), self._end_of_object()
        except (ValueError, RecursionError):
            return None
        found = _XML_NAME.match(self._text[: max(end, 0)])
        if not found or not (found[1] or found[2] in self._syntax.tools):
            return None
        name = found[1] or found[2]
        properties = self._syntax.tools.get(name, {}).get("properties")
        values = _typed(_xml_arguments(self._text[:end]), properties)
        return name, json.dumps(values, ensure_ascii=False), end

    def _end_of_object(self) -> int:
        start = len(self._text) - len(self._text.lstrip())
        return _decode(self._text, start)[1]

    def _begin(self, name: str) -> None:
        self.num_calls += 1
        self._emit("name", name)

    def _value(self) -> _Steps:
        """Pass on the JSON object that the text begins with."""
        depth, in_string = 0, False
        while True:
            for found in _STRUCTURE.finditer(self._text):
                if found[0] == '"':
                    in_string = not in_string
                elif not in_string and found[0] in "{}[]":
                    depth += 1 if found[0] in "{[" else -1
                if depth == 0:
                    self._emit("arguments", self._text[: found.end()])
                    self._text = self._text[found.end() :]
                    return
            # An odd backslash escapes the next character.
            num_kept = (len(self._text) - len(self._text.rstrip("\\"))) % 2
            cut = len(self._text) - num_kept
            self._emit("arguments", self._text[:cut])
            self._text = self._text[cut:]
            if self._has_ended:
                return
            yield

    def _channels(self) -> _Steps:
        """Parse the messages of gpt-oss: analysis is reasoning, the others content or calls."""
        while True:
            while "<|message|>" not in self._text:
                if self._has_ended:
                    if "<|channel|>" not in self._text:
                        self._emit("content", self._text.removeprefix("<|start|>assistant"))
                    return
                yield
            header, _, self._text = self._text.partition("<|message|>")
            recipient = _RECIPIENT.search(header) if self._syntax.tools else None
            channel = _CHANNEL.search(header)
            kind: PartKind = "content"
            if recipient and not (self._is_whole and not _is_object(self._text)):
                kind = "arguments"
                self._begin(recipient[1])
                if (yield from self._next(*_MESSAGE_ENDS)) or not self._text.strip():
                    self._emit(kind, "{}")
            elif channel and channel[1] == "analysis" and self._syntax.reasoning:
                kind = "reasoning"
            if not (yield from self._until(kind, *_MESSAGE_ENDS)):
                return

    def _until(self, kind: PartKind | None, *markers: str, trims: bool = True) -> _Found:
        """Pass on text as `kind` (None: drop it) up to a marker; return it, or "" at the end.

        Whitespace before the marker is dropped, and with `trims`, at the start.
        """
        markers = tuple(filter(None, markers))
        while True:
            text = self._text = self._text.lstrip() if trims else self._text
            places = [(place, m) for m in markers if (place := text.find(m)) >= 0]
            place, marker = min(places, default=(len(text), ""))
            text = text[:place]
            if not marker and not self._has_ended:
                text = text[: len(text) - _num_held_back(text, markers)]
            if marker or not self._has_ended:
                stripped = text.rstrip()
                self._space, text = text[len(stripped) :], stripped
            if kind is not None:
                self._emit(kind, text)
            if marker or self._has_ended:
                self._text = self._text[place + len(marker) :]
                return marker
            trims = trims and not text
            self._text = self._text[len(text) :]
            yield

    def _next(self, *texts: str) -> _Found:
        """Return which of `texts` comes next, after whitespace; "": none."""
        while True:
            rest = self._text.lstrip()
            found = next((text for text in texts if text and rest.startswith(text)), "")
            if found or self._has_ended or not any(t and t.startswith(rest) for t in texts):
                return found
            yield

    def _skip(self, *texts: str) -> _Found:
        """Drop and return which of `texts` comes next, after whitespace; "": none."""
        found = yield from self._next(*texts)
        self._skip_now(found)
        return found

    def _skip_now(self, text: str) -> None:
        if text:
            self._text = self._text.lstrip()[len(text) :]


def _num_held_back(text: str, markers: Iterable[str]) -> int:
    """Return the length of the longest end of `text` that may become a marker."""
    longest = 0
    for marker in markers:
        place = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while place >= 0 and not marker.startswith(text[place:]):
            place = text.find(marker[0], place + 1)
        longest = max(longest, len(text) - place if place >= 0 else 0)
    return longest


def _is_object(message: str) -> bool:
    """Return whether the message that a text begins with is a JSON object."""
    ends = (place for end in _MESSAGE_ENDS if (place := message.find(end)) >= 0)
    try:
        body = message[: min(ends, default=len(message))].strip()
        return isinstance(json.loads(body or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _called(call: dict[str, Any]) -> tuple[str, str]:
    """Return name and arguments of a call in JSON; raise ValueError if it is none."""
    inner = call.get("function")
    call = inner if isinstance(inner, dict) else {"name": inner, **call}
    arguments = call.get("arguments", call.get("parameters")) or {}
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict | str):
        raise ValueError("no call of a function")
    if isinstance(arguments, str):
        json.loads(arguments)
        return call["name"], arguments
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def _xml_arguments(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the arguments of a call in Qwen3-Coder's format, or in GLM's."""
    for part in text.split("</parameter>")[:-1]:
        name, _, value = part.partition("<parameter=")[2].partition(">")
        yield name, value
    for part in text.split("</arg_value>")[:-1]:
        key, _, value = part.partition("<arg_value>")
        yield key.partition("<arg_key>")[2].partition("</arg_key>")[0], value


def _typed(arguments: Iterable[tuple[str, str]], properties: object) -> dict[str, Any]:
    """Return arguments by name; those that are no strings by their JSON Schemas are JSON."""
    values: dict[str, Any] = {}
    for name, value in arguments:
        text = value.removeprefix("\n").removesuffix("\n")
        schema = properties.get(name) if isinstance(properties, dict) else None
        kind = schema.get("type", "string") if isinstance(schema, dict) else "string"
        try:
            values[name] = text if "string" in kind else json.loads(text)
        except (ValueError, TypeError, RecursionError):
            values[name] = text
    return values
