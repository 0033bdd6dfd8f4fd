"""The command line of benchmarks, and `bench offline` on a tiny random pair."""

import argparse
import json
import subprocess
import sys

import pytest

from serve_spec import cli
from serve_spec.bench.command import BENCHMARKS, HelpFormatter, command_parser, main
from serve_spec.bench.replay import replay_keys
from serve_spec.config import ConfigError
from serve_spec.core.request import SamplingParams
from serve_spec.engine.llm import LLM
from tests.helpers.engines import make_pair
from tests.unit.bench.configs import write_config, write_dataset


def loaded_by(code, *names):
    """Return which of these modules `code` loads, directly or not."""
    program = f"import sys\n{code}\nprint('loaded', *({set(names)!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split()[run.stdout.split().index("loaded") + 1 :])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_flag_has_a_help_text(name):
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    BENCHMARKS[name].add_flags(parser)
    assert all(action.help for action in parser._actions)
    assert parser.format_help()


def test_breakeven_loads_neither_torch_nor_ray_and_benchmarks_of_an_engine_no_ray():
    numbers = "'--accept-rate', '0.7', '--draft-ms', '1.2', '--target-ms', '10'"
    code = f"from serve_spec.cli import main\nmain(['breakeven', {numbers}])"
    assert not loaded_by(code, "torch", "ray")
    modules = (f"serve_spec.bench.{name}" for name in ("adaptive", "mixed", "offline", "tune"))
    code = f"import {', '.join(modules)}"
    assert not loaded_by(code, "ray")


@pytest.mark.parametrize("name", ["tune", "breakeven"])
def test_tune_and_breakeven_are_commands_of_their_own_and_of_bench(name, capsys):
    for argv in ([name, "--help"], ["bench", name, "--help"]):
        with pytest.raises(SystemExit, match="0"):
            cli.main(argv)
        assert f"serve-spec {' '.join(argv[:-1])}" in capsys.readouterr().out


def test_an_unknown_benchmark_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["kernels"])
    shown = capsys.readouterr().err
    assert all(name in shown for name in BENCHMARKS)


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        ("offline --json nowhere/x.json", "nowhere/x.json: there is no folder nowhere; "),
        ("offline --plot .", ".: is a folder; "),
        ("adaptive --json nowhere/x.json", "there is no folder nowhere; "),
        ("tune asset:tiny --output-dir /proc/x", "/proc/x: No such file or directory; "),
    ],
)
def test_outputs_that_cannot_be_written_are_refused_before_anything_runs(argv, fix, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv.split())
    assert f"{fix}name " in capsys.readouterr().err


def test_bounds_of_goodput_are_written_as_for_vllm_and_wrong_ones_refused(capsys):
    words = "online --url u --goodput ttft:500 e2el:9000 --slo-tpot-ms 50"
    bounds = command_parser().parse_args(words.split()).goodput
    assert bounds == [("ttft", 500), ("e2el", 9000), ("tpot", 50)]
    for wrong in ("--goodput itl:5", "--goodput ttft", "--goodput ttft:0", "--slo-ttft-ms x"):
        with pytest.raises(SystemExit, match="2"):
            main(["online", "--url", "u", *wrong.split()])
        assert "give METRIC:MS, such as ttft:500" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:8000"])
