"""Figures, tables and the plot of `serve-spec bench online`.

Percentiles are over the requests of all repetitions, interpolated linearly. Speeds are medians over
repetitions. A request without a complete answer has no latency and misses every objective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from serve_spec.bench.online.load import LoadRun, Sample, Served
from serve_spec.bench.report import Panel, Points, Record, draw, plot_title, table

HTTP = "http"
OFFLINE = "offline"

_SPEED = [
    *("load", "side", "requests", "errors", "tok/s", "goodput", "goodput req/s", "goodput tok/s"),
    *("tok/chunk", "accept length", "K", "decoding", "batch", "same texts", "client CPU"),
]
_LATENCIES = {
    "ttft_ms": ("TTFT", ("p50", "p90", "p99")),
    "tpot_ms": ("TPOT", ("p50", "p90", "p99")),
    "e2e_ms": ("e2e", ("p50", "p90", "p99")),
    "chunk_gap_ms": ("gap", ("p50", "p99")),
    "sent_late_ms": ("sent late", ("p99",)),
}


@dataclass(frozen=True)
class Objective:
    """Latency limits of a request, in ms; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def is_met(self, served: Served) -> bool:
        """Return whether the answer is complete and within the limits."""
        if served.error is not None:
            return False
        tpot_s = served.tpot_s or 0.0  # a single token has no time per further token
        seconds = served.ttft_s, tpot_s, served.e2e_s
        limits = self.ttft_ms, self.tpot_ms, self.e2el_ms
        return all(ms is None or s * 1e3 <= ms for s, ms in zip(seconds, limits, strict=True))

    @classmethod
    def of(cls, bounds: Iterable[tuple[str, float]]) -> Objective:
        """Return the limits of `--goodput`: pairs of a metric and milliseconds, the last wins."""
        return cls(**{f"{metric}_ms": ms for metric, ms in bounds})

    @property
    def label(self) -> str:
        """Return the limits in words."""
        named = {"TTFT": self.ttft_ms, "TPOT": self.tpot_ms, "E2EL": self.e2el_ms}
        limits = [f"{name} <= {limit:g} ms" for name, limit in named.items() if limit is not None]
        return " and ".join(limits) or "no limit, every complete answer counts"


def measure(
    load: str,
    side: str,
    runs: Sequence[LoadRun],
    objective: Objective,
    reference: Mapping[int, str],
    num_replicas: int | None = None,
    num_streams: int | None = None,
) -> dict[str, Any]:
    """Return the figures of a load's repetitions on one side; None if unknown.

    side: `OFFLINE`, or a server: `HTTP`, or the name of a variant. reference: the first complete
    text of each request on any side. num_replicas: of a variant. num_streams: of a closed loop, for
    all replicas together.

    In ms: ttft since the request was due, tpot per token after the first, chunk_gap between chunks
    (which hold the tokens of a round), sent_late from due to sent. errors: by HTTP status or
    reason. decoding_streams: mean number between first and last token. batch_size: as replicas
    report it, summed over them. samples: of the last repetition.
    """
    every = [served for run in runs for served in run.served]
    complete = [served for served in every if served.error is None]
    speeds = [_tokens_per_second(run) for run in runs]
    num_chunks = sum(len(served.chunk_s) for served in complete)
    num_tokens = sum(served.num_tokens for served in complete)
    cpu_fractions = [run.client_cpu_fraction for run in runs if run.client_cpu_fraction is not None]
    return {
        "load": load,
        "side": side,
        "num_requests": len(every),
        "errors": dict(Counter(s.error for s in every if s.error is not None).most_common()),
        "ttft_ms": percentiles_ms(served.ttft_s for served in complete),
        "tpot_ms": percentiles_ms(s.tpot_s for s in complete if s.tpot_s is not None),
        "e2e_ms": percentiles_ms(served.e2e_s for served in complete),
        "chunk_gap_ms": percentiles_ms(gap for served in complete for gap in served.chunk_gaps_s),
        "sent_late_ms": percentiles_ms(served.sent_s - served.due_s for served in every),
        "tokens_per_second": median(speeds),
        "tokens_per_second_low": min(speeds),
        "tokens_per_second_high": max(speeds),
        "requests_per_second": median(
            sum(served.error is None for served in run.served) / run.seconds for run in runs
        ),
        **goodput(runs, objective),
        "tokens_per_chunk": num_tokens / num_chunks if num_chunks else None,
        "prompt_tokens": fmean(s.num_prompt_tokens for s in complete) if complete else None,
        **_speculation(complete),
        "decoding_streams": fmean(map(_decoding_streams, runs)),
        "batch_size": _batch_size([sample for run in runs for sample in run.samples]),
        "same_texts": sum(
            served.error is None and served.text == reference[number]
            for run in runs
            for number, served in enumerate(run.served)
        ),
        "num_texts": len(complete),
        "client_cpu_share": max(cpu_fractions, default=None),
        "samples": list(runs[-1].samples),
        "num_replicas": num_replicas,
        "num_streams": num_streams,
    }


