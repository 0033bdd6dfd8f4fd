"""`serve-spec bench kernels`: what one GPU does with a pair, figure by figure beside its aim.

At most three engines are built, one after the other: one whose acceptance is real, one where it is
forced, and one of compiled layers. Policies take turns on them. Sections, in the order they run:

    floor         the matrix products of a step alone, and the speed of memory
    children      the best children of a tree's level: our draw of them, and torch's topk
    plain         steps without drafts, by batch size
    transformers  its generate over the same weights, plain and assisted
    capture       what recording the stages took
    costs         the cost table the engine weighs
    rounds        rounds of 3 and 7 drafts at a forced accept length, and where their time goes
    host          share of rounds in which the device waits for the host
    switch        what changing the tier costs
    adaptive      the goodput policy against every fixed depth
    compile       plain steps and rounds of 3 drafts with torch_compile, beside those without it
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from serve_spec.bench.configuration import add_configuration, configured
from serve_spec.bench.kernels.adaptive import adaptive
from serve_spec.bench.kernels.aims import ACCEPT_LENGTH, LINEARS_MS, ROUND_STEPS
from serve_spec.bench.kernels.children import children
from serve_spec.bench.kernels.floor import floor
from serve_spec.bench.kernels.plots import plot_kernels
from serve_spec.bench.kernels.report import tables
from serve_spec.bench.kernels.rounds import compiled, host, plain, rounds
from serve_spec.bench.kernels.run import KernelsRun, Measure
from serve_spec.bench.kernels.setting import Sizes, forced_acceptance, with_room
from serve_spec.bench.kernels.start import capture, costs
from serve_spec.bench.kernels.switch import switch
from serve_spec.bench.kernels.transformers import transformers
from serve_spec.bench.report import emit, show
from serve_spec.config import ServeSpecConfig

_REAL: Mapping[str, Measure] = {
    "floor": floor,
    "children": children,
    "plain": plain,
    "transformers": transformers,
}
_FORCED: Mapping[str, Measure] = {
    "capture": capture,
    "costs": costs,
    "rounds": rounds,
    "host": host,
    "switch": switch,
    "adaptive": adaptive,
}
_ALIKE = {"floor", "children"}
_COMPILED: Mapping[str, Measure] = {"compile": compiled}
SECTIONS = (*_REAL, *_FORCED, *_COMPILED)

_NO_DRAFTS = "speculative_algorithm='NONE'; name an algorithm and its draft"


def main(argv: list[str]) -> int:
    """Runs the sections, or draws an old result; prints tables and, last, one JSON line.

    1 if a section failed. The file named by --json is written anew after every section.
    """
    args = _parser().parse_args(argv)
    result = _measured(args) if args.from_json is None else json.loads(args.from_json.read_text())
    show(tables(result), result)
    if args.plot is not None:
        plot_kernels(result, args.plot)
    if args.from_json is None:
        emit(result, args.json)
    return int(bool(result["failed"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serve-spec bench kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_configuration(parser)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="NAME")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument(
        "--num-steps", type=int, nargs="+", default=list(range(8)), help="fixed depths; 0 always"
    )
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=256, help="in the mean")
    parser.add_argument("--repetitions", type=int, default=2, help="per figure, interleaved")
    parser.add_argument(
        "--acceptance", type=float, nargs="+", default=[ACCEPT_LENGTH],
        help="what is forced: one accept length, or the chance of each position's draft",
    )  # fmt: skip
    parser.add_argument(
        "--rows", type=int, nargs="+", default=list(LINEARS_MS), help="of the floor"
    )
    parser.add_argument("--assistant", help="a small target for transformers: folder or asset:NAME")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the sections here (PNG)")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE", help="run nothing: print and draw this result"
    )
    return parser


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    sizes = Sizes(
        batch_sizes=tuple(sorted(set(args.batch_sizes))),
        num_steps=tuple(sorted({0, *args.num_steps})),
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        repetitions=args.repetitions,
        rows=tuple(args.rows),
    )
    config = with_room(configured(args), sizes)
    real, forced = _split(args.sections)
    outputs = ("json", "plot", "from_json")
    arguments = {key: value for key, value in vars(args).items() if key not in outputs}
    run = KernelsRun(config, sizes, args.assistant, arguments, args.json)
    if real:
        run.on_engine(
            {name: _REAL[name] for name in real},
            speculative_adaptive=False,
            speculative_num_steps=sizes.num_steps[-1],
        )
    if forced and config.speculative.enabled:
        run.on_engine(
            {name: {**_REAL, **_FORCED}[name] for name in forced},
            speculative_adaptive=True,
            speculative_adaptive_strategy="goodput",
            synthetic_acceptance=forced_acceptance(args.acceptance),
        )
    elif forced:
        run.leave_out(forced, _NO_DRAFTS)
    if "compile" in args.sections:
        why = _why_not_compiled(config)
        if why is None:
            run.on_engine(
                _COMPILED,
                torch_compile=True,
                speculative_adaptive=False,
                speculative_num_steps=min(ROUND_STEPS, sizes.num_steps[-1]),
                synthetic_acceptance=forced_acceptance(args.acceptance),
            )
        else:
            run.leave_out(_COMPILED, why)
    return run.result


def _why_not_compiled(config: ServeSpecConfig) -> str | None:
    """What keeps rounds of compiled layers from being measured; None: nothing."""
    if config.model.device == "cpu" or not torch.cuda.is_available():
        return "torch_compile is measured on a GPU"
    if config.model.tensor_parallel_size > 1:
        return "torch_compile is for one GPU; set tensor_parallel_size to 1"
    return None if config.speculative.enabled else _NO_DRAFTS


def _split(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Sections by the engine they run on, in order. Some are the same on both."""
    real = [name for name in _REAL if name in names]
    forced = [name for name in _FORCED if name in names]
    return ([], real + forced) if set(real) <= _ALIKE and forced else (real, forced)
