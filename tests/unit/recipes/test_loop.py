"""The training loop and its evaluation: resuming changes nothing, schedules end on time."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from recipes.training.evaluate import evaluate, in_loop, markdown, walk
from recipes.training.loop import Run, Trainer, read_log
from recipes.training.plots import plot_survival
from recipes.training.sampling import mixed_rows, windows
from recipes.training.settings import EvaluationPlan, Phase, Schedule, draft_recipe, llama_config
from recipes.training.weights import MasterWeights, export_checkpoint, initialise, new_llama

PHASE = Phase(1e-2, Schedule(steps=12, warmup_steps=3), rows=2, row_tokens=8, log_every=1)


def trainer_in(folder):
    """A small network with a matrix (Muon), a table and a bias (AdamW), and its batches."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"embed_tokens": nn.Embedding(16, 8), "inner": nn.Linear(8, 8)})
    stream = torch.randint(0, 16, (200,), generator=torch.Generator().manual_seed(1))
    rng = torch.Generator().manual_seed(2)

    def loss_fn(step):
        rows = windows(stream, 2, 9, rng)
        hidden = module["inner"](module["embed_tokens"](rows[:, :-1])).tanh()
        logits = hidden @ module["embed_tokens"].weight.T
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        return loss, {"seen": rows.float().mean()}

    return Trainer(
        dict(module.named_parameters()), PHASE, Run("toy", folder, show_progress=False), rng
    ), loss_fn


def losses(folder):
    return [(row["step"], row["loss"], row["seen"]) for row in read_log(folder / "toy.jsonl")]


def test_a_resumed_run_has_bit_identical_losses_to_an_uninterrupted_one(tmp_path):
    trainer, loss_fn = trainer_in(tmp_path / "whole")
    trainer.train(loss_fn)
    first, loss_fn = trainer_in(tmp_path / "cut")
    first.train(loss_fn, stop_after=5)
    second, loss_fn = trainer_in(tmp_path / "cut")
    second.train(loss_fn)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for name, parameter in trainer.parameters.items():
        assert torch.equal(second.parameters[name], parameter)


def test_the_state_of_an_older_version_is_refused(tmp_path):
    trainer, loss_fn = trainer_in(tmp_path)
    torch.save({"step": 3}, tmp_path / "toy.state.pt")
    with pytest.raises(ValueError, match="another version; remove it"):
        trainer.train(loss_fn)


def test_a_crash_after_the_checkpoint_leaves_no_step_in_the_log_twice(tmp_path):
    trainer, loss_fn = trainer_in(tmp_path)
    trainer.train(loss_fn, stop_after=4)
    with (tmp_path / "toy.jsonl").open("a") as log:
        log.write('{"step": 5, "loss": 0.0, "seen": 0.0}\n')
    resumed, loss_fn = trainer_in(tmp_path)
    resumed.train(loss_fn)
    assert [step for step, _, _ in losses(tmp_path)] == list(range(1, 13))


def test_a_schedule_in_steps_or_seconds_warms_up_stays_and_decays_to_its_floor():
    schedule = Schedule(steps=100, warmup_steps=10, stable_fraction=0.5, floor=0.1)
    factors = [schedule.factor(step, schedule.progress(step, 0.0)) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:51] == [1.0] * 41
    assert all(a >= b for a, b in pairwise(factors[50:]))
    assert factors[-1] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="steps=3 and seconds=4"):
        Schedule(steps=3, seconds=4)


def test_corpus_and_on_policy_rows_alternate_and_a_stream_shorter_than_a_row_is_refused():
    stream, pool = torch.ones(100, dtype=torch.int16), torch.full((5, 8), 2, dtype=torch.int16)
    rng = torch.Generator().manual_seed(0)
    batches = [mixed_rows(step, stream, pool, 32, 16, rng) for step in range(2)]
    assert [int(batch[0, 0]) for batch in batches] == [2, 1]
    assert [batch.numel() for batch in batches] == [32, 32]
    with pytest.raises(ValueError, match="row_tokens=9: the stream has only 4"):
        windows(torch.zeros(4, dtype=torch.int16), 1, 9, torch.Generator())


def test_the_walk_counts_rounds_whose_root_counts_and_their_tokens():
    matches = torch.tensor([[[1, 0, 1, 1]], [[0, 1, 1, 0]]], dtype=torch.bool)
    outcome = walk(matches)
    assert (outcome.rounds, outcome.accept_length) == (2, 2.5)
    assert outcome.survival == [1.0, 0.5]
    perfect = walk(torch.ones(3, 2, 40, dtype=torch.bool))
    assert (perfect.accept_length, perfect.standard_error) == (4.0, 0.0)
    assert walk(torch.zeros(3, 2, 40, dtype=torch.bool)).accept_length == 1.0
    matches = torch.ones(1, 1, 8, dtype=torch.bool)
    matches[:, :, 4:] = False
    assert walk(matches, torch.arange(8)[None] < 4).accept_length == 2.0
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
