"""Laws of `serve-spec breakeven`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve_spec.bench.breakeven.command import main
from serve_spec.bench.throughput import best_num_steps, speedup
from serve_spec.config import ConfigError
from serve_spec.config.cost_table import CostTable, write_cost_table
from tests.helpers.costs import KEY

NUMBERS = ["--accept-rate", "0.7", "--draft-ms", "1.2", "--target-ms", "10"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, dict[str, Any]]:
    """What is printed for people, and the JSON line."""
    assert main(list(arguments)) == 0
    *text, line = capsys.readouterr().out.splitlines()
    return "\n".join(text), json.loads(line)


@pytest.fixture
def cost_table(tmp_path: Path) -> Path:
    """Two batch sizes: drafts are cheap for one sequence, and dear for eight."""
    draft = ((0.0, 1.0, 2.0), (0.0, 6.0, 12.0))
    verify = ((10.0, 10.5, 11.0), (12.0, 20.0, 28.0))
    table = CostTable(
        version=1,
        key=KEY,
        batch_sizes=(1, 8),
        num_steps=(0, 1, 2),
        contexts=(64, 512),
        draft_ms=(draft, tuple(tuple(2 * ms for ms in cells) for cells in draft)),
        verify_ms=(verify, tuple(tuple(2 * ms for ms in cells) for cells in verify)),
        sampled_row_ms=0.1,
        padded=False,
        extrapolated=(),
        measured_s=1.0,
    )
    write_cost_table(table, tmp_path / "costs.json")
    return tmp_path / "costs.json"


def test_numbers_give_the_equation_for_one_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_drafts_dearer_than_the_target_never_pay_and_free_ones_always_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    numbers = ["--target-ms", "10", "--max-steps", "4"]
    _, free = answer(capsys, "--accept-rate", "0.5", "--draft-ms", "0", *numbers)
    assert free["batches"][0]["break_even_rates"] == [0.0] * 4
    assert free["batches"][0]["at_rates"][0]["best_num_steps"] == 4
    text, result = answer(capsys, "--accept-rate", "1", "--draft-ms", "12", *numbers)
    assert result["batches"][0]["break_even"] is None
    assert result["batches"][0]["break_even_rates"] == [None] * 4
    assert text.count("never") == 4
    assert "do not speculate; off is the fastest. Drafts do not pay at any accept rate." in text


def test_a_cost_table_gives_an_answer_for_each_of_its_batch_sizes_and_accept_rates(
    cost_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = ["--accept-rate", "0.8", "0.1", "--cost-table", str(cost_table)]
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    text, result = answer(capsys, *costs, *files)
    assert json.loads((tmp_path / "r.json").read_text()) == result
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


def test_longer_texts_and_sampled_rows_cost_what_the_table_says(
    cost_table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--accept-rate", "0.8", "--cost-table", str(cost_table)]
    _, long = answer(capsys, *arguments, "--context", "512")
    assert long["batches"][0]["round_ms"] == pytest.approx([20, 23, 26])
    _, sampled = answer(capsys, *arguments, "--sampled")
    assert sampled["batches"][0]["round_ms"] == pytest.approx([10.1, 11.7, 13.3])
    assert sampled["batches"][1]["round_ms"] == pytest.approx([12.8, 27.6, 42.4])
    _, shallow = answer(capsys, *arguments, "--max-steps", "1")
    assert [len(batch["round_ms"]) for batch in shallow["batches"]] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--accept-rate", "1.2"], r"accept_rate=1.2: give the share of drafts kept, from 0 to 1"),
        (["--accept-rate", "nan"], r"accept_rate=nan: "),
        (["--draft-ms", "-1"], r"draft_ms=-1.0: give milliseconds from 0 on"),
        (["--target-ms", "-1"], r"target_ms=-1.0: give milliseconds above 0"),
        (["--target-ms", "inf"], r"target_ms=inf: "),
        (["--verify-ms-per-row", "-0.1"], r"verify_ms_per_row=-0.1: "),
        (["--batch-size", "0"], r"batch_size=0: give at least 1"),
        (["--max-steps", "0"], r"max_steps=0: give at least 1"),
        (["--sampled"], r"sampled=True: belongs to a cost_table; leave out"),
        (["--context", "64"], r"context=64: belongs to a cost_table; leave out"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        main([*NUMBERS, *arguments])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--draft-ms", "1"], r"draft_ms=1.0: the cost_table says it; leave out"),
        (["--batch-size", "4"], r"batch_size=4: the cost_table says it; leave out"),
        (["--max-steps", "3"], r"max_steps=3: the table reaches 1 to 2"),
        (["--context", "0"], r"context=0: give at least 1"),
        (None, r"draft_ms=None: give draft_ms and target_ms, or a cos"),
    ],
)
def test_what_contradicts_the_cost_table_or_stands_without_times_is_refused(
    arguments: list[str] | None, problem: str, cost_table: Path
) -> None:
    costs = [] if arguments is None else ["--cost-table", str(cost_table), *arguments]
    with pytest.raises(ConfigError, match=f"^{problem}"):
        main(["--accept-rate", "0.5", *costs])


def test_it_starts_without_torch() -> None:
    code = (
        "import sys\n"
        "from serve_spec.bench.breakeven.command import main\n"
        f"main({NUMBERS!r})\n"
        "sys.exit('torch was loaded' if 'torch' in sys.modules else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
