"""`serve-spec bench drafters`: every drafter in chains and in trees, and off, on the same prompts.

Each drafter has an engine of its own, one after the other, so that one target is in memory at a
time; within it all arms take turns, and every text is compared with that of off.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve_spec.bench.adaptive.arms import POLICIES
from serve_spec.bench.configuration import (
    add_allow_differences,
    add_configuration,
    configured,
    overrides,
    tree_shape,
)
from serve_spec.bench.drafters.drafters import DRAFTERS
from serve_spec.bench.drafters.plots import plot_drafters
from serve_spec.bench.drafters.report import markdown, tables
from serve_spec.bench.drafters.run import Clock, Row, Sizes, measured
from serve_spec.bench.report import emit, environment, forced_acceptance, save, show
from serve_spec.bench.workload import HELD_OUT_PACKAGES
from serve_spec.config import ConfigError
from serve_spec.core.errors import CheckpointError
from serve_spec.core.round import TreeShape


def main(argv: list[str]) -> int:
    """Runs the benchmark, or shows an old result; prints tables and, last, one JSON line."""
    args = _parser().parse_args(argv)
    if args.from_json is None:
        for result in _results(args):
            save(result, args.json)
    else:
        result = json.loads(args.from_json.read_text())
    show(tables(result), result)
    if args.markdown is not None:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(markdown(result))
    rows = result["rows"]
    if args.plot is not None and rows:
        plot_drafters(result, args.plot)
    if args.from_json is not None:
        return 0
    emit(result, args.json)
    same = all(row["same_texts"] == row["num_texts"] for row in rows)
    may_differ = args.allow_differences or forced_acceptance(result) is not None
    return 0 if rows and (same or may_differ) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve-spec bench drafters", description=__doc__)
    add_configuration(parser, "other keys, for every drafter")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument(
        "--drafts", nargs="+", type=_named, default=[], metavar="DRAFTER=PATH",
        help="checkpoints other than the shipped ones",
    )  # fmt: skip
    parser.add_argument("--num-steps", type=int, nargs="+", default=[4], help="chains")
    parser.add_argument(
        "--trees", type=tree_shape, nargs="*", default=[TreeShape(4, 15)], metavar="LEVELSxDRAFTS",
        help="trees, the root not counted",
    )  # fmt: skip
    parser.add_argument("--topk", type=int, default=4, help="children of a drafted token in trees")
    parser.add_argument(
        "--policies", nargs="*", choices=POLICIES, default=[], metavar="POLICY",
        help=f"further arms, which choose by themselves: {', '.join(POLICIES)}",
    )  # fmt: skip
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--num-prompts", type=int, default=8, help="at least a batch of them is run in any case"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3, help="per arm, interleaved")
    parser.add_argument("--packages", nargs="+", default=list(HELD_OUT_PACKAGES))
    parser.add_argument(
        "--max-seconds", type=float, metavar="S",
        help="begin nothing that would end later than S seconds after the start",
    )  # fmt: skip
    add_allow_differences(parser)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    parser.add_argument("--plot", type=Path, help="draw the result here (PNG)")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE", help="run nothing: print and draw this result"
    )
    return parser


def _results(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The result so far, after every temperature and batch size of every drafter."""
    sizes = Sizes(
        num_steps=tuple(args.num_steps),
        trees=tuple(args.trees),
        topk=args.topk,
        policies=tuple(args.policies),
        batch_sizes=tuple(args.batch_sizes),
        temperatures=tuple(args.temperatures),
        num_prompts=args.num_prompts,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        repetitions=args.repetitions,
        packages=tuple(args.packages),
    )
    outputs = ("json", "markdown", "plot", "from_json")
    said = {key: _plain(value) for key, value in vars(args).items() if key not in outputs}
    known = environment(configured(args))
    rows: list[Row] = []
    left_out: list[str] = []
    clock = Clock(args.max_seconds)

    def result() -> dict[str, Any]:
        return {
            "bench": "drafters",
            "environment": known,
            "arguments": said,
            "rows": rows,
            "left_out": left_out,
        }

    drafts = dict(args.drafts)
    for name in args.drafters:
        if clock.is_over():
            left_out.append(f"{name}: no time")
            continue
        try:
            cells = measured(DRAFTERS[name], drafts.get(name), args.config, overrides(args), sizes)
            for found in cells:
                rows += found
                clock.lap()
                yield result()
                if clock.is_over():
                    left_out.append(
                        f"{name}: no time after T={found[0]['temperature']:g}, "
                        f"batch {found[0]['batch_size']}"
                    )
                    break
        except (CheckpointError, ConfigError, ValueError) as error:
            left_out.append(f"{name}: {error}")
    yield result()


def _named(pair: str) -> tuple[str, str]:
    name, _, path = pair.partition("=")
    if name not in DRAFTERS or not path:
        raise argparse.ArgumentTypeError(f"{pair!r}: give DRAFTER=PATH, one of {list(DRAFTERS)}")
    return name, path


def _plain(value: object) -> object:
    """As JSON has it."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, TreeShape) else value
