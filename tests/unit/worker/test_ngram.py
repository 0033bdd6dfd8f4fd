"""Drafts that the text itself holds, tries of continuations, and a text that requests share."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.draft import DraftShape
from serve_spec.worker.drafters import ngram as module
from serve_spec.worker.drafters.ngram import (
    BRANCHING_PLACES,
    Corpus,
    NgramDrafter,
    branched,
    load_corpus,
)

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)
LENGTHS = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))


SHAPES = st.builds(
    lambda steps, more: DraftShape(steps, steps + more, 2), st.integers(1, 5), st.integers(0, 20)
)


def propose(drafter, name, text, most):
    """Return the drafts after a text that is read in steps."""
    while drafter.learn(name, text, 7):
        pass
    return drafter.propose(name, text, most)


def continuations(token_ids, least, longest, most):
    """By looking through the whole text: longer matches first, of these the last ones."""
    ends = []
    for length in range(longest, least - 1, -1):
        suffix = token_ids[-length:]
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == suffix and start + length not in ends:
                ends.append(start + length)
    periods = [(end, len(token_ids) - end) for end in ends]
    return [tuple(token_ids[end + i % period] for i in range(most)) for end, period in periods]


@given(text=TEXTS, lengths=LENGTHS, most=st.integers(0, 9), steps=st.lists(st.integers(1, 9)))
def test_the_last_of_the_longest_matches_goes_on_however_the_text_has_grown(
    text, lengths, most, steps
):
    drafter = NgramDrafter(*lengths, max_steps=9)
    length = 0
    for step in [*steps, len(text)]:
        length = min(length + step, len(text))
        propose(drafter, "other", text[::-1], most)
        found = propose(drafter, "this", text[:length], most)
        every = continuations(text[:length], *lengths, most)
        assert found == next(iter(every), ())


def test_a_text_is_read_in_steps_and_nothing_is_drafted_before_its_end():
    drafter, text = NgramDrafter(1, 2, 7), [1, 2, 3] * 20
    for _ in range(5):
        assert drafter.propose("a", text, 3) == ()
        assert drafter.propose_tree("a", text, DraftShape(1, 3, 2)).token_ids == ()
        assert drafter.learn("a", text, 12) == 12
    assert drafter.learn("a", text, 12) == 0
    assert drafter.propose("a", text, 3) == (1, 2, 3)


def test_a_request_that_left_leaves_nothing_and_no_more_is_drafted_than_there_are_depths():
    drafter = NgramDrafter(1, 2, 7)
    assert propose(drafter, "a", [1, 2, 1], 1) == (2,)
    drafter.forget("a")
    drafter.forget("never here")
    assert propose(drafter, "a", [3, 1], 1) == ()
    assert len(propose(NgramDrafter(1, 3, 4), "a", [1, 2, 1, 2], 9)) == 4


@given(text=TEXTS, lengths=LENGTHS, shape=SHAPES, topk=st.integers(1, 4), grown=st.integers(1, 60))
def test_a_tree_is_the_trie_of_what_followed_every_match_however_the_text_has_grown(
    text, lengths, shape, topk, grown
):
    drafter = NgramDrafter(*lengths, max_steps=9, topk=topk)
    for now in (text[:grown], text):
        found = continuations(now, *lengths, shape.depth)[:BRANCHING_PLACES]
        tree = branched(found, topk, shape.size)
        drafter.learn("this", now, len(now))
        assert drafter.propose_tree("this", now, shape) == tree


def test_a_tree_goes_on_as_a_corpus_does_where_the_text_has_no_match():
    drafter = NgramDrafter(1, 2, 7, Corpus([1, 2, 5, 1, 2, 6, 9, 2, 7], 2), topk=3)
    drafter.learn("a", [1, 2], 2)
    drafter.learn("b", [8, 8, 2, 8], 4)
    tree = drafter.propose_tree("a", [1, 2], DraftShape(1, 3, 2))
    assert sorted(tree.token_ids) == [5, 6, 7], "both longer matches and the shorter one"
    assert tree.token_ids[2] == 7
    assert drafter.propose_tree("b", [8, 8, 2, 8], DraftShape(1, 3, 2)).token_ids == (2, 8)


CONTINUATIONS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), max_size=8)


def paths(tree):
    found = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append((*(found[parent - 1] if parent else ()), token))
    return found


@given(continuations=CONTINUATIONS, topk=st.integers(1, 4), size=st.integers(1, 20))
def test_a_trie_holds_beginnings_of_continuations_once_each_within_its_bounds(
    continuations, topk, size
):
    tree = branched(continuations, topk, size)
    assert len(tree.token_ids) == len(tree.parents) <= size
    assert all(0 <= parent <= number for number, parent in enumerate(tree.parents))
    assert all(tree.parents.count(parent) <= topk for parent in tree.parents)
    assert len(set(paths(tree))) == len(tree.token_ids), "no draft is verified twice"
    assert set(paths(tree)) <= {c[:length] for c in continuations for length in range(1, 6)}
    assert set(continuations) <= set(paths(branched(continuations, 4, 100))), "there is room"


@given(
    continuations=CONTINUATIONS, topk=st.integers(1, 4), size=st.integers(1, 20), more=CONTINUATIONS
)
def test_what_comes_first_goes_first_and_later_ones_take_nothing_from_it(
    continuations, topk, size, more
):
    tree = branched(continuations, topk, size)
    larger = branched([*continuations, *more], topk, size)
    count = len(tree.token_ids)
    assert larger.token_ids[:count] == tree.token_ids
    assert larger.parents[:count] == tree.parents
    if continuations:
        first = continuations[0][:size]
        assert tree.token_ids[: len(first)] == first
        assert tree.parents[: len(first)] == tuple(range(len(first)))


CORPORA = st.lists(st.integers(0, 3), max_size=60)
MAX_MATCH = 4


def followers(text, newest, most):
    size = len(newest)
    return [
        tuple(text[i + size : i + size + most])
        for i in range(len(text) - size)
        if text[i : i + size] == newest
    ]


@given(text=CORPORA, newest=st.lists(st.integers(0, 3), min_size=1, max_size=MAX_MATCH))
def test_what_follows_is_found_once_for_every_place(text, newest):
    expected = followers(text, newest, 3)
    found = list(Corpus(text, MAX_MATCH).continuations(newest, 3))
    assert Counter(found) == Counter(expected)


@given(text=CORPORA, newest=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MATCH))
def test_a_continuation_that_most_places_have_is_the_one(text, newest):
    expected = followers(text, newest, 2)
    usual, count = Counter(expected).most_common(1)[0] if expected else ((), 0)
    if 2 * count > len(expected):
        assert next(Corpus(text, MAX_MATCH).continuations(newest, 2)) == usual


def test_the_own_text_comes_first_then_the_longest_match_of_the_corpus():
    drafter = NgramDrafter(1, 3, 4, Corpus([1, 2, 3, 9, 9, 8, 3, 7, 7], 3))
    assert propose(drafter, "a", [3, 5, 1, 3], 2) == (5, 1), "its own text has it"
    assert propose(drafter, "b", [1, 2, 3], 2) == (9, 9)
    assert propose(drafter, "c", [8, 3], 2) == (7, 7)
    assert propose(drafter, "d", [6], 2) == ()
    assert propose(drafter, "e", [3], 0) == ()


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
