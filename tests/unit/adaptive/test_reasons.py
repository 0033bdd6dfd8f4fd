"""Reasons of decisions: their meanings, and the sentence about the last one."""

from pathlib import Path

import pytest

from serve_spec.adaptive.reasons import MEANINGS, explain
from serve_spec.core.round import Reason

PAGE = Path(__file__).parents[3] / "docs" / "observability.md"
DECIDED = {
    "speculative_num_steps": 2,
    "speculative_num_draft_tokens": 3,
    "last_reason": "steady",
    "fallback": None,
    "budget": 61,
    "predicted_goodput": {"0": 43.0, "1": 44.5, "2": 46.04},
    "break_even": {"batch_size": 64},
    "slot": "64",
    "slots": {"64": {"guard_rounds_left": 0}},
}
PLAIN = {"speculative_num_steps": 0, "speculative_num_draft_tokens": 1}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {},
            "depth 2, 61 of 128 drafts: predicted 46 tokens/ms against 43 plain at batch 64; "
            "guard off",
        ),
        (
            {"budget": None},
            "depth 2, 128 of 128 drafts: predicted 46 tokens/ms against 43 plain at batch 64; "
            "guard off",
        ),
        (
            {"last_reason": "probe"},
            "depth 2 (probe: a trial): predicted 46 tokens/ms against 43 plain at batch 64; "
            "guard off",
        ),
        (
            {**PLAIN, "last_reason": "guard", "slots": {"64": {"guard_rounds_left": 40}}},
            "plain decoding (guard: no drafts: drafting was measured slower than plain decoding): "
            "predicted 43 tokens/ms against 46 at depth 2 at batch 64; guard on for 40 more rounds",
        ),
        (
            {"speculative_num_draft_tokens": 7, "predicted_goodput": {"0": 43.0, "2x6": 50.0}},
            "depth 2, 61 of 384 drafts: predicted 50 tokens/ms against 43 plain at batch 64; "
            "guard off",
        ),
        (
            {"predicted_goodput": {}, "last_reason": "static"},
            "depth 2: the depth is configured and never changes",
        ),
        (
            {**PLAIN, "last_reason": "fallback", "fallback": "the policy failed to choose: X()"},
            "plain decoding: the policy failed to choose: X()",
        ),
    ],
)
def test_the_last_decision_is_a_sentence(changes, sentence):
    assert explain({**DECIDED, **changes}) == sentence


def test_every_reason_has_a_meaning_and_a_row_of_the_page():
    assert set(MEANINGS) == set(Reason)
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [f"| `{reason}` | {meaning} |" in rows for reason, meaning in MEANINGS.items()] == [
        True
    ] * len(MEANINGS)
