"""Text to tokens and back, with Hugging Face `tokenizers` files."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer

from serve_spec.core.errors import CheckpointError


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

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens the checkpoint puts around a text."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: list[int]) -> str:
        """The text of token_ids without special tokens; incomplete characters become U+FFFD."""
        return str(self._tokenizer.decode(token_ids))
