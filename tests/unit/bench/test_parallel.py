"""Laws of `bench parallel`, and the whole of it on a tiny random pair, one and two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench.command import main
from serve_spec.bench.kernels.report import tables
from serve_spec.bench.kernels.setting import Sizes
from serve_spec.bench.parallel.figures import (
    SCALING_AIM,
    Rounds,
    rounds_section,
    texts_differ,
    texts_section,
    with_all_columns,
)
from serve_spec.bench.parallel.latency import Traffic
from serve_spec.bench.parallel.profile import (
    PROFILED_ROUNDS,
    WAITING,
    RoundProfile,
    added_time,
)
from serve_spec.bench.parallel.run import ParallelRun, Ranks
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.core.request import FinishReason, RequestOutput, SpeculationStats
from serve_spec.metrics import StepStats
from tests.helpers.engines import make_pair

MS = st.floats(0.1, 100.0)


def full_round(batch_size: int, ms: float, verify_ms: float) -> StepStats:
    """Of steps without drafts."""
    return StepStats(
        num_steps=0,
        batch_size=batch_size,
        num_draft_tokens=0,
        num_correct_drafts=0,
        num_output_tokens=batch_size,
        num_prefill_tokens=0,
        draft_ms=0.0,
        verify_ms=verify_ms,
        step_ms=ms,
        num_running_seqs=batch_size,
        num_waiting_seqs=0,
        num_used_pages=1,
        num_pages=2,
    )


def plain_steps(ms_by_size: dict[int, float], batch_size: int = 32) -> Rounds:
    return {
        (batch_size, 0, size): [full_round(batch_size, ms, ms / 2)] * 3
        for size, ms in ms_by_size.items()
    }


@given(MS, MS)
def test_scaling_is_speed_over_that_of_one_per_rank(one: float, four: float) -> None:
    alone, shared = rounds_section(plain_steps({1: one, 4: four}), on_gpus=True).rows
    assert (alone["over_one"], alone["scaling"], alone["verify_scaling"]) == (1, 1, 1)
    assert shared["over_one"] == pytest.approx(one / four)
    assert shared["scaling"] == pytest.approx(one / four / 4)
    assert shared["verify_scaling"] == pytest.approx(one / four / 4)


def test_the_aim_is_for_plain_steps_of_full_batches_on_several_gpus() -> None:
    measured = {**plain_steps({1: 8.0, 2: 5.0, 4: 3.0}), **plain_steps({1: 8.0, 2: 5.0}, 1)}
    found = rounds_section(measured, on_gpus=True).aims
    assert [(aim["value"], aim["aim"]) for aim in found] == [
        (pytest.approx(0.8), SCALING_AIM),
        (pytest.approx(8 / 12), SCALING_AIM),
    ]
    assert [aim["miss_percent"] > 0 for aim in found] == [False, True]
    assert rounds_section(measured, on_gpus=False).aims == [], "ranks share a CPU's cores"


def test_without_one_rank_there_is_nothing_to_scale_from() -> None:
    section = rounds_section(plain_steps({2: 5.0, 4: 3.0}), on_gpus=True)
    assert [row["scaling"] for row in section.rows] == [None, None]
    assert section.aims == []
    assert "name 1 among the sizes" in section.left_out[0]


def test_a_size_without_a_round_has_no_row() -> None:
    measured = {**plain_steps({1: 8.0}), (32, 0, 2): []}
    (row,) = rounds_section(measured, on_gpus=True).rows
    assert row["tensor_parallel_size"] == 1


def output(*token_ids: int) -> RequestOutput:
    return RequestOutput("r", (1,), token_ids, "", FinishReason.LENGTH, SpeculationStats())


def test_texts_are_held_against_those_of_the_first_size_without_drafts() -> None:
    first = [output(1, 2), output(3, 4)]
    other = [output(1, 2), output(3, 5)]
    same = texts_section({(1, 0): first, (2, 0): first}).rows
    assert not texts_differ({"rows": same})
    rows = texts_section({(1, 0): first, (2, 3): other}).rows
    assert [row["same_texts"] for row in rows] == [2, 1]
    assert texts_differ({"rows": rows})


def test_rows_that_know_less_than_others_have_gaps() -> None:
    assert with_all_columns([{"a": 1}, {"a": 2, "b": 3}]) == [
        {"a": 1, "b": None},
        {"a": 2, "b": 3},
    ]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a pair that two ranks can share, and three can not. One layer: ranks rarely meet."""
    root = tmp_path_factory.mktemp("parallel")
    pair = make_pair(root, num_key_value_heads=4, num_hidden_layers=1)
    settings = {
        "model": {"path": str(pair.target), "device": "cpu", "max_model_len": 256},
        "speculative": {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": str(pair.heads["EAGLE"]),
            "speculative_draft_dtype": "float32",
        },
        "replica": {"torch_num_threads": 1},
    }
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


