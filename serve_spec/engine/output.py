"""Incremental detokenization and stop checks."""

from __future__ import annotations

from collections.abc import Collection

from serve_spec.core.request import FinishReason
from serve_spec.core.sequence import Sequence
from serve_spec.engine.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
# A token's text depends on its neighbours (spaces, multi-byte characters), so new text is the
# difference of two decodings that share at least this many tokens of context.
_CONTEXT_TOKENS = 6
# A shorter context is kept, so that it is decoded only once.
_LONGEST_CONTEXT_TOKENS = 24


class OutputText:
    """Text of one request, grown token by token, so that it can stop among accepted drafts.

    `take` returns text that can no longer change: without an incomplete character, or an end that
    may become a stop string.
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
        self._read = len(self._ids)
        self._begin_context(0)
        self._taken = 0
        self.text = ""
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: list[int]) -> int:
        """Add tokens until the text ends. Return how many belong to it.

        A stop token counts as generated but adds no text; a stop string is cut off.
        """
        for count, token in enumerate(token_ids, start=1):
            self._num_remaining -= 1
            if token in self._ends:
                self.finish_reason = FinishReason.STOP
            else:
                self._ids.append(token)
                # Without stop strings `take` decodes all new tokens at once.
                is_stopped = bool(self._stop) and self._stops(self._read_to(len(self._ids)))
                if not is_stopped and self._num_remaining == 0:
                    self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                return count
        return len(token_ids)

    def take(self) -> str:
        """Return the text since the last call that can no longer change."""
        self._read_all()
        if self.finish_reason is FinishReason.LENGTH:
            self.text += self._decoded(len(self._ids))[len(self._context) :]
            self._read = len(self._ids)
        end = len(self.text)
        if self._stop and self.finish_reason is None:
            end -= self._held_back()
        new = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return new

    def _decoded(self, end: int) -> str:
        """Return the text of the context and the tokens up to `end`."""
        return self._tokenizer.decode(self._ids[self._context_start : end])

    def _begin_context(self, start: int) -> None:
        """Decode with context from `start` on from now on."""
        self._context_start = start
        self._context = self._decoded(self._read)

    def _read_all(self) -> None:
        """Move complete characters into `text`, also if later tokens begin another one."""
        if self._read < len(self._ids) and not self._read_to(len(self._ids)):
            for end in range(self._read + 1, len(self._ids)):
                self._read_to(end)

    def _read_to(self, end: int) -> int:
        """Move the text up to token `end` into `text` if its last character is complete.

        Return the number of new characters.
        """
        decoded = self._decoded(end)
        new = decoded[len(self._context) :]
        if not new or new.endswith(_INCOMPLETE):
            return 0
        self.text += new
        self._read, self._context = end, decoded
        if end - self._context_start > _LONGEST_CONTEXT_TOKENS:
            self._begin_context(end - _CONTEXT_TOKENS)
        return len(new)

    def _stops(self, num_new: int) -> bool:
        """Cut `text` at a stop string past `min_tokens`. Return whether there was one."""
        return self._num_remaining < self._may_stop_below and self._cut_at_stop(num_new)

    def _cut_at_stop(self, num_new: int) -> bool:
        """Cut `text` at the earliest stop string that ends in its last `num_new` characters."""
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
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = max(len(stop) - 1 for stop in self._stop)
        for count in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-count:]) for stop in self._stop):
                return count
        return 0
