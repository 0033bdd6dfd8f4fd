"""The command line of benchmarks: help texts, and what they load."""

import argparse
import subprocess
import sys

import pytest

from serve_spec import cli
from serve_spec.bench.command import BENCHMARKS, HelpFormatter, main


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


def test_help_and_breakeven_load_neither_torch_nor_ray():
    numbers = "'--accept-rate', '0.7', '--draft-ms', '1.2', '--target-ms', '10'"
    code = f"from serve_spec.cli import main\nmain(['--help'])\nmain(['breakeven', {numbers}])\n"
    code += "try: main(['bench', 'adaptive', '--help'])\nexcept SystemExit: pass"
    assert not loaded_by(code, "torch", "ray")


def test_benchmarks_of_an_engine_do_not_load_ray():
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
