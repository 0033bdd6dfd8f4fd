"""Texts of requests: incremental detokenization and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.core.sequence import Sequence as Request
from serve_spec.engine.tokenizer import REPLACEMENT, Tokenizer

# A token's text depends on its neighbours (spaces, multi-byte characters), so it is decoded with at
# least this many tokens of context: the 3 bytes of an open character, and a token before them.
_CONTEXT_TOKENS = 6
# A shorter context is kept, so that it is decoded only once.
_LONGEST_CONTEXT_TOKENS = 24


class OutputProcessor:
    """Adds texts to the deltas of an engine, which handles tokens only.

    abort: ends a request in the engine; called when a stop string has ended its text.
    """

    def __init__(self, tokenizer: Tokenizer, abort: Callable[[str], object]) -> None:
        self._tokenizer = tokenizer
        self._abort = abort
        self._texts: dict[str, OutputText | None] = {}
        """Texts by request; None: only tokens are wanted."""

    def add(self, seq: Request) -> None:
        """Begin the text of a request."""
        text = OutputText(self._tokenizer, seq) if seq.params.detokenize else None
        self._texts[seq.request_id] = text

    def forget(self, request_id: str) -> None:
        """Drop the text of a request that has no last delta."""
        self._texts.pop(request_id, None)

    def process(self, deltas: Iterable[TokenDelta]) -> list[TokenDelta]:
        """Return the deltas with texts; drop those of texts that have ended."""
        processed = []
        for delta in deltas:
            if delta.request_id not in self._texts:
                continue
            text = self._texts[delta.request_id]
            added = delta if text is None else text.add(delta)
            processed.append(added)
            if added.finish_reason is not None:
                del self._texts[delta.request_id]
                if delta.finish_reason is None:
                    self._abort(delta.request_id)
        return processed


class OutputText:
    """Text of one request, grown token by token, so that it can stop among accepted drafts.

    `take` returns text that can no longer change: without an incomplete character, or an end that
    may become a stop string. Its parts join to the text of all tokens behind that of the prompt; a
    character that the prompt begins belongs to the answer that completes it. Output tokens that the
    request comes with are those of another engine; their text is not returned again.
    """

    def __init__(self, tokenizer: Tokenizer, seq: Request) -> None:
        params = seq.params
        self._tokenizer = tokenizer
        self._stop = params.stop
        self._keeps_end = params.include_stop_str_in_output
        self._skips_special = params.skip_special_tokens
        self._joins_special = not (self._skips_special or params.spaces_between_special_tokens)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        newest_first = self._shown(reversed(seq.token_ids[: seq.num_prompt_tokens]))
        self._ids = [*islice(newest_first, _CONTEXT_TOKENS)][::-1]
        """The newest tokens that have text."""
        self._num_prompt = len(self._ids)
        self._num_begun = tokenizer.num_open(self._ids)
        """Length of the prompt's incomplete end."""
        self._num_read = len(self._decoded()) - self._num_begun
        """Characters of their text that are in `text`, or the prompt's."""
        self._taken = 0
        self.text = ""
        self.finish_reason: FinishReason | None = None
        if emitted := seq.output_token_ids:
            self.push(emitted)
            self.take()

    def add(self, delta: TokenDelta) -> TokenDelta:
        """Return the delta with the text it completes, cut at a stop string."""
        count = self.push(delta.token_ids, delta.finish_reason)
        delta = delta._replace(text=self.take(), finish_reason=self.finish_reason)
        if count == len(delta.token_ids):
            return delta
        stats = delta.speculation
        if stats is not None:
            stats = stats.without(len(delta.token_ids) - count)
        return delta._replace(
            token_ids=delta.token_ids[:count],
            logprobs=None if delta.logprobs is None else delta.logprobs[:count],
            speculation=stats,
        )

    def push(self, token_ids: Sequence[int], reason: FinishReason | None = None) -> int:
        """Add tokens until a stop string ends the text. Return how many belong to it.

        A stop string, or the text of a token that ends it, is cut off unless the request keeps it.
        reason: why the text ends after them, if it does.
        """
        is_cut = reason is FinishReason.STOP and not self._keeps_end
        added = token_ids[:-1] if is_cut else token_ids
        # A stop string may end at any token; without one, reading many together costs less.
        size = 1 if self._stop else _LONGEST_CONTEXT_TOKENS
        for start in range(0, len(added), size):
            new = added[start : start + size]
            self._num_tokens += len(new)
            self._ids += self._shown(new)
            if self._cut_at_stop(self._read()):
                return start + 1
        if reason is not None and not self._cut_at_stop(self._read(is_last=True)):
            self.finish_reason = reason
        return len(token_ids)

    def take(self) -> str:
        """Return the text since the last call that can no longer change."""
        end = len(self.text)
        if self._stop and self.finish_reason is None and not self._keeps_end:
            end -= self._held_back()
        new = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return new

    def _shown(self, token_ids: Iterable[int]) -> Iterable[int]:
        """Yield the tokens that have text, so that no context is without any."""
        has_text = self._tokenizer.has_text
        skips = self._skips_special
        return (token for token in token_ids if has_text(token, skip_special_tokens=skips))

    def _decoded(self) -> str:
        if self._joins_special:
            return self._tokenizer.decode_joined(self._ids, self._num_prompt)
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skips_special)

    def _read(self, *, is_last: bool = False) -> int:
        """Move complete characters into `text`, with `is_last` all; return their number."""
        decoded = self._decoded()
        num_open = self._tokenizer.num_open(self._ids) if decoded.endswith(REPLACEMENT) else 0
        end = len(decoded) if is_last else len(decoded) - num_open
        new = decoded[self._num_read : end]
        if new and self._num_begun:
            # Bytes that turn out to be no character are the prompt's.
            rest = new.lstrip(REPLACEMENT)
            new = new[min(self._num_begun, len(new) - len(rest)) :]
            self._num_begun = 0
        self.text += new
        self._num_read = max(self._num_read, end)
        if (
            num_old := len(self._ids) - _CONTEXT_TOKENS
        ) > _LONGEST_CONTEXT_TOKENS - _CONTEXT_TOKENS:
            del self._ids[:num_old]
            self._num_prompt = max(0, self._num_prompt - num_old)
            self._num_read = len(self._decoded()) - num_open
        return len(new)

    def _cut_at_stop(self, num_new: int) -> bool:
        """Cut `text` at the earliest stop string that ends in its last `num_new` characters."""
        if not num_new or self._num_tokens <= self._min_tokens:
            return False
        hits = []
        for stop in self._stop:
            first = self.text.find(stop, max(0, len(self.text) - num_new - len(stop) + 1))
            if first >= 0:
                hits.append((first, first + len(stop)))
        if hits:
            self.text = self.text[: min(hits)[self._keeps_end]]
            self.finish_reason = FinishReason.STOP
        return bool(hits)

    def _held_back(self) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = max(len(stop) - 1 for stop in self._stop)
        for count in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-count:]) for stop in self._stop):
                return count
        return 0
