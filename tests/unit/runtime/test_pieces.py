"""Texts cut into pieces, and which stages have room for them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.runtime.graphs import prompt_row_counts
from serve_spec.runtime.pieces import PIECE_ROWS, Pieces, Stretch

MAX_ROWS, MAX_STRETCHES = 256, 48
PIECES = Pieces.create(MAX_ROWS, MAX_STRETCHES, torch.device("cpu"))


@st.composite
def stretches(draw: st.DrawFn) -> list[Stretch]:
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=MAX_STRETCHES))
    room, kept = MAX_ROWS, []
    for lane, length in enumerate(lengths):
        kept.append(Stretch(lane, 5 * lane, list(range(min(length, room)))))
        room -= len(kept[-1].token_ids)
    return [stretch for stretch in kept if stretch.token_ids]


@given(stretches())
def test_every_row_of_a_text_is_in_a_piece_of_its_own_lane(texts: list[Stretch]) -> None:
    PIECES.write(texts)
    found: dict[int, dict[int, int]] = {}
    for column in PIECES.table.t().tolist():
        lane, start, length, *tokens = column
        assert length <= PIECE_ROWS
        of_lane = found.setdefault(lane, {}) if length else {}
        of_lane |= {start + i: tokens[i] for i in range(length)}
    assert found == {
        lane: {start + i: token for i, token in enumerate(ids)} for lane, start, ids in texts
    }


@given(stretches(), st.integers(0, 40))
def test_a_stage_of_the_rows_it_asks_for_has_room_for_all_its_pieces(
    texts: list[Stretch], num_others: int
) -> None:
    fewest = PIECES.write(texts)
    num_pieces = int((PIECES.lens > 0).sum())
    assert fewest >= sum(len(stretch.token_ids) for stretch in texts)
    assert PIECES.room(fewest) >= num_pieces
    larger = min(MAX_ROWS, fewest + num_others)
    assert PIECES.room(larger) >= num_pieces


def test_stages_of_few_rows_take_few_pieces_and_the_largest_takes_any() -> None:
    rooms = [PIECES.room(rows) for rows in prompt_row_counts(MAX_ROWS)]
    assert rooms == sorted(rooms)
    assert rooms[-1] == PIECES.table.shape[1]
    assert all(
        room <= rows // PIECE_ROWS + 16
        for rows, room in zip(prompt_row_counts(MAX_ROWS)[:-1], rooms[:-1], strict=True)
    )
