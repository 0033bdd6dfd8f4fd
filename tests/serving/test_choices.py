"""Choices are requests of their own: prompt, seed and index alone decide what one says."""

from contextlib import aclosing

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.request import SamplingParams
from serve_spec.serving.completions import choice_seed, choices_of, interleaved
from tests.serving.fakes import settle

SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(SEEDS, st.integers(1, 127))
def test_the_first_choice_has_the_requests_own_seed_and_the_others_have_others(seed, index):
    assert choice_seed(seed, 0) == seed
    assert 0 <= choice_seed(seed, index) < 2**63
    assert len({choice_seed(seed, i) for i in range(index + 1)}) == index + 1


def test_derived_seeds_never_change():
    """Somebody has noted a seed and wants the text again."""
    assert choice_seed(7, 1) == 2114375518687650719


def test_choices_of_a_prompt_are_neighbours_and_the_same_as_if_it_came_alone():
    both = choices_of("cmpl-1", "t", ["a", [1, 2]], SamplingParams(seed=3, top_k=5), 2)
    assert [c.request_id for c in both] == [f"cmpl-1-{i}" for i in range(4)]
    assert [c.prompt for c in both] == ["a", "a", [1, 2], [1, 2]]
    alone = choices_of("cmpl-2", "t", [[1, 2]], SamplingParams(seed=3, top_k=5), 2)
    assert [c.params for c in both[2:]] == [c.params for c in alone]


def test_without_a_seed_nobody_fixes_one_here():
    made = choices_of("cmpl-1", "t", ["a"], SamplingParams(), 3)
    assert [c.params.seed for c in made] == [None] * 3


async def test_what_a_reader_of_several_choices_does_not_take_stays_in_their_streams():
    taken = [0, 0]

    async def stream(index):
        for item in range(100):
            taken[index] += 1
            yield index, item

    async with aclosing(interleaved([stream(0), stream(1)])) as items:
        await anext(items)
        await settle()
        assert sum(taken) <= 6
        rest = [item async for item in items]
    assert len(rest) == 199
    assert [item for index, item in rest if index == 1][-1] == 99
