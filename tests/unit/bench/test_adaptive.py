"""Laws of the adaptive benchmark: its figures, and the whole of it on a tiny random pair."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench.adaptive.loads import Load
from serve_spec.bench.adaptive.report import (
    equal_prefixes,
    last_run,
    summary,
    tables,
    turn_figures,
)
from serve_spec.bench.closed_loop import MeasuredRound
from serve_spec.bench.command import main
from serve_spec.core.record import StepTimes
from serve_spec.core.round import RoundNotes
from tests.helpers.rounds import verified_round
from tests.unit.bench.configs import write_config

ARMS = {"off": True, "K=3": True, "ema": False, "goodput": False}
PHASES = ["batch 1", "batch 4"]
RUN = {
    "section": "run",
    "environment": {"gpu": None, "cpu": "a CPU"},
    "arguments": {},
    "phases": PHASES,
    "arms": ARMS,
}
Speeds = Sequence[Mapping[str, Sequence[float]]]
"""Tokens per ms, by phase, arm and turn."""


def turn(phase: int, number: int, arm: str, speed: float, **fields: Any) -> dict[str, Any]:
    rounds = [MeasuredRound(8.0 / speed, verified_round([1] * 4, 4, 2))]
    figures = turn_figures(rounds, 8.0 / speed, 8, Load("mixture", 4))
    place = {"phase": phase, "repetition": 0, "turn": number, "arm": arm}
    return {"section": "turn", **place, **figures, **fields}


def turns(speeds: Speeds) -> list[dict[str, Any]]:
    return [
        turn(phase, number, arm, speed)
        for phase, of_arms in enumerate(speeds)
        for arm, of_turns in of_arms.items()
        for number, speed in enumerate(of_turns)
    ]


def close(value: float) -> Any:
    """Times of records are rounded."""
    return pytest.approx(value, rel=1e-4)


TURNS = st.lists(st.floats(0.01, 1), min_size=3, max_size=3)
SPEEDS = st.lists(st.fixed_dictionaries(dict.fromkeys(ARMS, TURNS)), min_size=2, max_size=2)


@given(SPEEDS)
def test_totals_are_times_of_equal_work_against_off_and_the_best_fixed_depth(
    speeds: Speeds,
) -> None:
    result = summary([RUN, *turns(speeds)])
    # Turns are of as many tokens, so the speed of a phase is the harmonic mean of theirs.
    rates = [{arm: harmonic_mean(mine) for arm, mine in of.items()} for of in speeds]
    best = [max(of["off"], of["K=3"]) for of in rates]
    for of, phase in zip(rates, result["phases"], strict=True):
        assert of[phase["best_fixed"]] == max(of["off"], of["K=3"])
    for arm in result["arms"]:
        mine = [of[arm["arm"]] for of in rates]
        work = [of["off"] for of in rates]  # what off does in a second of each phase
        time = sum(tokens / speed for tokens, speed in zip(work, mine, strict=True))
        best_time = sum(tokens / speed for tokens, speed in zip(work, best, strict=True))
        assert arm["over_off"] == close(len(rates) / time)
        assert arm["over_best_fixed"] == close(best_time / time)
        worst = [speed / of["off"] for speed, of in zip(mine, rates, strict=True)]
        assert arm["worst_over_off"] == close(min(worst))
        at = [phase["phase"] for phase in result["phases"]].index(arm["worst_phase"])
        assert worst[at] == close(min(worst))
    assert result["arms"][0]["over_off"] == close(1)
    assert "goodput / best" in tables(result)


@given(SPEEDS, st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_a_machine_that_slows_down_between_turns_changes_no_steady_comparison(
    speeds: Speeds, drift: Sequence[float]
) -> None:
    steady = [{arm: [mine[0]] * 3 for arm, mine in of.items()} for of in speeds]
    drifted = [
        {arm: [v * d for v, d in zip(mine, drift, strict=True)] for arm, mine in of.items()}
        for of in steady
    ]
    before, after = (summary([RUN, *turns(each)]) for each in (steady, drifted))
    for one, other in zip(before["arms"], after["arms"], strict=True):
        for key in ("over_off", "over_best_fixed", "worst_over_off"):
            assert one[key] == close(other[key])
    for phase in after["phases"]:
        for cell in phase["arms"].values():
            assert cell["error"] <= 1e-3 * max(1.0, cell["over_best_fixed"])


def test_a_run_that_was_cut_off_compares_the_turns_that_every_arm_had() -> None:
    speeds = [{arm: [1.0, 1.0] for arm in ARMS}] * 2
    records = [each for each in turns(speeds) if not (each["phase"] and each["turn"])]
    records = [RUN, *records, turn(1, 1, "goodput", 100.0)]
    result = summary(records)
    assert [phase["num_turns"] for phase in result["phases"]] == [2, 1]
    assert result["arms"][-1]["over_off"] == 1
    assert summary([RUN, turn(0, 0, "off", 1.0)])["phases"] == []
    assert "no turn" in tables(summary([RUN]))


def test_of_a_file_of_several_runs_the_last_is_shown() -> None:
    first, second = turn(0, 0, "off", 1.0), turn(0, 0, "off", 2.0)
    assert last_run([RUN, first, RUN, second]) == [RUN, second]


def test_texts_are_compared_as_far_as_both_were_generated() -> None:
    expected = [[1, 2, 3], [4, 5], [6], [7]]
    assert equal_prefixes([[1, 2], [4, 5, 6], [9]], expected) == {"texts": 3, "same_texts": 2}
    records = [RUN, *turns([{arm: [1.0] for arm in ARMS}] * 2)]
    texts = {"section": "texts", "phase": 1, "arm": "ema", "texts": 3, "same_texts": 2}
    result = summary([*records, texts])
    assert [phase["same_texts"] for phase in result["phases"]] == [True, False]
    assert "NO" in tables(result)


def test_a_turn_of_full_batches_counts_full_steps_without_prompts_only() -> None:
    rounds = [
        MeasuredRound(ms, verified_round([1] * size, size, 2, num_prefill_tokens=prompt, **fields))
        for ms, size, prompt, fields in (
            (10.0, 4, 0, {"times": StepTimes(1.0, 2.0, 9.0), "notes": RoundNotes(predicted_ms=8)}),
            (11.0, 4, 0, {"times": StepTimes(1.0, 2.0, 9.0), "budget": 5, "row_drafted": [3] * 4}),
            (50.0, 4, 9, {"times": StepTimes(1.0, 2.0, 9.0), "notes": RoundNotes(predicted_ms=1)}),
            (20.0, 3, 0, {"times": StepTimes(1.0, 2.0, 9.0)}),
        )
    ]
    full = turn_figures(rounds, 100.0, 40, Load("mixture", 4, is_steady=True))
    assert (full["ms"], full["tokens"], full["steps"], full["prompt_tokens"]) == (21.0, 16, 2, 0)
    assert (full["predicted_ms"], full["measured_ms"]) == (8.0, 9.0)
    assert (full["verified"], full["unverified"], full["accepted"]) == (16, 4, 8)
    mixed = turn_figures(rounds, 100.0, 40, Load("mixture", 4))
    assert (mixed["ms"], mixed["tokens"], mixed["steps"], mixed["prompt_tokens"]) == (100, 40, 4, 9)
    assert (mixed["predicted_ms"], mixed["measured_ms"]) == (8.0, 9.0), "no prompt shared them"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("adaptive"), speculative={"speculative_draft_dtype": "float32"}
    )


def run(config: Path, extra: str) -> None:
    words = f"""adaptive --config {config} --prompt-tokens 12 --output-tokens 12
        --seconds-per-phase 0.03 --turn-ms 5 {extra}"""
    assert main(words.split()) == 0


def test_every_arm_generates_the_same_texts_and_an_old_result_is_shown_again(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    file, plot = tmp_path / "r.jsonl", tmp_path / "r.png"
    arms = "ema ema-aggressive per-request goodput goodput-chains"
    phases = f"--batch-sizes 1 3 1 --classes predictable mixture --num-steps 1 4 --arms {arms}"
    run(config, f"{phases} --repetitions 2 --json {file} --plot {plot}")
    shown = capsys.readouterr().out
    result = json.loads(shown.splitlines()[-1])
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert result == summary(records)
    assert plot.read_bytes().startswith(b"\x89PNG")
    names = ["off", "K=1", "K=4", *arms.split()]
    assert [arm["arm"] for arm in result["arms"]] == names
    assert [arm["is_static"] for arm in result["arms"]] == [True] * 3 + [False] * 5
    assert len(result["phases"]) == 6
    assert all(phase["same_texts"] for phase in result["phases"])

    measured = [record for record in records if record["section"] == "turn"]
    assert {record["repetition"] for record in measured} == {0, 1}
    assert max(record["turn"] for record in measured) > 0
    for record in measured:
        depths = {"off": 0, "K=1": 1, "K=4": 4}
        if record["arm"] in depths:
            assert record["depth_sum"] == depths[record["arm"]] * record["requests"]
    texts = [record for record in records if record["section"] == "texts"]
    assert len(texts) == 2 * 6 * len(names)
    assert all(record["same_texts"] == record["texts"] > 0 for record in texts)

    again = tmp_path / "again.png"
    assert main(["adaptive", "--from-json", str(file), "--plot", str(again)]) == 0
    assert again.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == shown


def test_full_batches_have_fresh_policies_and_no_prompts(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    file = tmp_path / "r.jsonl"
    where = "--batch-sizes 2 1 --classes predictable --temperatures 0 0.5 --output-tokens 40"
    run(config, f"--cells {where} --num-steps 2 --arms goodput --repetitions 1 --json {file}")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [phase["phase"] for phase in result["phases"]] == [
        *("batch 1, predictable T=0", "batch 1, predictable T=0.5"),
        *("batch 2, predictable T=0", "batch 2, predictable T=0.5"),
    ]
    records = [json.loads(line) for line in file.read_text().splitlines()]
    measured = [record for record in records if record["section"] == "turn"]
    assert not any(record["prompt_tokens"] for record in measured)
    sizes = (1, 1, 2, 2)
    assert all(r["requests"] == r["steps"] * sizes[r["phase"]] for r in measured)


def test_forced_acceptance_is_said_above_the_tables_of_fresh_and_of_old_results(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    forced = "--num-steps 2 --arms ema --set synthetic_acceptance=[1.0]"
    run(config, f"--batch-sizes 1 --classes predictable {forced} --json {tmp_path}/r.jsonl")
    fresh = capsys.readouterr().out
    result = json.loads(fresh.splitlines()[-1])
    assert result["environment"]["synthetic_acceptance"] == [1.0]
    assert main(["adaptive", "--from-json", f"{tmp_path}/r.jsonl"]) == 0
    old = capsys.readouterr().out
    for shown in (fresh, old):
        assert shown.startswith("*** synthetic_acceptance="), "the banner comes first"
