"""Drafts from the text itself: how it went on the last time its newest tokens occurred.

Prompt lookup (Saxena 2023; LLMA, arXiv 2304.04487): code, quotations and edits repeat themselves.
It runs on the host, before a round is planned: where nothing matches, nothing is drafted, and the
round costs what a plain one does. Trees hold the other times, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from serve_spec.config import SpeculativeConfig
from serve_spec.core.draft import TextDrafts
from serve_spec.core.draft_shape import DraftShape
from serve_spec.worker.corpus import Corpus, load_corpus
from serve_spec.worker.text_trees import branched

BRANCHING_PLACES = 16
"""Places a tree's continuations are taken from; on texts of the shipped pair, more added nothing.
The host takes about 2 µs for each."""


class NgramDrafter:
    """Remembers, for every request, where each of its n-grams occurred.

    min_match, max_match: tokens that have to match, at least and at most; the longest match counts,
    and of several the last. max_steps: drafts at a time, one after the other. corpus: where to look
    when a text has no match of its own. topk: children of a draft in a tree.
    """

    def __init__(
        self,
        min_match: int,
        max_match: int,
        max_steps: int,
        corpus: Corpus | None = None,
        topk: int = 1,
    ) -> None:
        self.max_steps = max_steps
        self.corpus = corpus
        self.topk = topk
        self._lengths = range(max_match, min_match - 1, -1)
        self._texts: dict[str, _Text] = {}

    def propose(self, request_id: str, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow the committed text `token_ids`; often none."""
        most = min(most, self.max_steps)
        if most < 1:
            return ()
        return next(self._continuations(request_id, token_ids, most), ())

    def propose_tree(
        self, request_id: str, token_ids: Sequence[int], shape: DraftShape
    ) -> TextDrafts:
        """The continuations of more places: where longer matches are, the newest first."""
        most = min(shape.depth, self.max_steps)
        found = self._continuations(request_id, token_ids, most)
        return branched(islice(found, BRANCHING_PLACES), self.topk, shape.size)

    def _continuations(
        self, request_id: str, token_ids: Sequence[int], most: int
    ) -> Iterator[tuple[int, ...]]:
        """What followed the newest tokens elsewhere, up to `most` tokens each, the best first."""
        text = self._texts.setdefault(request_id, _Text(self._lengths))
        text.learn(token_ids)
        end = None
        for end in text.ends(token_ids):
            yield _continued(token_ids, end, most)
        if end is None:
            yield from self._from_corpus(token_ids, most)

    def _from_corpus(self, token_ids: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
        if self.corpus is None:
            return
        for length in self._lengths:
            if length <= len(token_ids):
                yield from self.corpus.continuations(token_ids[-length:], most)

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
    topk = config.speculative_eagle_topk
    return NgramDrafter(config.ngram_min_match, longest, max_steps, corpus, topk)


class _Text:
    """The n-grams of one text, each with the places after its occurrences.

    Only those that something follows: the newest ones are what is looked up. A text only grows.
    lengths: of n-grams, descending.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._newest: dict[tuple[int, ...], int] = {}
        self._earlier: dict[int, list[int]] = {length: [0] * length for length in lengths}
        """By length and place, the place after the occurrence before that; 0: there is none."""

    def learn(self, token_ids: Sequence[int]) -> None:
        """Takes in all that is new."""
        for length, earlier in self._earlier.items():
            for end in range(len(earlier), len(token_ids)):
                ngram = tuple(token_ids[end - length : end])
                earlier.append(self._newest.get(ngram, 0))
                self._newest[ngram] = end

    def ends(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Places after what `token_ids` ends with: of longer n-grams first, the newest first."""
        seen: set[int] = set()
        for length, earlier in self._earlier.items():
            ngram = tuple(token_ids[-length:])
            end = self._newest.get(ngram, 0) if len(ngram) == length else 0
            while end:
                if end not in seen:
                    seen.add(end)
                    yield end
                end = earlier[end]


def _continued(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens as from `start` on; a match that reaches the end repeats itself."""
    found = list(token_ids[start : start + count])
    while len(found) < count:
        found.append(found[len(found) - (len(token_ids) - start)])
    return tuple(found)
