"""`serve-spec breakeven`: should I speculate, how far, and from which accept rate on?

The throughput equation, over times you give or over the cost table that `serve-spec tune` wrote:

    serve-spec breakeven --accept-rate 0.7 --draft-ms 1.2 --target-ms 10
    serve-spec breakeven --accept-rate 0.5 0.7 0.9 --cost-table DIR/cost_table.json --plot FILE
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve_spec.adaptive.costs import Costs, Work
from serve_spec.bench.breakeven.plots import plot_breakeven
from serve_spec.bench.report import emit, table
from serve_spec.bench.throughput import (
    best_num_steps,
    break_even,
    break_even_rate,
    round_times,
    speedup,
    tokens_per_round,
)
from serve_spec.config import ConfigError
from serve_spec.config.cost_table import CostTable, load_cost_table
from serve_spec.core.draft import DraftShape

_COLUMNS = ["batch", "K", "tokens/round", "ms/round", "x off", "pays from rate"]
_TIMES = ("draft_ms", "target_ms", "verify_ms_per_row", "batch_size")


def main(argv: list[str]) -> int:
    """Prints a table for each accept rate, the answer in a sentence and, last, one JSON line."""
    args = _parser().parse_args(argv)
    for rate in args.accept_rate:
        _check("accept_rate", rate, 0 <= rate <= 1, "give the share of drafts kept, from 0 to 1")
    costs = None if args.cost_table is None else load_cost_table(args.cost_table)
    round_ms = _given_times(args) if costs is None else _measured_times(args, costs)
    batches = [_weigh(size, times, args.accept_rate) for size, times in round_ms.items()]
    for index, rate in enumerate(args.accept_rate):
        print(f"accept rate {rate:g}\n{table(_COLUMNS, _rows(batches, index))}\n")
        print("\n".join(_answer(batch, index) for batch in batches), end="\n\n")
    result = {
        "bench": "breakeven",
        "arguments": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(args).items()
            if name not in ("json", "plot")
        },
        # Who measured the times; an equation needs no hardware of its own.
        "measured_on": None if costs is None else costs.key.model_dump(),
        "batches": batches,
    }
    if args.plot is not None:
        plot_breakeven(result, args.plot)
    emit(result, args.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serve-spec breakeven",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--accept-rate",
        type=float,
        nargs="+",
        required=True,
        metavar="RATE",
        help="chance that a draft is kept, given that those before it were",
    )
    given = parser.add_argument_group("times of your own")
    given.add_argument(
        "--draft-ms", type=float, help="one draft step of the whole batch; 0: n-grams"
    )
    given.add_argument("--target-ms", type=float, help="one round of the batch without drafts")
    given.add_argument(
        "--verify-ms-per-row",
        type=float,
        help="what each drafted token adds to the target's round (default: 0, it is free)",
    )
    given.add_argument("--batch-size", type=int, help="sequences in the batch (default: 1)")
    measured = parser.add_argument_group("measured times")
    measured.add_argument("--cost-table", type=Path, metavar="FILE", help="all its batch sizes")
    measured.add_argument(
        "--context", type=int, help="tokens per sequence (default: the table's shorter texts)"
    )
    measured.add_argument(
        "--sampled", action="store_true", help="sequences draw at a temperature above 0"
    )
    parser.add_argument("--max-steps", type=int, help="largest K (default: 8, or the table's)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--plot", type=Path, help="draw the result here (PNG)")
    return parser


def _check(name: str, value: float, ok: bool, fix: str) -> None:
    if not ok or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r}: {fix}")


def _given_times(args: argparse.Namespace) -> dict[int, list[float]]:
    """t(K) of the one batch size that the arguments describe."""
    for name in ("draft_ms", "target_ms"):
        if getattr(args, name) is None:
            raise ConfigError(f"{name}=None: give draft_ms and target_ms, or a cost_table")
    _check("draft_ms", args.draft_ms, args.draft_ms >= 0, "give milliseconds from 0 on")
    _check("target_ms", args.target_ms, args.target_ms > 0, "give milliseconds above 0")
    for name in ("context", "sampled"):
        if getattr(args, name):
            raise ConfigError(f"{name}={getattr(args, name)!r}: belongs to a cost_table; leave out")
    row_ms = 0.0 if args.verify_ms_per_row is None else args.verify_ms_per_row
    _check("verify_ms_per_row", row_ms, row_ms >= 0, "give milliseconds from 0 on")
    batch_size = 1 if args.batch_size is None else args.batch_size
    _check("batch_size", batch_size, batch_size >= 1, "give at least 1")
    max_steps = 8 if args.max_steps is None else args.max_steps
    _check("max_steps", max_steps, max_steps >= 1, "give at least 1")
    times = round_times(
        draft_ms=args.draft_ms,
        target_ms=args.target_ms,
        verify_ms_per_row=row_ms,
        batch_size=batch_size,
        max_steps=max_steps,
    )
    return {batch_size: times}


def _measured_times(args: argparse.Namespace, costs: CostTable) -> dict[int, list[float]]:
    """t(K) of every batch size of the table."""
    for name in _TIMES:
        if getattr(args, name) is not None:
            raise ConfigError(f"{name}={getattr(args, name)!r}: the cost_table says it; leave out")
    deepest = costs.num_steps[-1]
    max_steps = deepest if args.max_steps is None else args.max_steps
    _check("max_steps", max_steps, 1 <= max_steps <= deepest, f"the table reaches 1 to {deepest}")
    context = costs.contexts[0] if args.context is None else args.context
    _check("context", context, context >= 1, "give at least 1")
    model, sampled = Costs(costs), float(args.sampled)
    return {
        size: [
            model.ms(Work(size, context, sampled, DraftShape.chain(k), size * k))
            for k in range(max_steps + 1)
        ]
        for size in costs.batch_sizes
    }


def _weigh(batch_size: int, round_ms: list[float], rates: Sequence[float]) -> dict[str, Any]:
    """Everything the equation says of one batch size. Lists by K; a rate of null: it never pays."""
    depths = range(len(round_ms))
    lowest = break_even(round_ms)
    return {
        "batch_size": batch_size,
        "round_ms": round_ms,
        "break_even_rates": [break_even_rate(k, round_ms) for k in depths[1:]],
        "break_even": None if lowest is None else lowest._asdict(),
        "at_rates": [
            {
                "accept_rate": rate,
                "tokens_per_round": [tokens_per_round(rate, k) for k in depths],
                "speedup": [speedup(rate, k, round_ms) for k in depths],
                "best_num_steps": best_num_steps(rate, round_ms),
            }
            for rate in rates
        ],
    }


def _rows(batches: Sequence[dict[str, Any]], index: int) -> list[list[object]]:
    rows: list[list[object]] = []
    for batch in batches:
        at_rate = batch["at_rates"][index]
        pays_from: list[float | str] = [
            "never" if rate is None else rate for rate in batch["break_even_rates"]
        ]
        columns = (at_rate["tokens_per_round"], batch["round_ms"], at_rate["speedup"])
        for k, cells in enumerate(zip(*columns, ["", *pays_from], strict=True)):
            rows.append([batch["batch_size"], k, *cells])
    return rows


def _answer(batch: dict[str, Any], index: int) -> str:
    at_rate, lowest = batch["at_rates"][index], batch["break_even"]
    best = at_rate["best_num_steps"]
    where = f"Batch {batch['batch_size']}, accept rate {at_rate['accept_rate']:g}:"
    if best:
        answer = f"speculate; {_steps(best)} a round: {at_rate['speedup'][best]:.2f} times as fast."
    else:
        answer = "do not speculate; off is the fastest."
    if lowest is None:
        return f"{where} {answer} Drafts do not pay at any accept rate."
    rate, steps = lowest["accept_rate"], _steps(lowest["num_steps"])
    return f"{where} {answer} Drafts pay above an accept rate of {rate:.2f} ({steps})."


def _steps(num_steps: int) -> str:
    return f"{num_steps} step" + "s" * (num_steps != 1)
