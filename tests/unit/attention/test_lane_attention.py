"""Attention over lanes computes and stores what the torch backend does, padded or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve_spec.attention.lane_attention import LaneAttention
from serve_spec.core.context import LayerAttention
from serve_spec.layers.rope import RotaryTable
from tests.helpers.paged import PagedSequences
from tests.helpers.triton import DEVICE

MAX_LEN = 80
MAX_QUERY_LEN = 8
LAYER = 1
# The scale of a sum of values; GPUs add up in another order.
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-4}


@dataclass(frozen=True)
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    sliding_window: int | None = None
    num_layers: int = 2

    @property
    def num_all(self) -> int:
        return self.num_heads + 2 * self.num_kv_heads


class Pair:
    """The same sequences twice: one attended by the torch backend, the other over lanes."""

    def __init__(self, shape: Heads, num_sequences: int, page_size: int = 4) -> None:
        self.shape = shape
        self.plain, self.lanes = (
            PagedSequences(shape, num_sequences, MAX_LEN, page_size, device=str(DEVICE))
            for _ in range(2)
        )
        self.generator = torch.Generator().manual_seed(0)
        with torch.device(DEVICE):
            self.table = RotaryTable(shape.head_dim, 10000.0, None, MAX_LEN)

    def fill(self, lengths: Sequence[int]) -> None:
        """Gives every sequence a cache, the same in both pools."""
        pieces = [(index, length) for index, length in enumerate(lengths) if length]
        if pieces:
            self._run(self.plain.extend(pieces).attention, self._heads(pieces), pieces)
            self.lanes.pool.keys.copy_(self.plain.pool.keys)
            self.lanes.pool.values.copy_(self.plain.pool.values)
        self.lanes.lengths = list(self.plain.lengths)

    def check(self, rows: Sequence[int], padding: int = 0) -> None:
        """Adds rows to each sequence (0: it sits out), and as many padding rows as asked."""
        pieces = [(index, count) for index, count in enumerate(rows) if count]
        heads = self._heads(pieces)
        attention = self._over_lanes(rows, padding)
        expected = self._run(self.plain.extend(pieces).attention, heads, pieces)
        spare = torch.randn(padding, self.shape.num_all, self.shape.head_dim).to(DEVICE)
        out = self._run(attention, torch.cat((heads, spare)), pieces, padding)
        for index, count in pieces:
            self.lanes.lengths[index] += count
        assert out.isfinite().all()
        tolerance = TOLERANCE[DEVICE.type]
        assert (out[: len(heads)] - expected).abs().max() < tolerance
        used = slice(0, self.lanes.pool.scratch_slot)
        for ours, theirs in (
            (self.lanes.pool.keys, self.plain.pool.keys),
            (self.lanes.pool.values, self.plain.pool.values),
        ):
            assert (ours[:, used] - theirs[:, used]).abs().max() < tolerance

    def check_last(self, rows: Sequence[int]) -> None:
        """Adds as many rows to each sequence and asks for the last of each."""
        count, pieces = rows[0], list(enumerate(rows))
        heads = self._heads(pieces)
        attention = self._over_lanes(rows, 0)
        last = slice(count - 1, None, count)
        layout = attention._layout
        ends = torch.arange(len(layout.query_starts), dtype=torch.int32, device=DEVICE)
        some = LaneAttention(
            self.lanes.pool,
            layout.tables,
            ends,
            layout.kv_lens,
            attention._slots,
            max_query_len=1,
            window=self.shape.sliding_window,
            asked=last,
        )
        expected = self._run(self.plain.extend(pieces).attention, heads, pieces)[last]
        out = self._run(some, heads, pieces)
        assert (out - expected).abs().max() < TOLERANCE[DEVICE.type]
        used = slice(0, self.lanes.pool.scratch_slot)
        keys, others = self.lanes.pool.keys[:, used], self.plain.pool.keys[:, used]
        assert (keys - others).abs().max() < TOLERANCE[DEVICE.type]

    def _over_lanes(self, rows: Sequence[int], padding: int) -> LaneAttention:
        lanes = self.lanes
        slots = lanes.batch([(index, count) for index, count in enumerate(rows) if count]).slots
        spare = slots.new_full((padding,), lanes.pool.scratch_slot)
        ends = [length + count for length, count in zip(lanes.lengths, rows, strict=True)]

        def on_device(numbers: Tensor) -> Tensor:
            return numbers.to(DEVICE, torch.int32)

        return LaneAttention(
            lanes.pool,
            on_device(lanes.pages),
            on_device(torch.tensor([0, *rows]).cumsum(0)),
            on_device(torch.tensor(ends)),
            torch.cat((slots, spare)),
            max_query_len=MAX_QUERY_LEN,
            window=self.shape.sliding_window,
        )

    def _heads(self, pieces: Sequence[tuple[int, int]]) -> Tensor:
        count = sum(count for _, count in pieces)
        shape = (count, self.shape.num_all, self.shape.head_dim)
        return torch.randn(shape, generator=self.generator).to(DEVICE)

    def _run(
        self,
        attention: LayerAttention,
        heads: Tensor,
        pieces: Sequence[tuple[int, int]],
        padding: int = 0,
    ) -> Tensor:
        starts = self.lanes.lengths
        positions = [starts[index] + row for index, count in pieces for row in range(count)]
        rotation = self.table.at(torch.tensor(positions + [0] * padding, device=DEVICE))
        return attention.run(LAYER, heads, rotation)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("rows", [[1, 1, 1, 1], [4, 4, 4, 4], [1, 8, 0, 3], [0, 2, 1, 0]])
def test_a_round_over_lanes_is_the_torch_backends(
    rows: list[int], heads: tuple[int, int], window: int | None
) -> None:
    pair = Pair(Heads(*heads, sliding_window=window), 4)
    # Empty, at a page's end, one entry into the next page, long.
    pair.fill([0, 8, 9, 60])
    pair.check(rows)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_last_rows_alone_see_what_they_do_among_all(count: int, window: int | None) -> None:
    pair = Pair(Heads(sliding_window=window), 4)
    pair.fill([0, 8, 9, 60])
    pair.check_last([count] * 4)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, MAX_LEN - 2 * MAX_QUERY_LEN), min_size=1, max_size=4),
    rounds=st.lists(
        st.lists(st.integers(0, MAX_QUERY_LEN), min_size=4, max_size=4), min_size=1, max_size=2
    ),
    padding=st.integers(0, 3),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_rounds_follow_each_other(
    lengths: list[int], rounds: list[list[int]], padding: int, page_size: int
) -> None:
    pair = Pair(Heads(), len(lengths), page_size)
    pair.fill(lengths)
    for rows in rounds:
        if any(rows[: len(lengths)]):
            pair.check(rows[: len(lengths)], padding)


def test_the_layout_is_read_when_it_runs() -> None:
    pair, fresh = Pair(Heads(), 2), Pair(Heads(), 2)
    for each in (pair, fresh):
        each.fill([10, 30])
    heads = pair._heads([(0, 1), (1, 1)])
    early = pair._over_lanes([1, 1], 0)
    late = fresh._over_lanes([1, 1], 0)
    early._layout.kv_lens[0] = 3
    expected = fresh._run(late, heads, [(0, 1), (1, 1)])
    found = pair._run(early, heads, [(0, 1), (1, 1)])
    assert not torch.allclose(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.gpu
def test_a_graph_serves_rounds_of_other_lengths() -> None:
    pair = Pair(Heads(), 2)
    pair.fill([10, 30])
    heads = pair._heads([(0, 1), (1, 1)])
    attention = pair._over_lanes([1, 1], 0)
    rotation = pair.table.at(torch.tensor([10, 30], device=DEVICE))
    before = attention.run(LAYER, heads, rotation)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.run(LAYER, heads, rotation)
    attention._layout.kv_lens.copy_(torch.tensor([4, 21], dtype=torch.int32))
    graph.replay()
    assert torch.equal(out, attention.run(LAYER, heads, rotation))
    assert not torch.equal(out, before)
