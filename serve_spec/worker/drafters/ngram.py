"""N-gram drafts: what followed the last occurrence of the newest tokens.

Prompt lookup (Saxena 2023; LLMA, arXiv 2304.04487), on the host, before a step is planned. Without
a match nothing is drafted, and the step costs as much as a plain one. Trees hold the continuations
of several occurrences.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serve_spec.config import SpeculativeConfig
from serve_spec.core.draft import DraftShape, NgramDrafts
from serve_spec.log import get_logger


def branched(
    continuations: Iterable[Sequence[int]], topk: int, num_draft_tokens: int
) -> NgramDrafts:
    """Return the trie of `continuations`, cut to `num_draft_tokens` tokens of `topk` children."""
    token_ids: list[int] = []
    parents: list[int] = []
    children: list[dict[int, int]] = [{}]
    for continuation in continuations:
        parent = 0
        for token in continuation:
            if token not in children[parent]:
                if len(children[parent]) == topk or len(token_ids) == num_draft_tokens:
                    break
                token_ids.append(token)
                parents.append(parent)
                children[parent][token] = len(token_ids)
                children.append({})
            parent = children[parent][token]
        if len(token_ids) == num_draft_tokens:
            break
    return NgramDrafts(tuple(token_ids), tuple(parents))


BRANCHING_PLACES = 16
"""Most occurrences that a tree takes continuations from; each costs the host about 2 µs."""


@dataclass(eq=False, repr=False)
class NgramDrafter:
    """Keeps an index of each request's n-grams.

    min_match, max_match: tokens of a match; the longest wins, then the newest. max_steps: most
    drafts of a chain. corpus: looked up if the text has no match. topk: children of a tree's draft.
    """

    min_match: int
    max_match: int
    max_steps: int
    corpus: Corpus | None = None
    topk: int = 1

    def __post_init__(self) -> None:
        self._lengths = range(self.max_match, self.min_match - 1, -1)
        self._texts: dict[str, _Text] = {}
        self._matches: dict[str, int] = {}

    def learn(self, request_id: str, token_ids: Sequence[int], most: int) -> int:
        """See `NgramDrafter`."""
        return self._text(request_id).learn(token_ids, most)

    def _text(self, request_id: str) -> _Text:
        text = self._texts.get(request_id)
        if text is None:
            text = self._texts[request_id] = _Text(self._lengths)
        return text

    def propose(
        self, request_id: str, token_ids: Sequence[int], most: int, first: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """See `NgramDrafter`."""
        most = min(most, self.max_steps)
        if most < 1:
            return ()
        return next(self._continuations(request_id, token_ids, most, first), ())

    def propose_tree(
        self,
        request_id: str,
        token_ids: Sequence[int],
        shape: DraftShape,
        first: Sequence[int] = (),
    ) -> NgramDrafts:
        """Return a tree of the continuations of several matches: longer ones first, then newer."""
        most = min(shape.depth, self.max_steps)
        found = self._continuations(request_id, token_ids, most, first)
        return branched(islice(found, BRANCHING_PLACES), self.topk, shape.size)

    def match_length(self, request_id: str) -> int:
        """See `NgramDrafter`: of the first match, if a tree holds several."""
        return self._matches.get(request_id, 0)

    def _continuations(
        self, request_id: str, given: Sequence[int], most: int, first: Sequence[int]
    ) -> Iterator[tuple[int, ...]]:
        """Yield what followed the newest tokens elsewhere, up to `most` tokens, the best first."""
        text = self._text(request_id)
        if text.num_tokens < len(given):
            return
        token_ids = [*given, *first] if first else given
        found = ((n, _continued(token_ids, end, most)) for n, end in text.ends(token_ids))
        best = next(found, None)
        rest: Iterator[tuple[int, tuple[int, ...]]] = found
        if best is None:
            rest = self._from_corpus(token_ids, most)
            best = next(rest, None)
        if best is not None:
            self._matches[request_id] = best[0]
            yield best[1]
            yield from (continuation for _, continuation in rest)

    def _from_corpus(
        self, token_ids: Sequence[int], most: int
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield continuations from the corpus, each after the tokens of its match."""
        if self.corpus is None:
            return
        for length in self._lengths:
            if length <= len(token_ids):
                for found in self.corpus.continuations(token_ids[-length:], most):
                    yield length, found

    def forget(self, request_id: str) -> None:
        """See `NgramDrafter`."""
        self._texts.pop(request_id, None)
        self._matches.pop(request_id, None)


def build_ngram(
    config: SpeculativeConfig, encode: Callable[[str], list[int]], max_steps: int
) -> NgramDrafter:
    """Return the configured n-gram drafter; raise ValueError if the corpus cannot be used."""
    longest, path = config.speculative_ngram_max_match_window_size, config.speculative_ngram_corpus
    corpus = None if path is None else load_corpus(path, encode, longest)
    topk = config.topk
    return NgramDrafter(config.ngram_min_match, longest, max_steps, corpus, topk)


