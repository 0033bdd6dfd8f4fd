"""The acceptance walk against a plain loop."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.ops.acceptance import accept_chain


def walk(drafts: list[int], drawn: list[int], num_steps: int) -> int:
    correct = 0
    while correct < num_steps and drafts[correct] == drawn[correct]:
        correct += 1
    return correct


@given(st.data(), st.integers(0, 6), st.integers(1, 5))
def test_the_walk_stops_at_the_first_draft_the_target_did_not_draw(
    data: st.DataObject, depth: int, batch: int
) -> None:
    token = st.integers(0, 1)
    drafts = data.draw(
        st.lists(st.lists(token, min_size=depth, max_size=depth), min_size=batch, max_size=batch)
    )
    drawn = data.draw(
        st.lists(
            st.lists(token, min_size=depth + 1, max_size=depth + 1), min_size=batch, max_size=batch
        )
    )
    steps = data.draw(st.lists(st.integers(0, depth), min_size=batch, max_size=batch))
    found = accept_chain(
        torch.tensor(drafts, dtype=torch.int64).reshape(batch, depth),
        torch.tensor(drawn, dtype=torch.int64),
        torch.tensor(steps),
    )
    assert found.tolist() == [walk(*row) for row in zip(drafts, drawn, steps, strict=True)]
