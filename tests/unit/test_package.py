"""What a program imports."""

import subprocess
import sys

import pytest

import serve_spec
from serve_spec import cli
from serve_spec.bench.command import BENCHMARKS


@pytest.mark.parametrize("name", serve_spec.__all__)
def test_every_public_name_is_there(name):
    assert getattr(serve_spec, name) is not None


def test_public_names_make_a_request_and_other_names_are_attribute_errors():
    capped = serve_spec.SpeculativeOptions(enabled=True, max_steps=2)
    params = serve_spec.SamplingParams(
        speculative=capped, grammar=serve_spec.Grammar.regex("[a-z]+")
    )
    assert params.speculative == capped
    with pytest.raises(AttributeError, match="LMM"):
        serve_spec.LMM  # noqa: B018


@pytest.mark.parametrize("command", ["train", "expand", "trian"])
def test_programs_of_a_checkout_are_named_and_unknown_commands_refused(capsys, command):
    assert cli.main([command]) == 2
    line, *usage = capsys.readouterr().err.splitlines()
    assert command in line
    assert ("in a checkout of the repository" in line) == (not usage)


def test_the_help_names_every_benchmark(capsys):
    assert cli.main(["--help"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "  bench " in line]
    assert line.split("run ")[1].split(", ") == list(BENCHMARKS)


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "generate",
        "check-config",
        "tune",
        "bench adaptive",
        "bench offline",
        "bench online",
    ],
)
def test_a_help_text_waits_for_no_heavy_library(command):
    program = (
        "import sys; from serve_spec import cli\n"
        f"try: cli.main([*{command.split()!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--max-model-len" in done.stdout
