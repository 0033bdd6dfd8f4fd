"""`serve-spec check-config`: check a model as `serve` does and print its configuration.

serve-spec check-config MODEL [KEY=VALUE ...] [flags of serve]
serve-spec check-config SERVE_FILE
serve-spec check-config --draft DRAFT [MODEL [KEY=VALUE ...]]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from serve_spec.config.base import ConfigError, checkpoint_name, parse_yaml, read_text
from serve_spec.config.flags import Parser, add_flags, add_model, flags_named, read_flags
from serve_spec.config.hub import checkpoint_folder
from serve_spec.config.root import ServeSpecConfig, is_file, parse_override
from serve_spec.config.speculative import ignored_adaptive_keys

DescribeDraft = Callable[[Path, ServeSpecConfig | None], str]
"""Describe the draft in a folder, for the target of a configuration if given."""

ReadDeployment = Callable[[Path], Sequence[ServeSpecConfig]]
"""Validates a Ray Serve file, such as those in `deploy/`; returns its configurations."""

CheckCheckpoints = Callable[[ServeSpecConfig], Mapping[str, str]]
"""Returns resolved values; raises an error if the checkpoints of a configuration cannot be used."""


def command_parser() -> Parser:
    """Return the parser of `serve-spec check-config`."""
    parser = Parser(
        prog="serve-spec check-config",
        usage="serve-spec check-config MODEL [KEY=VALUE ...] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, positional=True, default=None)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="override of a key")
    parser.add_argument(
        "--draft",
        metavar="DRAFT",
        help="draft checkpoint to describe instead, for the target MODEL if given",
    )
    add_flags(parser)
    return parser


def main(
    argv: list[str],
    describe_draft: DescribeDraft,
    read_deployment: ReadDeployment,
    check_checkpoints: CheckCheckpoints,
) -> int:
    """Print the configuration with resolved values, or the draft's description.

    Returns 0, or 1 on errors.
    """
    parser = command_parser()
    args = parser.parse_intermixed_args(argv)
    try:
        given = {**read_flags(args), **dict(map(parse_override, args.overrides))}
        if args.config is None and args.draft is None:
            parser.error("give a MODEL, or a draft with --draft")
        with flags_named(args):
            configs = _load(args.config, given, read_deployment)
            if args.draft is None:
                configs = [config.download() for config in configs]
                resolved = [_as_comment(check_checkpoints(config)) for config in configs]
        draft = None if args.draft is None else _draft_folder(args.draft)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if draft is not None:
        print(describe_draft(draft, configs[0] if configs else None))
    else:
        shown = (text + _as_yaml(config) for text, config in zip(resolved, configs, strict=True))
        print("---\n".join(shown), end="")
        for config in configs:
            if ignored := ignored_adaptive_keys(config.speculative):
                print(ignored, file=sys.stderr)
    return 0


def _load(
    model: str | None, given: Mapping[str, Any], read_deployment: ReadDeployment
) -> Sequence[ServeSpecConfig]:
    if model is None:
        return []
    if is_file(model):
        content = parse_yaml(read_text(Path(model)), model)
        if isinstance(content, dict) and "applications" in content:
            if given:
                raise ConfigError(
                    f"{next(iter(given))}: a Serve file has its keys in `args`; set it there"
                )
            return read_deployment(Path(model))
    return [ServeSpecConfig.load(model, **given)]


def _draft_folder(name: str) -> Path:
    field = "--draft"
    return checkpoint_folder(field, checkpoint_name(field, name, Path.cwd()), progress=True)


def _as_comment(values: Mapping[str, str]) -> str:
    """Return resolved values as comments, so that the output stays a configuration."""
    return "".join(f"# {name}: {value}\n" for name, value in values.items())


def _as_yaml(config: ServeSpecConfig) -> str:
    shown = config.model_dump(mode="json")
    # Secrets do not belong in a terminal's history or a build log.
    shown["router"]["api_keys"] = ["<hidden>"] * len(config.router.api_keys)
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
