"""Figures, tables and the plot of `serve-spec bench mixed`.

Figures are medians over the repetitions that every variant has; percentiles are of a repetition. A
gap is the time between two deliveries of tokens of a request, the ITL of `vllm bench serve`: the
tokens of a round come together, and make one gap.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from serve_spec.bench.online.load import LoadRun
from serve_spec.bench.online.report import Objective, goodput, percentiles_ms
from serve_spec.bench.report import (
    Record,
    draw,
    forced_acceptance,
    plot_title,
    table,
    variant_bars,
)
from serve_spec.core.record import StepRecord


def figures(
    run: LoadRun,
    steps: Sequence[StepRecord],
    objective: Objective,
    inter_token_ms: float | None,
    expected: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Return the figures of a trace that was served once.

    expected: token ids of every text. In ms: ttft and e2el since the request was due, tpot per
    token after the first, gap between deliveries; decode_step and mixed_step are medians of steps
    without and with prompt tokens in which requests decoded. gaps_within: the fraction of gaps up
    to `inter_token_ms`. prompt_tokens_per_step: of mixed steps.
    """
    served, seconds = run.served, run.seconds
    gaps = list(chain.from_iterable(each.chunk_gaps_s for each in served))
    mixed = [step for step in steps if step.batch_size and step.num_prefill_tokens]
    requests = sum(step.batch_size for step in steps)
    texts = [each.token_ids for each in served]
    return {
        "seconds": seconds,
        "requests_per_second": len(served) / seconds,
        "tokens_per_second": sum(each.num_tokens for each in served) / seconds,
        "ttft_ms": percentiles_ms(each.ttft_s for each in served),
        "gap_ms": percentiles_ms(gaps),
        "tpot_ms": percentiles_ms(each.tpot_s for each in served if each.tpot_s is not None),
        "e2el_ms": percentiles_ms(each.e2e_s for each in served),
        "gaps_within": None
        if inter_token_ms is None or not gaps
        else float(np.mean(np.array(gaps) * 1e3 <= inter_token_ms)),
        **goodput([run], objective),
        "steps": len(steps),
        "prompt_tokens": sum(step.num_prefill_tokens for step in steps),
        "prompt_tokens_per_step": fmean(step.num_prefill_tokens for step in mixed)
        if mixed
        else None,
        "decode_step_ms": _median_ms([step for step in steps if step.decodes_only]),
        "mixed_step_ms": _median_ms(mixed),
        "accept_length": sum(step.num_output_tokens for step in steps) / max(requests, 1),
        "num_steps": sum(step.shape.depth * step.batch_size for step in steps) / max(requests, 1),
        "texts": hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16],
        "same_texts": sum(a == tuple(b) for a, b in zip(texts, expected, strict=True)),
        "num_texts": len(texts),
    }


def _median_ms(steps: Sequence[StepRecord]) -> float | None:
    return median(step.step_ms for step in steps) if steps else None


