"""What a request has said so far: incremental text, and where it ends."""

from __future__ import annotations

from collections.abc import Collection

from serve_spec.core.request import FinishReason
from serve_spec.core.sequence import Sequence
from serve_spec.engine.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
# Tokenizers decode a token by its neighbours (spaces, multi-byte characters), so each piece of
# text is the difference of two decodings that share this many tokens of context.
_CONTEXT_TOKENS = 6


class OutputText:
    """Text of one request, grown token by token, so that a stop inside an accepted run ends it.

    Text is handed out by `take` as soon as it can no longer change: not while a character is
    incomplete, nor while its end could still become a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, seq: Sequence, eos_token_ids: Collection[int]) -> None:
        params = seq.params
        self._tokenizer = tokenizer
        self._stop = params.stop
        self._ends = set(params.stop_token_ids)
        if not params.ignore_eos or params.grammar is not None:
            self._ends |= set(eos_token_ids)
        self._num_remaining = seq.num_remaining
        self._may_stop_below = params.max_tokens - params.min_tokens
        self._ids = seq.token_ids[-_CONTEXT_TOKENS:]
        self._context_start = 0
        self._read = len(self._ids)
        self._taken = 0
        self.text = ""
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: list[int]) -> int:
        """Adds tokens until the text ends; how many of them belong to it.

        A stop token counts as generated but adds no text; a stop string is cut off.
        """
        for count, token in enumerate(token_ids, start=1):
            self._num_remaining -= 1
            if token in self._ends:
                self.finish_reason = FinishReason.STOP
            else:
                self._ids.append(token)
                if self._grow() or self._num_remaining == 0:
                    self.finish_reason = self.finish_reason or FinishReason.LENGTH
            if self.finish_reason is not None:
                return count
        return len(token_ids)

    def take(self) -> str:
        """The text since the last call that can no longer change."""
        if self.finish_reason is FinishReason.LENGTH:
            self.text += self._pending()
            self._read = len(self._ids)
        end = len(self.text) - (0 if self.finish_reason else self._held_back())
        piece = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return piece

    def _pending(self) -> str:
        """Decoded text of the tokens not yet in `text`."""
        known = self._tokenizer.decode(self._ids[self._context_start : self._read])
        return self._tokenizer.decode(self._ids[self._context_start :])[len(known) :]

    def _grow(self) -> bool:
        """Moves complete characters into `text`; whether a stop string appeared."""
        piece = self._pending()
        if not piece or piece.endswith(_INCOMPLETE):
            return False
        self.text += piece
        self._context_start = max(0, self._read - _CONTEXT_TOKENS)
        self._read = len(self._ids)
        return self._num_remaining < self._may_stop_below and self._cut_at_stop(len(piece))

    def _cut_at_stop(self, num_new: int) -> bool:
        """Cuts `text` at the earliest stop string that ends in its last `num_new` characters."""
        hits = []
        for stop in self._stop:
            first = self.text.find(stop, max(0, len(self.text) - num_new - len(stop) + 1))
            if first >= 0:
                hits.append(first)
        if hits:
            self.text = self.text[: min(hits)]
            self.finish_reason = FinishReason.STOP
        return bool(hits)

    def _held_back(self) -> int:
        """Length of the longest end of `text` with which a stop string could begin."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for count in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-count:]) for stop in self._stop):
                return count
        return 0
