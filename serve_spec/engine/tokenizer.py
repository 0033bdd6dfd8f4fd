"""Text to tokens and back, with Hugging Face `tokenizers` files."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer

from serve_spec.core.errors import CheckpointError
from serve_spec.engine.spelling import Speller


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
            raise CheckpointError(f"{path} can not be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def added_tokens(self) -> dict[str, bool]:
        """Tokens that are found in a text before anything else, and whether they are special."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return {token.content: bool(token.special) for token in added}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids.

        add_special_tokens: with the special tokens the checkpoint puts around a text.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_literally(self, text: str) -> list[int]:
        """Token ids of a text in which added tokens are characters like any others."""
        return list(self._literal.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        """The text of token_ids without special tokens; incomplete characters become U+FFFD."""
        return str(self._tokenizer.decode(token_ids))

    def describe(self) -> str:
        """Its tokenizer.json, without what would cut or pad a text."""
        description = json.loads(self._tokenizer.to_str())
        return json.dumps({**description, "truncation": None, "padding": None})

    @cached_property
    def spell(self) -> Speller:
        """The bytes of one token."""
        return Speller(self._tokenizer)

    @cached_property
    def _literal(self) -> HFTokenizer:
        # Only special tokens can be switched off, and only for a whole tokenizer.
        description = json.loads(self._tokenizer.to_str())
        for token in description["added_tokens"]:
            token["special"] = True
        literal = HFTokenizer.from_str(json.dumps(description))
        literal.encode_special_tokens = True
        return literal