def summary(head: Record, measurements: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the median figures of every variant, by trace and load, over the best fixed pair.

    A fixed pair is a depth and a chunk size that stay, off included. The best has the least seconds
    in a closed loop; in an open loop, where all take as long, the least mean time of a request.
    """
    by_load: dict[tuple[str, str], dict[int, dict[str, Record]]] = {}
    for each in measurements:
        runs = by_load.setdefault((each["trace"], each["load"]), {})
        runs.setdefault(each["repetition"], {})[each["variant"]] = each
    found = []
    for runs in by_load.values():
        complete = [by_name for by_name in runs.values() if len(by_name) == len(head["variants"])]
        if complete:
            found += _over_best(head["variants"], complete)
    return found


def _over_best(
    variants: Mapping[str, Record], repetitions: Sequence[Mapping[str, Record]]
) -> list[dict[str, Any]]:
    rows = {name: _medians([each[name] for each in repetitions]) for name in variants}
    times = {
        name: row["seconds"] if row["of_capacity"] is None else row["e2el_ms"]["mean"]
        for name, row in rows.items()
    }
    fixed = [name for name, variant in variants.items() if variant["is_fixed"]]
    best = min(fixed, key=lambda name: times[name], default=None)
    return [
        {
            **row,
            **variants[name],
            "best_fixed": best,
            "over_best_fixed": None if best is None else times[best] / times[name],
        }
        for name, row in rows.items()
    ]


def _medians(repetitions: Sequence[Record]) -> dict[str, Any]:
    """Return the repetitions as one: medians of figures, sums of texts."""
    merged = {key: _merged([each[key] for each in repetitions]) for key in repetitions[0]}
    for key in ("same_texts", "num_texts"):
        merged[key] = sum(each[key] for each in repetitions)
    seconds = [each["seconds"] for each in repetitions]
    return {**merged, "seconds_range": (min(seconds), max(seconds))}


def _merged(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if known and isinstance(known[0], Mapping):
        return {name: median(each[name] for each in known) for name in known[0]}
    return median(known) if known and isinstance(known[0], int | float) else values[0]


def tables(head: Record, measurements: Sequence[Record]) -> str:
    """Return the figures of every variant, and what is chosen at run time over the best pair."""
    rows = summary(head, measurements)
    bound = head["inter_token_ms"]
    notes = [
        *(head["prompts"], *head["traces"]),
        "Milliseconds. TTFT: since the request was due. Gap: between deliveries of tokens (ITL).",
        f"Good: {Objective(**head['objective']).label}.",
        "Of steps in which requests decode: without prompt tokens (decode), with them (mixed).",
    ]
    if not rows:
        return "\n".join([*notes, "", "no repetition is complete"])
    within = [] if bound is None else [f"gaps <= {bound:g}"]
    columns = [
        *("trace", "load", "depth", "chunk", "seconds", "range", "tok/s", "TTFT p50", "p99"),
        *("gap p50", "p99", *within, "good req/s", "prompt tok/mixed step", "decode", "mixed"),
        *("accept length", "K", "same texts"),
    ]
    is_forced = forced_acceptance(head) is not None
    cells = [_row(row, is_forced=is_forced, is_bounded=bool(within)) for row in rows]
    shown = ["\n".join(notes), table(columns, cells)]
    chosen = [row for row in rows if not row["is_fixed"] and row["best_fixed"] is not None]
    if chosen:
        shown.append(
            "x best: speed over the best pair of depth and chunk held fixed, by seconds; in open "
            "loops by the mean time of a request."
        )
        columns = ["trace", "load", "best fixed pair", "depth", "chunk", "x best"]
        keys = "best_fixed", "depth", "chunk", "over_best_fixed"
        cells = [[row["trace"], _load(row), *(row[key] for key in keys)] for row in chosen]
        shown.append(table(columns, cells))
    return "\n\n".join(shown)


def _load(row: Record) -> str:
    of = row["of_capacity"]
    return str(row["load"]) if of is None else f"{row['load']} ({of:g})"


def _row(row: Record, *, is_forced: bool, is_bounded: bool) -> list[object]:
    low, high = row["seconds_range"]
    within = row["gaps_within"]
    return [
        *(row["trace"], _load(row), row["depth"], row["chunk"], row["seconds"]),
        *(f"{low:.2f}-{high:.2f}", row["tokens_per_second"]),
        *(row["ttft_ms"]["p50"], row["ttft_ms"]["p99"]),
        *((row["gap_ms"] or {}).get(place) for place in ("p50", "p99")),
        *(["" if within is None else f"{within:.2%}"] if is_bounded else []),
        *(row["goodput_requests_per_second"], row["prompt_tokens_per_step"]),
        *(row["decode_step_ms"], row["mixed_step_ms"], row["accept_length"], row["num_steps"]),
        "" if is_forced else f"{row['same_texts']}/{row['num_texts']}",
    ]


def plot(head: Record, measurements: Sequence[Record], path: Path) -> None:
    """Draw every variant's speed over the best fixed pair, a panel for each trace and load."""
    panels: dict[str, list[tuple[str, Record]]] = {}
    for row in summary(head, measurements):
        bar = str(row["chunk"]), {**row, "variant": row["depth"]}
        panels.setdefault(f"{row['trace']}, {_load(row)}", []).append(bar)
    label = "speed over the best fixed pair"
    draw(
        [variant_bars(title, bars, "over_best_fixed", label) for title, bars in panels.items()],
        path,
        f"{plot_title(head)}; by chunk; accept length above each bar",
        columns=min(len(panels), 2) or 1,
    )
