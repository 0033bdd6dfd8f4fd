"""Log-probabilities in the OpenAI API's formats for completions and chat.

The engine returns token ids; they are converted to bytes and text here, next to the tokenizer.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from typing_extensions import TypedDict  # Python 3.11's own is not enough for FastAPI's schema

from serve_spec.core.request import TokenLogprob
from serve_spec.engine.tokenizer import TokenBytes

TokenBytesLookup: TypeAlias = Callable[[int], TokenBytes]
"""`engine.tokenizer.Tokenizer.token_bytes`."""

UNLIKELY = -9999.0
"""The OpenAI API's value for negligible probabilities; JSON has no infinity."""


class CompletionLogprobs(TypedDict):
    """`logprobs` of a completion's choice or chunk: one item per token in every list.

    `top_logprobs` includes the token itself. The first token of an echo has no log-probability.
    `text_offset` counts characters. Tokens that are not complete characters are shown as
    `bytes:\\xe2\\x82`.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatTopLogprob(TypedDict):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatTopLogprob):
    """A token of the answer. The joined `bytes` are its text; special tokens have none.

    Tokens that are not complete characters are shown as `\\xe2\\x82`.
    """

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(TypedDict):
    """`logprobs` of a chat choice or chunk."""

    content: list[ChatTokenLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    """One likely token at a position of the prompt, as in vLLM."""

    logprob: float
    rank: int
    decoded_token: str


def prompt_logprobs(
    tokens: Sequence[TokenLogprob | None], num_top: int, token_bytes: TokenBytesLookup
) -> list[dict[str, PromptLogprob] | None]:
    """Return vLLM's `prompt_logprobs`: the token and the `num_top` most likely ones, by id."""

    def shown(token: int, logprob: float, rank: int) -> PromptLogprob:
        text = token_bytes(token).data.decode(errors="replace")
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    return [
        None
        if token is None
        else {
            str(token.token_id): shown(token.token_id, token.logprob, token.rank),
            **{
                str(other): shown(other, logprob, rank)
                for rank, (other, logprob) in enumerate(token.top[:num_top], start=1)
            },
        }
        for token in tokens
    ]


class TextOffsets:
    """Offsets of consecutive tokens in the text of one choice, from the character `start`."""

    def __init__(self, start: int = 0) -> None:
        self._num_characters = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, raw: TokenBytes) -> int:
        """Return the offset of the next token; one that continues a character has its offset."""
        start = self._num_characters
        self._num_characters += self._length(raw)
        return start

    def _length(self, raw: TokenBytes) -> int:
        return 0 if raw.is_special else len(self._decoder.decode(raw.data))


class EchoOffsets(TextOffsets):
    """Offsets of the tokens of a prompt in its text.

    Tokens are matched against it: tokenizers add some, and clients may write special ones.
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
    tokens: Iterable[TokenLogprob], token_bytes: TokenBytesLookup, offsets: TextOffsets
) -> CompletionLogprobs:
    """Return `logprobs` of the completions API for the next generated tokens of a choice."""
    return aligned_logprobs(((token.token_id, token) for token in tokens), token_bytes, offsets)


def aligned_logprobs(
    tokens: Iterable[tuple[int, TokenLogprob | None]],
    token_bytes: TokenBytesLookup,
    offsets: TextOffsets,
) -> CompletionLogprobs:
    """Return `logprobs` of the completions API for tokens, such as a prompt's, by id."""
    shown: CompletionLogprobs = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
    }  # fmt: skip
    for token_id, token in tokens:
        raw = token_bytes(token_id)
        shown["tokens"].append(_completion_text(raw))
        shown["text_offset"].append(offsets.next(raw))
        shown["token_logprobs"].append(None if token is None else _finite(token.logprob))
        shown["top_logprobs"].append(None if token is None else _alternatives(token, token_bytes))
    return shown


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Concatenate the log-probabilities of a prompt and its completion."""
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def chat_logprobs(tokens: Iterable[TokenLogprob], token_bytes: TokenBytesLookup) -> ChatLogprobs:
    """Return `logprobs` of the chat API for generated tokens."""
    content: list[ChatTokenLogprob] = [
        {
            **_chat_token(token.token_id, token.logprob, token_bytes),
            "top_logprobs": [_chat_token(other, p, token_bytes) for other, p in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _alternatives(token: TokenLogprob, token_bytes: TokenBytesLookup) -> dict[str, float]:
    """Return log-probabilities by text, most likely first; the token itself is included."""
    pairs = [*token.top, (token.token_id, token.logprob)]
    found: dict[str, float] = {}
    for token_id, logprob in pairs:  # the most likely of tokens with equal text
        found.setdefault(_completion_text(token_bytes(token_id)), _finite(logprob))
    return found


def _chat_token(token_id: int, logprob: float, token_bytes: TokenBytesLookup) -> ChatTopLogprob:
    raw = token_bytes(token_id)
    text = _text(raw)
    return {
        "token": _escaped(raw.data) if text is None else text,
        "logprob": _finite(logprob),
        "bytes": None if raw.is_special else list(raw.data),
    }


def _completion_text(raw: TokenBytes) -> str:
    text = _text(raw)
    return f"bytes:{_escaped(raw.data)}" if text is None else text


def _text(raw: TokenBytes) -> str | None:
    """Return the text of a token, or None if its bytes are not complete characters."""
    try:
        return raw.data.decode() if raw.label is None else raw.label
    except UnicodeDecodeError:
        return None


def labelled(token_bytes: TokenBytesLookup) -> TokenBytesLookup:
    """Return a lookup whose tokens are shown as `token_id:5`."""
    return lambda token: token_bytes(token)._replace(label=f"token_id:{token}")


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, UNLIKELY)
