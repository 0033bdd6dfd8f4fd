"""Stages run at the smallest captured size that holds what is asked."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.worker.graphs import (
    StageRunner,
    StepSize,
    batch_sizes,
    mixed_token_counts,
    token_counts,
)


def padded(sizes, count):
    captured = {StepSize(n, n): lambda n=n: n for n in sizes}
    return StageRunner(lambda size: 0, captured).run(StepSize(count, count))


@given(st.integers(1, 700))
def test_every_size_up_to_the_largest_has_a_place(largest):
    for sizes in (batch_sizes(largest), token_counts(largest), mixed_token_counts(largest)):
        assert sizes[-1] == largest
        assert list(sizes) == sorted(set(sizes))
        assert all(size <= padded(sizes, size) <= largest for size in range(1, largest + 1))


@given(st.integers(112, 2000))
def test_padding_wastes_at_most_a_quarter_where_tokens_are_expensive(tokens):
    """Below a hundred tokens a step mostly reads weights, above it each token costs."""
    assert padded(token_counts(2048), tokens) <= tokens * 5 / 4


def test_a_stage_runs_at_the_smallest_size_that_holds_it_or_as_it_is():
    ran = []

    def captured(*sizes):
        return StageRunner(ran.append, {size: lambda size=size: ran.append(size) for size in sizes})

    runner = captured(StepSize(8, 8, 2), StepSize(1, 1), StepSize(4, 4, 1))
    asked = [StepSize(n, 1) for n in (1, 2, 4, 5, 8, 9)] + [StepSize(2, 1, 2), StepSize(2, 1, 3)]
    for size in asked:
        runner.run(size)
    assert [(size.tokens, size.chunks) for size in ran] == [
        *[(1, 0), (4, 1), (4, 1), (8, 2), (8, 2)],
        (9, 0),  # larger than any captured one
        (8, 2),  # the smaller ones have no room for the chunks
        (2, 3),
    ]


def test_without_graphs_a_stage_runs_at_its_exact_size_and_returns_its_output():
    runner = StageRunner(lambda size: torch.full((size.tokens,), 7.0))
    for count in (3, 5):
        output = runner.run(StepSize(count, 1))
        assert output is not None
        assert output.tolist() == [7.0] * count
