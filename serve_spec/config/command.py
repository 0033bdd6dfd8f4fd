"""`serve-spec check-config`: print a resolved configuration or describe a draft, or report errors.

serve-spec check-config FILE [KEY=VALUE ...]
serve-spec check-config SERVE_FILE
serve-spec check-config --draft FOLDER [FILE [KEY=VALUE ...]]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from serve_spec.config.base import ConfigError, Refusal, locate, parse_yaml, read_text
from serve_spec.config.root import ServeSpecConfig, parse_override
from serve_spec.config.speculative import ignored_adaptive_keys

DescribeDraft = Callable[[Path, ServeSpecConfig | None], str]
"""Describe the draft in a folder, for the target of a configuration if given."""

ReadDeployment = Callable[[Path], Sequence[ServeSpecConfig]]
"""Validates a Ray Serve file, such as those in `deploy/`; returns its configurations."""


def main(argv: list[str], describe_draft: DescribeDraft, read_deployment: ReadDeployment) -> int:
    """Print the resolved configuration or the draft's description; return 0, or 1 on errors."""
    parser = argparse.ArgumentParser(
        prog="serve-spec check-config",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", help="configuration file or Serve file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="override of a key")
    parser.add_argument(
        "--draft",
        metavar="FOLDER",
        help="draft checkpoint to describe instead, for the target of the file if given",
    )
    args = parser.parse_intermixed_args(argv)
    if args.file is None and args.draft is None:
        parser.error("give a configuration file, or a draft with --draft")
    try:
        configs = _load(args.file, args.overrides, read_deployment)
        draft = None if args.draft is None else locate("--draft", args.draft, Path.cwd())
    except (ConfigError, Refusal) as error:
        print(error, file=sys.stderr)
        return 1
    if draft is not None:
        print(describe_draft(draft, configs[0] if configs else None))
    else:
        print("---\n".join(map(_as_yaml, configs)), end="")
        for config in configs:
            if ignored := ignored_adaptive_keys(config.speculative):
                print(ignored, file=sys.stderr)
    return 0


def _load(
    file: str | None, overrides: list[str], read_deployment: ReadDeployment
) -> Sequence[ServeSpecConfig]:
    if file is None:
        return []
    given = parse_yaml(read_text(Path(file)), file)
    if isinstance(given, dict) and "applications" in given:
        if overrides:
            raise ConfigError(f"{overrides[0]}: a Serve file has its keys in `args`; set it there")
        return read_deployment(Path(file))
    return [ServeSpecConfig.load(file, **dict(parse_override(text) for text in overrides))]


def _as_yaml(config: ServeSpecConfig) -> str:
    shown = config.model_dump(mode="json")
    # Secrets do not belong in a terminal's history or a build log.
    shown["router"]["api_keys"] = ["<hidden>"] * len(config.router.api_keys)
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
