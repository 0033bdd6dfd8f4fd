"""Grammar drafts: the usual tokens of the text that a grammar forces next.

The name of a property is forced, from its quote on. The white space around it is not, but a text
has the same again at places alike, so drafts go on past it:

    generated   {"name": "Ann", "age": 4,
    drafts      ' "email": "'       the space is as before "age", the last quote opens a value
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from serve_spec.structured.compiler import GrammarCompiler, Mask, Matcher

_WHITE_SPACE = b" \t\r\n"
_READ_TOKENS = 128
"""Newest tokens of a text that are searched for its white space."""
_TOKEN_BYTES = 16
"""Bytes of text that are enough for a draft."""


class ForcedText:
    """Finds the text that a grammar forces, and its tokens. Safe to call from any thread."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._masks: dict[bytes, Mask] = {}

    def drafts(
        self, matcher: Matcher, mask: Mask, token_ids: Sequence[int], most: int
    ) -> tuple[int, ...]:
        """Return up to `most` tokens that a text likely goes on with, as its grammar has no choice.

        matcher: at the end of the text; it stays there. mask: of the next draw. token_ids: the
        tokens generated.
        """
        text, is_whole = self._text(matcher.copy(), mask, token_ids, most)
        if not text:
            return ()
        if is_whole:
            return tuple(self._compiler.tokens_of(text)[:most])
        return tuple(self._compiler.settled_tokens_of(text, token_ids[-4:])[:most])

    def _text(
        self, matcher: Matcher, mask: Mask, token_ids: Sequence[int], most: int
    ) -> tuple[bytes, bool]:
        """Return the bytes that come next, and whether their last token ends with them."""
        before, text, num_tokens = b"", b"", 0
        at: Mask | None = mask
        is_last = False
        while not is_last and num_tokens <= most and len(text) < most * _TOKEN_BYTES:
            added = matcher.forced_bytes()
            if not added:
                at = matcher.mask() if at is None else at
                if at is None:
                    break
                before = before or self._compiler.bytes_of(token_ids[-_READ_TOKENS:])
                then, space = self._after_white_space(at, before + text)
                if not then and not space:
                    # Free text or a choice follows. A quote rarely merges with either.
                    return text, not text[-1:].isalnum()
                if space is None:
                    break
                added, is_last = space + then, not then
            added = added[: most * _TOKEN_BYTES]
            tokens = self._compiler.tokens_of(added)
            if not tokens or not matcher.allows_all(tokens) or not matcher.advance(tokens):
                break
            text, num_tokens, at = text + added, num_tokens + len(tokens), None
        return text, False

    def _after_white_space(self, mask: Mask, before: bytes) -> tuple[bytes, bytes | None]:
        """Return the byte that follows any white space, and the white space before it.

        The byte is empty if there are several, or if no white space may come. The white space is
        that of the last place alike, None if there was none.
        """
        white = self._beginning_with(_WHITE_SPACE)
        rest = mask & ~white
        words = np.flatnonzero(rest)
        if not len(words) or not (mask & white).any():
            return b"", None
        word = int(rest[words[0]])
        token = 32 * int(words[0]) + (word & -word).bit_length() - 1
        byte = int(self._compiler.first_bytes[token])
        then = bytes([byte]) if byte >= 0 else b""
        if then and (rest & ~self._beginning_with(then)).any():
            then = b""
        head = before.rstrip(_WHITE_SPACE)
        alike = re.escape(head[-1:]) + rb"([ \t\r\n]*)" + (re.escape(then) or rb"[^ \t\r\n]")
        places = re.findall(alike, head) if head else []
        given = before[len(head) :]
        if not places or not places[-1].startswith(given):
            return then, None
        return then, places[-1][len(given) :]

    def _beginning_with(self, some: bytes) -> Mask:
        """Return the tokens whose first byte is one of these."""
        found = self._masks.get(some)
        if found is None:
            is_one = np.isin(self._compiler.first_bytes, list(some))
            found = self._compiler.mask_of(np.flatnonzero(is_one).tolist())
            self._masks[some] = found
        return found
