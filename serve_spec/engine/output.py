"""Texts of requests: incremental detokenization and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.core.sequence import Sequence as Request
from serve_spec.engine.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
# A token's text depends on its neighbours (spaces, multi-byte characters), so new text is the
# difference of two decodings that share at least this many tokens of context.
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
        self._texts: dict[str, OutputText] = {}

    def add(self, seq: Request) -> None:
        """Begin the text of a request."""
        self._texts[seq.request_id] = OutputText(self._tokenizer, seq)

    def process(self, deltas: Iterable[TokenDelta]) -> list[TokenDelta]:
        """Return the deltas with texts; drop those of texts that have ended."""
        processed = []
        for delta in deltas:
            text = self._texts.get(delta.request_id)
            if text is None:
                continue
            added = text.add(delta)
            processed.append(added)
            if added.finish_reason is not None:
                del self._texts[delta.request_id]
                if delta.finish_reason is None:
                    self._abort(delta.request_id)
        return processed


class OutputText:
    """Text of one request, grown token by token, so that it can stop among accepted drafts.

    `take` returns text that can no longer change: without an incomplete character, or an end that
    may become a stop string. Output tokens that the request comes with are those of another
    engine; their text is not returned again.
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
        self._ids = seq.token_ids[: seq.num_prompt_tokens][-_CONTEXT_TOKENS:]
        self._num_prompt = self._read = len(self._ids)
        self._begin_context(0)
        self._taken = 0
        self._has_kept_end = False
        self.text = ""
        self.finish_reason: FinishReason | None = None
        if emitted := seq.output_token_ids:
            self.push(emitted)
            self.take()

    def add(self, delta: TokenDelta) -> TokenDelta:
        """Return the delta with the text it completes, cut at a stop string."""
        if delta.finish_reason is FinishReason.ABORT:
            return delta
        count = self.push(delta.token_ids, delta.finish_reason)
        delta = delta._replace(text=self.take(), finish_reason=self.finish_reason)
        if count == len(delta.token_ids):
            return delta
        stats = delta.speculation
        if stats is not None:
            num_correct = stats.num_correct_drafts - (len(delta.token_ids) - count)
            stats = replace(stats, num_correct_drafts=num_correct)
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
        if not self._stop:
            self._ids += added  # `take` decodes them at once
        else:
            for count, token in enumerate(added, start=1):
                self._num_tokens += 1
                self._ids.append(token)
                num_new = self._read_to(len(self._ids))
                if self._num_tokens > self._min_tokens and self._cut_at_stop(num_new):
                    return count
        self.finish_reason = reason
        self._has_kept_end = reason is FinishReason.STOP and self._keeps_end
        return len(token_ids)

    def take(self) -> str:
        """Return the text since the last call that can no longer change."""
        self._read_all()
        if self.finish_reason is FinishReason.LENGTH or self._has_kept_end:
            self.text += self._decoded(len(self._ids))[len(self._context) :]
            self._read = len(self._ids)
        end = len(self.text)
        if self._stop and self.finish_reason is None and not self._keeps_end:
            end -= self._held_back()
        new = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return new

    def _decoded(self, end: int) -> str:
        ids = self._ids[self._context_start : end]
        if self._joins_special:
            first = max(0, self._num_prompt - self._context_start)
            return self._tokenizer.decode_joined(ids, first)
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)

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
        """Move complete characters up to token `end` into `text`; return their number."""
        decoded = self._decoded(end)
        new = decoded[len(self._context) :]
        if not new or new.endswith(_INCOMPLETE):
            return 0
        self.text += new
        self._read, self._context = end, decoded
        if end - self._context_start > _LONGEST_CONTEXT_TOKENS:
            self._begin_context(end - _CONTEXT_TOKENS)
        return len(new)

    def _cut_at_stop(self, num_new: int) -> bool:
        """Cut `text` at the earliest stop string that ends in its last `num_new` characters."""
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
