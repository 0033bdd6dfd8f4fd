"""Continuations from a text that many requests share."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.worker import ngram as module
from serve_spec.worker.ngram import Corpus, NgramDrafter, load_corpus

TEXTS = st.lists(st.integers(0, 3), max_size=60)
MAX_MATCH = 4


def continuations(text, newest, most):
    """Of every place, by looking through all of them."""
    size = len(newest)
    return [
        tuple(text[i + size : i + size + most])
        for i in range(len(text) - size)
        if text[i : i + size] == newest
    ]


@given(text=TEXTS, newest=st.lists(st.integers(0, 3), min_size=1, max_size=MAX_MATCH))
def test_what_follows_is_found_once_for_every_place(text, newest):
    expected = continuations(text, newest, 3)
    found = list(Corpus(text, MAX_MATCH).continuations(newest, 3))
    assert Counter(found) == Counter(expected)


@given(text=TEXTS, newest=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MATCH))
def test_a_continuation_that_most_places_have_is_the_one(text, newest):
    expected = continuations(text, newest, 2)
    usual, count = Counter(expected).most_common(1)[0] if expected else ((), 0)
    if 2 * count > len(expected):
        assert next(Corpus(text, MAX_MATCH).continuations(newest, 2)) == usual


def test_the_own_text_comes_first_then_the_longest_match_of_the_corpus():
    drafter = NgramDrafter(1, 3, 4, Corpus([1, 2, 3, 9, 9, 8, 3, 7, 7], 3))
    assert drafter.propose("a", [3, 5, 1, 3], 2) == (5, 1), "its own text has it"
    assert drafter.propose("b", [1, 2, 3], 2) == (9, 9)
    assert drafter.propose("c", [8, 3], 2) == (7, 7)
    assert drafter.propose("d", [6], 2) == ()
    assert drafter.propose("e", [3], 0) == ()


def encode(text):
    return list(text.encode())


def test_a_corpus_is_a_text_or_token_ids(tmp_path):
    (tmp_path / "notes.txt").write_text("abcd")
    np.save(tmp_path / "ids.npy", np.array(encode("abcd")))
    for name in ("notes.txt", "ids.npy"):
        corpus = load_corpus(tmp_path / name, encode, 2)
        assert list(corpus.continuations(encode("ab"), 9)) == [tuple(encode("cd"))]
    (tmp_path / "empty.txt").write_text("")
    assert not [*load_corpus(tmp_path / "empty.txt", encode, 2).continuations([1], 1)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("noise.txt", b"\xff\xfe\xff", "cannot be read: .*UTF-8"),
        ("noise.npy", b"nothing", "cannot be read"),
        ("table.npy", np.zeros((2, 2), np.int64), r"int64 \[2, 2\]; give integers"),
        ("shares.npy", np.zeros(2), "float64"),
        ("signed.npy", np.array([3, -1]), "not all numbers are token ids"),
    ],
)
def test_what_is_neither_is_refused_by_name(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(ValueError, match=f"speculative_ngram_corpus=.*{name}.*{message}"):
        load_corpus(path, encode, 2)


def test_of_a_corpus_beyond_the_bound_the_first_tokens_are_used(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_TOKENS", 3)
    (tmp_path / "long.txt").write_text("abcde")
    corpus = load_corpus(tmp_path / "long.txt", encode, 2)
    assert corpus.num_tokens == 3
    assert list(corpus.continuations(encode("b"), 9)) == [tuple(encode("c"))]
