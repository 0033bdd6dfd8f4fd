"""The bytes of tokens, which may be less than a character."""

from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

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
