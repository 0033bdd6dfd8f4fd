"""Request slots, prefill chunks and plans: only what a device cannot know is sent to it."""

import pickle
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.draft import DraftShape
from serve_spec.core.plan import EditedText, ScheduledBatch, ScheduledRequest
from serve_spec.core.request import SamplingParams
from serve_spec.ops.score_edits import GENERATED_ONCE, HELD_BACK, IN_PROMPT
from serve_spec.worker.request_slots import RING_TOKENS, RequestSlots, RequestStates
from serve_spec.worker.step_buffers import Chunk, PrefillChunks, grouped
from serve_spec.worker.tensor_parallel import PlanDecoder, PlanEncoder


def make_slots():
    return RequestSlots(4, 64, 99, 300, torch.device("cpu"))


def row(slot, tokens, pages, made=0, **params):
    """Return the plan of a decode of a text of which the draft has `made` KV entries."""
    return ScheduledRequest(
        request_id=f"in {slot}",
        token_ids=(tokens[-1],),
        start=len(tokens) - 1,
        samples=True,
        page_ids=tuple(pages),
        params=SamplingParams(**params),
        seed=2**63 + 5,
        is_decode=True,
        draft_start=made,
        extend_ids=tuple(tokens[made + 1 :]),
        request_slot=slot,
    )


def test_a_new_request_brings_its_length_its_missing_tokens_and_its_parameters():
    """Also where another had its slot."""
    slots = make_slots()
    states = RequestStates(slots)
    text = list(range(100, 120))
    params = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1}
    states.sync([row(2, [1, 2, 3], [5])._replace(request_id="another")])
    states.sync([row(2, text, [4, 8], made=15, **params)])
    assert slots.lengths[2] == 20
    assert slots.draft_lengths[2] == 15
    assert slots.recent[2, 16:20].tolist() == text[16:20]
    assert slots.pages[2, :3].tolist() == [4, 8, 99]
    found = [field[2] for field in slots.params]
    assert found[0] == 2.0
    assert found[1].tolist() == [5, -(2**31)]
    assert found[2] == 7
    torch.testing.assert_close(torch.stack(found[3:]), torch.tensor([0.9, 0.1]))


def test_of_more_missing_tokens_than_are_kept_the_newest_stay():
    slots = make_slots()
    text = list(range(200))
    RequestStates(slots).sync([row(0, text, list(range(13)))])
    newest = [slots.recent[0, p % RING_TOKENS] for p in range(200 - RING_TOKENS, 200)]
    assert newest == text[-RING_TOKENS:]


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_pages_follow_growth_and_returned_pages(seed):
    rng = random.Random(seed)
    slots = make_slots()
    states = RequestStates(slots)
    free = list(range(100, 112))  # few, so that returned ones come back, at any place
    pages = [free.pop()]
    for _ in range(20):
        kept = rng.randint(1, len(pages))
        free += pages[kept:]
        del pages[kept:]
        rng.shuffle(free)
        pages += [free.pop() for _ in range(rng.randint(0, min(4, len(free))))]
        states.sync([row(3, [1, 2], pages)])
        assert slots.pages[3, : len(pages)].tolist() == pages


def test_a_request_brings_its_score_edits_and_the_next_one_without_any_ends_them():
    slots = make_slots()
    states = RequestStates(slots)
    editing = row(1, [7, 8, 7], [5], frequency_penalty=1.5, min_tokens=2, bad_token_ids=(4,))
    states.sync([editing._replace(edited=EditedText(2, (7, 8, 7), held_ids=(9,)))])
    edits = slots.edits
    assert edits.is_on.tolist() == [0, 1, 0, 0, 0]
    assert (edits.frequency[1], edits.repetition[1], edits.min_lengths[1]) == (1.5, 1.0, 4)
    assert edits.marks[1, [7, 8, 9]].tolist() == [IN_PROMPT + GENERATED_ONCE, IN_PROMPT, HELD_BACK]
    assert edits.marks[1].count_nonzero() == 3
    assert edits.bias[1].nonzero().tolist() == [[4]]
    states.sync([row(1, [9, 8], [7])._replace(request_id="another")])
    assert edits.is_on.tolist() == [0] * 5


def test_what_a_slot_counts_of_a_known_request_is_not_written_over():
    slots = make_slots()
    states = RequestStates(slots)
    known = row(1, [7, 8], [5], presence_penalty=1.0)
    states.sync([known._replace(edited=EditedText(2, (7, 8)))])
    slots.edits.marks[1, 7] += GENERATED_ONCE
    states.sync([known])
    assert slots.edits.marks[1, 7] == IN_PROMPT + GENERATED_ONCE


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


PARAMS = [SamplingParams(), SamplingParams(temperature=0.0, frequency_penalty=0.5)]


def random_row(rng, request):
    """Return a row whose long fields mostly continue those of an earlier one."""
    text = tuple(range(rng.randint(1, 30)))
    edited = EditedText(3, text, held_ids=(2,)) if rng.random() < 0.5 else None
    return ScheduledRequest(
        request_id=str(request),
        token_ids=text[-1:],
        start=len(text) - 1,
        samples=rng.random() < 0.8,
        page_ids=tuple(range(rng.randint(0, 9))) + tuple(rng.sample(range(20, 40), 2)),
        params=PARAMS[request % 2],
        seed=request,
        is_decode=True,
        shape=DraftShape.chain(rng.randint(0, 3)),
        request_slot=request,
        edited=edited,
        generated_ids=text if rng.random() < 0.5 else (),
    )


@given(st.integers(0, 2**32))
def test_a_rank_restores_every_plan_in_order(seed):
    rng = random.Random(seed)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    for _ in range(8):
        requests = rng.sample(range(5), rng.randint(0, 5))
        rows = tuple(random_row(rng, request) for request in requests)
        plan = ScheduledBatch(rows, DraftShape.chain(3), len(rows), follows=rng.random() < 0.5)
        assert decoder.decode(pickle.loads(pickle.dumps(encoder.encode(plan)))) == plan


def test_a_long_text_costs_a_step_no_more_than_a_short_one():
    encoder = PlanEncoder()
    sizes = []
    for length in (10, 5_000):
        for grown in (0, 1):
            pages = tuple(range(length + grown))
            row = random_row(random.Random(1), 1)._replace(page_ids=pages, generated_ids=pages)
            row = row._replace(request_id=str(length), edited=EditedText(3, pages))
            encoded = encoder.encode(ScheduledBatch((row,), DraftShape.chain(0), 1))
        sizes.append(len(pickle.dumps(encoded)))
    assert sizes[1] < sizes[0] + 100
