"""The bytes of tokens, which may be less than a character."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

# Steps that never drop or shorten text. Split and Replace depend on their settings.
_HARMLESS = frozenset({"ByteLevel", "Digits", "Metaspace", "Prepend"})
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def max_token_bytes(tokenizer: Mapping[str, Any]) -> int | None:
    """Return the bound, or None for a tokenizer that may drop or merge text without a bound.

    tokenizer: the content of tokenizer.json, as the `tokenizers` library writes it.
    """
    model = tokenizer["model"]
    added = tokenizer["added_tokens"]
    steps = [*_steps(tokenizer.get("normalizer")), *_steps(tokenizer.get("pre_tokenizer"))]
    if not all(map(_keeps_text, steps)):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # such a token takes the white space around it
    vocab = model.get("vocab", ())
    names = vocab if isinstance(vocab, Mapping) else [name for name, _ in vocab]
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    every_byte = is_byte_level and set(BYTE_CHARACTERS).issubset(names)
    if not (model.get("byte_fallback") or every_byte):
        return None  # one token, or none, may stand for any unknown text
    lengths = [len(name) if is_byte_level else _num_bytes(name) for name in names]
    return max([*lengths, *(len(token["content"].encode()) for token in added)], default=None)


def _num_bytes(name: str) -> int:
    return 1 if _BYTE_TOKEN.fullmatch(name) else len(name.encode())


def _steps(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return a normalizer or pre-tokenizer as the list of its parts."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    parts = step.get("normalizers") or step.get("pretokenizers") or []
    return [inner for part in parts for inner in _steps(part)]


def _keeps_text(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Split":
        return bool(part["behavior"] != "Removed")
    if part["type"] == "Replace":
        found = part["pattern"].get("String")
        return found is not None and len(part["content"].encode()) >= len(found.encode())
    return part["type"] in _HARMLESS


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "▁"


class TokenBytes(NamedTuple):
    """Bytes of a token. Special tokens have those of their name, and add no text."""

    data: bytes
    is_special: bool = False


class TokenToBytes:
    """Maps token ids to bytes, for byte-level vocabularies and converted SentencePiece ones, where
    words begin with a mark for the space and bytes are named `<0x0A>`."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token_id: int) -> TokenBytes:
        """Return the bytes of one token; none for unknown ids."""
        added = self._added.get(token_id)
        if added is not None:
            return TokenBytes(added.content.encode(), bool(added.special))
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return TokenBytes(b"")
        if self._is_byte_level:
            return TokenBytes(bytes(BYTE_CHARACTERS[character] for character in token))
        byte = _BYTE.fullmatch(token)
        if byte:
            return TokenBytes(bytes.fromhex(byte[1]))
        return TokenBytes(token.replace(_WORD_START, " ").encode())

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return dict(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._tokenizer.decoder
        # The parts of a sequence of decoders are visible in this form only.
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def _byte_characters() -> dict[str, int]:
    """Return bytes by the character that stands for them in byte-level vocabularies (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    characters = {chr(256 + place): byte for place, byte in enumerate(hidden)}
    return characters | {chr(byte): byte for byte in printable}


BYTE_CHARACTERS = _byte_characters()
"""See `_byte_characters`."""
