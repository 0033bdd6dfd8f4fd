"""Server-sent events as they arrive: bytes with their times in, a completion out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


class SseParser:
    """Cuts a byte stream into the data of its events, wherever the bytes were cut.

    Lines end in LF or CR LF; comments and fields other than `data` are passed over.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[str]:
        """The events that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [event for line in lines for event in self._take(line.removesuffix(b"\r"))]

    def _take(self, line: bytes) -> Iterable[str]:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif not line and self._data:
            yield b"\n".join(self._data).decode()
            self._data = []


@dataclass
class StreamedCompletion:
    """A completion put together from its events."""

    chunk_s: list[float] = field(default_factory=list)
    """When each event came that brought tokens, by text, by ids or by the end they make."""
    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    num_token_ids: int = 0
    error: str | None = None
    """What broke it: an error frame, a bad frame, or the stream broken off before [DONE]."""

    @property
    def num_tokens(self) -> int:
        """As `usage` says, else counted by the ids in the chunks; 0 where the server sent neither.

        Chunks are not counted: one holds the tokens of a round.
        """
        return int(self.usage.get("completion_tokens", self.num_token_ids))


def read_stream(arrivals: Iterable[tuple[float, bytes]]) -> StreamedCompletion:
    """The completion that came as `arrivals`: times, each with the bytes of that moment."""
    answer, parser = StreamedCompletion(error="broken off"), SseParser()
    for time_s, data in arrivals:
        for event in parser.feed(data):
            if event == DONE:
                answer.error = None
                return answer
            try:
                _add(answer, time_s, json.loads(event))
            except (ValueError, KeyError, TypeError, AttributeError):
                answer.error = "bad frame"
                return answer
            if answer.error == "error frame":
                return answer
    return answer


def _add(answer: StreamedCompletion, time_s: float, payload: Mapping[str, Any]) -> None:
    if "error" in payload:
        answer.error = "error frame"
        return
    answer.usage = payload.get("usage") or answer.usage
    for choice in payload["choices"]:
        token_ids = choice.get("token_ids") or ()
        answer.text += choice["text"]
        answer.num_token_ids += len(token_ids)
        if choice["text"] or token_ids or choice.get("finish_reason"):
            answer.chunk_s.append(time_s)
