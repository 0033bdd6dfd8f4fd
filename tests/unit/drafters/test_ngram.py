"""Drafts that the text itself holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.drafters.ngram import NgramDrafter

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)
LENGTHS = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))


def expected(token_ids: list[int], least: int, longest: int, most: int) -> tuple[int, ...]:
    """By looking through the whole text: the longest match, of these the last one."""
    for length in range(longest, least - 1, -1):
        suffix = token_ids[-length:]
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == suffix:
                period = len(token_ids) - start - length
                return tuple(token_ids[start + length + i % period] for i in range(most))
    return ()


@given(text=TEXTS, lengths=LENGTHS, most=st.integers(1, 9), steps=st.lists(st.integers(1, 9)))
def test_the_last_of_the_longest_matches_goes_on_however_the_text_has_grown(
    text: list[int], lengths: tuple[int, int], most: int, steps: list[int]
) -> None:
    drafter = NgramDrafter(*lengths, max_steps=9)
    length = 0
    for step in [*steps, len(text)]:
        length = min(length + step, len(text))
        drafter.propose("other", text[::-1], most)
        found = drafter.propose("this", text[:length], most)
        assert found == expected(text[:length], *lengths, most)


def test_a_text_that_repeats_itself_is_drafted_on_and_on() -> None:
    assert NgramDrafter(1, 3, 7).propose("a", [7, 1, 2, 1, 2], 5) == (1, 2, 1, 2, 1)


def test_no_more_is_drafted_than_there_are_tiers_for() -> None:
    assert len(NgramDrafter(1, 3, 4).propose("a", [1, 2, 1, 2], 9)) == 4


def test_where_nothing_matches_or_nothing_is_wanted_nothing_is_drafted() -> None:
    drafter = NgramDrafter(2, 3, 7)
    assert drafter.propose("a", [1, 2, 3, 4, 3], 5) == ()
    assert drafter.propose("b", [1, 2, 1, 2], 0) == ()
    assert drafter.propose("c", [1], 5) == ()


def test_a_request_that_left_leaves_nothing() -> None:
    drafter = NgramDrafter(1, 2, 7)
    assert drafter.propose("a", [1, 2, 1], 1) == (2,)
    drafter.forget("a")
    drafter.forget("never here")
    assert drafter.propose("a", [3, 1], 1) == ()
