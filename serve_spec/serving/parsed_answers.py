"""Chat answers with reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.serving.answers import (
    TEXT_MARK,
    AnswerHead,
    ChatFormat,
    JSONObject,
    Usage,
    encode_text,
    event,
)
from serve_spec.serving.logprobs import TokenBytesLookup
from serve_spec.serving.parsers import AnswerParser, AnswerSyntax, Part
from serve_spec.serving.tools import call_id


class ParsedChatFormat(ChatFormat):
    """Format of parsed chat answers; a chunk has the log-probabilities of the tokens it begins."""

    def __init__(
        self, head: AnswerHead, syntax: AnswerSyntax, token_bytes: TokenBytesLookup | None = None
    ) -> None:
        super().__init__(head, token_bytes)
        self._syntax = syntax
        self._parsers: dict[int, AnswerParser] = {}
        self._num_reasoning_tokens: dict[int, tuple[int, bool]] = {}
        """Tokens of each choice up to the end of its reasoning, and whether it has ended."""
        self._around_parts: dict[tuple[int, str, int], list[bytes]] = {}

    def frame(self, index: int, delta: TokenDelta) -> bytes:
        """Return the events of the parts that `delta` completes; there may be none."""
        if self.sends_tokens or delta.finish_reason is not None:
            return b"".join(event(chunk) for chunk in self.chunks(index, delta))
        return b"".join(self._event(index, part) for part in self._parts(index, delta))

    def chunks(self, index: int, delta: TokenDelta) -> list[JSONObject]:
        """See `AnswerFormat.chunks`."""
        texts = [self._delta(index, part) for part in self._parts(index, delta)]
        is_last = delta.finish_reason is not None
        if is_last or (not texts and self.sends_tokens):
            texts.append({})
        choices = [_choice_of(index, text) for text in texts]
        chunks = [self._chunk(choice) for choice in choices]
        if chunks:
            ending = self._ending([delta])
            choices[0]["logprobs"] = ending["logprobs"]
            choices[-1]["finish_reason"] = _reason(ending, self._parsers[index].num_calls)
            self._detail(chunks[0], choices[0], index, [delta])
        return chunks

    def whole(self, choices: Sequence[Sequence[TokenDelta]], counts: Usage) -> JSONObject:
        """See `AnswerFormat.whole`."""
        body = super().whole(choices, counts)
        assert isinstance(body, dict), "one answer"
        return {**body, "usage": self._detailed(counts)}

    def usage_chunk(self, counts: Usage) -> JSONObject:
        """See `AnswerFormat.usage_chunk`."""
        return super().usage_chunk(self._detailed(counts))

    def _detailed(self, counts: Usage) -> Usage:
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
        """Count tokens up to the end of the reasoning."""
        num_tokens, has_ended = self._num_reasoning_tokens.get(index, (0, False))
        if not has_ended:
            end = self._syntax.reasoning_end
            has_ended = end in token_ids
            num_tokens += token_ids.index(end) + 1 if end in token_ids else len(token_ids)
            self._num_reasoning_tokens[index] = num_tokens, has_ended

    def _parts(self, index: int, delta: TokenDelta) -> list[Part]:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = AnswerParser(self._syntax)
        self._count(index, delta.token_ids)
        return parser.feed(delta.text, is_last=delta.finish_reason is not None)

    def _event(self, index: int, part: Part) -> bytes:
        """Return a part as an event. The bytes around its text are encoded once."""
        if part.kind == "name":
            return event(self._chunk(_choice_of(index, self._delta(index, part))))
        key = index, part.kind, part.call
        around = self._around_parts.get(key)
        if around is None:
            marked = _choice_of(index, self._delta(index, part._replace(text=TEXT_MARK)))
            num_places = 2 if part.kind == "reasoning" else 1
            around = event(self._chunk(marked)).rsplit(encode_text(TEXT_MARK), num_places)
            self._around_parts[key] = around
        return encode_text(part.text).join(around)

    def _choice(self, index: int, deltas: Sequence[TokenDelta]) -> JSONObject:
        parser = self._parsers[index] = AnswerParser(self._syntax, is_whole=True)
        self._count(index, [token for delta in deltas for token in delta.token_ids])
        parts = parser.feed("".join(delta.text for delta in deltas), is_last=True)
        content = "".join(part.text for part in parts if part.kind == "content")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        calls = [self._call(index, part) for part in parts if part.kind == "name"]
        for part in parts:
            if part.kind == "arguments":
                calls[part.call]["function"]["arguments"] += part.text
        message: JSONObject = {
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

    def _delta(self, index: int, part: Part) -> JSONObject:
        """Return the `delta` of a chunk."""
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text, "reasoning": part.text}
        if part.kind == "name":
            return {"tool_calls": [{"index": part.call, **self._call(index, part)}]}
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}

    def _call(self, index: int, part: Part) -> dict[str, Any]:
        return {
            "id": call_id(self.head.id, index, part.call, self._syntax),
            "type": "function",
            "function": {"name": part.text, "arguments": ""},
        }


def _choice_of(index: int, delta: JSONObject) -> JSONObject:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _reason(ending: JSONObject, num_calls: int) -> object:
    is_stop = ending["finish_reason"] == FinishReason.STOP.value
    return "tool_calls" if num_calls and is_stop else ending["finish_reason"]
