"""Where rows are, against a plain loop, for the impl and its kernels."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_spec.ops import layout
from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference

from serve_spec.ops import layout_triton  # isort: skip

SCRATCH = 9999
PAGES = 3
BOTH = pytest.mark.parametrize("impl", [reference(layout), layout_triton], ids=["plain", "kernel"])


def row_by_row(query_lens, starts, first_valid, tables, page_size, num_rows):
    """Owners, offsets, positions, slots and query starts, as plainly as possible."""
    rows = []
    ends = [0]
    for b, count in enumerate(query_lens):
        for offset in range(count):
            position = starts[b] + offset
            slot = SCRATCH
            if max(first_valid[b], 0) <= position < PAGES * page_size:
                slot = tables[b][position // page_size] * page_size + position % page_size
            rows.append((b, offset, max(position, 0), slot))
        ends.append(min(ends[-1] + count, num_rows))
    rows = (rows + [(-1, 0, 0, SCRATCH)] * num_rows)[:num_rows]
    return (*([*column] for column in zip(*rows, strict=True)), ends)


def int_tensor(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


sequences = st.lists(
    # rows, start, first valid position
    st.tuples(st.integers(0, 6), st.integers(-4, 14), st.integers(-4, 4) | st.integers(0, 16)),
    min_size=1,
    max_size=5,
)


@BOTH
@settings(max_examples=30, deadline=None)
@given(
    sequences=sequences,
    page_size=st.sampled_from([1, 4, 5]),
    num_rows=st.integers(1, 40),
    wide=st.booleans(),
)
@example(sequences=[(150, 10, 0), (1, 0, 0)], page_size=64, num_rows=420, wide=False)
@example(sequences=[(4, -2, -3), (0, 3, 0), (3, 11, 5)], page_size=4, num_rows=6, wide=True)
def test_every_row_knows_whose_it_is_and_where_it_goes(impl, sequences, page_size, num_rows, wide):
    query_lens, starts, first_valid = (list(column) for column in zip(*sequences, strict=True))
    tables = [[100 * b + 7 * page for page in range(PAGES)] for b in range(len(sequences))]
    kind = torch.int64 if wide else torch.int32
    with poisoned_memory():
        found = impl.lay_out_tokens(
            int_tensor(query_lens),
            int_tensor(starts, kind),
            int_tensor(first_valid, kind),
            int_tensor(tables),
            page_size,
            num_rows,
            SCRATCH,
        )
    expected = row_by_row(query_lens, starts, first_valid, tables, page_size, num_rows)
    assert tuple(column.tolist() for column in found) == expected
    i32, i64 = torch.int32, torch.int64
    assert [column.dtype for column in found] == [i32, i32, i64, i64, i32]


@BOTH
@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 40)), min_size=1, max_size=9))
def test_the_ring_gives_the_token_of_a_position_while_it_is_recent(impl, rows):
    window = 8
    # Request slot l has come to position 8 + l of a text whose token at p is 1000 l + p.
    ring = [[0] * window for _ in range(3)]
    for request_slot in range(3):
        for position in range(9 + request_slot):
            ring[request_slot][position % window] = 1000 * request_slot + position
    rows = [
        (request_slot, min(max(position, request_slot + 1), request_slot + 8))
        for request_slot, position in rows
    ]
    request_slots, positions = (list(column) for column in zip(*rows, strict=True))
    with poisoned_memory():
        found = impl.ring_tokens(
            int_tensor(ring), int_tensor(request_slots), int_tensor(positions, torch.int64)
        )
    assert found.tolist() == [
        1000 * request_slot + at if request_slot >= 0 else 0 for request_slot, at in rows
    ]
    assert found.dtype == torch.int64
