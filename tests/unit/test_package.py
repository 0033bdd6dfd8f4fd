"""What a program imports, and what a wheel has."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml

import serve_spec
from serve_spec import ServeSpecConfig, cli
from serve_spec.bench.command import BENCHMARKS
from serve_spec.config import ConfigError, base

PACKAGE = Path(serve_spec.__file__).parent


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


def test_a_misspelt_command_is_refused_with_the_nearest_one(capsys):
    assert cli.main(["sreve"]) == 2
    assert "unknown command 'sreve'; did you mean serve?" in capsys.readouterr().err


def test_the_command_prints_its_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"serve-spec {serve_spec.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_every_command_and_its_flags(shell, capsys, tmp_path):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert set(cli._COMMANDS) <= set(re.findall(r"[\w-]+", script))
    for flag in ("--speculative-num-steps", "--tensor-parallel-size", "--seconds-per-phase"):
        assert flag in script
    file = tmp_path / "completion"
    file.write_text(script)
    if found := shutil.which(shell):
        subprocess.run([found, "-n", file], check=True)


def test_the_environment_is_printed_without_secrets(capsys, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hush")
    monkeypatch.setenv("SERVE_SPEC_LOG_LEVEL", "INFO")
    monkeypatch.setenv("AWS_REGION", "elsewhere")
    assert cli.main(["collect-env"]) == 0
    printed = capsys.readouterr().out
    assert f"torch: {version('torch')}\n" in printed
    assert "SERVE_SPEC_LOG_LEVEL: INFO\n" in printed
    assert "RAY_AUTH_TOKEN: <hidden>\n" in printed
    assert "hush" not in printed
    assert "elsewhere" not in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU serves on it")
def test_a_mistake_of_the_user_is_one_line_without_a_traceback(capsys):
    assert cli.main(["generate", "--device", "cuda", "Hello"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("serve-spec generate: device='cuda': torch sees no GPU here; ")


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


ROOT = PACKAGE.parent


@pytest.fixture(scope="module")
def settings():
    """Return the settings of the project and of its tools."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_has_one_source_and_a_section_of_the_changelog(settings):
    assert settings["project"]["dynamic"] == ["version"]
    source = settings["tool"]["setuptools"]["dynamic"]["version"]
    assert source == {"attr": "serve_spec.__version__"}
    newest = re.search(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == serve_spec.__version__


def test_images_are_named_by_the_version_of_the_package():
    files = [
        *(ROOT / "deploy").glob("Dockerfile.*"),
        ROOT / "docs/deploy.md",
        ROOT / "k8s/README.md",
    ]
    for file in files:
        text = file.read_text()
        named = re.findall(r"serve-spec:(\d[\w.]*)-[cg]pu|image\.version=\"(.+)\"", text)
        assert {tag or label for tag, label in named} == {serve_spec.__version__}, file


def test_tools_check_for_the_oldest_python_of_the_classifiers(settings):
    """Newer syntax, and names of newer versions of the standard library, are then errors."""
    prefix = "Programming Language :: Python :: "
    named = [c.removeprefix(prefix) for c in settings["project"]["classifiers"] if prefix in c]
    oldest = min(tuple(map(int, name.split("."))) for name in named if "." in name)
    version = ".".join(map(str, oldest))
    assert settings["project"]["requires-python"] == f">={version}"
    tools = settings["tool"]
    assert tools["mypy"]["python_version"] == version
    assert tools["ruff"]["target-version"] == f"py{version.replace('.', '')}"


FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_for_issues_is_one_that_github_shows(form):
    """It hides a form with an unknown key or type, without a word."""
    keys = yaml.safe_load(form.read_text())
    assert keys.keys() == {"name", "description", "labels", "body"}
    fields = [field for field in keys["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    for field in keys["body"]:
        assert field["type"] in ("markdown", "input", "textarea", "checkboxes")
        assert field.keys() <= {"type", "id", "attributes", "validations"}
        assert ("value" if field["type"] == "markdown" else "label") in field["attributes"]


@pytest.fixture(scope="module")
def shipped(settings):
    """Return the data files of a wheel, relative to the package."""
    settings = settings["tool"]["setuptools"]
    assert not settings["include-package-data"]
    files = (path for glob in settings["package-data"]["serve_spec"] for path in PACKAGE.glob(glob))
    return {path.relative_to(PACKAGE) for path in files if path.is_file()}


def test_a_wheel_has_all_data_but_the_drafts_that_no_default_names(shipped):
    found = (path for path in PACKAGE.rglob("*") if path.suffix not in (".py", ".pyc"))
    data = {path.relative_to(PACKAGE) for path in found if path.is_file()}
    config = ServeSpecConfig.load("asset:tiny")
    used = [config.model.folder, config.draft_folder, PACKAGE / "assets/smollm2/eagle3"]
    unused = {
        path
        for path in data
        if (PACKAGE / path.parent / "config.json").exists() and PACKAGE / path.parent not in used
    }
    assert unused, "the repository has more drafts than a wheel"
    assert shipped == data - unused


def test_a_draft_that_a_wheel_lacks_is_refused_in_one_line_that_says_where_it_is(
    shipped, tmp_path, monkeypatch
):
    for path in shipped:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        if path.name == "config.json":
            shutil.copy(PACKAGE / path, tmp_path / path)
    monkeypatch.setattr(base, "ASSETS", tmp_path / "assets")
    with pytest.raises(ConfigError) as caught:
        ServeSpecConfig.load(
            "asset:tiny/target", speculative_draft_model_path="asset:tiny/standalone"
        )
    (line,) = str(caught.value).splitlines()
    assert line.startswith("speculative.speculative_draft_model_path='asset:tiny/standalone': ")
    assert "use one of asset:smollm2/eagle3, asset:tiny/eagle3, asset:tiny/target; " in line
    assert "clone of the repository" in line
