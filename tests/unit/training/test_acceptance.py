"""Acceptance figures, and the evaluation that measures them."""

from dataclasses import replace

import pytest
import torch

from recipes.tiny.plots import plot_survival
from serve_spec.training.evaluate import evaluate, in_loop, markdown, walk
from serve_spec.training.settings import EvaluationPlan, draft_recipe, llama_config
from serve_spec.training.weights import MasterWeights, export_checkpoint, initialise, new_llama


def test_the_walk_plays_the_worked_example():
    matches = torch.tensor([[[1, 0, 1, 1]], [[0, 1, 1, 0]]], dtype=torch.bool)
    outcome = walk(matches)
    assert (outcome.rounds, outcome.accept_length) == (2, 2.5)
    assert outcome.survival == [1.0, 0.5]


def test_a_perfect_drafter_emits_k_plus_one_tokens_a_round():
    outcome = walk(torch.ones(3, 2, 40, dtype=torch.bool))
    assert outcome.accept_length == 4.0
    assert outcome.standard_error == 0.0
    assert walk(torch.zeros(3, 2, 40, dtype=torch.bool)).accept_length == 1.0


def test_rounds_whose_root_is_not_counted_do_not_enter_the_figures():
    matches = torch.ones(1, 1, 8, dtype=torch.bool)
    matches[:, :, 4:] = False
    counted = torch.arange(8)[None] < 4
    assert walk(matches, counted).accept_length == 2.0
    assert walk(matches, torch.zeros(1, 8, dtype=torch.bool)).rounds == 0


@pytest.mark.parametrize("period", [1, 3, 8])
def test_a_token_loops_from_the_end_of_the_third_repetition_on(period):
    lead, unit = list(range(100, 110)), list(range(period))
    tokens = torch.tensor([lead + unit * 4 + [99]])
    expected = [False] * (10 + 3 * period - 1) + [True] * (period + 1) + [False]
    assert in_loop(tokens, longest=8)[0].tolist() == expected
    assert not in_loop(tokens, longest=period - 1).any()


def test_a_stand_alone_draft_that_is_the_target_is_always_right(tmp_path):
    """Coupled at tau = T the draft has the same distribution and noise: every draft is accepted."""
    plan = EvaluationPlan(
        prompts=4, rows_per_chunk=4, prompt_tokens=24, new_tokens=32, loop_tokens=8,
        draft_temperature_ratio=1.0,
    )  # fmt: skip
    config = llama_config(
        vocab_size=512, hidden_size=64, intermediate_size=128, head_dim=16,
        max_position_embeddings=256,
    )  # fmt: skip
    masters = MasterWeights(new_llama(config, torch.device("cpu"), torch.float32))
    initialise(masters, 8, torch.Generator().manual_seed(0))
    for name in ("target", "standalone"):
        export_checkpoint(tmp_path / name, masters.parameters, config, torch.float32)
    held_out = torch.randint(0, 512, (400,), generator=torch.Generator().manual_seed(1))
    recipe = replace(draft_recipe(), evaluation=plan)
    record = evaluate(recipe, tmp_path, held_out, torch.float32)
    for temperature, figures in record["temperatures"].items():
        modes = figures["drafters"]["standalone"]
        best = modes["greedy" if temperature == "0.0" else "coupled"]
        assert [a["accept_length"] for a in best["all"]] == [2.0, 4.0, 6.0, 8.0]
    assert "standalone | coupled" in markdown(record)
    plot_survival(record, tmp_path / "survival.png")
    assert (tmp_path / "survival.png").stat().st_size > 1000
