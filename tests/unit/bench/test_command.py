"""The command line of benchmarks, and `bench offline` on a tiny random pair."""

import argparse
import json
import subprocess
import sys

import pytest

from serve_spec import cli
from serve_spec.bench.command import BENCHMARKS, HelpFormatter, main
from tests.unit.bench.configs import write_config


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
    code = "import serve_spec.bench.adaptive, serve_spec.bench.offline, serve_spec.bench.tune"
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
