"""Drafts that are saved answers: which of them go on, and files that hold something else."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.config import SpeculativeConfig
from serve_spec.config.base import validate
from serve_spec.core.draft import DraftShape
from serve_spec.worker.drafters.replay import ReplayDrafter, build_replay

TOKENS = st.lists(st.integers(0, 2), max_size=8)
ANSWERS = st.lists(st.tuples(TOKENS.filter(bool), TOKENS), max_size=8)


def continued(answers, text, most):
    """By looking at every answer: longer prompts first, of these the last ones."""
    fitting = [
        (len(prompt), place, prompt + answer)
        for place, (prompt, answer) in enumerate(answers)
        if text[: len(prompt)] == prompt and (prompt + answer)[: len(text)] == text
    ]
    saved = max(fitting, default=(0, 0, []))[2]
    return tuple(saved[len(text) : len(text) + most])


@given(answers=ANSWERS, text=TOKENS.filter(bool), more=TOKENS, most=st.integers(0, 9))
def test_the_newest_answer_that_equals_the_text_goes_on_however_the_text_has_grown(
    answers, text, more, most
):
    drafter = ReplayDrafter(answers, max_steps=7)
    for length in range(len(text), len(text + more) + 1):
        grown = (text + more)[:length]
        started = [saved for saved in answers if saved[0] == text[: len(saved[0])]]
        assert drafter.propose("a", grown, most) == (), "before the text is read"
        while drafter.learn("a", grown, 2):
            pass
        found = drafter.propose("a", grown, most)
        assert found == continued(started, grown, min(most, 7))
        tree = drafter.propose_tree("a", grown, DraftShape(3, 5, 2))
        assert tree.token_ids == drafter.propose("a", grown, 3)
        assert tree.parents == tuple(range(len(tree.token_ids)))
        assert drafter.match_length("a") == len(grown)
    drafter.forget("a")
    assert (drafter.propose("a", text, most), drafter.match_length("a")) == ((), 0)


def build(path):
    keys = {"speculative_algorithm": "REPLAY", "speculative_replay_answers": str(path)}
    return build_replay(validate(SpeculativeConfig, keys), lambda text: [], 4)


def test_answers_are_read_from_a_file_of_which_the_last_line_counts(tmp_path):
    file = tmp_path / "answers.jsonl"
    answers = [[3, 4], [5, 6, 7]]
    lines = [json.dumps({"prompt_token_ids": [1, 2], "token_ids": answer}) for answer in answers]
    file.write_text("\n".join(lines))
    drafter = build(file)
    drafter.learn("a", [1, 2], 9)
    assert drafter.propose("a", [1, 2], 9) == (5, 6, 7)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: invalid JSON: "),
        ("[]", "line 2, field prompt_token_ids: not a list of token ids"),
        ('{"prompt_token_ids": [1]}', "line 2, field token_ids: not a list of token ids"),
        ('{"prompt_token_ids": "a", "token_ids": []}', "line 2, field prompt_token_ids: not a"),
        ('{"prompt_token_ids": [true], "token_ids": []}', "line 2, field prompt_token_ids: "),
        ('{"prompt_token_ids": [1], "token_ids": [-1]}', "line 2, field token_ids: "),
    ],
)
def test_a_line_that_is_no_answer_is_refused_with_its_field(tmp_path, line, problem):
    file = tmp_path / "answers.jsonl"
    file.write_text('{"prompt_token_ids": [1], "token_ids": []}\n' + line)
    start = re.escape(f"speculative_replay_answers='{file}': {problem}")
    with pytest.raises(ValueError, match=f"^{start}.*; give a file that"):
        build(file)
