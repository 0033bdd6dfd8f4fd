"""Parse the text of an answer, as it arrives, into reasoning, content and tool calls.

The parts depend on the text only, not on how it is cut: a decision waits for the text it needs.
`transformers.utils.chat_parsing.ResponseParser` returns the arguments of a call when the call is
complete, and raises for broken JSON. Clients expect arguments as they are written, and broken JSON
as content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from serve_spec.serving.protocols.argument_types import typed
from serve_spec.serving.protocols.partial_text import (
    CutCall,
    Found,
    NoCall,
    PartialText,
    Scanner,
    Steps,
    num_held_back,
)

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
_OBJECT = r'(?=\{\s*["}])'
_JSON_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.){1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
    + _OBJECT
)
_JSON_START = re.compile(r'\s*\{\s*(?:["}]|$)')
_NAME_HEAD = re.compile(r"\s*([\w.-]{1,256})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*" + _OBJECT)
_NAME_START = re.compile(r"\s*([\w.-]*)(?:\[[A-Z_]*(?:\]\w*)?)*\s*(?:\{\s*)?")
# Qwen3-Coder's format, which models also write without the marker, and GLM's.
_FUNCTION = "<function="
_CODER_ENDS = ("</function>", "</tool_call>")
_GLM_END = "</tool_call>"
_GLM_NAME = re.compile(r"\s*([^<\n]*)[<\n]")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")


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
    is_parallel: whether the answer goes on after its first call.
    ends_itself: whether a grammar ends an answer that is not parallel.
    shows_reasoning: whether reasoning is returned.
    reasoning_end: the token that ends the reasoning, if it is one.
    """

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_reasoning: bool = False
    is_parallel: bool = True
    ends_itself: bool = False
    shows_reasoning: bool = True
    reasoning_end: int | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser needs, some of which are special tokens."""
        channels = ("<|channel|>",) if "openai" in (self.calls, self.reasoning) else ()
        thoughts = THOUGHTS.get(self.reasoning or "openai", ())
        return tuple(filter(None, (*channels, *thoughts, *_MARKERS.get(self.calls or "json", ()))))


class AnswerParser(PartialText):
    """Parser of one answer. Text that is not yet part of the answer is held back."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        super().__init__()
        self._syntax = syntax
        self._parts: list[Part] = []
        self.num_calls = 0
        """Calls so far."""
        self.has_reasoned = False
        self.is_complete = False
        """Whether the only call that is returned has ended, and with it the answer."""
        self._space = ""
        """Whitespace before the last marker, which is content if no call follows."""
        has_channels = "<|channel|>" in syntax.markers
        self._steps = self._channels() if has_channels else self._answer()

    def feed(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Return the parts that `text` completes. is_last: the answer ends with it."""
        self._text = "" if self.is_complete else self._text + text
        self._has_ended = is_last
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def _emit(self, kind: PartKind, text: str) -> None:
        is_call = kind in ("name", "arguments")
        self.has_reasoned |= kind == "reasoning"
        if text and (kind != "reasoning" or self._syntax.shows_reasoning):
            self._parts.append(Part(kind, text, self.num_calls - 1 if is_call else 0))

    def _answer(self) -> Steps:
        """Parse reasoning at the start, and calls between markers; the rest is content."""
        begin, end = THOUGHTS.get(self._syntax.reasoning or "openai", ("", ""))
        marker, close = _MARKERS.get(self._syntax.calls or "json", ("", ""))
        markers = (marker, _FUNCTION) if self._syntax.calls == "hermes" else (marker,)
        may_be_bare = self._syntax.calls in ("llama3_json", "json")
        trims = False
        if self._syntax.is_reasoning or (yield from self._skip(begin)):
            yield from self._until("reasoning", end)
            self._space, trims = "", True
        while not self.is_complete:
            if may_be_bare and (yield from self._next("{", "[")):
                self._text = self._text.lstrip() if trims else self._text
                may_be_bare = yield from self._calls("", "")
                trims |= may_be_bare
                continue
            found = yield from self._until("content", *markers, trims=trims)
            if not found:
                return
            trims = yield from self._calls(found, close)

    def _calls(self, marker: str, close: str) -> Generator[None, None, bool]:
        """Parse calls, or a list of them. If the first is none, return False with it left over."""
        if marker == _FUNCTION:
            self._text = marker + self._text
        in_list = yield from self._next("[")
        text = self._text
        self._skip_now(in_list)
        opening = text[: len(text) - len(self._text)]
        num_calls = self.num_calls
        while (is_call := (yield from self._call())) and not self.is_complete:
            if not (yield from self._skip(",", ";")):
                yield from self._skip("]" if in_list else "")
                yield from self._skip(close)
                return True
        if self.num_calls > num_calls or (is_call is None and self.num_calls):
            if is_call is None:  # a call that is cut off is not content beside others
                self._text = ""
            return True
        if marker == _FUNCTION:
            self._text = self._text[len(marker) :]
        self._emit("content", self._space + marker + opening)
        return False

    def _call(self) -> Generator[None, None, bool | None]:
        """Parse the call that the text begins with; return whether it is one, None if it is cut."""
        try:
            while not self._text.strip():
                yield from self._more()
            if self._text.lstrip().startswith("{"):
                yield from self._json_call()
            elif self._syntax.calls == "mistral":
                yield from self._named_call()
            elif self._syntax.calls != "hermes":
                return False
            elif (yield from self._next(_FUNCTION)):
                yield from self._coder_call()
            else:
                yield from self._glm_call()
        except NoCall:
            return False
        except CutCall:
            return None
        self.is_complete = not self._syntax.is_parallel
        return True

    def _json_call(self) -> Steps:
        """Parse a call that is an object with a name and arguments."""
        scanner, place = Scanner(), 0
        while not scanner.has_ended:
            if found := _JSON_HEAD.match(self._text):
                self._begin(_unquoted(found[1]), found.end())
                yield from self._balanced("arguments", Scanner())
                if (yield from self._skip("}", ",")) == ",":  # what follows the arguments
                    yield from self._balanced(None, Scanner(depth=1))
                return
            place += scanner.read(self._text[place:])
            if not scanner.has_ended:
                if not _JSON_START.match(self._text):
                    raise NoCall
                yield from self._more()
        name, arguments = _called(self._text[:place])
        self._begin(name, place)
        self._emit("arguments", arguments)

    def _named_call(self) -> Steps:
        """Parse a call that is a name and arguments, as Mistral's newer models write it."""
        while not (found := _NAME_HEAD.match(self._text)):
            start = _NAME_START.fullmatch(self._text)
            if not start or not any(name.startswith(start[1]) for name in self._syntax.tools):
                raise NoCall
            yield from self._more()
        self._begin(found[1], found.end())
        yield from self._balanced("arguments", Scanner())

    def _coder_call(self) -> Steps:
        """Parse a call in Qwen3-Coder's format."""
        _, place = yield from self._tag(0, _FUNCTION)
        end = yield from self._find(">", place)
        name, place = self._text[place:end], end + 1
        if name not in self._syntax.tools:
            raise NoCall
        values = []
        while True:
            tag, place = yield from self._tag(place, "<parameter=", *_CODER_ENDS)
            if tag != "<parameter=":
                break
            start = (yield from self._find(">", place)) + 1
            end = yield from self._value_end(start, "</parameter>", "<parameter=", *_CODER_ENDS)
            values.append((self._text[place : start - 1], self._text[start:end]))
            place = end + len("</parameter>")
        arguments = self._arguments(name, values)
        self._begin(name, place)
        self._emit("arguments", arguments)

    def _glm_call(self) -> Steps:
        """Parse a call in GLM's format."""
        while not (found := _GLM_NAME.match(self._text)):
            begun = self._text.strip()
            if not any(name.startswith(begun) for name in self._syntax.tools):
                raise NoCall
            yield from self._more()
        name, place = found[1].rstrip(), found.end(1)
        values: list[tuple[str, str]] = []
        if name not in self._syntax.tools:
            raise NoCall
        while True:
            tag, start = yield from self._tag(place, "<arg_key>", _GLM_END, may_end=bool(values))
            if tag != "<arg_key>":
                break
            end = yield from self._find("</arg_key>", start)
            key = self._text[start:end]
            _, start = yield from self._tag(end + len("</arg_key>"), "<arg_value>")
            end = yield from self._value_end(start, "</arg_value>", "<arg_key>", _GLM_END)
            values.append((key, self._text[start:end]))
            place = end + len("</arg_value>")
        arguments = self._arguments(name, values)
        self._begin(name, place)
        self._emit("arguments", arguments)

    def _arguments(self, name: str, values: Iterable[tuple[str, str]]) -> str:
        try:
            return json.dumps(typed(values, self._syntax.tools[name]), ensure_ascii=False)
        except RecursionError:
            raise NoCall from None

    def _begin(self, name: str, end: int) -> None:
        """Begin a call, whose text up to `end` has been read."""
        if name not in self._syntax.tools:
            raise NoCall
        self._text = self._text[end:]
        self.num_calls += 1
        self._emit("name", name)

    def _balanced(self, kind: PartKind | None, scanner: Scanner) -> Steps:
        """Pass on text as `kind` (None: drop it) up to the end of the JSON value in it."""
        while True:
            size = scanner.read(self._text)
            if kind is not None:
                self._emit(kind, self._text[:size])
            self._text = self._text[size:]
            if scanner.has_ended or self._has_ended:
                return
            yield

    def _channels(self) -> Steps:
        """Parse the messages of gpt-oss: analysis is reasoning, the others content or calls."""
        while True:
            while "<|message|>" not in self._text:
                if self._has_ended:
                    if "<|channel|>" not in self._text:
                        self._emit("content", self._text.removeprefix("<|start|>assistant"))
                    return
                yield
            header, _, self._text = self._text.partition("<|message|>")
            recipient = _RECIPIENT.search(header)
            channel = _CHANNEL.search(header)
            kind: PartKind = "content"
            if recipient and recipient[1] in self._syntax.tools:
                found = yield from self._next("{", *_MESSAGE_ENDS)
                if found or not self._text.strip():
                    kind = "arguments"
                    self._begin(recipient[1], 0)
                    self._emit(kind, "" if found == "{" else "{}")
            elif channel and channel[1] == "analysis" and self._syntax.reasoning:
                kind = "reasoning"
            ended = yield from self._until(kind, *_MESSAGE_ENDS)
            self.is_complete = kind == "arguments" and not self._syntax.is_parallel
            if self.is_complete or not ended:
                return

    def _until(self, kind: PartKind | None, *markers: str, trims: bool = True) -> Found:
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
                text = text[: len(text) - num_held_back(text, markers)]
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


def _unquoted(text: str) -> str:
    """Return the text of a JSON string."""
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        raise NoCall from None


def _called(text: str) -> tuple[str, str]:
    """Return name and arguments of a call in JSON."""
    try:
        call = json.loads(text)
        inner = call.get("function")
        call = inner if isinstance(inner, dict) else {"name": inner, **call}
        arguments = call.get("arguments", call.get("parameters")) or {}
        if isinstance(arguments, str):
            given, arguments = arguments, json.loads(arguments)
        else:
            given = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise NoCall from None
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        raise NoCall
    return call["name"], given