def by_category(
    runs: Sequence[LoadRun], categories: Sequence[str | None], reference: Mapping[int, str]
) -> dict[str, Any]:
    """Return the figures of the complete answers of each category of a dataset.

    categories: of each request. reference: as for `measure`.
    """
    found: dict[str, list[tuple[int, Served]]] = {}
    for run in runs:
        for number, (category, served) in enumerate(zip(categories, run.served, strict=True)):
            if category is not None and served.error is None:
                found.setdefault(category, []).append((number, served))
    return {
        category: {
            "num_texts": len(answers),
            "num_tokens": sum(served.num_tokens for _, served in answers),
            "tpot_ms": percentiles_ms(s.tpot_s for _, s in answers if s.tpot_s is not None),
            "accept_length": _speculation([served for _, served in answers])["accept_length"],
            "same_texts": sum(served.text == reference[number] for number, served in answers),
        }
        for category, answers in found.items()
    }


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """Return mean, p50, p90, p99 and maximum in ms; None if there is no value."""
    values = np.fromiter(seconds, dtype=float) * 1e3
    if not values.size:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    named = {"mean": values.mean(), "p50": p50, "p90": p90, "p99": p99, "max": values.max()}
    return {name: round(float(value), 3) for name, value in named.items()}


def add_texts(texts: dict[int, str], runs: Iterable[LoadRun]) -> None:
    """Add the first complete text of every request that has none, by its number."""
    for run in runs:
        for number, served in enumerate(run.served):
            if served.error is None:
                texts.setdefault(number, served.text)


def against_offline(measurements: Sequence[Record]) -> list[dict[str, Any]]:
    """Return, per load that also ran offline, the fraction of speed kept by HTTP, and its delay."""
    offline = {each["load"]: each for each in measurements if each["side"] == OFFLINE}
    pairs = [
        (each, offline[each["load"]])
        for each in measurements
        if each["side"] != OFFLINE and each["load"] in offline
    ]
    return [
        {
            "load": http["load"],
            "side": http["side"],
            "tokens_per_second_over_offline": http["tokens_per_second"] / own["tokens_per_second"],
            **{
                f"added_{key}_p50": http[key] and own[key] and http[key]["p50"] - own[key]["p50"]
                for key in ("ttft_ms", "tpot_ms")
            },
        }
        for http, own in pairs
    ]


def against_first(measurements: Sequence[Record]) -> list[dict[str, Any]]:
    """Return, per load of each variant, its speed over that of the first variant.

    `over_first`: under the same load. `over_first_per_stream`: under the closed loop that gives a
    replica of the first variant as many streams; None if there is none.
    """
    variants = [each for each in measurements if each.get("num_replicas")]
    first = [each for each in variants if each["side"] == variants[0]["side"]]
    by_load = {each["load"]: each["tokens_per_second"] for each in first}

    def streams(each: Record) -> float | None:
        streams = each["num_streams"]
        return float(streams / each["num_replicas"]) if streams else None

    by_streams = {streams(each): each["tokens_per_second"] for each in first if streams(each)}
    found = []
    for each in variants:
        row = {"load": each["load"], "variant": each["side"]}
        row |= {key: each[key] for key in ("num_replicas", "tokens_per_second")}
        same, alike = by_load.get(each["load"]), by_streams.get(streams(each))
        for key, speed in (("over_first", same), ("over_first_per_stream", alike)):
            row[key] = each["tokens_per_second"] / speed if speed else None
        found.append(row)
    return found


