"""`bench adaptive`: its figures from records, and whole runs on a tiny random pair."""

import json
from statistics import harmonic_mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench.adaptive_report import summary, tables, trial_figures
from serve_spec.bench.command import main
from serve_spec.bench.harness import MeasuredStep
from serve_spec.bench.report import read_records
from serve_spec.bench.workload import Load
from serve_spec.config import ConfigError
from serve_spec.core.record import StepTimes
from serve_spec.core.round import RoundNotes
from tests.helpers.rounds import verified_round
from tests.unit.bench.configs import write_config, write_dataset

VARIANTS = {"off": True, "K=3": True, "ema": False, "goodput": False}
PHASES = ["batch 1", "batch 4"]
RUN = {
    "section": "run",
    "environment": {"gpu": None, "cpu": "a CPU"},
    "arguments": {},
    "phases": PHASES,
    "variants": VARIANTS,
}


def trial(phase, number, variant, speed, **fields):
    rounds = [MeasuredStep(8.0 / speed, verified_round([1] * 4, 4, 2))]
    figures = trial_figures(rounds, 8.0 / speed, 8, Load("mixture", 4))
    place = {"phase": phase, "repetition": 0, "trial": number, "variant": variant}
    return {"section": "trial", **place, **figures, **fields}


def trials(speeds):
    """speeds: tokens per ms, by phase, variant and trial."""
    return [
        trial(phase, number, variant, speed)
        for phase, by_variant in enumerate(speeds)
        for variant, of_trials in by_variant.items()
        for number, speed in enumerate(of_trials)
    ]


def close(value):
    """Times of records are rounded."""
    return pytest.approx(value, rel=1e-4)


TRIALS = st.lists(st.floats(0.01, 1), min_size=3, max_size=3)
SPEEDS = st.lists(st.fixed_dictionaries(dict.fromkeys(VARIANTS, TRIALS)), min_size=2, max_size=2)


@given(SPEEDS)
def test_totals_are_times_of_equal_work_against_off_and_the_best_fixed_depth(speeds):
    result = summary([RUN, *trials(speeds)])
    # Turns are of as many tokens, so the speed of a phase is the harmonic mean of theirs.
    rates = [{variant: harmonic_mean(mine) for variant, mine in of.items()} for of in speeds]
    best = [max(of["off"], of["K=3"]) for of in rates]
    for of, phase in zip(rates, result["phases"], strict=True):
        assert of[phase["best_fixed"]] == max(of["off"], of["K=3"])
    for variant in result["variants"]:
        mine = [of[variant["variant"]] for of in rates]
        work = [of["off"] for of in rates]  # what off does in a second of each phase
        time = sum(tokens / speed for tokens, speed in zip(work, mine, strict=True))
        best_time = sum(tokens / speed for tokens, speed in zip(work, best, strict=True))
        assert variant["over_off"] == close(len(rates) / time)
        assert variant["over_best_fixed"] == close(best_time / time)
        worst = [speed / of["off"] for speed, of in zip(mine, rates, strict=True)]
        assert variant["worst_over_off"] == close(min(worst))
        at = [phase["phase"] for phase in result["phases"]].index(variant["worst_phase"])
        assert worst[at] == close(min(worst))
    assert result["variants"][0]["over_off"] == close(1)
    assert "goodput / best" in tables(result)


