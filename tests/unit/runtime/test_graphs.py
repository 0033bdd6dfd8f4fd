"""Stages run at the smallest recorded size that holds what is asked."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.runtime.graphs import PlainRecorder, StageGraphs, batch_sizes, row_counts


@given(st.integers(1, 700))
def test_every_batch_size_and_row_count_up_to_the_largest_has_a_place(largest: int) -> None:
    for sizes in (batch_sizes(largest), row_counts(largest)):
        assert sizes[-1] == largest
        assert list(sizes) == sorted(set(sizes))
        graphs = StageGraphs(dict.fromkeys(sizes, lambda: None))
        for size in range(1, largest + 1):
            assert size <= graphs.padded(size) <= largest


@given(st.integers(112, 2000))
def test_padding_wastes_at_most_a_quarter_where_rows_are_dear(rows: int) -> None:
    """Below a hundred rows the weights are what a step reads, above each row is paid for."""
    graphs = StageGraphs(dict.fromkeys(row_counts(2048), lambda: None))
    assert graphs.padded(rows) <= rows * 5 / 4


def test_a_stage_runs_at_the_smallest_size_that_holds_it() -> None:
    ran: list[int] = []
    recorder = PlainRecorder()
    sizes = (1, 4, 8)
    graphs = StageGraphs({n: recorder.record(lambda n=n: ran.append(n)) for n in sizes})
    for size in (1, 2, 4, 5, 8):
        graphs.run(size)
    assert ran == [1, 4, 4, 8, 8]
    assert recorder.num_recorded == 3


def test_a_size_beyond_all_recorded_ones_is_refused() -> None:
    with pytest.raises(ValueError, match="size=9: recorded for at most 8"):
        StageGraphs({8: lambda: None}).padded(9)


def test_what_a_stage_left_is_what_it_left_when_it_ran_last() -> None:
    recorder = PlainRecorder()
    numbers = iter(range(3))
    leftover = recorder.leftover()
    run = recorder.record(lambda: leftover.leave(torch.tensor([next(numbers)])))
    for number in range(3):
        run()
        assert leftover.tensor().tolist() == [number]
