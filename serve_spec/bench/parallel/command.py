"""`serve-spec bench parallel`: one pair on 1, 2, 4, ... GPUs, against each other in one run.

Sections:

    start    what a size takes until it is warm: seconds, and memory of each rank
    rounds   steps without drafts and rounds with, by size; speed over one GPU's, per GPU
    latency  what one exchange between ranks takes, by rows, and what other ways would
    profile  with --profile: rank 0's kernels: launches, and microseconds they add to a round
    texts    with --check-texts: greedy texts of every size in float32, which should be the same

Acceptance is forced in `rounds`, so that any weights do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from serve_spec.bench.configuration import add_configuration, configured
from serve_spec.bench.kernels.report import tables
from serve_spec.bench.kernels.setting import Sizes, forced_acceptance, with_room
from serve_spec.bench.parallel.figures import texts_differ
from serve_spec.bench.parallel.plots import plot_parallel
from serve_spec.bench.parallel.run import ParallelRun, Ranks
from serve_spec.bench.report import emit, show
from serve_spec.config import ConfigError, ServeSpecConfig


def main(argv: list[str]) -> int:
    """Runs the sections, or draws an old result; prints tables and, last, one JSON line.

    1 if a size failed, or its texts differ. The file named by --json is written anew after every
    section.
    """
    args = _parser().parse_args(argv)
    result = _measured(args) if args.from_json is None else json.loads(args.from_json.read_text())
    show(tables(result), result)
    if args.plot is not None:
        plot_parallel(result, args.plot)
    if args.from_json is None:
        emit(result, args.json)
    texts = result["sections"].get("texts")
    return int(bool(result["failed"]) or (texts is not None and texts_differ(texts)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serve-spec bench parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_configuration(parser)
    parser.add_argument(
        "--sizes", type=int, nargs="+", help="tensor-parallel sizes (default: the powers of two "
        "there are GPUs for; 1 and 2 on a CPU)",
    )  # fmt: skip
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--num-steps", type=int, nargs="+", default=[0, 3], help="depths; 0 always")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=128, help="in the mean")
    parser.add_argument("--repetitions", type=int, default=3, help="of every size, interleaved")
    parser.add_argument(
        "--acceptance", type=float, nargs="+", default=[0.69],
        help="what is forced: one accept length, or the chance of each position's draft",
    )  # fmt: skip
    parser.add_argument(
        "--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128, 256],
        help="of exchanges whose latency is measured; none: leave that out",
    )  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="rounds by kernel")
    parser.add_argument("--check-texts", action="store_true", help="compare texts in float32")
    parser.add_argument(
        "--limit-s", type=float, default=90.0, help="what a size may take before it is ended"
    )
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--plot", type=Path, help="draw the result here (PNG)")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE", help="run nothing: print and draw this result"
    )
    return parser


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    loaded = configured(args)
    enabled = loaded.speculative.enabled
    work = Sizes(
        batch_sizes=tuple(sorted(set(args.batch_sizes))),
        num_steps=tuple(sorted({0, *args.num_steps})) if enabled else (0,),
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        repetitions=args.repetitions,
        rows=tuple(args.rows),
    )
    config = with_room(loaded, work)
    if enabled:
        config = ServeSpecConfig.load(
            config, synthetic_acceptance=forced_acceptance(args.acceptance)
        )
    outputs = ("json", "plot", "from_json")
    arguments = {key: value for key, value in vars(args).items() if key not in outputs}
    run = ParallelRun(config, work, _ranks(args, config), arguments, args.json)
    if any(args.num_steps) and not enabled:
        run.result["left_out"]["rounds with drafts"] = "speculative_algorithm='NONE'; name one"
    run.rounds(profile=args.profile)
    if work.rows:
        run.latency()
    if args.check_texts:
        run.texts()
    return run.result


def _ranks(args: argparse.Namespace, config: ServeSpecConfig) -> Ranks:
    """Raises ConfigError: a size below 1."""
    on_gpus = config.model.device != "cpu" and torch.cuda.is_available()
    most = torch.cuda.device_count() if on_gpus else 2
    sizes = args.sizes or [1 << i for i in range(most.bit_length())]
    if min(sizes) < 1:
        raise ConfigError(f"sizes={sizes!r}: give numbers of ranks, such as 1 2 4")
    return Ranks(tuple(sorted(set(sizes))), on_gpus, args.limit_s)
