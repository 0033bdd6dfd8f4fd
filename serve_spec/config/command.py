"""`serve-spec check-config FILE [KEY=VALUE ...]`: the resolved configuration, or what is wrong."""

from __future__ import annotations

import argparse
import sys

import yaml

from serve_spec.config.base import ConfigError
from serve_spec.config.root import ServeSpecConfig, parse_override


def main(argv: list[str]) -> int:
    """Prints the resolved configuration as YAML, or the problems; 0, or 1 when refused."""
    parser = argparse.ArgumentParser(prog="serve-spec check-config", description=__doc__)
    parser.add_argument("file", help="configuration file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="leaf keys that win")
    args = parser.parse_args(argv)
    try:
        overrides = dict(parse_override(text) for text in args.overrides)
        config = ServeSpecConfig.load(args.file, **overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    shown = config.model_dump(mode="json")
    # Secrets do not belong in a terminal's history or a build log.
    shown["router"]["api_keys"] = ["<hidden>"] * len(config.router.api_keys)
    print(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True), end="")
    return 0
