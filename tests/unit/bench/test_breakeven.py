"""`serve-spec breakeven` and its throughput equation."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench.breakeven import (
    best_num_steps,
    break_even,
    break_even_rate,
    speedup,
    tokens_per_round,
)
from serve_spec.bench.command import main
from serve_spec.config import ConfigError
from serve_spec.config.cost_table import FORMAT_VERSION, CostTable, write_cost_table
from tests.helpers.costs import KEY

TABLE = "--cost-table"
NUMBERS = ["--accept-rate", "0.7", "--draft-ms", "1.2", "--target-ms", "10"]


def answer(capsys, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "r.jsonl"
        assert main(["breakeven", *arguments, "--json", str(file)]) == 0
        return capsys.readouterr().out, json.loads(file.read_text())


@pytest.fixture
def cost_table(tmp_path):
    """Two batch sizes: drafts are cheap for one sequence, and dear for eight."""
    table = CostTable(
        version=FORMAT_VERSION,
        key=KEY,
        context=64,
        batch_sizes=(1, 8),
        num_steps=(1, 2),
        draft_ms=((1.0, 2.0), (6.0, 12.0)),
        draft_context_ms=0.001,
        num_tokens=(1, 2, 3, 8, 16, 24),
        verify_ms=(10.0, 10.5, 11.0, 12.0, 20.0, 28.0),
        verify_context_ms=0.0,
        sampled_token_ms=0.1,
        extrapolated=(),
        measured_s=1.0,
    )
    write_cost_table(table, tmp_path / "costs.json")
    return tmp_path / "costs.json"


def test_given_times_are_weighed_for_one_batch_size(capsys):
    text, result = answer(capsys, *NUMBERS, "--max-steps", "3", "--verify-ms-per-row", "0.3")
    (batch,) = result["batches"]
    assert batch["round_ms"] == pytest.approx([10, 11.5, 13, 14.5])
    (at_rate,) = batch["at_rates"]
    assert at_rate["tokens_per_round"] == pytest.approx([1, 1.7, 2.19, 2.533])
    assert at_rate["speedup"] == pytest.approx([1, 1.7 / 1.15, 2.19 / 1.3, 2.533 / 1.45])
    assert at_rate["best_num_steps"] == 3
    assert batch["break_even"] == {"accept_rate": pytest.approx(0.15), "num_steps": 1}
    assert "speculate; 3 steps a round: 1.75 times as fast." in text
    assert "Drafts pay above an accept rate of 0.15 (1 step)." in text


def test_a_cost_table_gives_an_answer_for_each_of_its_batch_sizes_and_accept_rates(
    cost_table, tmp_path, capsys
):
    costs = ["--accept-rate", "0.8", "0.1", "--cost-table", str(cost_table)]
    text, result = answer(capsys, *costs, "--plot", str(tmp_path / "r.png"))
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    one, eight = result["batches"]
    assert (one["batch_size"], one["round_ms"]) == (1, pytest.approx([10, 11.5, 13]))
    assert (eight["batch_size"], eight["round_ms"]) == (8, pytest.approx([12, 26, 40]))
    assert "Batch 1, accept rate 0.8: speculate" in text
    assert "Batch 8, accept rate 0.8: do not speculate" in text
    assert "Batch 1, accept rate 0.1: do not speculate" in text
    assert result["measured_on"]["hardware"] == KEY.hardware
    for batch in result["batches"]:
        for k, times in enumerate(batch["at_rates"][0]["speedup"]):
            assert times == pytest.approx(speedup(0.8, k, batch["round_ms"]))
        assert batch["at_rates"][0]["best_num_steps"] == best_num_steps(0.8, batch["round_ms"])


def test_context_and_sampling_cost_what_the_table_says(cost_table, capsys):
    arguments = ["--accept-rate", "0.8", "--cost-table", str(cost_table)]
    _, long = answer(capsys, *arguments, "--context", "512")
    assert long["batches"][0]["round_ms"] == pytest.approx([10, 11.948, 13.896])
    _, sampled = answer(capsys, *arguments, "--sampled")
    assert sampled["batches"][0]["round_ms"] == pytest.approx([10.1, 11.7, 13.3])
    assert sampled["batches"][1]["round_ms"] == pytest.approx([12.8, 27.6, 42.4])
    _, shallow = answer(capsys, *arguments, "--max-steps", "1")
    assert [len(batch["round_ms"]) for batch in shallow["batches"]] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--accept-rate", "1.2"], r"--accept-rate=1.2: give a number in \[0, 1\]"),
        (["--accept-rate", "nan"], r"--accept-rate=nan: "),
        (["--draft-ms", "-1"], r"--draft-ms=-1.0: give milliseconds ≥ 0"),
        (["--target-ms", "-1"], r"--target-ms=-1.0: give milliseconds > 0"),
        (["--target-ms", "inf"], r"--target-ms=inf: "),
        (["--verify-ms-per-row", "-0.1"], r"--verify-ms-per-row=-0.1: "),
        (["--batch-size", "0"], r"--batch-size=0: give at least 1"),
        (["--max-steps", "0"], r"--max-steps=0: give at least 1"),
        (["--sampled"], r"--sampled=True: needs --cost-table; omit it"),
        (["--context", "64"], r"--context=64: needs --cost-table; omit it"),
        ([TABLE, "--draft-ms", "1"], r"--draft-ms=1.0: --cost-table has it; omit it"),
        ([TABLE, "--batch-size", "4"], r"--batch-size=4: --cost-table has it; omit it"),
        ([TABLE, "--max-steps", "3"], r"--max-steps=3: the table has 1 to 2"),
        ([TABLE, "--context", "0"], r"--context=0: give at least 1"),
        ([], r"--draft-ms: missing; add it, or give --cost-table"),
    ],
)
def test_impossible_and_contradictory_numbers_are_refused(arguments, problem, cost_table):
    has_times = arguments and TABLE not in arguments
    given = [f"{TABLE}={cost_table}" if each == TABLE else each for each in arguments]
    with pytest.raises(ConfigError, match=f"^{problem}"):
        main(["breakeven", *(NUMBERS if has_times else NUMBERS[:2]), *given])


RATES = st.floats(0, 1)
STEPS = st.integers(0, 12)
ROUND_MS = st.lists(st.floats(0.01, 1000), min_size=2, max_size=10)
LINEAR = st.builds(
    lambda target_ms, step_ms, deepest: [target_ms + k * step_ms for k in range(deepest + 1)],
    st.floats(1e-2, 1000),
    st.floats(1e-3, 1000),
    st.integers(1, 12),
)


@given(RATES, STEPS)
def test_tokens_per_round_are_the_mean_over_every_outcome_of_a_round(rate, num_steps):
    """m drafts kept, then a miss or the end: m + 1 tokens."""
    probabilities = [rate**m * (1 - rate) for m in range(num_steps)] + [rate**num_steps]
    mean = sum((m + 1) * probability for m, probability in enumerate(probabilities))
    assert tokens_per_round(rate, num_steps) == pytest.approx(mean)


@given(RATES, ROUND_MS)
def test_the_best_depth_emits_most_per_time_and_is_the_smallest_of_equals(rate, round_ms):
    best = best_num_steps(rate, round_ms)
    fastest = speedup(rate, best, round_ms)
    rivals = [speedup(rate, k, round_ms) for k in range(len(round_ms))]
    assert fastest == max(rivals)
    assert best == rivals.index(fastest)


@given(ROUND_MS, st.integers(1, 9))
def test_at_its_break_even_rate_a_depth_is_as_fast_as_off(round_ms, num_steps):
    num_steps = min(num_steps, len(round_ms) - 1)
    rate = break_even_rate(num_steps, round_ms)
    if rate is None:
        assert speedup(1.0, num_steps, round_ms) < 1
    elif rate == 0:
        assert speedup(0.0, num_steps, round_ms) >= 1
    else:
        assert speedup(rate, num_steps, round_ms) == pytest.approx(1, abs=1e-6)


@given(LINEAR, RATES)
def test_speculation_pays_exactly_above_the_overall_break_even_rate(round_ms, rate):
    point = break_even(round_ms)
    best = best_num_steps(rate, round_ms)
    if point is None:
        assert best == 0
    elif abs(rate - point.accept_rate) > 1e-9:
        assert (best > 0) == (rate > point.accept_rate)
