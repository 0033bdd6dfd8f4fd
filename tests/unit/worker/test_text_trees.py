"""Tries of continuations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.worker.ngram import branched

CONTINUATIONS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), max_size=8)
TOPK = st.integers(1, 4)
SIZES = st.integers(1, 20)
ROOM_FOR_ALL = 100


def paths(tree):
    """The tokens from the root to each draft."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append((*(found[parent - 1] if parent else ()), token))
    return found


@given(continuations=CONTINUATIONS, topk=TOPK, size=SIZES)
def test_a_tree_keeps_within_its_bounds_and_holds_the_parents_of_all_it_holds(
    continuations, topk, size
):
    tree = branched(continuations, topk, size)
    assert len(tree.token_ids) == len(tree.parents) <= size
    assert all(0 <= parent <= number for number, parent in enumerate(tree.parents))
    assert all(tree.parents.count(parent) <= topk for parent in tree.parents)
    assert len(set(paths(tree))) == len(tree.token_ids), "no draft is verified twice"


@given(continuations=CONTINUATIONS, topk=TOPK, size=SIZES)
def test_every_path_is_the_beginning_of_a_continuation(continuations, topk, size):
    known = {tokens[:length] for tokens in continuations for length in range(1, 6)}
    assert set(paths(branched(continuations, topk, size))) <= known


@given(continuations=CONTINUATIONS)
def test_where_there_is_room_all_of_them_are_in(continuations):
    tree = branched(continuations, 4, ROOM_FOR_ALL)
    assert set(continuations) <= set(paths(tree))


@given(continuations=CONTINUATIONS, topk=TOPK, size=SIZES, more=CONTINUATIONS)
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