class _Text:
    """Index of the n-grams of a growing text: the positions after their occurrences.

    It lacks the n-grams at the end of the text, which are looked up. lengths: descending.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.num_tokens = 0
        """Tokens that are known; until it is all of them, matches would be old ones."""
        self._newest: dict[tuple[int, ...], int] = {}
        self._earlier: dict[int, list[int]] = {length: [0] * length for length in lengths}
        """By length and end: the end of the occurrence before it; 0: none."""

    def learn(self, token_ids: Sequence[int], most: int) -> int:
        """Add the n-grams of at most `most` new tokens; return their number."""
        before = self.num_tokens
        self.num_tokens = min(len(token_ids), before + most)
        for length, earlier in self._earlier.items():
            for end in range(len(earlier), self.num_tokens):
                ngram = tuple(token_ids[end - length : end])
                earlier.append(self._newest.get(ngram, 0))
                self._newest[ngram] = end
        return self.num_tokens - before

    def ends(self, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield length and end of earlier matches of the last tokens: longer first, then newer."""
        seen: set[int] = set()
        for length, earlier in self._earlier.items():
            ngram = tuple(token_ids[-length:])
            end = self._newest.get(ngram, 0) if len(ngram) == length else 0
            while end:
                if end not in seen:
                    seen.add(end)
                    yield length, end
                end = earlier[end]


def _continued(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """Return `count` tokens from `start` on, repeating them past the end of the text."""
    found = list(token_ids[start : start + count])
    while len(found) < count:
        found.append(found[len(found) - (len(token_ids) - start)])
    return tuple(found)


logger = get_logger(__name__)

MAX_TOKENS = 1 << 24
"""Most tokens that are used. Each takes 8 bytes, and about 60 while the corpus is built."""
COMPARED_BEYOND = 4
"""Tokens after a match that suffixes are sorted by, so that equal continuations are adjacent."""

_BYTES = 4


class Corpus:
    """A text that all requests share: a code base, documents, earlier outputs.

    A suffix array (Manber & Myers 1993) over the first tokens of every suffix, built once. A
    look-up is two binary searches. max_match: most tokens of a look-up.
    """

    def __init__(self, token_ids: Sequence[int] | NDArray[np.int64], max_match: int) -> None:
        self.num_tokens = len(token_ids)
        depth = max_match + COMPARED_BEYOND
        padded = np.zeros(self.num_tokens + depth, np.uint32)
        padded[: self.num_tokens] = np.asarray(token_ids) + 1  # 0: the end
        # Big-endian bytes are in the order of their numbers.
        self._bytes = padded.astype(">u4").tobytes()
        keys = [padded[i : i + self.num_tokens] for i in reversed(range(depth))]
        self._places = array("I", np.lexsort(keys).astype(np.uint32).tobytes())

    def continuations(self, newest: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
        """Yield up to `most` tokens after each occurrence of `newest`.

        Occurrences are sorted by what follows. The middle one comes first, because it likely has
        the most frequent continuation, then the middles of both halves, and so on.
        """
        wanted = (np.asarray(newest) + 1).astype(">u4").tobytes()

        def stands_at(place: int) -> bytes:
            return self._bytes[_BYTES * place : _BYTES * place + len(wanted)]

        first = bisect_left(self._places, wanted, key=stands_at)
        last = bisect_right(self._places, wanted, lo=first, key=stands_at)
        if first < last and self._places[first] + len(newest) == self.num_tokens:
            first += 1  # the end of the corpus, which nothing follows, is sorted first
        for number in _middles(first, last):
            start = self._places[number] + len(newest)
            end = min(start + most, self.num_tokens)
            found = np.frombuffer(self._bytes[_BYTES * start : _BYTES * end], ">u4")
            yield tuple((found - 1).tolist())


def _middles(first: int, last: int) -> Iterator[int]:
    """Yield `first` to `last - 1`: the middle, then the middles of both halves, and so on."""
    parts = deque([(first, last)])
    while parts:
        low, high = parts.popleft()
        if low < high:
            middle = (low + high) // 2
            yield middle
            parts += [(low, middle), (middle + 1, high)]


def load_corpus(path: Path, encode: Callable[[str], list[int]], max_match: int) -> Corpus:
    """Read a text file (UTF-8), or token ids (`.npy`, integers [N]), or raise ValueError."""
    key = f"speculative_ngram_corpus={str(path)!r}"
    try:
        if path.suffix == ".npy":
            token_ids = np.load(path, allow_pickle=False)
        else:
            token_ids = np.array(encode(path.read_text(encoding="utf-8")), dtype=np.int64)
    except (OSError, ValueError) as error:
        fix = "give a text file (UTF-8), or token ids as .npy"
        raise ValueError(f"{key}: cannot be read: {error}; {fix}") from error
    if token_ids.ndim != 1 or not np.issubdtype(token_ids.dtype, np.integer):
        shape = f"{token_ids.dtype} {list(token_ids.shape)}"
        raise ValueError(f"{key}: the file holds {shape}; give integers [N]")
    if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < 2**31:
        raise ValueError(f"{key}: not all numbers are token ids; give integers in [0, 2^31)")
    if len(token_ids) > MAX_TOKENS:
        logger.warning(
            "%s: only the first %d of %d tokens are used", path, MAX_TOKENS, len(token_ids)
        )  # fmt: skip
    corpus = Corpus(token_ids[:MAX_TOKENS], max_match)
    logger.info("%s: n-gram drafts from a corpus of %d tokens", path, corpus.num_tokens)
    return corpus