@given(SPEEDS, st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_a_machine_that_slows_down_between_trials_changes_no_comparison(speeds, drift):
    steady = [{variant: [mine[0]] * 3 for variant, mine in of.items()} for of in speeds]
    drifted = [
        {variant: [v * d for v, d in zip(mine, drift, strict=True)] for variant, mine in of.items()}
        for of in steady
    ]
    before, after = (summary([RUN, *trials(each)]) for each in (steady, drifted))
    for one, other in zip(before["variants"], after["variants"], strict=True):
        for key in ("over_off", "over_best_fixed", "worst_over_off"):
            assert one[key] == close(other[key])
    for phase in after["phases"]:
        for cell in phase["variants"].values():
            assert cell["error"] <= 1e-3 * max(1.0, cell["over_best_fixed"])


def test_a_run_that_was_cut_off_compares_the_trials_that_every_variant_had():
    speeds = [{variant: [1.0, 1.0] for variant in VARIANTS}] * 2
    records = [each for each in trials(speeds) if not (each["phase"] and each["trial"])]
    records = [RUN, *records, trial(1, 1, "goodput", 100.0)]
    result = summary(records)
    assert [phase["num_trials"] for phase in result["phases"]] == [2, 1]
    assert result["variants"][-1]["over_off"] == 1
    assert summary([RUN, trial(0, 0, "off", 1.0)])["phases"] == []
    assert "no trial" in tables(summary([RUN]))


def test_the_last_run_of_a_file_is_read_also_in_the_words_of_older_versions(tmp_path):
    first, second = trial(0, 0, "off", 1.0), trial(0, 0, "off", 2.0)
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in (RUN, first, RUN, second)))
    assert read_records(file, "adaptive") == [RUN, second]
    text = file.read_text()
    for new, old in (("variants", "arms"), ("variant", "arm"), ("trial", "turn")):
        text = text.replace(f'"{new}"', f'"{old}"')
    file.write_text(text)
    assert read_records(file, "adaptive") == [RUN, second]


def test_a_phase_with_a_different_text_is_marked():
    records = [RUN, *trials([{variant: [1.0] for variant in VARIANTS}] * 2)]
    texts = {"section": "texts", "phase": 1, "variant": "ema", "texts": 3, "same_texts": 2}
    result = summary([*records, texts])
    assert [phase["same_texts"] for phase in result["phases"]] == [True, False]
    assert "NO" in tables(result)


def test_a_trial_of_steady_batches_counts_full_steps_without_prompts_only():
    rounds = [
        MeasuredStep(ms, verified_round([1] * size, size, 2, num_prefill_tokens=prompt, **fields))
        for ms, size, prompt, fields in (
            (10.0, 4, 0, {"times": StepTimes(1.0, 2.0, 9.0), "notes": RoundNotes(predicted_ms=8)}),
            (
                11.0,
                4,
                0,
                {"times": StepTimes(1.0, 2.0, 9.0), "budget": 5, "drafted_per_req": [3] * 4},
            ),
            (50.0, 4, 9, {"times": StepTimes(1.0, 2.0, 9.0), "notes": RoundNotes(predicted_ms=1)}),
            (20.0, 3, 0, {"times": StepTimes(1.0, 2.0, 9.0)}),
        )
    ]
    full = trial_figures(rounds, 100.0, 40, Load("mixture", 4, is_steady=True))
    assert (full["ms"], full["tokens"], full["steps"], full["prompt_tokens"]) == (21.0, 16, 2, 0)
    assert (full["predicted_ms"], full["measured_ms"]) == (8.0, 9.0)
    assert (full["verified"], full["unverified"], full["accepted"]) == (16, 4, 8)
    mixed = trial_figures(rounds, 100.0, 40, Load("mixture", 4))
    assert (mixed["ms"], mixed["tokens"], mixed["steps"], mixed["prompt_tokens"]) == (100, 40, 4, 9)
    assert (mixed["predicted_ms"], mixed["measured_ms"]) == (8.0, 9.0), "no prompt shared them"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"section": "run", "bench": "online"}'])
def test_a_file_without_records_of_this_benchmark_is_refused(tmp_path, text):
    (tmp_path / "r.jsonl").write_text(text)
    for name in ("r.jsonl", "missing.jsonl"):
        with pytest.raises(ConfigError, match="--from-json="):
            main(["adaptive", "--from-json", str(tmp_path / name)])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(
        tmp_path_factory.mktemp("adaptive"), speculative={"speculative_draft_dtype": "float32"}
    )


def run(config, extra):
    words = f"""adaptive --config {config} --prompt-tokens 12 --output-tokens 12
        --seconds-per-phase 0.03 --turn-ms 5 {extra}"""
    assert main(words.split()) == 0


