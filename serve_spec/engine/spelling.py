"""The bytes a token stands for: a token may be less than a character, or have no place in texts."""

from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "▁"


class Spelling(NamedTuple):
    """What a token says. Special tokens say their name, and add nothing to a text."""

    said: bytes
    is_special: bool = False


class Speller:
    """Spells the tokens of byte-level vocabularies, and of SentencePiece's as converted for the
    `tokenizers` library: words begin with a mark for the space, bytes are named `<0x0A>`."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token_id: int) -> Spelling:
        """Of one token; ids without a token say nothing."""
        added = self._added.get(token_id)
        if added is not None:
            return Spelling(added.content.encode(), bool(added.special))
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return Spelling(b"")
        if self._is_byte_level:
            return Spelling(bytes(BYTE_CHARACTERS[character] for character in token))
        byte = _BYTE.fullmatch(token)
        if byte:
            return Spelling(bytes.fromhex(byte[1]))
        return Spelling(token.replace(_WORD_START, " ").encode())

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return dict(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._tokenizer.decoder
        # A sequence of decoders shows its parts in this form only.
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def _byte_characters() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    characters = {chr(256 + place): byte for place, byte in enumerate(hidden)}
    return characters | {chr(byte): byte for byte in printable}


BYTE_CHARACTERS = _byte_characters()
"""Bytes by the character that stands for them in byte-level vocabularies."""
