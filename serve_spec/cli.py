"""`serve-spec COMMAND ...`. The module of a command is imported when it runs."""

import sys
from collections.abc import Callable
from pathlib import Path

from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.core.errors import CheckpointError, InvalidRequest

_COMMANDS = {
    "serve": "serve a model with Ray Serve",
    "generate": "complete prompts from the command line",
    "train": "train a tokenizer, a target and its drafts from a local corpus",
    "expand": "expand a small pair to the shape and cost of a published model",
    "tune": "measure a pair: cost table, depths and trees per batch size, report",
    "breakeven": "compute the break-even accept rate of speculation",
    "bench": "run adaptive, offline, online, trace, tune, breakeven",
    "check-config": "check a model and print its configuration, or its errors",
}

_INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the process exit status."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0
    command = args[0]
    if command not in _COMMANDS:
        print(f"serve-spec: unknown command {command!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return _load(command)(args[1:])
    except (ConfigError, InvalidRequest, CheckpointError) as error:
        print(f"serve-spec {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def _load(command: str) -> Callable[[list[str]], int]:
    if command == "serve":
        from serve_spec.serving.command import main as run
    elif command == "generate":
        from serve_spec.engine.llm import main as run
    elif command == "train":
        from serve_spec.training.command import main as run
    elif command == "expand":
        from serve_spec.models.upscale_command import main as run
    elif command == "bench":
        from serve_spec.bench.command import main as run
    elif command in ("tune", "breakeven"):
        from serve_spec.bench.command import main as bench

        def run(argv: list[str]) -> int:
            return bench([command, *argv], "serve-spec")
    else:
        run = _check_config
    return run


def _check_config(argv: list[str]) -> int:
    from serve_spec.config.command import main

    def describe_draft(draft: Path, config: ServeSpecConfig | None) -> str:
        # Imports torch.
        from serve_spec.models.draft_report import describe_draft as describe

        return describe(draft, config)

    def read_deployment(file: Path) -> tuple[ServeSpecConfig, ...]:
        from serve_spec.serving.command import read_plan  # imports Ray

        return read_plan(file).configs

    def check_checkpoints(config: ServeSpecConfig) -> None:
        from serve_spec.serving.command import check_model

        check_model(config)

    return main(argv, describe_draft, read_deployment, check_checkpoints)


def _usage() -> str:
    lines = [f"  {name:<14}{text}" for name, text in _COMMANDS.items()]
    return "usage: serve-spec COMMAND [ARGUMENTS]\n\n" + "\n".join(lines)