def is_forced(run: LoadRun) -> bool:
    """Return whether the server forced acceptance, so that no text is the model's."""
    return any(served.speculation.get("synthetic_acceptance") for served in run.served)


def fleet_course(samples: Iterable[Sample], key: str) -> tuple[list[float], list[list[float]]]:
    """Return times, and at each the latest known value of `key` of every replica."""
    times, values = [], []
    latest: dict[str, float] = {}
    for sample in sorted(samples, key=lambda sample: sample["time_s"]):
        if sample[key] is not None:
            latest[sample["replica"]] = sample[key]
            times.append(float(sample["time_s"]))
            values.append(list(latest.values()))
    return times, values


def goodput(runs: Sequence[LoadRun], objective: Objective) -> dict[str, float]:
    """Return what met the objective: as a fraction, and per second in answers and tokens."""
    met = [sum(map(objective.is_met, run.served)) for run in runs]
    return {
        "goodput_share": sum(met) / sum(len(run.served) for run in runs),
        "goodput_requests_per_second": median(
            count / run.seconds for count, run in zip(met, runs, strict=True)
        ),
        "goodput_tokens_per_second": median(_tokens_per_second(run, objective) for run in runs),
    }


def _tokens_per_second(run: LoadRun, objective: Objective | None = None) -> float:
    """Return the speed of complete answers; with an objective, of those that met it."""
    met = (objective or Objective()).is_met
    return sum(served.num_tokens for served in run.served if met(served)) / run.seconds


def _decoding_streams(run: LoadRun) -> float:
    spans = [served.chunk_s[-1] - served.chunk_s[0] for served in run.served if served.chunk_s]
    return sum(spans) / run.seconds


def _batch_size(samples: Sequence[Sample]) -> float | None:
    sizes: dict[str, list[float]] = {}
    for sample in samples:
        if sample["batch_size"] is not None:
            sizes.setdefault(sample["replica"], []).append(sample["batch_size"])
    return sum(map(fmean, sizes.values())) if sizes else None


def _speculation(complete: Sequence[Served]) -> dict[str, Any]:
    rounds: Counter[str] = Counter()
    for served in complete:
        rounds.update(served.speculation.get("rounds_by_num_steps", {}))
    total = rounds.total()
    accepted = sum(served.speculation.get("num_correct_drafts", 0) for served in complete)
    drafts = sum(int(num_steps) * count for num_steps, count in rounds.items())
    return {
        "accept_length": 1 + accepted / total if total else None,
        "num_steps": drafts / total if total else None,
        "rounds_by_num_steps": dict(sorted(rounds.items(), key=lambda item: int(item[0]))),
    }


def tables(run: Record, measurements: Sequence[Record]) -> str:
    """Return speeds, latencies and, if there are several sides, comparisons."""
    shown = [] if run.get("prompts") is None else [run["prompts"]]
    shown += [
        f"Goodput: {Objective(**run['objective']).label}.\n"
        "Decoding: mean streams between first and last token. Batch: as replicas report it.\n"
        "Client CPU: near 100%, the client is the limit; use more --clients.",
        table(_SPEED, list(map(_speed_row, measurements))),
        "Milliseconds. Open loops count from the scheduled time, closed loops from sending.\n"
        "TPOT is per token after the first, gap per chunk.",
        table(
            ["load", "side", *(f"{n} {p}" for n, ps in _LATENCIES.values() for p in ps)],
            list(map(_latency_row, measurements)),
        ),
    ]
    if any(each.get("by_category") for each in measurements):
        columns = ["category", "load", "side", "texts", "tok/text", "accept length", "TPOT p50"]
        shown.append(table([*columns, "same texts"], _category_rows(measurements)))
    offline = against_offline(measurements)
    if offline:
        columns = ["load", "side", "tok/s over offline", "added TTFT p50", "added TPOT p50"]
        shown.append(table(columns, [list(row.values()) for row in offline]))
    first = against_first(measurements)
    if first:
        columns = ["load", "variant", "replicas", "tok/s", "x first", "x first per stream"]
        shown.append("x first: same load; per stream: same number of streams per replica.")
        shown.append(table(columns, [list(row.values()) for row in first]))
    return "\n\n".join(shown)


