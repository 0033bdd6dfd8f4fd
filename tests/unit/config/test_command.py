"""`serve-spec check-config`: the resolved configuration, or what is wrong with it."""

import json

import pytest
import yaml

from serve_spec.config import ServeSpecConfig, command


def main(argv):
    """The command, with functions that only repeat their arguments."""
    return command.main(
        argv,
        lambda draft, config: f"{draft} {config and config.model.path}",
        lambda file: (),
        lambda config: {"context": f"{config.model.max_model_len} positions"},
    )


@pytest.fixture
def file(tmp_path, minimal):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(minimal))
    return file


def test_the_printed_configuration_is_the_resolved_one(tmp_path, drafting, capsys):
    file, printed = tmp_path / "d.yaml", tmp_path / "printed.yaml"
    file.write_text(yaml.safe_dump(drafting))
    assert main([str(file), "page_size=4", "synthetic_acceptance=[0.8, 0.6]"]) == 0
    printed.write_text(capsys.readouterr().out)
    assert printed.read_text().startswith("# context: ")
    overrides = {"page_size": 4, "synthetic_acceptance": [0.8, 0.6]}
    assert ServeSpecConfig.load(printed) == ServeSpecConfig.load(file, **overrides)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["{file}", "page_size=0"], "cache.page_size=0: "),
        (["--draft", "{file}", "{file}", "page_size=0"], "cache.page_size=0: "),
        (["--draft", "nowhere"], "--draft='nowhere': nothing at "),
    ],
)
def test_what_is_refused_is_told_and_nothing_else_is_printed(file, argv, problem, capsys):
    assert main([word.format(file=file) for word in argv]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(problem)


def test_api_keys_are_not_printed(file, capsys):
    assert main([str(file), "api_keys=[hunter2]"]) == 0
    printed = capsys.readouterr().out
    assert "hunter2" not in printed
    assert "<hidden>" in printed


@pytest.mark.parametrize(
    ("overrides", "ignored"),
    [
        ([], "strategy 'goodput' ignores ema_alpha, up_hysteresis"),
        (
            ["speculative_adaptive_strategy=per_request"],
            "strategy 'per_request' ignores candidate_trees, ema_alpha, up_hysteresis",
        ),
        (
            ["speculative_adaptive=false"],
            "a fixed depth ignores candidate_steps, candidate_trees, ema_alpha, up_hysteresis",
        ),
        (["speculative_adaptive_strategy=ema"], None),
    ],
)
def test_adaptive_keys_that_the_strategy_ignores_are_named(
    tmp_path, drafting, capsys, overrides, ignored
):
    slots = {
        "up_hysteresis": 0.5,
        "1": {"candidate_steps": [1, 3], "candidate_trees": []},
        "8": {"candidate_steps": [1], "ema_alpha": 0.3},
    }
    (tmp_path / "slots.json").write_text(json.dumps(slots))
    drafting["speculative"]["speculative_adaptive_config"] = "slots.json"
    file = tmp_path / "d.yaml"
    file.write_text(yaml.safe_dump(drafting))
    assert main([str(file), *overrides]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["speculative"]
    path = tmp_path / "slots.json"
    told = f"speculative_adaptive_config='{path}': {ignored}\n"
    assert printed.err == ("" if ignored is None else told)


def test_a_draft_is_explained_alone_or_beside_the_target_of_a_file(file, tmp_path, minimal, capsys):
    draft, target = str(tmp_path / "draft"), minimal["model"]["path"]
    for argv, report in (
        (["--draft", draft], f"{draft} None"),
        (["--draft", draft, str(file)], f"{draft} {target}"),
        ([str(file), "--draft", draft], f"{draft} {target}"),
        ([str(file), "--draft", draft, f"path={draft}"], f"{draft} {draft}"),
    ):
        assert main(argv) == 0
        assert capsys.readouterr().out == report + "\n"


def test_one_of_file_and_draft_is_needed(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "--draft" in capsys.readouterr().err
