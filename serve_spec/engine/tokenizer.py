"""Text to tokens and back, with Hugging Face `tokenizers` files."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from tokenizers import Encoding
from tokenizers import Tokenizer as HFTokenizer

from serve_spec.core.errors import CheckpointError, TextTooLong
from serve_spec.engine.token_bytes import TokenToBytes, max_token_bytes

# A text with more characters per token than prose or code is counted in parts first.
_USUAL_CHARS_PER_TOKEN = 8
_PART_CHARS = 65_536
# Cutting a text adds tokens at the cuts, far fewer than this factor allows for.
_CUT_FACTOR = 1.25


class Tokenizer:
    """The tokenizer of a checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing; save the model with a fast tokenizer (tokenizer.json)"
            )
        try:
            self._tokenizer = HFTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def added_tokens(self) -> dict[str, bool]:
        """Tokens matched before the text is tokenized, and whether they are special."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return {token.content: bool(token.special) for token in added}

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a text.

        It releases the GIL, and fails early for a text that is far too long.

        Args:
            add_special_tokens: add the special tokens the checkpoint puts around a text.
            max_tokens: most tokens the caller has room for; None: no limit.

        Raises:
            TextTooLong: the text has more than `max_tokens` tokens.
        """
        if max_tokens is not None:
            self.refuse_long(text, max_tokens)
        encoding = _encoding(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TextTooLong(len(encoding))
        return list(encoding.ids)

    def encode_literally(self, text: str) -> list[int]:
        """Return the token ids of a text in which added tokens are ordinary characters."""
        return list(_encoding(self._literal, text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text without special tokens; incomplete characters become U+FFFD."""
        return str(self._tokenizer.decode(token_ids))

    def describe(self) -> str:
        """Return its tokenizer.json without truncation and padding."""
        description = json.loads(self._tokenizer.to_str())
        return json.dumps({**description, "truncation": None, "padding": None})

    def refuse_long(self, text: str, max_tokens: int) -> None:
        """Raise TextTooLong for a text that is far too long."""
        if len(text) <= _USUAL_CHARS_PER_TOKEN * max_tokens:
            return
        num_bytes = len(text.encode())
        if self.max_token_bytes and num_bytes > max_tokens * self.max_token_bytes:
            raise TextTooLong(-(-num_bytes // self.max_token_bytes))
        count = 0
        for start in range(0, len(text), _PART_CHARS):
            part = text[start : start + _PART_CHARS]
            count += len(_encoding(self._tokenizer, part, add_special_tokens=False))
            if count > _CUT_FACTOR * max_tokens + 1:
                raise TextTooLong(max_tokens + 1)

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Most bytes of a text that one token covers; None without a bound."""
        return max_token_bytes(json.loads(self._tokenizer.to_str()))

    @cached_property
    def token_bytes(self) -> TokenToBytes:
        """Return a function from token ids to bytes."""
        return TokenToBytes(self._tokenizer)

    @cached_property
    def _literal(self) -> HFTokenizer:
        # The library can ignore special tokens only, and only for a whole tokenizer.
        description = json.loads(self._tokenizer.to_str())
        for token in description["added_tokens"]:
            token["special"] = True
        literal = HFTokenizer.from_str(json.dumps(description))
        literal.encode_special_tokens = True
        return literal


def _encoding(tokenizer: HFTokenizer, text: str, *, add_special_tokens: bool) -> Encoding:
    # Only the library's batch functions release the GIL.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
