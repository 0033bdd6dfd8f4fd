"""Prefill chunks in static buffers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.worker.step_buffers import Chunk, PrefillChunks, grouped

MAX_TOKENS, MAX_CHUNKS = 256, 12
BUFFERS = PrefillChunks(MAX_TOKENS, MAX_CHUNKS, torch.device("cpu"))
CHUNKS = st.lists(
    st.builds(
        lambda slot, start, length: Chunk(slot, start, [100 * slot + i for i in range(length)]),
        st.integers(0, 9),
        st.integers(0, 1000),
        st.integers(0, 21),
    ),
    max_size=MAX_CHUNKS,
)


@given(CHUNKS)
def test_every_chunk_is_written_with_its_tokens_in_order(chunks):
    BUFFERS.write([Chunk(1, 2, [3] * MAX_TOKENS)])  # what the step before left
    there = [chunk for chunk in chunks if chunk.token_ids]
    assert BUFFERS.write(chunks) == len(there)
    lens = [len(chunk.token_ids) for chunk in there]
    empty = [0] * (MAX_CHUNKS - len(there))
    assert BUFFERS.request_slots.tolist() == [chunk.request_slot for chunk in there] + empty
    assert BUFFERS.starts.tolist() == [chunk.start for chunk in there] + empty
    assert BUFFERS.lens.tolist() == lens + empty
    rows = torch.arange(sum(lens), dtype=torch.int32)
    expected = [token for chunk in there for token in chunk.token_ids]
    assert BUFFERS.tokens_of(rows).tolist() == expected
    assert len(BUFFERS.tokens_of(torch.tensor([-5, MAX_TOKENS + 5]))) == 2


@given(CHUNKS, st.integers(1, 40), st.integers(1, 4))
def test_groups_hold_the_same_tokens_in_order_within_the_bounds(chunks, max_tokens, max_chunks):
    def tokens(chunks):
        return [
            (slot, start + i, token) for slot, start, ids in chunks for i, token in enumerate(ids)
        ]

    groups = list(grouped(chunks, max_tokens, max_chunks))
    assert [row for group in groups for row in tokens(group)] == tokens(chunks)
    for group in groups:
        assert 0 < len(group) <= max_chunks
        assert 0 < len(tokens(group)) <= max_tokens
        assert all(chunk.token_ids for chunk in group)
