"""Laws of `bench kernels`, and the whole of it on a tiny random pair."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench.command import main
from serve_spec.bench.kernels.adaptive import expected_tokens
from serve_spec.bench.kernels.aims import at_least, at_most
from serve_spec.bench.kernels.command import SECTIONS
from serve_spec.bench.kernels.report import tables, with_others
from serve_spec.bench.kernels.rounds import compiled
from serve_spec.bench.kernels.run import KernelsRun
from serve_spec.bench.kernels.setting import LeftOut, Section, Setting, Sizes
from serve_spec.config import ServeSpecConfig
from serve_spec.verify.synthetic import draft_chances
from tests.helpers.engines import make_pair

NUMBER = st.floats(0.01, 1e4)


@given(NUMBER, NUMBER)
def test_an_aim_is_missed_by_what_is_lacking_and_never_when_it_is_reached(
    value: float, aim: float
) -> None:
    high, low = at_most("x", value, aim), at_least("x", value, aim)
    assert (high["miss_percent"] == 0) or value > aim
    assert (low["miss_percent"] == 0) or value < aim
    distance = abs(value - aim) / aim * 100
    assert high["miss_percent"] + low["miss_percent"] == pytest.approx(distance, abs=0.051)


def test_of_an_aim_of_nothing_anything_is_a_miss() -> None:
    assert at_most("bytes", 0, 0)["miss_percent"] == 0
    assert at_most("bytes", 1, 0)["miss_percent"] == 100


@given(
    st.floats(1, 9) | st.lists(st.floats(0, 1), min_size=1, max_size=9).map(tuple),
    st.integers(0, 8),
)
def test_the_law_of_forced_acceptance_is_the_one_that_is_forced(
    acceptance: float | tuple[float, ...], num_steps: int
) -> None:
    kept = sum(accumulate(draft_chances(acceptance, num_steps), mul))
    assert expected_tokens(acceptance, num_steps) == pytest.approx(1 + kept)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kernels")
    pair = make_pair(root)
    tiers = root / "tiers.json"
    tiers.write_text(json.dumps({"candidate_steps": [0, 1, 3]}))
    settings = {
        "model": {"path": str(pair.target), "device": "cpu", "max_model_len": 256},
        "speculative": {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(pair.heads["EAGLE3"]),
            "speculative_draft_dtype": "float32",
            "speculative_adaptive_config": str(tiers),
        },
    }
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run(config: Path, *arguments: str) -> int:
    small = ["--batch-sizes", "1", "2", "--num-steps", "1", "3", "--rows", "1", "4"]
    small += ["--prompt-tokens", "10", "--output-tokens", "100", "--repetitions", "1"]
    return main(["kernels", "--config", str(config), *small, *arguments])


@pytest.fixture(scope="module")
def result_file(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of everything that needs no other library, on lanes."""
    folder = tmp_path_factory.mktemp("result")
    names = [name for name in SECTIONS if name != "transformers"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVE_SPEC_CACHE", str(folder))
        arguments = ["--sections", *names, "--set", "execution=lanes"]
        assert run(config, *arguments, "--json", str(folder / "r.json")) == 0
    return folder / "r.json"


@pytest.fixture(scope="module")
def result(result_file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result_file.read_text())
    return found


def test_every_section_is_measured_and_what_needs_a_gpu_is_named(result: dict[str, Any]) -> None:
    missing = ("transformers", "compile")
    assert list(result["sections"]) == [name for name in SECTIONS if name not in missing]
    assert result["failed"] == {}
    assert result["left_out"] == {"compile": "torch_compile is measured on a GPU"}
    left_out = {name: section["left_out"] for name, section in result["sections"].items()}
    lacking = {name for name, what in left_out.items() if what}
    assert lacking == {"floor", "children", "capture", "switch"}
    assert all("GPU" in what or "CUDA" in what for name in left_out for what in left_out[name])
    assert result["environment"]["synthetic_acceptance"] == 2.5


def test_a_levels_children_are_timed_beside_torch_and_a_chain(result: dict[str, Any]) -> None:
    rows = result["sections"]["children"]["rows"]
    assert len({(row["width"], row["rows"], row["topk"]) for row in rows}) == len(rows) > 1
    assert all(value > 0 for row in rows for value in row.values())


def test_plain_steps_are_measured_at_every_batch_size(result: dict[str, Any]) -> None:
    rows = result["sections"]["plain"]["rows"]
    assert [row["batch_size"] for row in rows] == [1, 2]
    assert all(row["accept_length"] == 1 and row["ms"] > 0 for row in rows)
    assert all(row["aim_ms"] is None for row in rows), "aims are those of one GPU and shape"


def test_efficiency_is_speed_over_plain_by_accept_length(result: dict[str, Any]) -> None:
    rows = result["sections"]["rounds"]["rows"]
    assert [(row["batch_size"], row["num_steps"]) for row in rows] == [
        (1, 0),
        (1, 3),
        (2, 0),
        (2, 3),
    ]
    for off, on in zip(rows[::2], rows[1::2], strict=True):
        over_plain = on["tokens_per_second"] / off["tokens_per_second"]
        assert on["efficiency"] == pytest.approx(over_plain / on["accept_length"])
        assert off["efficiency"] == 1
        assert 1 < on["accept_length"] < 4


def test_compiled_rounds_stand_beside_those_of_the_default_engine_of_the_same_run(
    config: Path, tmp_path: Path, result: dict[str, Any]
) -> None:
    mine = a_run(config, tmp_path / "r.json")
    mine.on_engine({"compile": compiled}, speculative_num_steps=3, synthetic_acceptance=2.5)
    section = mine.result["sections"]["compile"]
    shown = [(row["batch_size"], row["num_steps"]) for row in section["rows"]]
    assert shown == [(1, 0), (1, 3)]
    assert with_others("compile", mine.result)["rows"] == section["rows"], "nothing to compare with"
    both = {"sections": {**result["sections"], "compile": section}}
    rows = with_others("compile", both)["rows"]
    plain, rounds = (result["sections"][name]["rows"] for name in ("plain", "rounds"))
    assert [row["default_ms"] for row in rows] == [plain[0]["ms"], rounds[1]["ms"]]
    assert all(row["over_default"] == row["ms"] / row["default_ms"] for row in rows)


def test_a_policy_is_compared_with_the_best_depth_at_the_forced_length(
    result: dict[str, Any],
) -> None:
    rows = result["sections"]["adaptive"]["rows"]
    assert [row["arm"] for row in rows] == ["K=0", "K=1", "K=3", "goodput"]
    assert all(sum(row["chosen"].values()) == pytest.approx(1) for row in rows)
    # A single draft can not emit 2.5 tokens: its round emits two, always.
    assert rows[1]["per_law"] == pytest.approx(rows[1]["tokens_per_second"])
    best = max(row["per_law"] for row in rows[:-1])
    assert max(row["over_best_fixed"] for row in rows[:-1]) == 1
    assert rows[-1]["over_best_fixed"] == pytest.approx(rows[-1]["per_law"] / best)


def test_switching_records_nothing(result: dict[str, Any]) -> None:
    facts = result["sections"]["switch"]["facts"]
    assert facts["tiers"] == [1, 3]
    assert facts["num_recorded"] == 0
    recorded = sum(row["num_stages"] for row in result["sections"]["capture"]["rows"])
    assert recorded == result["sections"]["capture"]["facts"]["total_num_stages"] > 0


def test_costs_are_those_of_the_engine_s_table(result: dict[str, Any]) -> None:
    rows = result["sections"]["costs"]["rows"]
    assert {row["stage"] for row in rows} == {"draft", "verify"}
    assert {row["batch_size"] for row in rows} == {1, 2}
    assert all((row["K=0"] == 0) == (row["stage"] == "draft") for row in rows)


def test_an_old_result_is_printed_and_drawn_anew(
    result_file: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", "--from-json", str(result_file), "--plot", str(tmp_path)]) == 0
    banner, _, shown = capsys.readouterr().out.partition("\n")
    assert banner.startswith("*** synthetic_acceptance="), "rounds with drafts were forced"
    assert shown == tables(result) + "\n"
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert drawn == {"floor", "plain", "rounds", "adaptive", "costs"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


def test_pictures_and_tables_hold_aims_where_there_are_any(
    result: dict[str, Any], tmp_path: Path
) -> None:
    judged = json.loads(json.dumps(result))
    judged["sections"]["plain"]["rows"][0]["aim_ms"] = 4.79
    judged["sections"]["plain"]["aims"] = [at_most("plain step, batch 1, ms", 5.269, 4.79)]
    judged["sections"]["rounds"]["rows"][1] |= {"aim_ms": 5.8, "leading_ms": 6.8}
    judged["sections"]["adaptive"]["rows"][-1] |= {"aim": 9000.0, "leading": 8000.0}
    lines = [line.split() for line in tables(judged).splitlines()]
    assert ["plain", "step,", "batch", "1,", "ms", "5.269", "<=", "4.79", "10.0"] in lines
    file = tmp_path / "judged.json"
    file.write_text(json.dumps(judged))
    assert main(["kernels", "--from-json", str(file), "--plot", str(tmp_path)]) == 0


def test_where_rounds_run_eagerly_what_lanes_alone_know_is_left_out_by_name(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    sections = ["--sections", "capture", "host", "switch", "costs"]
    assert run(config, *sections, "--set", "execution=eager") == 0
    *_, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert set(result["left_out"]) == {"capture", "host", "switch"}
    assert list(result["sections"]) == ["costs"]


def test_without_a_draft_plain_decoding_is_measured_and_the_rest_left_out(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = ["--sections", "plain", "rounds", "adaptive"]
    assert run(config, *sections, "--set", "speculative_algorithm=NONE") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["sections"]) == ["plain"]
    assert set(result["left_out"]) == {"rounds", "adaptive"}
    assert "synthetic_acceptance" not in result["environment"]


def a_run(config: Path, path: Path) -> KernelsRun:
    sizes = Sizes((1,), (0, 3), 10, 100, 1, (1,))
    loaded = ServeSpecConfig.load(config, num_pages=64, speculative_adaptive=False)
    return KernelsRun(loaded, sizes, None, {}, path)


def measured(setting: Setting) -> Section:
    return Section([{"batch_size": setting.sizes.batch_sizes[0]}])


def refused(setting: Setting) -> Section:
    raise LeftOut("there is no such thing here")


def broken(setting: Setting) -> Section:
    raise ZeroDivisionError("by zero")


def killed(setting: Setting) -> Section:
    raise KeyboardInterrupt


def test_a_section_that_fails_is_named_and_does_not_take_others_with_it(
    config: Path, tmp_path: Path
) -> None:
    mine = a_run(config, tmp_path / "r.json")
    mine.on_engine({"broken": broken, "refused": refused, "measured": measured})
    assert mine.result["failed"] == {"broken": "ZeroDivisionError: by zero"}
    assert mine.result["left_out"] == {"refused": "there is no such thing here"}
    assert mine.result["sections"] == {"measured": asdict(Section([{"batch_size": 1}]))}


def test_a_run_that_is_killed_keeps_what_it_has_measured(config: Path, tmp_path: Path) -> None:
    mine = a_run(config, tmp_path / "r.json")
    with pytest.raises(KeyboardInterrupt):
        mine.on_engine({"first": measured, "second": killed})
    assert list(json.loads((tmp_path / "r.json").read_text())["sections"]) == ["first"]


def test_transformers_computes_the_same_texts(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    target = yaml.safe_load(config.read_text())["model"]["path"]
    arguments = ["--sections", "transformers", "--assistant", target]
    assert run(config, *arguments, "--output-tokens", "20") == 0
    section = json.loads(capsys.readouterr().out.splitlines()[-1])["sections"]["transformers"]
    assert {row["arm"] for row in section["rows"]} == {
        *("transformers, plain", "transformers, assisted"),
        *("serve_spec, off", "serve_spec, K=3"),
    }
    assert all(row["same_texts"] == row["num_texts"] == 1 for row in section["rows"])
    assert all(row["tokens_per_second"] > 0 for row in section["rows"])
    assert section["left_out"] == []