def test_an_address_without_a_server_is_refused_before_the_load(url, capsys):
    assert cli.main(["bench", "online", "--url", url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--url={url}: no server answers there (" in line
    assert line.endswith("give http://HOST:PORT of one that runs")


def run(path, extra):
    assert main(f"offline --json {path} {extra}".split()) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("bench"))


def test_every_variant_generates_the_same_texts_in_full_batches_and_every_figure_is_written(
    config, tmp_path, capsys
):
    plot = tmp_path / "r.png"
    head, *found = run(
        tmp_path / "r.jsonl",
        f"""--config {config} --num-prompts 2 --batch-sizes 1 3 --prompt-tokens 20
        --output-tokens 20 --repetitions 2 --num-steps 3 --temperatures 0 1 --plot {plot}""",
    )
    at = [(each["batch_size"], each["temperature"], each["variant"]) for each in found]
    assert at == [(b, t, v) for b in (1, 3) for t in (0, 1) for v in ("off", "K=3", "adaptive")]
    for each in found:
        assert each["same_texts"] == each["num_texts"] == max(2, each["batch_size"])
    for off, fixed, _ in (found[:3], found[6:9]):
        assert off["accept_length"] == off["decode_speedup"] == 1.0
        assert 1.0 < fixed["accept_length"] <= 4.0
        assert set(fixed["rounds_by_num_steps"]) <= set("0123"), "a last token needs no draft"
        over_off = fixed["decode_tokens_per_second"] / off["decode_tokens_per_second"]
        assert fixed["decode_speedup"] == pytest.approx(over_off)
    assert {"cpu", "commit", "versions", "command"} <= set(head["environment"])
    assert "synthetic_acceptance" not in head["environment"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 2 + len(found), "a table and nothing else"


def test_forced_acceptance_is_named_above_the_table_and_in_the_record(config, tmp_path, capsys):
    head, *found = run(
        tmp_path / "r.jsonl",
        f"""--config {config} --num-prompts 2 --repetitions 1 --prompt-tokens 20 --num-steps 3
        --output-tokens 24 --temperatures 0 --set synthetic_acceptance=[1.0]""",
    )
    assert "synthetic_acceptance=(1.0,)" in capsys.readouterr().out.splitlines()[0]
    assert head["environment"]["synthetic_acceptance"] == [1.0]
    accept_length = {each["variant"]: each["accept_length"] for each in found}
    assert accept_length["off"] == 1.0, "off stays plain decoding"
    # All drafts are accepted, except those past the end of a text.
    assert accept_length["K=3"] > 3.5


def test_a_dataset_is_measured_by_category_with_the_best_fixed_depth(config, tmp_path, capsys):
    file, plot = write_dataset(tmp_path), tmp_path / "r.png"
    head, *found = run(
        tmp_path / "r.jsonl",
        f"""--config {config} --num-prompts 4 --output-tokens 20 --repetitions 1 --num-steps 2
        --temperatures 0 1 --dataset {file} --plot {plot}""",
    )
    at = [(each["category"], each["temperature"], each["variant"]) for each in found]
    names = ("off", "K=2", "adaptive")
    assert at == [(c, t, v) for c in ("code", "chat") for t in (0, 1) for v in names]
    for three in (found[i : i + 3] for i in range(0, len(found), 3)):
        assert all(each["same_texts"] == each["num_texts"] == 4 for each in three)
        assert max(each["over_best_fixed"] for each in three[:2]) == 1.0
        over = [each["speedup"] / each["over_best_fixed"] for each in three]
        assert over == pytest.approx([over[0]] * 3)
    assert head["prompts"] == f"prompts of {file} (3 code, 3 chat), as chats"
    shown = capsys.readouterr().out
    assert shown.startswith(head["prompts"])
    assert "adaptive, by category" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_texts_of_a_dataset_end_where_the_model_ends_them(tmp_path):
    pair = make_pair(tmp_path, eos_token_id=list(range(200)))
    config, file = write_config(tmp_path, pair=pair), write_dataset(tmp_path)
    words = f"--config {config} --output-tokens 20 --repetitions 1 --num-steps 2 --temperatures 0"
    rounds = {
        prompts: [
            sum(each["rounds_by_num_steps"].values())
            for each in run(tmp_path / f"{n}.jsonl", f"{words} {prompts}")[1:]
            if each["variant"] == "off"
        ]
        for n, prompts in enumerate((f"--dataset {file}", "--prompt-tokens 20"))
    }
    (code, chat), (source,) = rounds.values()
    assert max(code, chat) < source == 8 * 19


@pytest.mark.parametrize(
    ("prompts", "configured"),
    [("", "rejection_sample_method=block"), ("--dataset", "speculative_algorithm=NONE")],
)
def test_replayed_answers_are_accepted_at_every_depth_and_saved(
    config, tmp_path, prompts, configured
):
    file = tmp_path / "new" / "answers.jsonl"
    prompts = f"--dataset {write_dataset(tmp_path)}" if prompts else "--prompt-tokens 20"
    _, *found = run(
        tmp_path / "r.jsonl",
        f"""--config {config} --num-prompts 3 --batch-sizes 1 3 --output-tokens 21 --num-steps 1 4
        --repetitions 1 --temperatures 0 1 --replay {file} {prompts}
        --set {configured}""",
    )
    for each in found:
        assert each["same_texts"] == each["num_texts"] == 3
        if each["variant"] in ("K=1", "K=4") and not prompts.startswith("--dataset"):
            depth = int(each["variant"][2:])
            # The first of 21 tokens comes with the prompt, the others in full rounds.
            assert each["accept_length"] == depth + 1
            assert each["rounds_by_num_steps"] == {str(depth): 3 * 20 / (depth + 1)}
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    assert {tuple(answer) for answer in answers} == {("prompt_token_ids", "token_ids")}
    llm = LLM(config, **replay_keys(tmp_path / "none.jsonl"), num_pages=256)
    output = llm.generate([answers[0]["prompt_token_ids"]], SamplingParams(max_tokens=9))
    assert output[0].speculation.num_correct_drafts == 0, "nothing is saved"
    with pytest.raises(ConfigError, match=r"^--replay=.*: Is a directory; give a file"):
        replay_keys(tmp_path)
