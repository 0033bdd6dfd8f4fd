"""Where the tokens of a forward are, against a plain loop, for the reference and its kernels."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_spec.ops import layout
from serve_spec.ops.layout import Extended, Followed, Sequences
from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference

from serve_spec.ops import layout_triton  # isort: skip

SCRATCH = 9999
PAGES = 3
NUM_SLOTS = 5
BOTH = pytest.mark.parametrize("impl", [reference(layout), layout_triton], ids=["plain", "kernel"])


def token_by_token(slots, starts, lens, first_written, page_size, num_tokens):
    """Return the columns of a layout, as plainly as possible."""
    tokens, ends = [], [0]
    for b, count in enumerate(lens):
        for offset in range(count):
            position, slot = starts[b] + offset, SCRATCH
            if max(first_written[b], 0) <= position < PAGES * page_size:
                slot = page_of(slots[b], position // page_size) * page_size + position % page_size
            tokens.append((b, offset, slots[b], max(position, 0), slot))
        ends.append(min(ends[-1] + count, num_tokens))
    tokens = (tokens + [(-1, 0, -1, 0, SCRATCH)] * num_tokens)[:num_tokens]
    kv_lens = [start + count for start, count in zip(starts, lens, strict=True)]
    return (*([*column] for column in zip(*tokens, strict=True)), ends, kv_lens)


def page_of(slot, page):
    return 100 * slot + 7 * page


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def checked(impl, page_size, sequences, num_tokens, expected, drafted=None):
    """Compare with a plain loop; return the layout."""
    pages = [[page_of(slot, page) for page in range(PAGES)] for slot in range(NUM_SLOTS)]
    with poisoned_memory():
        found = impl.lay_out_tokens(ints(pages), page_size, SCRATCH, sequences, num_tokens, drafted)
    assert tuple(column.tolist() for column in found[:7]) == expected
    i32, i64 = torch.int32, torch.int64
    assert [column.dtype for column in found] == [i32, i32, i32, i64, i64, i32, i32, i32]
    for slot, end, table in zip(sequences.request_slots, found.kv_lens, found.tables, strict=True):
        used = min(-(-max(int(end), 0) // page_size), PAGES)
        assert table.tolist()[:used] == pages[slot][:used]
    return found


sequences_of = st.lists(
    # slot, tokens, start
    st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, 6), st.integers(-4, 14)),
    min_size=1,
    max_size=5,
)


@BOTH
@settings(max_examples=30, deadline=None)
@given(sequences_of, st.sampled_from([1, 4, 5]), st.integers(1, 40), st.integers(-2, 2))
@example([(3, 150, 10), (1, 1, 0)], 64, 420, 0)
@example([(0, 4, -2), (4, 0, 3), (4, 3, 11)], 4, 6, 1)
def test_every_token_knows_whose_it_is_and_where_it_goes(
    impl, sequences, page_size, num_tokens, offset
):
    slots, lens, starts = (list(column) for column in zip(*sequences, strict=True))
    expected = token_by_token(
        slots, [start + offset for start in starts], lens, [0] * len(lens), page_size, num_tokens
    )
    given = Sequences(ints(slots), ints(starts), ints(lens), offset)
    checked(impl, page_size, given, num_tokens, expected)


by_slot = st.permutations(range(NUM_SLOTS)).flatmap(
    lambda slots: st.integers(1, NUM_SLOTS).map(lambda count: slots[:count])
)
lengths_of = st.lists(st.integers(0, 14), min_size=NUM_SLOTS, max_size=NUM_SLOTS)


@BOTH
@settings(max_examples=30, deadline=None)
@given(by_slot, lengths_of, lengths_of, st.integers(1, 4), st.integers(0, 1))
def test_an_extension_writes_what_is_missing_or_nothing_after_a_gap(
    impl, slots, lengths, missing, count, shift
):
    """Entries of a draft model: the last `count` of all but one of each text."""
    made = [max(length - 1 - lack, 0) for length, lack in zip(lengths, missing, strict=True)]
    starts = [lengths[slot] - 1 - count + shift for slot in slots]
    written, after = [], list(made)
    for slot, start in zip(slots, starts, strict=True):
        has_gap = start > made[slot] + shift
        written.append(10**6 if has_gap else made[slot] + shift)
        after[slot] = made[slot] if has_gap else lengths[slot] - 1
    num_tokens = count * len(slots)
    expected = token_by_token(slots, starts, [count] * len(slots), written, 4, num_tokens)
    given = Sequences(ints(slots), ints(lengths), count, shift - 1 - count, by_slot=True)
    counts = ints(made)
    checked(impl, 4, given, num_tokens, expected, Extended(counts, shift))
    assert counts.tolist() == after


@BOTH
@settings(max_examples=30, deadline=None)
@given(by_slot, lengths_of, st.integers(0, 3), st.integers(1, 3))
def test_requests_whose_drafts_have_ended_write_nothing(impl, slots, lengths, level, width):
    depths = [slot % 4 for slot in slots]
    offset = level * width - 1
    expected = token_by_token(
        slots,
        [lengths[slot] + offset for slot in slots],
        [width] * len(slots),
        [10**6 if depth <= level else 0 for depth in depths],
        4,
        width * len(slots),
    )
    given = Sequences(ints(slots), ints(lengths), width, offset, by_slot=True)
    checked(impl, 4, given, width * len(slots), expected, Followed(ints(depths), level))


WINDOW = 8


def text_at(slot, position):
    """Return the token of a text that has come to position `WINDOW + slot`."""
    return 1000 * slot + position


@BOTH
@settings(max_examples=30, deadline=None)
@given(
    slots=by_slot,
    lens=st.lists(st.integers(0, 4), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    ahead=st.integers(0, 1),
    num_drafted=st.integers(0, NUM_SLOTS),
    has_drafts=st.booleans(),
)
def test_tokens_are_those_of_the_text_and_then_the_drafts(
    impl, slots, lens, ahead, num_drafted, has_drafts
):
    ring = [[0] * WINDOW for _ in range(NUM_SLOTS)]
    for slot in range(NUM_SLOTS):
        for position in range(WINDOW + slot + 1):
            ring[slot][position % WINDOW] = text_at(slot, position)
    lens = lens[: len(slots)]
    starts = [slot + 2 for slot in slots]
    drafts = [[-1 - 10 * row - column for column in range(3)] for row in range(num_drafted)]
    table = ints(drafts, torch.int64).reshape(num_drafted, 3) if has_drafts else None
    with poisoned_memory():
        found = impl.lay_out_tokens(
            torch.zeros((NUM_SLOTS, PAGES), dtype=torch.int32, device=DEVICE),
            8,
            SCRATCH,
            Sequences(ints(slots), ints(starts), ints(lens)),
            sum(lens) + 2,
        )
        tokens = impl.read_tokens(ints(ring), found, ahead, table)
    expected = []
    for row, (slot, start, count) in enumerate(zip(slots, starts, lens, strict=True)):
        for offset in range(count):
            is_draft = has_drafts and offset > 0 and offset <= 3 and row < num_drafted
            text = text_at(slot, start + offset + ahead)
            expected.append(drafts[row][offset - 1] if is_draft else text)
    assert tokens.tolist() == [*expected, 0, 0]
    assert tokens.dtype == torch.int64
