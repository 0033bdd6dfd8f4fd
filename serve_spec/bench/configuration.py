"""Which configuration a benchmark measures: --config, --device, --dtype and --set."""

from __future__ import annotations

import argparse
import re
from typing import Any

from serve_spec.config import ServeSpecConfig
from serve_spec.config.root import parse_override


def add_configuration(parser: argparse.ArgumentParser, other_keys: str = "other keys") -> None:
    """The arguments. other_keys: what --set is for."""
    parser.add_argument("--config", default="configs/tiny.yaml")
    parser.add_argument("--device", help="overrides the configuration")
    parser.add_argument("--dtype", help="overrides the configuration")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help=other_keys)


def add_allow_differences(parser: argparse._ActionsContainer) -> None:
    """For benchmarks that compare texts."""
    parser.add_argument(
        "--allow-differences",
        action="store_true",
        help="exit 0 although texts differ (bfloat16 rounds differently per batch shape)",
    )


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """The keys that the command line names, and no prefix cache unless it names that.

    Arms run the same prompts: what one leaves in a cache would be a gift to the next.

    Raises:
        ConfigError: --set is not KEY=VALUE.
    """
    named = {key: getattr(args, key) for key in ("device", "dtype")}
    said = {key: value for key, value in named.items() if value is not None}
    return {"prefix_caching": False, **said, **dict(map(parse_override, args.set))}


def configured(args: argparse.Namespace) -> ServeSpecConfig:
    """The configuration with these keys.

    Raises:
        ConfigError: it is missing or wrong.
    """
    return ServeSpecConfig.load(args.config, **overrides(args))


def tree_size(text: str) -> tuple[int, int]:
    """An argument like 4x15: depth and size of a tree, the root not counted."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give LEVELSxDRAFTS, such as 4x15")
    return int(found[1]), int(found[2])
