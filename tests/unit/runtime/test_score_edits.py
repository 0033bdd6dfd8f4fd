"""From a round's plan to edited rows, by the law and by the kernel that serves GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.plan import EditedText, RowPlan, StepPlan
from serve_spec.core.request import SamplingParams
from serve_spec.ops import score_edits
from serve_spec.runtime.score_edits import edit_round
from tests.helpers.plain_edits import edited
from tests.helpers.triton import DEVICE

from serve_spec.ops import score_edits_triton  # isort: skip

VOCAB = 30
PARAMS = [
    SamplingParams(frequency_penalty=0.5, min_tokens=6, stop_token_ids=(3, 5)),
    SamplingParams(),
    SamplingParams(repetition_penalty=1.4, logit_bias={2: 3.0}),
    SamplingParams(bad_token_ids=(1, 4), min_tokens=2, stop_token_ids=(9,)),
]


def decode_row(params: SamplingParams, text: Sequence[int], num_prompt: int, steps: int) -> RowPlan:
    return RowPlan(
        request_id=str(PARAMS.index(params)),
        token_ids=(text[-1],),
        start=len(text) - 1,
        samples=True,
        page_ids=(),
        params=params,
        seed=0,
        is_decode=True,
        num_steps=steps,
        edited=EditedText(num_prompt, tuple(text), tuple(params.stop_token_ids))
        if params.edits_scores
        else None,
    )


@pytest.mark.parametrize("way", [score_edits, score_edits_triton])
@settings(max_examples=8)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=3), min_size=4, max_size=4),
    st.integers(0, 2**32),
)
def test_every_row_of_a_planned_round_is_edited_for_its_own_request_and_place(
    way: object, drafts: list[list[int]], seed: int
) -> None:
    texts = [[7, 3, 3], [1], [9, 2, 4, 2], [5, 9]]
    rows = [
        decode_row(params, text, len(text) - 1, len(drafted))
        for params, text, drafted in zip(PARAMS, texts, drafts, strict=True)
    ]
    token_ids: list[int] = []
    expected: list[list[float]] = []
    num_rows = sum(len(drafted) + 1 for drafted in drafts)
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    for params, text, drafted in zip(PARAMS, texts, drafts, strict=True):
        prompt, generated = text[: len(text) - 1], text[len(text) - 1 :]
        for depth in range(len(drafted) + 1):
            scores = logits[len(expected)].tolist()
            expected.append(
                edited(scores, prompt, generated + drafted[:depth], params, [])
                if params.edits_scores
                else scores
            )
            token_ids.append([text[-1], *drafted][depth])
    found = logits.to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_edits, "edit_scores", way.edit_scores)  # type: ignore[attr-defined]
        plan = StepPlan(tuple(rows), max(map(len, drafts)), len(rows))
        edit_round(plan, torch.tensor(token_ids, device=DEVICE), found)
    torch.testing.assert_close(found.cpu(), torch.tensor(expected), rtol=1e-5, atol=2e-5)
