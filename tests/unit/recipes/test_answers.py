"""Training on a chat model's answers: rows, what counts, and the ids that a head draws from."""

from dataclasses import replace

import pytest
import torch

from recipes.smollm2.answers import Answers, Chat, fill_rows, join, split
from recipes.smollm2.prompts import function_heads
from recipes.training.drafts import Batch, new_draft, train_head
from recipes.training.loop import Run, read_log
from recipes.training.settings import Phase, Schedule, draft_recipe
from recipes.training.unroll import Teacher, draft_loss
from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.loader import load_target

CHATS = [Chat([1, 2, 3], [4, 5]), Chat([6], [7, 8, 9]), Chat([10], [11, 12])]


def test_rows_hold_whole_chats_and_count_their_answers_only():
    tokens, counted = fill_rows(CHATS, row_tokens=10, least=2)
    assert tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 0], [10, 11, 12, *[0] * 7]]
    assert counted.int().tolist() == [[0, 0, 0, 1, 1, 0, 1, 1, 1, 0], [0, 1, 1, *[0] * 7]]


def test_a_chat_longer_than_its_row_is_cut():
    tokens, counted = fill_rows(CHATS, row_tokens=7, least=2)
    assert tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7], [10, 11, 12, *[0] * 4]]
    assert counted.sum() == 5


def test_prompts_joined_for_a_file_are_split_again():
    prompts = [[1, 2], [3], [4, 5, 6]]
    assert split(*join(prompts)) == prompts


def test_ids_are_the_most_frequent_of_answers_in_ascending_order():
    rows = fill_rows([Chat([9] * 9, [3, 7, 7, 3, 5]), Chat([9], [7])], row_tokens=20)
    assert Answers(rows, rows).draft_ids(2).tolist() == [3, 7]


@pytest.mark.parametrize("step", range(3))
def test_drafts_of_tokens_that_do_not_count_have_no_weight(target, step):
    """A draft of step k at row i is of token i + 2 + k."""
    teacher = Teacher(target, padding=6)
    counted = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0]]).bool()
    weight = teacher(torch.arange(8)[None], counted).weight(step)[0].tolist()
    drafted = [place + 2 + step for place in range(8)]
    assert weight == [float(token < 8 and bool(counted[0, token])) for token in drafted]


def test_a_lesson_has_the_probabilities_of_the_ids_that_a_head_draws_from(target):
    ids, tokens = torch.tensor([2, 5, 40]), torch.arange(8)[None]
    some, every = (Teacher(target, 2, ids=which)(tokens).probs for which in (ids, None))
    torch.testing.assert_close(some, every[..., ids])


def test_a_loss_without_a_counted_token_is_zero():
    logits, probs = torch.zeros(1, 2, 4), torch.full((1, 2, 4), 0.25)
    loss, overlap = draft_loss(logits, probs, torch.zeros(1, 2), overlap_weight=1.0)
    assert loss == overlap == 0.0


def test_a_head_of_few_ids_is_trained_and_loads_as_it_was_trained(target, target_folder, tmp_path):
    phase = Phase(3e-3, Schedule(steps=12, warmup_steps=2), 4, 16, log_every=1)
    recipe = replace(draft_recipe(), phases={"eagle3": phase}, draft_vocab_size=16, unroll_steps=2)
    cycle = torch.arange(1, 17).repeat(5)[:64].view(4, 16)
    rows = Batch(cycle, torch.ones_like(cycle).bool())
    run, out = Run("eagle3", tmp_path / "logs", show_progress=False), tmp_path / "eagle3"
    train_head("eagle3", recipe, target, Answers(rows, rows), run, out)
    log = read_log(run.log_path)
    assert log[-1]["loss"] < log[0]["loss"]
    head = load_draft(out, load_target(target_folder, torch.float32, "cpu"), "EAGLE3")
    assert head.target_ids.tolist() == list(range(1, 17))
    assert head.logits(torch.zeros(2, 32)).shape == (2, 16)


def test_a_new_head_of_few_ids_starts_with_their_rows_of_the_targets_output(target):
    ids = torch.tensor([3, 8, 60])
    draft = new_draft("eagle3", target, draft_recipe(), ids)
    rows = draft.weights.parameters["lm_head.weight"]
    torch.testing.assert_close(rows, target.embed_tokens.weight[ids], check_dtype=False)
    assert draft.maps["d2t"].tolist() == [3, 7, 58]
    assert draft.maps["t2d"].nonzero().flatten().tolist() == ids.tolist()


def test_prompts_of_code_are_heads_of_functions_up_to_their_docstrings():
    docstring = "What it does, in a sentence that is long enough to tell it apart from others."
    text = f'''import os


def short():
    """No."""


def wanted(a,
           b=1):
    """{docstring}"""
    return a + b


def broken
'''
    assert list(function_heads(text)) == []
    heads = list(function_heads(text.replace("def broken\n", "")))
    assert heads == [f'def wanted(a,\n           b=1):\n    """{docstring}"""\n']
