"""Command-line flags shared by benchmarks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve_spec.config import ServeSpecConfig
from serve_spec.config.root import parse_override


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that shows defaults and keeps line breaks of descriptions."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help or ""
        if default in (None, False, argparse.SUPPRESS, []) or "default" in text:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
        return f"{text} (default: {shown})"


def add_configuration(parser: argparse.ArgumentParser, *, config: bool = True) -> None:
    """Add --device, --dtype, --set and, unless it is positional, --config."""
    if config:
        parser.add_argument(
            "--config", default="configs/tiny.yaml", metavar="FILE", help="configuration (YAML)"
        )
    parser.add_argument("--device", metavar="DEVICE", help="override of the configured device")
    parser.add_argument("--dtype", metavar="DTYPE", help="override of the configured dtype")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="override of any other key"
    )


def add_comparison(parser: argparse._ActionsContainer) -> None:
    """Add --allow-differences, for benchmarks that compare texts."""
    parser.add_argument(
        "--allow-differences",
        action="store_true",
        help="exit with 0 even if texts differ, as they may in bfloat16",
    )


def add_outputs(parser: argparse._ActionsContainer, *, plot: bool = True) -> None:
    """Add --json and --plot."""
    text = "file to append every record to, as JSON lines while the benchmark runs"
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)
    if plot:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG file to draw")


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration keys of the command line; the prefix cache is off by default.

    Variants run the same prompts, so one would fill the cache of the next.

    Raises:
        ConfigError: --set is not KEY=VALUE.
    """
    named = {key: getattr(args, key) for key in ("device", "dtype")}
    given = {key: value for key, value in named.items() if value is not None}
    return {"prefix_caching": False, **given, **dict(map(parse_override, args.set))}


def configured(args: argparse.Namespace) -> ServeSpecConfig:
    """Return the configuration with the overrides of the command line.

    Raises:
        ConfigError: it is missing or invalid.
    """
    return ServeSpecConfig.load(args.config, **overrides(args))


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers ≥ `least`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return integer


def positive(text: str) -> float:
    """Parse a positive number."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def rate_range(text: str) -> tuple[float, float]:
    """Parse FROM:TO."""
    first, _, last = text.partition(":")
    return positive(first), positive(last)


def tree_size(text: str) -> tuple[int, int]:
    """Parse LEVELSxDRAFTS of a tree, such as 4x15, without the root."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give LEVELSxDRAFTS, such as 4x15")
    return int(found[1]), int(found[2])
