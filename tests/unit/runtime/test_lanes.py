"""Lanes hold what a round needs, and are told only what they can not know."""

import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.plan import EditedText, RowPlan
from serve_spec.core.request import SamplingParams
from serve_spec.ops.score_edits import GENERATED_ONCE, HELD_BACK, IN_PROMPT
from serve_spec.runtime.lanes import RING_TOKENS, LaneKeeper, Lanes


def make_lanes(num_lanes: int = 4, max_pages: int = 64) -> Lanes:
    return Lanes.create(
        num_lanes, max_pages, scratch_page=99, vocab_size=300, device=torch.device("cpu")
    )


def row(lane: int, tokens: list[int], pages: list[int], made: int = 0, **params: Any) -> RowPlan:
    """A decode row of a text of which the draft has made `made` entries."""
    return RowPlan(
        request_id=f"on {lane}",
        token_ids=(tokens[-1],),
        start=len(tokens) - 1,
        samples=True,
        page_ids=tuple(pages),
        params=SamplingParams(**params),
        seed=2**63 + 5,
        is_decode=True,
        draft_start=made,
        catch_up_ids=tuple(tokens[made + 1 :]),
        lane=lane,
    )


def test_a_sequence_that_moves_in_brings_its_length_its_backlog_and_its_parameters() -> None:
    lanes = make_lanes()
    text = list(range(100, 120))
    params = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1}
    LaneKeeper(lanes).sync([row(2, text, [4, 8], made=15, **params)])
    assert lanes.lengths[2] == 20
    assert lanes.draft_lengths[2] == 15
    assert lanes.recent[2, 16:20].tolist() == text[16:20]
    assert lanes.pages[2, :3].tolist() == [4, 8, 99]
    found = [field[2] for field in lanes.params]
    assert found[0] == 2.0
    assert found[1].tolist() == [5, -(2**31)]
    assert found[2] == 7
    torch.testing.assert_close(torch.stack(found[3:]), torch.tensor([0.9, 0.1]))


def test_greedy_sequences_have_no_temperature_to_divide_by() -> None:
    lanes = make_lanes()
    LaneKeeper(lanes).sync([row(0, [1, 2, 3], [0], temperature=0.0)])
    assert lanes.params.inverse_temperature[0] == 0


def test_a_known_sequence_is_not_written_over() -> None:
    """Its lane is ahead of the host while a round is under way."""
    lanes = make_lanes()
    keeper = LaneKeeper(lanes)
    known = row(1, [1, 2, 3], [5])
    keeper.sync([known])
    lanes.lengths[1], lanes.recent[1, 3] = 4, 77
    keeper.sync([known])
    assert lanes.lengths[1] == 4
    assert lanes.recent[1, 3] == 77


def test_after_a_round_without_lanes_a_sequence_moves_in_anew() -> None:
    lanes = make_lanes()
    keeper = LaneKeeper(lanes)
    keeper.sync([row(1, [1, 2, 3], [5])])
    later = row(1, [1, 2, 3, 4, 5], [6], made=3)
    keeper.forget([later])
    keeper.sync([later])
    assert lanes.lengths[1] == 5
    assert lanes.pages[1, 0] == 6


def test_another_request_takes_over_a_lane() -> None:
    lanes = make_lanes()
    keeper = LaneKeeper(lanes)
    keeper.sync([row(1, [1, 2, 3], [5])])
    keeper.sync([row(1, [9, 8], [7])._replace(request_id="another")])
    assert lanes.lengths[1] == 2
    assert lanes.recent[1, 1] == 8


def test_a_backlog_longer_than_the_ring_keeps_its_newest_tokens() -> None:
    lanes = make_lanes()
    text = list(range(200))
    LaneKeeper(lanes).sync([row(0, text, list(range(13)))])
    newest = [lanes.recent[0, p % RING_TOKENS] for p in range(200 - RING_TOKENS, 200)]
    assert newest == text[-RING_TOKENS:]


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_pages_follow_whatever_growth_and_give_back_do(seed: int) -> None:
    rng = random.Random(seed)
    lanes = make_lanes()
    keeper = LaneKeeper(lanes)
    free = list(range(100, 112))  # few, so that given back ones return, at any place
    pages = [free.pop()]
    for _ in range(20):
        kept = rng.randint(1, len(pages))
        free += pages[kept:]
        del pages[kept:]
        rng.shuffle(free)
        pages += [free.pop() for _ in range(rng.randint(0, min(4, len(free))))]
        keeper.sync([row(3, [1, 2], pages)])
        assert lanes.pages[3, : len(pages)].tolist() == pages


def test_a_sequence_brings_its_score_edits_and_the_next_one_without_any_ends_them() -> None:
    lanes = make_lanes()
    keeper = LaneKeeper(lanes)
    editing = row(1, [7, 8, 7], [5], frequency_penalty=1.5, min_tokens=2, bad_token_ids=(4,))
    keeper.sync([editing._replace(edited=EditedText(2, (7, 8, 7), held_ids=(9,)))])
    edits = lanes.edits
    assert edits.is_on.tolist() == [0, 1, 0, 0, 0]
    assert (edits.frequency[1], edits.repetition[1], edits.min_lengths[1]) == (1.5, 1.0, 4)
    assert edits.marks[1, [7, 8, 9]].tolist() == [IN_PROMPT + GENERATED_ONCE, IN_PROMPT, HELD_BACK]
    assert edits.marks[1].count_nonzero() == 3
    assert edits.bias[1].nonzero().tolist() == [[4]]
    keeper.sync([row(1, [9, 8], [7])._replace(request_id="another")])
    assert edits.is_on.tolist() == [0] * 5


def test_what_lanes_count_of_a_known_sequence_is_not_written_over() -> None:
    lanes = make_lanes()
    keeper = LaneKeeper(lanes)
    known = row(1, [7, 8], [5], presence_penalty=1.0)
    keeper.sync([known._replace(edited=EditedText(2, (7, 8)))])
    lanes.edits.marks[1, 7] += GENERATED_ONCE
    keeper.sync([known])
    assert lanes.edits.marks[1, 7] == IN_PROMPT + GENERATED_ONCE
