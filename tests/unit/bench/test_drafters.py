"""`bench drafters`: its arithmetic, and one tiny run of chains, trees and a policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_spec.adaptive import PolicySettings
from serve_spec.bench.command import main
from serve_spec.bench.drafters.drafters import DRAFTERS
from serve_spec.bench.drafters.report import FULL, markdown, tables, winners
from serve_spec.bench.drafters.run import Clock, Sizes, tiers
from serve_spec.config import ServeSpecConfig
from serve_spec.core.round import TreeShape
from tests.helpers.checkpoints import make_eagle3, make_target

TREE = TreeShape(2, 5)


def row(drafter: str, drafts: str, arm: str, speed: float, **changes: Any) -> dict[str, Any]:
    """A row as a run has it; off is 10 tokens a second."""
    return {
        "drafter": drafter,
        "drafts": drafts,
        "arm": arm,
        "temperature": 0.0,
        "batch_size": 1,
        "accept_length": 2.0,
        "tokens_per_second": speed,
        "tokens_per_second_range": [speed - 1, speed + 1],
        "speedup": speed / 10,
        "same_texts": 4,
        "num_texts": 4,
        "rounds_by_tier": {"0": 1, "4x15": 3},
        **changes,
    }


ROWS = [
    row("EAGLE3", "off", "off", 10.0),
    row("EAGLE3", "chain", "K=2", 20.0),
    row("EAGLE3", "chain", "K=4", 25.0),
    row("EAGLE3", "tree", "4x15", 30.0),
    row("EAGLE3", "policy", "goodput", 27.0),
    row("NGRAM", "off", "off", 10.0),
    row("NGRAM", "chain", "K=4", 9.0, same_texts=3),
]


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    environment = {"gpu": None, "cpu": "a processor", "commit": "0", "command": "serve-spec"}
    return {"environment": environment, "rows": rows, "left_out": ["EAGLE: no time"]}


def test_the_winner_is_the_fastest_chain_or_tree_and_policies_are_held_against_it() -> None:
    (found,) = winners(ROWS)
    assert (found["chain"]["arm"], found["tree"]["arm"]) == ("K=4", "4x15")
    assert found["tree_over_chain"] == pytest.approx(30 / 25)
    assert found["policies_over_best"] == {"goodput": pytest.approx(27 / 30)}


def test_where_nothing_pays_policies_are_held_against_off() -> None:
    slow = [row("EAGLE3", kind, kind, 5.0) for kind in ("chain", "tree")]
    rows = [ROWS[0], *slow, row("EAGLE3", "policy", "goodput", 9.5)]
    (found,) = winners(rows)
    assert found["policies_over_best"] == {"goodput": pytest.approx(0.95)}


def test_full_batches_are_compared_where_all_arms_had_some() -> None:
    # A tree of uneven texts: fast while all decode, then one of them goes on alone.
    full = {"off": 10.0, "K=4": 30.0, "4x15": 45.0, "goodput": 40.0}
    rows = [
        {**r, "decode_tokens_per_second": full[r["arm"]], "decode_speedup": full[r["arm"]] / 10}
        for r in ROWS
        if r["drafter"] == "EAGLE3" and r["arm"] in full
    ]
    (found,) = winners(rows, FULL)
    assert found["tree_over_chain"] == pytest.approx(45 / 30)
    assert found["policies_over_best"] == {"goodput": pytest.approx(40 / 45)}
    for shown in (tables(result(rows)), markdown(result(rows))):
        assert "Trees against chains, full batches" in shown
    some = [rows[0], *({**r, "decode_tokens_per_second": None} for r in rows[1:])]
    assert "full batches:" not in tables(result(some))


def test_settings_are_compared_apart() -> None:
    other = [{**r, "batch_size": 8} for r in ROWS[:4]]
    assert [found["batch_size"] for found in winners([*ROWS[:5], *other])] == [1, 8]


def test_tables_say_whether_texts_are_equal_and_what_a_policy_chose() -> None:
    for shown in (tables(result(ROWS)), markdown(result(ROWS))):
        lines = [line.replace("|", " ").split() for line in shown.splitlines()]
        of = {(line[0], line[2]): line for line in lines if len(line) > 8 and line[1] != "0.00"}
        assert "yes" in of["EAGLE3", "4x15"]
        assert "3/4" in of["NGRAM", "K=4"]
        assert of["EAGLE3", "goodput"][-2:] == ["4x15:75%", "0:25%"]
        assert "EAGLE: no time" in shown


def test_a_run_that_came_to_nothing_says_why() -> None:
    assert tables(result([])) == "left out: EAGLE: no time"


def test_a_markdown_table_has_as_many_cells_in_every_line() -> None:
    shown = markdown(result(ROWS)).splitlines()
    cells = [line.count("|") for line in shown if line.startswith("|")]
    assert set(cells) == {
        len(line.split("|")) - 1 for line in shown if line.startswith("| drafter")
    }


def test_nothing_begins_that_would_end_too_late() -> None:
    now = [0.0]
    clock = Clock(10.0, lambda: now[0])
    assert not clock.is_over()
    now[0] = 4.0
    clock.lap()
    assert not clock.is_over(), "another one would end at 8"
    now[0] = 7.0
    clock.lap()
    assert clock.is_over(), "the longest took 4: that would be 11"
    assert not Clock(None, lambda: 1e9).is_over()


def sizes(**changes: Any) -> Sizes:
    given: dict[str, Any] = {
        "num_steps": (2,),
        "trees": (TREE,),
        "topk": 3,
        "policies": (),
        "batch_sizes": (1,),
        "temperatures": (0.0,),
        "num_prompts": 1,
        "prompt_tokens": 8,
        "output_tokens": 8,
        "repetitions": 1,
    }
    return Sizes(**{**given, **changes})


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(
    "wanted",
    [
        sizes(),
        sizes(trees=()),
        sizes(num_steps=(1, 2)),
        sizes(policies=("goodput",)),
        sizes(num_steps=(1, 3, 4), trees=(TREE, TreeShape(3, 12)), policies=("goodput",)),
    ],
)
def test_every_drafter_is_configured_with_all_tiers_that_are_to_run(
    tmp_path: Path, name: str, wanted: Sizes
) -> None:
    """As far as a configuration tells: it is accepted, and its policy may choose them all."""
    drafter = DRAFTERS[name]
    keys = {**drafter.keys(), **tiers(wanted, tmp_path)}
    config = ServeSpecConfig.load("configs/tiny.yaml", **keys)
    policy = PolicySettings.of(config.speculative)
    assert set(wanted.num_steps) <= {0, *policy.candidate_steps}
    assert policy.tree_shapes == wanted.trees
    assert policy.needs_costs or not wanted.policies


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("drafters")
    target = make_target(root / "target", layer_scale=0.3)
    head = make_eagle3(root / "eagle3", target, mimic=True)
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": str(target), "device": "cpu"}}))
    return path, head


def test_a_tiny_run_says_the_same_in_every_arm_and_can_be_drawn_again(
    config: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, head = config
    words = f"""drafters --config {path} --drafters EAGLE3 NGRAM --drafts EAGLE3={head}
        --num-steps 2 --trees 2x5 --topk 3 --batch-sizes 1 2 --num-prompts 2 --prompt-tokens 12
        --output-tokens 10 --repetitions 2 --json {tmp_path}/new/a.json"""
    assert main(words.split()) == 0
    shown = capsys.readouterr().out
    found = json.loads(shown.splitlines()[-1])
    assert found == json.loads((tmp_path / "new/a.json").read_text())
    rows = found["rows"]
    assert {(r["drafter"], r["arm"]) for r in rows} == {
        (drafter, arm) for drafter in ("EAGLE3", "NGRAM") for arm in ("off", "K=2", "2x5")
    }
    assert len(rows) == 6 * 2 * 2
    assert all(r["same_texts"] == r["num_texts"] == 2 for r in rows)
    for r in rows:
        slowest, fastest = r["tokens_per_second_range"]
        assert slowest <= r["tokens_per_second"] <= fastest
        only = {"off": "0", "K=2": "2", "2x5": "2x5"}[r["arm"]]
        assert set(r["rounds_by_tier"]) == {only}
    assert found["left_out"] == []

    again = f"drafters --from-json {tmp_path}/new/a.json --plot {tmp_path}/a.png "
    assert main((again + f"--markdown {tmp_path}/a.md").split()) == 0
    assert capsys.readouterr().out in shown
    assert (tmp_path / "a.png").stat().st_size > 0
    assert "## Trees against chains" in (tmp_path / "a.md").read_text()


def test_a_draft_that_can_not_be_built_leaves_the_others(
    config: tuple[Path, Path], tmp_path: Path
) -> None:
    path, _ = config
    words = f"""drafters --config {path} --drafters MEDUSA NGRAM --drafts MEDUSA={tmp_path}
        --num-steps 1 --trees --num-prompts 1 --prompt-tokens 8 --output-tokens 4
        --repetitions 1 --temperatures 0 --json {tmp_path}/b.json"""
    assert main(words.split()) == 0
    found = json.loads((tmp_path / "b.json").read_text())
    assert {r["drafter"] for r in found["rows"]} == {"NGRAM"}
    (reason,) = found["left_out"]
    assert reason.startswith("MEDUSA: ")


def test_a_run_that_measured_nothing_fails_and_draws_nothing(
    config: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = config
    words = f"""drafters --config {path} --drafters MEDUSA --drafts MEDUSA={tmp_path}
        --num-steps 1 --trees --plot {tmp_path}/c.png --allow-differences"""
    assert main(words.split()) == 1
    assert not (tmp_path / "c.png").exists()
    assert "left out: MEDUSA: " in capsys.readouterr().out
