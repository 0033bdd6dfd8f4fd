"""What a client writes is text, also where it spells one of the model's control tokens.

Control tokens in a conversation are the chat template's to write. Those that a client's texts spell
are marked before the template is rendered, so that the tokenizer can tell them from the template's.
The rest of the text is encoded as ever, so a conversation without them has the usual token ids.
"""

from __future__ import annotations

import re
from typing import Protocol

from serve_spec.core.errors import TextTooLong

# A noncharacter of Unicode: no text has a use for it.
_MARK = "\ufdd0"
_NEVER = "(?!)"


class TextEncoder(Protocol):
    """What is used of `engine.tokenizer.Tokenizer`."""

    @property
    def added_tokens(self) -> dict[str, bool]:
        """Tokens found before anything else, and whether they are special."""
        ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return token ids, those of added tokens included; raise TextTooLong for more than
        `max_tokens`.
        """
        ...

    def encode_literally(self, text: str) -> list[int]:
        """Token ids of a text in which added tokens are ordinary characters."""
        ...


class ControlTokens:
    """Special tokens of a tokenizer, and other added tokens that the chat template writes."""

    def __init__(self, tokenizer: TextEncoder, template: str) -> None:
        self._tokenizer = tokenizer
        names = [
            name
            for name, special in tokenizer.added_tokens.items()
            if special or (name in template and not name.isspace())
        ]
        # Longest first: a token may begin like another one.
        names.sort(key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, names)) or _NEVER)
        whole = "|".join(re.escape(_marked(name)) for name in names) or _NEVER
        # A template may cut a marked token in two; the marks that are left keep it so.
        self._marks = re.compile(f"({whole})|{_MARK}")

    def mark(self, text: str) -> str:
        """A client's text for the template, control tokens marked."""
        return self._spelled.sub(lambda found: _marked(found[0]), text.replace(_MARK, ""))

    def encode(
        self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of what the template made of marked texts.

        Raises:
            TextTooLong: they are more than `max_tokens`.
        """
        # Text and marked tokens in turns; None is a mark that stood alone.
        first, *rest = self._marks.split(text)
        token_ids = self._tokenizer.encode(
            first, add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )
        for index, piece in enumerate(rest):
            if piece:
                plain, is_marked = piece.replace(_MARK, ""), index % 2 == 0
                token_ids += self._inner(plain, max_tokens, is_marked=is_marked)
            if max_tokens is not None and len(token_ids) > max_tokens:
                raise TextTooLong(len(token_ids))
        return token_ids

    def _inner(self, piece: str, max_tokens: int | None, *, is_marked: bool) -> list[int]:
        """Token ids inside a text; some tokenizers put a space before whatever they are given."""
        before = self._encode("\n", None, is_marked=is_marked)
        most = None if max_tokens is None else max_tokens + len(before)
        token_ids = self._encode(f"\n{piece}", most, is_marked=is_marked)
        if token_ids[: len(before)] == before:
            return token_ids[len(before) :]
        return self._encode(piece, max_tokens, is_marked=is_marked)

    def _encode(self, text: str, max_tokens: int | None, *, is_marked: bool) -> list[int]:
        if is_marked:
            return self._tokenizer.encode_literally(text)
        return self._tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)


def _marked(name: str) -> str:
    """A token with marks around it and within it."""
    return _MARK.join(("", name[:1], *([name[1:]] if name[1:] else []), ""))