SMALL = ["--batch-sizes", "1", "2", "--prompt-tokens", "10", "--output-tokens", "40"]


@pytest.fixture(scope="module")
def result_file(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("result") / "r.json"
    arguments = [*SMALL, "--repetitions", "1", "--rows", "1", "8", "--profile", "--check-texts"]
    arguments += ["--limit-s", "280"]  # a busy machine is slow
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        assert main(["parallel", "--config", str(config), *arguments, "--json", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def result(result_file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result_file.read_text())
    return found


def test_every_section_is_measured_on_one_and_two_ranks(result: dict[str, Any]) -> None:
    sections = result["sections"]
    assert list(sections) == ["start", "rounds", "profile", "latency", "texts"]
    assert result["failed"] == result["left_out"] == {}
    assert [row["tensor_parallel_size"] for row in sections["start"]["rows"]] == [1, 2]
    assert all(row["start_s"] > 0 for row in sections["start"]["rows"])
    assert result["environment"]["synthetic_acceptance"] == [0.69]


def test_all_sizes_run_the_same_rounds_at_every_batch_size_and_depth(
    result: dict[str, Any],
) -> None:
    rows = result["sections"]["rounds"]["rows"]
    keys = [(row["batch_size"], row["num_steps"], row["tensor_parallel_size"]) for row in rows]
    assert keys == [(b, k, size) for b in (1, 2) for k in (0, 3) for size in (1, 2)]
    for alone, shared in zip(rows[::2], rows[1::2], strict=True):
        assert alone["scaling"] == 1
        assert shared["scaling"] > 0
        for name in ("rounds", "accept_length"):  # acceptance is a law of seeds and lengths
            assert alone[name] == shared[name]
        assert (alone["accept_length"] > 1) == (alone["num_steps"] > 0)


def test_a_profile_tells_what_rounds_of_every_size_and_depth_consist_of(
    result: dict[str, Any],
) -> None:
    kernels: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for row in result["sections"]["profile"]["rows"]:
        cell = row["batch_size"], row["num_steps"], row["tensor_parallel_size"]
        kernels.setdefault(cell, []).append(row)
    assert sorted(kernels) == [(b, k, size) for b in (1, 2) for k in (0, 3) for size in (1, 2)]
    for (_, num_steps, _), rows in kernels.items():
        named = [row["us"] for row in rows if not row["kernel"].endswith("others")]
        assert named == sorted(named, reverse=True)
        assert named[-1] > 0
        # Every layer of the target multiplies, and with drafts those of the draft do.
        products = sum(row["launches"] for row in rows if "mm" in row["kernel"])
        assert products > (4 if num_steps else 1)


def test_kernels_that_wait_for_others_are_charged_for_what_they_add() -> None:
    spans = [("product", 0.0, 10.0), ("norm", 2.0, 11.0), ("aside", 1.0, 4.0), ("norm", 15.0, 16.0)]
    found = added_time(spans)
    assert found == {"aside": (1, 4.0), "product": (1, 6.0), "norm": (2, 2.0), WAITING: (1, 4.0)}
    assert sum(time for _, time in found.values()) == 16.0
    assert added_time([]) == {}


def test_a_turn_that_is_too_short_for_a_profile_is_told() -> None:
    watch = RoundProfile(first=2, on_gpu=False)
    for number in range(2 + PROFILED_ROUNDS):
        watch(number)
    with pytest.raises(RuntimeError, match="more output tokens"):
        watch.rows()


def test_two_ranks_say_what_one_says_with_drafts_and_without(result: dict[str, Any]) -> None:
    rows = result["sections"]["texts"]["rows"]
    assert [(row["tensor_parallel_size"], row["num_steps"]) for row in rows] == [
        *((1, 0), (1, 3)),
        *((2, 0), (2, 3)),
    ]
    assert all(row["same_texts"] == row["num_texts"] == 8 for row in rows)
    assert rows[3]["accept_length"] == rows[1]["accept_length"] > 1


def test_what_ranks_exchange_is_timed_by_rows(result: dict[str, Any]) -> None:
    section = result["sections"]["latency"]
    assert [(row["tensor_parallel_size"], row["rows"]) for row in section["rows"]] == [
        (2, 1),
        (2, 8),
    ]
    num_norms = section["facts"]["num_norms"]
    assert num_norms == 2, "two of the layer"
    for row in section["rows"]:
        microseconds = num_norms * (row["add_norm_us"] - row["norm_us"])
        microseconds += row["sum_us"] + row["logits_us"] + row["draws_us"]
        assert row["forward_ms"] == pytest.approx(microseconds / 1e3)
        names = ("sum_us", "add_norm_us", "norm_us", "logits_us", "draws_us")
        assert min(row[name] for name in names) > 0
    assert "need GPUs" in section["left_out"][0]


def test_an_old_result_is_printed_and_drawn_anew(
    result_file: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "r.png"
    assert main(["parallel", "--from-json", str(result_file), "--plot", str(picture)]) == 0
    banner, _, shown = capsys.readouterr().out.partition("\n")
    assert banner.startswith("*** synthetic_acceptance="), "rounds with drafts were forced"
    assert shown == tables(result) + "\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_texts_that_differ_are_the_exit_status(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = json.loads(json.dumps(result))
    other["sections"]["texts"]["rows"][-1]["same_texts"] -= 1
    file = tmp_path / "other.json"
    file.write_text(json.dumps(other))
    assert main(["parallel", "--from-json", str(file)]) == 1


def test_a_size_that_fails_is_told_and_the_others_go_on(config: Path, tmp_path: Path) -> None:
    loaded = ServeSpecConfig.load(config, num_pages=64, synthetic_acceptance=2.5)
    work = Sizes((1,), (0, 3), 10, 50, 1, ())
    run = ParallelRun(loaded, work, Ranks((1, 3), False, 280.0), {}, tmp_path / "r.json")
    run.rounds()
    assert list(run.result["failed"]) == ["tensor_parallel_size=3"]
    assert (
        "tensor_parallel_size=3 does not divide" in run.result["failed"]["tensor_parallel_size=3"]
    )
    rows = run.result["sections"]["rounds"]["rows"]
    assert {row["tensor_parallel_size"] for row in rows} == {1}
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(json.dumps(run.result))
    assert "tensor_parallel_size=3: CheckpointError" in tables(run.result)


def test_a_number_of_ranks_below_one_is_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"sizes=\[0, 2\]"):
        main(["parallel", "--config", str(config), "--sizes", "0", "2"])


def test_the_traffic_is_that_of_the_target(config: Path) -> None:
    traffic = Traffic.of(ServeSpecConfig.load(config), (1, 4), on_gpus=False)
    assert (traffic.width, traffic.vocab_size, traffic.dtype) == (64, 288, "float32")
    assert traffic.hidden(0, 4).shape == (4, 64)


def test_of_a_norm_over_ranks_only_what_one_rank_does_not_need_is_exchange() -> None:
    traffic = Traffic((1,), 64, 288, num_norms=4, dtype="float32", on_gpus=False)
    row = {"sum_us": 3.0, "add_norm_us": 7.0, "norm_us": 2.0, "logits_us": 10.0, "draws_us": 1.0}
    assert traffic.forward_ms(row) == pytest.approx(0.034)
