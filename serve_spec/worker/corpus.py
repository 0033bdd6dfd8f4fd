"""N-gram drafts from a corpus that all requests share: a code base, documents, earlier outputs.

A suffix array (Manber & Myers 1993) over the first tokens of every suffix, built once. A look-up is
two binary searches on the host.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serve_spec.log import get_logger

logger = get_logger(__name__)

MAX_TOKENS = 1 << 24
"""Most tokens that are used. Each takes 8 bytes, and about 60 while the corpus is built."""
COMPARED_BEYOND = 4
"""Tokens after a match that suffixes are sorted by, so that equal continuations are adjacent."""

_BYTES = 4


class Corpus:
    """A suffix array of token ids. max_match: most tokens of a look-up."""

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
    """Read a text file (UTF-8), or token ids (`.npy`, integers [N]).

    Raises:
        ValueError: the file is neither; names it.
    """
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
