"""Drafts from the text itself: how it went on the last time its newest tokens occurred.

Prompt lookup (Saxena 2023; LLMA, arXiv 2304.04487): code, quotations and edits repeat themselves.
It runs on the host, before a round is planned: where nothing matches, nothing is drafted, and the
round costs what a plain one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serve_spec.config import SpeculativeConfig
from serve_spec.drafters.corpus import Corpus, load_corpus


class NgramDrafter:
    """Remembers, for every request, where each of its n-grams occurred last.

    min_match, max_match: tokens that have to match, at least and at most; the longest match counts.
    max_steps: drafts at a time. corpus: where to look when a text has no match of its own.
    """

    def __init__(
        self, min_match: int, max_match: int, max_steps: int, corpus: Corpus | None = None
    ) -> None:
        self.max_steps = max_steps
        self.corpus = corpus
        self._lengths = range(max_match, min_match - 1, -1)
        self._texts: dict[str, _Text] = {}

    def propose(self, request_id: str, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow the committed text `token_ids`; often none."""
        most = min(most, self.max_steps)
        if most < 1:
            return ()
        text = self._texts.setdefault(request_id, _Text())
        text.learn(token_ids, self._lengths)
        for length in self._lengths:
            end = text.ends.get(tuple(token_ids[-length:]))
            if end is not None and length <= len(token_ids):
                return _continued(token_ids, end, most)
        return self._from_corpus(token_ids, most)

    def _from_corpus(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        if self.corpus is None:
            return ()
        lengths = (length for length in self._lengths if length <= len(token_ids))
        found = (self.corpus.continuation(token_ids[-length:], most) for length in lengths)
        return next(filter(None, found), ())

    def forget(self, request_id: str) -> None:
        """The request has left."""
        self._texts.pop(request_id, None)


def build_ngram(
    config: SpeculativeConfig, encode: Callable[[str], list[int]], max_steps: int
) -> NgramDrafter:
    """The drafter a configuration asks for. encode: token ids of a text, for a corpus.

    Raises:
        ValueError: a corpus that can not be used.
    """
    longest, path = config.speculative_ngram_max_match_window_size, config.speculative_ngram_corpus
    corpus = None if path is None else load_corpus(path, encode, longest)
    return NgramDrafter(config.ngram_min_match, longest, max_steps, corpus)


class _Text:
    """The n-grams of one text, each with the place after its last occurrence.

    Only those that something follows: the newest ones are what is looked up. A text only grows.
    """

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self._num_learned = 0

    def learn(self, token_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Takes in all that is new."""
        for end in range(max(1, self._num_learned), len(token_ids)):
            for length in lengths:
                if length <= end:
                    self.ends[tuple(token_ids[end - length : end])] = end
        self._num_learned = len(token_ids)


def _continued(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens as from `start` on; a match that reaches the end repeats itself."""
    found = list(token_ids[start : start + count])
    while len(found) < count:
        found.append(found[len(found) - (len(token_ids) - start)])
    return tuple(found)
