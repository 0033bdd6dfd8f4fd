"""`serve-spec COMMAND ...`. The module of a command is imported when it runs."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from serve_spec import __version__
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.core.errors import CheckpointError, InvalidRequest, PluginError

_COMMANDS = {
    "serve": ("serving.deployment.command", "serve a model with Ray Serve"),
    "generate": ("engine.llm", "complete prompts from the command line"),
    "tune": (
        "bench.command",
        "measure a pair: cost table, depths and trees per batch size, report",
    ),
    "breakeven": ("bench.command", "compute the break-even accept rate of speculation"),
    "bench": ("bench.command", "run adaptive, offline, online, mixed, trace, tune, breakeven"),
    "check-config": ("config.command", "check a model and print its configuration, or its errors"),
    "collect-env": ("config.environment", "print versions and machine, for an issue"),
    "completion": ("cli", "print a script that completes commands and flags in a shell"),
}
"""Module of this package and summary of each command."""

_ELSEWHERE = {"train": "python -m recipes.train", "expand": "python -m benchmarks.expand"}
"""Programs of a checkout that are often taken for commands."""

_INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the process exit status."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if args[0] == "--version":
        print(f"serve-spec {__version__}")
        return 0
    command = args[0]
    if command in _ELSEWHERE:
        fix = f"run `{_ELSEWHERE[command]}` in a checkout of the repository"
        print(f"serve-spec {command}: not in the installed package; {fix}", file=sys.stderr)
        return 2
    if command not in _COMMANDS:
        close = difflib.get_close_matches(command, _COMMANDS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        print(f"serve-spec: unknown command {command!r}{hint}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return _load(command)(args[1:])
    except PluginError as error:
        print(f"serve-spec {command}: {error}", file=sys.stderr)
        return 1
    except (ConfigError, InvalidRequest, CheckpointError) as error:
        print(f"serve-spec {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def _load(command: str) -> Callable[[list[str]], int]:
    if command == "check-config":
        return _check_config
    if command == "serve":
        return _serve
    if command == "completion":
        return _print_completion
    run: Callable[..., int] = import_module(f"serve_spec.{_COMMANDS[command][0]}").main
    if command in ("tune", "breakeven"):
        return lambda argv: run([command, *argv], "serve-spec")
    return run


def _serve(argv: list[str]) -> int:
    from serve_spec.serving.processes import supervise

    def serve() -> int:
        command = import_module("serve_spec.serving.deployment.command")
        return int(command.main(argv))

    return supervise(serve)


def _check_config(argv: list[str]) -> int:
    from serve_spec.config.command import main

    def describe_draft(draft: Path, config: ServeSpecConfig | None) -> str:
        # Imports torch.
        from serve_spec.models.drafts.report import describe_draft as describe

        return describe(draft, config)

    def read_deployment(file: Path) -> tuple[ServeSpecConfig, ...]:
        from serve_spec.serving.deployment.plan import read_plan  # imports Ray

        return read_plan(file).configs

    def check_checkpoints(config: ServeSpecConfig) -> Mapping[str, str]:
        from serve_spec.engine.check import resolved_values  # imports torch
        from serve_spec.serving.deployment.plan import check_model

        check_model(config)
        return resolved_values(config)

    return main(argv, describe_draft, read_deployment, check_checkpoints)


def _print_completion(argv: list[str]) -> int:
    """Print the completion script of a shell, made from the parsers of all commands."""
    import argparse

    import shtab

    parser = argparse.ArgumentParser(prog="serve-spec")
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    own = argparse.ArgumentParser(prog="serve-spec completion")
    own.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    shell = own.parse_args(argv).shell
    for name, (module, summary) in _COMMANDS.items():
        if name in ("tune", "breakeven"):
            benchmark = import_module(f"serve_spec.{module}").BENCHMARKS[name]
            benchmark.add_flags(commands.add_parser(name, help=summary))
            continue
        source = f"serve_spec.{module}"
        known = own if name == "completion" else import_module(source).command_parser()
        commands.add_parser(name, help=summary, parents=[known], add_help=False)
    print(shtab.complete(parser, shell))
    return 0


def _usage() -> str:
    lines = [f"  {name:<14}{text}" for name, (_, text) in _COMMANDS.items()]
    usage = "usage: serve-spec COMMAND [ARGUMENTS] | --version"
    return f"{usage}\n\n" + "\n".join(lines)