def test_every_variant_generates_the_same_texts_and_a_file_shows_the_same_tables(
    config, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    file = tmp_path / "r.jsonl"
    variants = "ema ema-aggressive per-request goodput goodput-chains"
    phases = f"--batch-sizes 1 3 --classes mixture --num-steps 4 --arms {variants}"
    run(config, f"{phases} --repetitions 2 --json {file}")
    shown = capsys.readouterr().out
    records = [json.loads(line) for line in file.read_text().splitlines()]
    result = summary(records)
    assert shown.rstrip() == tables(result), "tables and nothing else"
    names = ["off", "K=4", *variants.split()]
    assert [variant["variant"] for variant in result["variants"]] == names
    assert [variant["is_static"] for variant in result["variants"]] == [True] * 2 + [False] * 5
    assert len(result["phases"]) == 2
    assert all(phase["same_texts"] for phase in result["phases"])

    measured = [record for record in records if record["section"] == "trial"]
    assert {record["repetition"] for record in measured} == {0, 1}
    for record in measured:
        depths = {"off": 0, "K=4": 4}
        if record["variant"] in depths:
            assert record["depth_sum"] == depths[record["variant"]] * record["requests"]
    texts = [record for record in records if record["section"] == "texts"]
    assert len(texts) == 2 * 2 * len(names)
    assert all(record["same_texts"] == record["texts"] > 0 for record in texts)

    again = tmp_path / "again.png"
    assert main(["adaptive", "--from-json", str(file), "--plot", str(again)]) == 0
    assert again.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == shown


def test_steady_batches_have_no_prompt_steps(config, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    file = tmp_path / "r.jsonl"
    where = "--batch-sizes 2 1 --classes predictable --temperatures 0.5 --output-tokens 40"
    run(config, f"--cells {where} --num-steps 2 --variants goodput --repetitions 1 --json {file}")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    result = summary(records)
    names = [phase["phase"] for phase in result["phases"]]
    assert names == ["batch 1, predictable T=0.5", "batch 2, predictable T=0.5"]
    measured = [record for record in records if record["section"] == "trial"]
    assert not any(record["prompt_tokens"] for record in measured)
    assert all(r["requests"] == r["steps"] * (1 + r["phase"]) for r in measured)


@pytest.mark.parametrize("cells", ["", "--cells"])
def test_each_category_of_a_dataset_is_a_class_with_totals_of_its_own(
    config, tmp_path, capsys, monkeypatch, cells
):
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    file, plot = tmp_path / "r.jsonl", tmp_path / "r.png"
    words = f"""adaptive --config {config} --dataset {write_dataset(tmp_path)} --batch-sizes 2
        --output-tokens 40 --seconds-per-phase 0.03 --turn-ms 5 --num-steps 2 --repetitions 1
        --variants goodput --json {file} --plot {plot} {cells}"""
    assert main(words.split()) == 0
    records = [json.loads(line) for line in file.read_text().splitlines()]
    result = summary(records)
    assert [phase["phase"] for phase in result["phases"]] == [
        f"batch 2, {category} T={t}" for category in ("code", "chat") for t in (0, 1)
    ]
    names = [(each["category"], each["variant"]) for each in result["categories"]]
    assert names == [(c, v) for c in ("code", "chat") for v in ("off", "K=2", "goodput")]
    for each in result["categories"]:
        mine = [p for p in result["phases"] if p["class"] == each["category"]]
        over = [p["variants"][each["variant"]]["over_off"] for p in mine]
        assert each["over_off"] == pytest.approx(harmonic_mean(over))
        assert each["same_texts"]
        assert 1 <= each["accept_length"] <= 3
    shown = capsys.readouterr().out
    assert shown.rstrip() == tables(result)
    assert shown.startswith(records[0]["prompts"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_classes_of_source_files_are_refused_beside_a_dataset(config, tmp_path):
    words = f"adaptive --config {config} --dataset {write_dataset(tmp_path)} --classes heated"
    with pytest.raises(ConfigError, match=r"^--classes=\['heated'\]: chooses no prompts of --data"):
        main(words.split())
