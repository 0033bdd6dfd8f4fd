"""Drafts that the text itself holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.draft import DraftShape, TextDrafts
from serve_spec.worker.ngram import BRANCHING_PLACES, Corpus, NgramDrafter, branched

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)
LENGTHS = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))


SHAPES = st.builds(
    lambda steps, more: DraftShape(steps, steps + more, 2), st.integers(1, 5), st.integers(0, 20)
)


def continuations(token_ids, least, longest, most):
    """By looking through the whole text: longer matches first, of these the last ones."""
    ends: list[int] = []
    for length in range(longest, least - 1, -1):
        suffix = token_ids[-length:]
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == suffix and start + length not in ends:
                ends.append(start + length)
    periods = [(end, len(token_ids) - end) for end in ends]
    return [tuple(token_ids[end + i % period] for i in range(most)) for end, period in periods]


def expected(token_ids, least, longest, most):
    """The longest match, of these the last one."""
    return next(iter(continuations(token_ids, least, longest, most)), ())


def num_kept(tree, future):
    """Drafts of a tree, or of a chain, that a text of this future keeps."""
    parents = tree.parents or range(len(tree.token_ids))
    node, kept = 0, 0
    for token in future:
        drafts = enumerate(zip(tree.token_ids, parents, strict=True), start=1)
        node = next((number for number, draft in drafts if draft == (token, node)), -1)
        if node < 0:
            break
        kept += 1
    return kept


@given(text=TEXTS, lengths=LENGTHS, most=st.integers(0, 9), steps=st.lists(st.integers(1, 9)))
def test_the_last_of_the_longest_matches_goes_on_however_the_text_has_grown(
    text, lengths, most, steps
):
    drafter = NgramDrafter(*lengths, max_steps=9)
    length = 0
    for step in [*steps, len(text)]:
        length = min(length + step, len(text))
        drafter.propose("other", text[::-1], most)
        found = drafter.propose("this", text[:length], most)
        assert found == expected(text[:length], *lengths, most)


def test_no_more_is_drafted_than_there_are_tiers_for():
    assert len(NgramDrafter(1, 3, 4).propose("a", [1, 2, 1, 2], 9)) == 4


def test_a_request_that_left_leaves_nothing():
    drafter = NgramDrafter(1, 2, 7)
    assert drafter.propose("a", [1, 2, 1], 1) == (2,)
    drafter.forget("a")
    drafter.forget("never here")
    assert drafter.propose("a", [3, 1], 1) == ()


@given(text=TEXTS, lengths=LENGTHS, shape=SHAPES, topk=st.integers(1, 4), grown=st.integers(1, 60))
def test_a_tree_is_the_trie_of_what_followed_every_match_however_the_text_has_grown(
    text, lengths, shape, topk, grown
):
    drafter = NgramDrafter(*lengths, max_steps=9, topk=topk)
    for now in (text[:grown], text):
        found = continuations(now, *lengths, shape.depth)[:BRANCHING_PLACES]
        tree = branched(found, topk, shape.size)
        assert drafter.propose_tree("this", now, shape) == tree


@given(
    text=TEXTS,
    lengths=LENGTHS,
    shape=SHAPES,
    topk=st.integers(1, 4),
    corpus=TEXTS,
    future=st.lists(st.integers(0, 3), max_size=6),
)
def test_a_tree_keeps_at_least_what_the_chain_of_its_depth_keeps(
    text, lengths, shape, topk, corpus, future
):
    drafter = NgramDrafter(*lengths, 9, Corpus(corpus, max(lengths)), topk)
    chain = drafter.propose("a", text, shape.depth)
    tree = drafter.propose_tree("a", text, shape)
    assert tree.token_ids[: len(chain)] == chain
    assert num_kept(tree, future) >= num_kept(TextDrafts(chain), future)
    assert bool(tree.token_ids) == bool(chain), "without a match there is no tree"


def test_a_tree_goes_on_as_a_corpus_does_where_the_text_has_no_match():
    drafter = NgramDrafter(1, 2, 7, Corpus([1, 2, 5, 1, 2, 6, 9, 2, 7], 2), topk=3)
    tree = drafter.propose_tree("a", [1, 2], DraftShape(1, 3, 2))
    assert sorted(tree.token_ids) == [5, 6, 7], "both longer matches and the shorter one"
    assert tree.token_ids[2] == 7
    assert drafter.propose_tree("b", [8, 8, 2, 8], DraftShape(1, 3, 2)).token_ids == (2, 8)
