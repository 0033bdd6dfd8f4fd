"""Laws of the adaptive benchmark: its figures, and the whole of it on a tiny random pair."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive import AdaptiveController
from serve_spec.adaptive.controller import PolicySettings
from serve_spec.bench import phases as phases_module
from serve_spec.bench.adaptive.arms import Arm
from serve_spec.bench.adaptive.command import HOPELESS, _is_hopeless
from serve_spec.bench.adaptive.report import (
    FULL_SHARE,
    SERIES_POINTS,
    ArmRuns,
    Measurement,
    measure,
    result_of,
    tables,
)
from serve_spec.bench.closed_loop import MeasuredRound, PhaseRun, prompt_ms_per_token
from serve_spec.bench.command import main
from serve_spec.bench.phases import Phase
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepTimes
from serve_spec.core.round import RoundNotes
from tests.helpers.rounds import verified_round
from tests.unit.bench.configs import write_config

PHASES = [Phase("predictable", 1, 4, 64), Phase("mixture", 4, 8, 100), Phase("heated", 2, 2, 70)]
ARMS = {"off": True, "K=3": True, "ema": False, "goodput": False, "off-again": True}
FIXED = ("off", "K=3")
RATE = st.floats(1, 1000)


def measurement(rate: float) -> Measurement:
    """A phase at `rate` tokens per second; the rest does not matter."""
    course = {"ms": [1.0], "batch_size": [1.0], "steps_per_row": [0.0], "tokens_per_second": [rate]}
    rounds, shares = {1: 1, 3: 3}, {1: 0.25, 3: 0.75}
    return Measurement(rate, rate, 1.0, 0.0, 1.0, 2.75, rounds, shares, {}, 0.0, [], {}, course)


def runs(rates: list[list[list[float | None]]]) -> list[ArmRuns]:
    """rates[arm][phase][repetition]."""
    return [
        ArmRuns(
            name,
            is_static,
            [[None if r is None else measurement(r) for r in phase] for phase in of_arm],
            [phase.num_requests for phase in PHASES],
        )
        for (name, is_static), of_arm in zip(ARMS.items(), rates, strict=True)
    ]


def all_rates() -> st.SearchStrategy[list[list[list[float]]]]:
    """Three repetitions of every arm in every phase."""
    times = st.lists(RATE, min_size=3, max_size=3)
    of_arm = st.lists(times, min_size=len(PHASES), max_size=len(PHASES))
    return st.lists(of_arm, min_size=len(ARMS), max_size=len(ARMS))


@given(all_rates(), st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_a_machine_that_slows_down_between_repetitions_changes_no_comparison(
    rates: list[list[list[float]]], drift: list[float]
) -> None:
    steady = [[[phase[0]] * 3 for phase in arm] for arm in rates]
    drifted = [
        [[rate * d for rate, d in zip(phase, drift, strict=True)] for phase in arm]
        for arm in steady
    ]
    before, after = (result_of(PHASES, runs(each)) for each in (steady, drifted))
    assert before["best_fixed"] == after["best_fixed"]
    for key in ("regret", "first_regret", "worst_over_off", "worst_regret", "speed_over_ema"):
        for one, other in zip(before["arms"], after["arms"], strict=True):
            assert one[key] == pytest.approx(other[key], abs=1e-9)


@given(all_rates())
def test_figures_of_an_arm_follow_from_its_cells(rates: list[list[list[float]]]) -> None:
    result = result_of(PHASES, runs(rates))
    for arm in result["arms"]:
        cells = [cell for cell in result["cells"] if cell["arm"] == arm["arm"]]
        over_off = [cell["speed_over_off"] for cell in cells]
        assert arm["worst_over_off"] == min(over_off)
        assert over_off[arm["worst_over_off_phase"]] == min(over_off)
        assert arm["worst_regret"] == max(cell["regret"] for cell in cells)
        for cell in cells:
            low, high = cell["spread"]
            assert low * (1 - 1e-9) <= cell["speed_over_off"] <= high * (1 + 1e-9)
    assert result["arms"][0]["worst_over_off"] == 1.0
    for phase, best in enumerate(result["best_fixed"]):
        cells = [cell for cell in result["cells"] if cell["phase"] == phase]
        gains = {cell["arm"]: cell["speed_over_off"] for cell in cells if cell["arm"] in FIXED}
        assert gains[best] == max(gains.values())


def test_a_depth_that_was_given_up_is_compared_where_it_ran() -> None:
    """Where the machine was fast: that is no reason to be the best where it was slow."""
    rates: list[list[list[float | None]]] = [[[10.0, 4.0, 4.0] for _ in PHASES] for _ in ARMS]
    rates[1] = [[5.0, None, None] for _ in PHASES]
    result = result_of(PHASES, runs(rates))
    assert result["best_fixed"] == ["off"] * 3
    given_up = [cell for cell in result["cells"] if cell["arm"] == "K=3"]
    assert [cell["repetitions"] for cell in given_up] == [[5.0, None, None]] * 3
    assert all(cell["speed_over_off"] == 0.5 and cell["regret"] == 1.0 for cell in given_up)
    assert [arm["regret"] for arm in result["arms"]] == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert "K=3" in tables(result)
    assert tables(result).count("2.75 (2.5)") == 9, "tokens and depth, by phase and arm that drafts"


@given(all_rates())
def test_the_control_is_never_the_best_and_its_error_is_told(
    rates: list[list[list[float]]],
) -> None:
    result = result_of(PHASES, runs(rates))
    control = list(ARMS).index("off-again")
    assert set(result["best_fixed"]) <= set(FIXED)
    by_phase = [
        [mine / off for mine, off in zip(*pair, strict=True)]
        for pair in zip(rates[control], rates[0], strict=True)
    ]
    noise = result["noise"]
    assert noise["speed_over_off"] == [pytest.approx(sorted(ratios)[1]) for ratios in by_phase]
    assert noise["largest_error"] == max(abs(ratio - 1) for ratio in noise["speed_over_off"])
    everywhere = [ratio for ratios in by_phase for ratio in ratios]
    low, high = noise["spread"]
    assert min(everywhere) <= low * (1 + 1e-9)
    assert high <= max(everywhere) * (1 + 1e-9)
    assert f"{max(noise['speed_over_off']):.3f} by phase" in tables(result)


def test_the_luckiest_of_a_repetition_is_no_reason_to_regret() -> None:
    """K=3 is as fast as off, but for its luck in one repetition and its bad luck in the others."""
    rates: list[list[list[float | None]]] = [[[100.0] * 4 for _ in PHASES] for _ in ARMS]
    rates[1] = [[130.0, 99.0, 99.0, 99.0] for _ in PHASES]
    off = result_of(PHASES, runs(rates))["arms"][0]
    assert off["regret"] == pytest.approx(0.0)
    assert off["first_regret"] == pytest.approx(0.0)
    rates[1] = [[130.0] * 4 for _ in PHASES]
    off = result_of(PHASES, runs(rates))["arms"][0]
    assert off["regret"] == off["hindsight_regret"] == pytest.approx(0.3)


def test_results_of_a_time_before_the_control_are_still_printed() -> None:
    result = result_of(PHASES, runs([[[1.0] * 3 for _ in PHASES] for _ in ARMS]))
    del result["noise"]
    for arm in result["arms"]:
        for key in ("speed_over_off", "speed_over_off_spread", "regret_spread"):
            del arm[key]
        del arm["hindsight_regret"]
    for cell in result["cells"]:
        del cell["spread"]
    assert "goodput" in tables(result)
    assert "noise floor" not in tables(result)


def test_no_repetition_begins_that_would_end_too_late(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    arguments = ["adaptive", "--config", str(config), "--prompt-tokens", "8", "--batch-sizes", "1"]
    arguments += ["--classes", "predictable", "--seconds-per-phase", "0.001", "--arms", "ema"]
    arguments += ["--num-steps", "1", "--repetitions", "5"]
    assert main([*arguments, "--max-seconds", "0"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["arguments"]["repetitions"] == 1
    assert all(len(cell["repetitions"]) == 1 for cell in result["cells"])


def test_only_fixed_depths_are_given_up_and_never_off() -> None:
    controller = AdaptiveController(PolicySettings(DraftShape.chain(0), strategy="static"))
    below, above = 100 * HOPELESS - 1, 100 * HOPELESS + 1
    rates = {"off": 1.0, "off-again": 1.0, "K=1": below, "K=3": above, "ema": 1.0, "x": 100.0}
    arms = [
        Arm(name, name not in ("ema", "x"), controller, [[measurement(rate)]])
        for name, rate in rates.items()
    ]
    assert [arm.name for arm in arms if _is_hopeless(arm, 0, arms)] == ["K=1"]


def measured_round(
    ms: float, batch_size: int, drafts: int, tokens: int, prompt: int = 0
) -> MeasuredRound:
    kept = [tokens - batch_size][:batch_size]
    return MeasuredRound(
        ms,
        verified_round(
            kept,
            batch_size,
            drafts,
            num_draft_tokens=drafts * batch_size,
            num_prefill_tokens=prompt,
            times=StepTimes(ms / 4, ms / 2, ms),
        ),
    )


ROUNDS = st.builds(
    lambda ms, size, drafts, kept, prompt: measured_round(
        ms, size, drafts, size + min(kept, drafts * size), prompt
    ),
    st.floats(0.1, 100),
    st.integers(1, 64),
    st.integers(0, 7),
    st.integers(0, 100),
    st.sampled_from([0, 0, 0, 9]),
)


def a_run(rounds: list[MeasuredRound], *, prompt_tokens: int = 30) -> PhaseRun:
    """The rounds, after one that computes a prompt at 2 ms a token."""
    prompt = measured_round(2.0 * prompt_tokens, 0, 0, 0, prompt_tokens)
    return PhaseRun([prompt, *rounds], [[0]])


@given(st.lists(ROUNDS, min_size=1, max_size=200))
def test_speed_of_decoding_does_not_depend_on_the_prompts_and_their_price(
    rounds: list[MeasuredRound],
) -> None:
    """Each round takes its own time, and 2 ms for every prompt token that shares it."""
    shared = [replace(r, ms=r.ms + 2.0 * r.record.num_prefill_tokens) for r in rounds]
    run = a_run(shared)
    prompt_ms = prompt_ms_per_token([run])
    assert prompt_ms == pytest.approx(2.0)
    figures = measure(run, prompt_ms)
    ms, tokens = sum(r.ms for r in rounds), sum(r.record.num_output_tokens for r in rounds)
    assert figures.tokens_per_second == pytest.approx(tokens / ms * 1e3)
    assert figures.tokens_per_second == pytest.approx(
        measure(a_run(shared, prompt_tokens=900), 2.0).tokens_per_second
    )


@given(st.lists(ROUNDS, min_size=1, max_size=200))
def test_every_round_with_decode_rows_is_counted_and_prompts_spoil_no_mean(
    rounds: list[MeasuredRound],
) -> None:
    figures = measure(a_run(rounds), 2.0)
    alone = [r.ms for r in rounds if not r.record.num_prefill_tokens]
    assert sum(figures.rounds_by_num_steps.values()) == len(rounds)
    assert sum(figures.time_by_num_steps.values()) == pytest.approx(1)
    if alone:
        assert figures.ms_per_round == pytest.approx(sum(alone) / len(alone))
    else:
        assert figures.ms_per_round is None


@given(st.lists(ROUNDS, min_size=1, max_size=100))
def test_rounds_of_a_full_batch_are_told_apart_by_the_prompts_that_share_them(
    rounds: list[MeasuredRound],
) -> None:
    most = max(r.record.batch_size for r in rounds)
    full = [r for r in rounds if r.record.batch_size >= FULL_SHARE * most]
    told = measure(a_run(rounds), 2.0).full_rounds
    assert sum(each["rounds"] for each in told) == len(full)
    assert sum(each["rounds"] * each["ms"] for each in told) == pytest.approx(
        sum(r.ms for r in full)
    )
    for each in told:
        upto = each["prompt_tokens"]
        assert each["rounds"] == sum(
            upto / 2 < r.record.num_prefill_tokens <= upto or r.record.num_prefill_tokens == upto
            for r in full
        )


@given(st.lists(ROUNDS, min_size=1, max_size=300))
def test_a_course_is_short_and_loses_neither_time_nor_tokens(rounds: list[MeasuredRound]) -> None:
    run = a_run(rounds)
    series = measure(run, 0.0).series
    ends = series["ms"]
    assert len({len(column) for column in series.values()}) == 1
    assert 1 <= len(ends) <= SERIES_POINTS
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(sum(r.ms for r in rounds), abs=0.001)
    lengths = [end - start for start, end in zip([0.0, *ends], ends, strict=False)]
    tokens = sum(
        length * rate / 1e3
        for length, rate in zip(lengths, series["tokens_per_second"], strict=True)
    )
    assert tokens == pytest.approx(run.num_decode_tokens, rel=0.02)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("adaptive"), speculative={"speculative_draft_dtype": "float32"}
    )


def test_every_arm_says_the_same_and_an_old_result_is_drawn_anew(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    for name, tokens in (("MIN_TOKENS", 8), ("USUAL_TOKENS", 10), ("MAX_TOKENS", 12)):
        monkeypatch.setattr(phases_module, name, tokens)
    arguments = ["adaptive", "--config", str(config), "--prompt-tokens", "12"]
    arguments += ["--batch-sizes", "1", "3", "--classes", "predictable", "mixture"]
    arguments += ["--seconds-per-phase", "0.01", "--repetitions", "2", "--num-steps", "1", "4"]
    arguments += ["--turn-ms", "2"]
    result_file, plot = tmp_path / "r.json", tmp_path / "r.png"
    assert main([*arguments, "--json", str(result_file), "--plot", str(plot)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads(result_file.read_text())
    assert plot.read_bytes().startswith(b"\x89PNG")

    arms = [arm["arm"] for arm in result["arms"]]
    assert arms[:3] == ["off", "K=1", "K=4"]
    policies = {"ema", "ema-aggressive", "per-request", "goodput-uniform", "goodput"}
    assert set(arms[3:]) == {*policies, "off-again"}
    assert all(turns > 1 for turns in result["turns"])
    assert len(result["noise"]["speed_over_off"]) == 4
    assert set(result["best_fixed"]) <= {"off", "K=1", "K=4"}
    assert [(p["batch_size"], p["prompt_class"]) for p in result["phases"]] == [
        *((1, "predictable"), (1, "mixture"), (3, "predictable"), (3, "mixture")),
    ]
    cells = result["cells"]
    assert len(cells) == 4 * len(arms)
    assert all(cell["same_texts"] == cell["num_texts"] > 0 for cell in cells)
    assert all(set(c["rounds_by_num_steps"]) == {"4"} for c in cells if c["arm"] == "K=4")
    assert all(cell["accept_length"] == 1.0 for cell in cells if cell["arm"] == "off")
    assert any(cell["accept_length"] > 1.0 for cell in cells if cell["arm"] == "K=4")

    again = tmp_path / "again.png"
    assert main(["adaptive", "--from-json", str(result_file), "--plot", str(again)]) == 0
    assert again.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == tables(result) + "\n"


def test_forced_acceptance_is_said_above_the_tables_of_fresh_and_of_old_results(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    for name in ("MIN_TOKENS", "USUAL_TOKENS", "MAX_TOKENS"):
        monkeypatch.setattr(phases_module, name, 12)
    words = f"""adaptive --config {config} --prompt-tokens 12 --batch-sizes 1 --classes predictable
        --seconds-per-phase 0.01 --repetitions 1 --num-steps 2 --arms ema
        --set synthetic_acceptance=[1.0] --json {tmp_path}/r.json"""
    assert main(words.split()) == 0, "texts differ by construction: that is no failure"
    fresh = capsys.readouterr().out
    result = json.loads(fresh.splitlines()[-1])
    assert result["environment"]["synthetic_acceptance"] == [1.0]
    assert main(["adaptive", "--from-json", f"{tmp_path}/r.json"]) == 0
    old = capsys.readouterr().out
    for shown in (fresh, old):
        assert shown.startswith("*** synthetic_acceptance="), "nobody may read on unwarned"


def test_what_a_policy_expected_is_compared_with_rounds_that_no_prompt_shared() -> None:
    rounds = []
    for ms, drafts, predicted_ms, prompt in (
        (10.0, 0, 8.0, 0),
        (30.0, 3, 20.0, 0),
        (30.0, 3, 28.0, 0),
        (99.0, 3, 1.0, 7),
        (99.0, 1, None, 0),
    ):
        r = measured_round(ms, 2, drafts, 4, prompt)
        notes = RoundNotes(predicted_ms=predicted_ms)
        rounds.append(replace(r, record=replace(r.record, notes=notes)))
    assert measure(a_run(rounds), 2.0).over_predicted == {0: 1.25, 3: 60 / 48}
