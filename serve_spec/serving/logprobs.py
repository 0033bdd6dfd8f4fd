"""Log-probabilities as the OpenAI API shows them: for completions, and for chat.

Tokens become bytes and text here, where the tokenizer is; the engine speaks of ids alone.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from typing_extensions import TypedDict  # Python 3.11's own is not enough for FastAPI's schema

from serve_spec.core.request import TokenLogprob
from serve_spec.engine.token_bytes import TokenBytes

TokenBytesLookup: TypeAlias = Callable[[int], TokenBytes]
"""`engine.tokenizer.Tokenizer.token_bytes`."""

UNLIKELY = -9999.0
"""What the OpenAI API says of tokens that can hardly come up; JSON has no infinity."""


class CompletionLogprobs(TypedDict):
    """`logprobs` of a completion's choice, or of a chunk: one item per token in every list.

    `top_logprobs` holds the likeliest tokens and the token itself. The first token of an echoed
    prompt has no log-probability. `text_offset` counts characters from the start of the choice's
    text. Tokens that are no whole characters are shown as `bytes:\\xe2\\x82`.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatTopLogprob(TypedDict):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatTopLogprob):
    """A token of the answer. `bytes` of neighbours put together are its text; special tokens, which
    are not part of it, have none. Tokens that are no whole characters are shown as `\\xe2\\x82`."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(TypedDict):
    """`logprobs` of a chat choice, or of a chunk."""

    content: list[ChatTokenLogprob]
    refusal: None


class TextOffsets:
    """Where the tokens of a choice begin in its text, one after the other.

    Give every choice its own, and keep it through the choice's stream.

    start: characters of the text before the first of the tokens.
    """

    def __init__(self, start: int = 0) -> None:
        self._num_characters = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, raw: TokenBytes) -> int:
        """Characters before this token. One that goes on with a character begins where it does."""
        start = self._num_characters
        self._num_characters += self._length(raw)
        return start

    def _length(self, raw: TokenBytes) -> int:
        return 0 if raw.is_special else len(self._decoder.decode(raw.data))


class EchoOffsets(TextOffsets):
    """Where the tokens of a prompt begin in its text.

    The text decides: tokenizers add tokens and spaces to it, and clients may write the names of
    special tokens into it.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def _length(self, raw: TokenBytes) -> int:
        special = raw.is_special
        text = raw.data.decode() if special else self._decoder.decode(raw.data)
        for found in (text, text.removeprefix(" ")):  # SentencePiece puts a space before the text
            if self._text.startswith(found, self._num_characters):
                return len(found)
        return 0 if special else min(len(text), len(self._text) - self._num_characters)


def completion_logprobs(
    entries: Iterable[TokenLogprob], token_bytes: TokenBytesLookup, offsets: TextOffsets
) -> CompletionLogprobs:
    """What the completions API shows of generated tokens.

    entries: of one choice, those after the ones that `offsets` has seen.
    """
    shown = _empty()
    for entry in entries:
        _add(shown, token_bytes(entry.token_id), offsets)
        shown["token_logprobs"].append(_finite(entry.logprob))
        shown["top_logprobs"].append(_alternatives(entry, token_bytes))
    return shown


def echoed_logprobs(
    text: str,
    prompt_ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    token_bytes: TokenBytesLookup,
) -> CompletionLogprobs:
    """What the completions API shows of an echoed prompt, whose first token has no entry.

    text: the prompt as it is echoed.
    entries: `prompt_logprobs` of the engine, aligned with `prompt_ids`.
    """
    shown = _empty()
    offsets = EchoOffsets(text)
    for token, entry in zip(prompt_ids, entries, strict=True):
        _add(shown, token_bytes(token), offsets)
        shown["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
        shown["top_logprobs"].append(None if entry is None else _alternatives(entry, token_bytes))
    return shown


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Both, one after the other: a prompt and its completion."""
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def chat_logprobs(entries: Iterable[TokenLogprob], token_bytes: TokenBytesLookup) -> ChatLogprobs:
    """What the chat API shows of generated tokens."""
    content: list[ChatTokenLogprob] = [
        {
            **_chat_token(entry.token_id, entry.logprob, token_bytes),
            "top_logprobs": [_chat_token(token, p, token_bytes) for token, p in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _empty() -> CompletionLogprobs:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _add(shown: CompletionLogprobs, raw: TokenBytes, offsets: TextOffsets) -> None:
    shown["tokens"].append(_completion_text(raw.data))
    shown["text_offset"].append(offsets.next(raw))


def _alternatives(entry: TokenLogprob, token_bytes: TokenBytesLookup) -> dict[str, float]:
    """Likeliest first, and the token itself last if it is none of them."""
    pairs = [*entry.top, (entry.token_id, entry.logprob)]
    found: dict[str, float] = {}
    for token, logprob in pairs:  # of tokens that read alike, the likeliest
        found.setdefault(_completion_text(token_bytes(token).data), _finite(logprob))
    return found


def _chat_token(token_id: int, logprob: float, token_bytes: TokenBytesLookup) -> ChatTopLogprob:
    raw = token_bytes(token_id)
    text = _text(raw.data)
    return {
        "token": _escaped(raw.data) if text is None else text,
        "logprob": _finite(logprob),
        "bytes": None if raw.is_special else list(raw.data),
    }


def _completion_text(data: bytes) -> str:
    text = _text(data)
    return f"bytes:{_escaped(data)}" if text is None else text


def _text(data: bytes) -> str | None:
    """None: not whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, UNLIKELY)