def _category_rows(measurements: Sequence[Record]) -> list[list[object]]:
    rows: list[list[object]] = [
        [
            *(category, each["load"], each["side"], mine["num_texts"]),
            mine["num_tokens"] / mine["num_texts"],
            mine["accept_length"],
            mine["tpot_ms"] and float(mine["tpot_ms"]["p50"]),
            f"{mine['same_texts']}/{mine['num_texts']}",
        ]
        for each in measurements
        for category, mine in each.get("by_category", {}).items()
    ]
    return sorted(rows, key=lambda row: str(row[0]))


def _speed_row(each: Record) -> list[object]:
    cpu_fraction = each["client_cpu_share"]
    return [
        *(each[key] for key in ("load", "side", "num_requests")),
        " ".join(f"{count}x {what}" for what, count in each["errors"].items()) or 0,
        each["tokens_per_second"],
        f"{each['goodput_share']:.1%}",
        each.get("goodput_requests_per_second"),  # older records have none
        each["goodput_tokens_per_second"],
        *(each[key] for key in ("tokens_per_chunk", "accept_length", "num_steps")),
        *(each[key] for key in ("decoding_streams", "batch_size")),
        f"{each['same_texts']}/{each['num_texts']}",
        "" if cpu_fraction is None else f"{cpu_fraction:.0%}",
    ]


def _latency_row(each: Record) -> list[object]:
    return [
        *(each["load"], each["side"]),
        *(
            each[key] and float(each[key][place])
            for key, (_, places) in _LATENCIES.items()
            for place in places
        ),
    ]


def plot(run: Record, measurements: Sequence[Record], path: Path) -> None:
    """Draw latencies, speed and goodput by load, and the last repetition over time."""
    ticks = [f"{each['load']}\n{each['side']}" for each in measurements]

    def bars(title: str, values: Mapping[str, Sequence[float | None]], limit: Any = None) -> Panel:
        series = {name: list(enumerate(heights)) for name, heights in values.items()}
        return Panel(title, series, kind="bars", ticks=ticks, baseline=limit)

    def latency(key: str, title: str) -> Panel:
        by_name = {
            name: [each[key] and each[key][name] for each in measurements]
            for name in ("p50", "p90", "p99")
        }
        return bars(title, by_name, run["objective"][key])

    def course(key: str, title: str, merge: Any) -> Panel:
        series: dict[str, Points] = {}
        for each, tick in zip(measurements, ticks, strict=True):
            times, values = fleet_course(each["samples"], key)
            if times:
                series[tick.replace("\n", ", ")] = list(zip(times, map(merge, values), strict=True))
        return Panel(title, series, kind="steps", x_label="seconds")

    panels = [
        latency("ttft_ms", "time to first token, ms"),
        latency("tpot_ms", "time per output token, ms"),
        bars(
            "tokens/s",
            {
                "every complete answer": [m["tokens_per_second"] for m in measurements],
                "within the objective": [m["goodput_tokens_per_second"] for m in measurements],
            },
        ),
        course("batch_size", "decoding requests, all replicas, as reported", sum),
        course("num_steps", "K, mean of the replicas, as reported", fmean),
    ]
    names = list(
        dict.fromkeys(name for each in measurements for name in each.get("by_category", ()))
    )
    if names:
        lengths = {
            tick.replace("\n", ", "): [
                (place, each["by_category"].get(name, {}).get("accept_length"))
                for place, name in enumerate(names)
            ]
            for each, tick in zip(measurements, ticks, strict=True)
        }
        title = "accept length by category"
        panels.append(Panel(title, lengths, kind="bars", ticks=names, baseline=1.0))
    draw(panels, path, plot_title(run), columns=3)
