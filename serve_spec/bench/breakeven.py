"""`serve-spec breakeven`: solve the throughput equation for the break-even accept rate.

    tokens per round   n(a, K) = 1 + a + ... + a^K      (= (1 - a^(K+1)) / (1 - a) for a < 1)
    time of a round    t(K)    = K · t_draft + t_target(batch_size · (K + 1) tokens)
    speedup over off   S(a, K) = n(a, K) · t(0) / t(K)

The accept rate a is the probability that a draft is accepted if all before it were, the same at
every position (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
section 3). `round_ms[K]` is t(K) in ms for K = 0, 1, ...; K = 0 is off.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serve_spec.adaptive.costs import Costs, Work
from serve_spec.bench.report import OUTPUTS, Panel, append_record, draw, option, table
from serve_spec.config import ConfigError
from serve_spec.config.cost_table import CostTable, load_cost_table
from serve_spec.core.draft import DraftShape

_COLUMNS = ("batch", "K", "tokens/round", "ms/round", "x off", "pays from rate")
_TIMES = ("draft_ms", "target_ms", "verify_ms_per_row", "batch_size")


class BreakEven(NamedTuple):
    """The accept rate at which `num_steps` drafts a round are as fast as none."""

    accept_rate: float
    num_steps: int


def tokens_per_round(accept_rate: float, num_steps: int) -> float:
    """Compute n(a, K), the mean tokens of a request per round: 1 to K+1."""
    tokens = 1.0
    for _ in range(num_steps):
        tokens = 1.0 + accept_rate * tokens
    return tokens


def speedup(accept_rate: float, num_steps: int, round_ms: Sequence[float]) -> float:
    """Compute S(a, K)."""
    return tokens_per_round(accept_rate, num_steps) * round_ms[0] / round_ms[num_steps]


def best_num_steps(accept_rate: float, round_ms: Sequence[float]) -> int:
    """Return the fastest K, 0 included; on ties, the smallest."""
    return max(range(len(round_ms)), key=lambda k: (speedup(accept_rate, k, round_ms), -k))


def break_even_rate(num_steps: int, round_ms: Sequence[float]) -> float | None:
    """Return the a at which K = `num_steps` ≥ 1 is as fast as off; None if it never is.

    The result is 0 if K is faster than off even without any accepted draft.
    """
    needed = round_ms[num_steps] / round_ms[0]
    if needed > num_steps + 1:
        return None
    if needed <= 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):  # to float precision
        middle = (low + high) / 2
        pays = tokens_per_round(middle, num_steps) >= needed
        low, high = (low, middle) if pays else (middle, high)
    return high


def break_even(round_ms: Sequence[float]) -> BreakEven | None:
    """Return the smallest accept rate at which any depth pays, and that depth."""
    points = [
        BreakEven(rate, num_steps)
        for num_steps in range(1, len(round_ms))
        if (rate := break_even_rate(num_steps, round_ms)) is not None
    ]
    return min(points, default=None)


def run(args: argparse.Namespace) -> int:
    """Print a table and a conclusion for each accept rate."""
    for rate in args.accept_rate:
        _check("accept_rate", rate, 0 <= rate <= 1, "give a number in [0, 1]")
    costs = None if args.cost_table is None else load_cost_table(args.cost_table)
    round_ms = _given_times(args) if costs is None else _measured_times(args, costs)
    batches = [_weigh(size, times, args.accept_rate) for size, times in round_ms.items()]
    for index, rate in enumerate(args.accept_rate):
        print(f"accept rate {rate:g}\n{table(_COLUMNS, _rows(batches, index))}\n")
        print("\n".join(_answer(batch, index) for batch in batches), end="\n\n")
    hardware = None if costs is None else costs.key.model_dump()
    result = {
        "bench": "breakeven",
        "arguments": {name: value for name, value in vars(args).items() if name not in OUTPUTS},
        "measured_on": hardware,
        "batches": batches,
    }
    append_record(args.json, {"section": "run", **result})
    if args.plot is not None:
        _plot(batches, "" if hardware is None else hardware["hardware"], args.plot)
    return 0


def _check(name: str, value: float, ok: bool, fix: str) -> None:
    if not ok or not math.isfinite(value):
        raise ConfigError(f"{option(name)}={value!r}: {fix}")


def _given_times(args: argparse.Namespace) -> dict[int, list[float]]:
    """Compute t(K) from the times in the arguments."""
    for name in ("draft_ms", "target_ms"):
        if getattr(args, name) is None:
            raise ConfigError(f"{option(name)}: missing; add it, or give --cost-table")
    _check("draft_ms", args.draft_ms, args.draft_ms >= 0, "give milliseconds ≥ 0")
    _check("target_ms", args.target_ms, args.target_ms > 0, "give milliseconds > 0")
    for name in ("context", "sampled"):
        if value := getattr(args, name):
            raise ConfigError(f"{option(name)}={value!r}: needs --cost-table; omit it")
    row_ms = 0.0 if args.verify_ms_per_row is None else args.verify_ms_per_row
    _check("verify_ms_per_row", row_ms, row_ms >= 0, "give milliseconds ≥ 0")
    batch_size = 1 if args.batch_size is None else args.batch_size
    _check("batch_size", batch_size, batch_size >= 1, "give at least 1")
    max_steps = 8 if args.max_steps is None else args.max_steps
    _check("max_steps", max_steps, max_steps >= 1, "give at least 1")
    step_ms = args.draft_ms + row_ms * batch_size
    return {batch_size: [args.target_ms + k * step_ms for k in range(max_steps + 1)]}


def _measured_times(args: argparse.Namespace, costs: CostTable) -> dict[int, list[float]]:
    """Compute t(K) of every batch size of the table."""
    for name in _TIMES:
        if (value := getattr(args, name)) is not None:
            raise ConfigError(f"{option(name)}={value!r}: --cost-table has it; omit it")
    deepest = costs.num_steps[-1]
    max_steps = deepest if args.max_steps is None else args.max_steps
    _check("max_steps", max_steps, 1 <= max_steps <= deepest, f"the table has 1 to {deepest}")
    context = costs.context if args.context is None else args.context
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
    """Return the figures of a batch size. Lists are by K; None: K never pays."""
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
        at_rate, rates = batch["at_rates"][index], batch["break_even_rates"]
        pays = ["", *("never" if rate is None else rate for rate in rates)]
        columns = (at_rate["tokens_per_round"], batch["round_ms"], at_rate["speedup"], pays)
        rows += [[batch["batch_size"], k, *row] for k, row in enumerate(zip(*columns, strict=True))]
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


def _plot(batches: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the figures by batch size; of a single batch size, speedup by accept rate."""
    if len(batches) == 1:
        times = batches[0]["round_ms"]
        curves = {
            f"K={k}": [(rate / 100, speedup(rate / 100, k, times)) for rate in range(101)]
            for k in range(1, len(times))
        }
        name = f"speedup over off, batch {batches[0]['batch_size']}"
        panels = [Panel(name, curves, x_label="accept rate", baseline=1.0)]
        return draw(panels, path, title)
    best, fastest = {}, {}
    for index, rate in enumerate(batches[0]["at_rates"]):
        at_rate = [batch["at_rates"][index] for batch in batches]
        label = f"accept rate {rate['accept_rate']:g}"
        best[label] = [(at, each["best_num_steps"]) for at, each in enumerate(at_rate)]
        fastest[label] = [(at, max(each["speedup"])) for at, each in enumerate(at_rate)]
    lowest = [batch["break_even"] and batch["break_even"]["accept_rate"] for batch in batches]
    ticks = [str(batch["batch_size"]) for batch in batches]
    panels = [
        Panel("best K", best, ticks=ticks, x_label="batch size"),
        Panel("speedup over off at the best K", fastest, "lines", ticks, "batch size", "", 1.0),
        Panel("accept rate above which drafts pay", {"_": [*enumerate(lowest)]}, ticks=ticks),
    ]
    return draw(panels, path, title)
