"""From runs to figures: latencies, speed, goodput. No clock, no files.

Percentiles are taken over the requests of all repetitions, by linear interpolation between the two
nearest of them (numpy's default). Speeds are medians over repetitions, each from the first due
time to the last end. A request without a whole answer has no latency, and fails every objective.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve_spec.bench.online.record import LoadRun, Sample, Served

HTTP = "http"
OFFLINE = "offline"


@dataclass(frozen=True)
class Objective:
    """What a service promises of each request, in ms; None promises nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met(self, served: Served) -> bool:
        """Whether there is a whole answer, and in time."""
        if served.error is not None:
            return False
        tpot_s = served.tpot_s or 0.0  # a single token has nothing to be late with
        return _within(served.ttft_s, self.ttft_ms) and _within(tpot_s, self.tpot_ms)


def _within(seconds: float, limit_ms: float | None) -> bool:
    return limit_ms is None or seconds * 1e3 <= limit_ms


@dataclass(frozen=True)
class Cell:
    """The figures of one load on one side; latencies in ms, None where nothing was measured."""

    load: str
    side: str
    """`OFFLINE`, or a server: `HTTP`, or the name of an arm."""
    num_requests: int
    errors: dict[str, int]
    """Requests without a whole answer, by HTTP status or by what happened."""
    ttft_ms: dict[str, float] | None
    """From when the request was due."""
    tpot_ms: dict[str, float] | None
    """Per token after the first, of each request."""
    e2e_ms: dict[str, float] | None
    chunk_gap_ms: dict[str, float] | None
    """Between chunks of a stream: a chunk holds the tokens of a round."""
    sent_late_ms: dict[str, float] | None
    """How far sending lagged behind the schedule; offline, it waits for the round under way."""
    tokens_per_second: float
    tokens_per_second_low: float
    tokens_per_second_high: float
    requests_per_second: float
    goodput_share: float
    """Of all requests, those that met the objective."""
    goodput_tokens_per_second: float
    tokens_per_chunk: float | None
    prompt_tokens: float | None
    """Mean."""
    accept_length: float | None
    num_steps: float | None
    """Mean over the rounds of requests."""
    rounds_by_num_steps: dict[str, int]
    decoding_streams: float
    """Streams between their first and their last token, on average over the run."""
    batch_size: float | None
    """Sequences that decode, as replicas report it now and then: means, summed over replicas."""
    same_texts: int
    num_texts: int
    first_token_ms: dict[str, float]
    """Mean time to first token as the server measures it, by place: median of repetitions."""
    client_cpu_share: float | None
    samples: list[Sample]
    """Of the last repetition."""


def cell(
    load: str,
    side: str,
    runs: Sequence[LoadRun],
    objective: Objective,
    reference: Mapping[int, str],
) -> Cell:
    """The figures of `runs`, repetitions of one load; `reference`: the text of each request."""
    every = [served for run in runs for served in run.served]
    whole = [served for served in every if served.error is None]
    speeds = [_tokens_per_second(run) for run in runs]
    shares = [run.client_cpu_share for run in runs if run.client_cpu_share is not None]
    num_chunks = sum(len(served.chunk_s) for served in whole)
    num_tokens = sum(served.num_tokens for served in whole)
    return Cell(
        load=load,
        side=side,
        num_requests=len(every),
        errors=dict(Counter(s.error for s in every if s.error is not None).most_common()),
        ttft_ms=percentiles_ms(served.ttft_s for served in whole),
        tpot_ms=percentiles_ms(s.tpot_s for s in whole if s.tpot_s is not None),
        e2e_ms=percentiles_ms(served.e2e_s for served in whole),
        chunk_gap_ms=percentiles_ms(gap for served in whole for gap in served.chunk_gaps_s),
        sent_late_ms=percentiles_ms(served.sent_s - served.due_s for served in every),
        tokens_per_second=statistics.median(speeds),
        tokens_per_second_low=min(speeds),
        tokens_per_second_high=max(speeds),
        requests_per_second=statistics.median(
            sum(served.error is None for served in run.served) / run.seconds for run in runs
        ),
        goodput_share=sum(map(objective.is_met, every)) / len(every),
        goodput_tokens_per_second=statistics.median(
            _tokens_per_second(run, objective) for run in runs
        ),
        tokens_per_chunk=num_tokens / num_chunks if num_chunks else None,
        prompt_tokens=_mean(served.num_prompt_tokens for served in whole),
        **_speculation(whole),
        decoding_streams=statistics.fmean(map(_decoding_streams, runs)),
        batch_size=_batch_size([sample for run in runs for sample in run.samples]),
        same_texts=sum(
            served.error is None and served.text == reference[number]
            for run in runs
            for number, served in enumerate(run.served)
        ),
        num_texts=len(whole),
        first_token_ms=_first_token_ms(runs),
        client_cpu_share=max(shares, default=None),
        samples=list(runs[-1].samples),
    )


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and maximum in ms; None of nothing."""
    values = np.fromiter(seconds, dtype=float) * 1e3
    if not values.size:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    named = {"mean": values.mean(), "p50": p50, "p90": p90, "p99": p99, "max": values.max()}
    return {name: round(float(value), 3) for name, value in named.items()}


def reference_texts(runs: Iterable[LoadRun]) -> dict[int, str]:
    """The first whole text of every request, by its number."""
    texts: dict[int, str] = {}
    for run in runs:
        for number, served in enumerate(run.served):
            if served.error is None:
                texts.setdefault(number, served.text)
    return texts


def against_offline(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Per load that ran on both sides: the share of speed that HTTP keeps, the time it adds."""
    offline = {cell.load: cell for cell in cells if cell.side == OFFLINE}
    return [
        {
            "load": http.load,
            "side": http.side,
            "tokens_per_second_over_offline": http.tokens_per_second / alone.tokens_per_second,
            "added_ttft_ms_p50": _difference(http.ttft_ms, alone.ttft_ms),
            "added_tpot_ms_p50": _difference(http.tpot_ms, alone.tpot_ms),
        }
        for http in cells
        if http.side != OFFLINE and (alone := offline.get(http.load)) is not None
    ]


def against_first_arm(
    cells: Sequence[Cell], num_replicas: Mapping[str, int], num_streams: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Per load of each arm: its speed over the first arm's.

    `over_first`: under the same load. `over_first_per_stream`: under the closed loop that gives
    each of the first arm's replicas as many streams; None where none was run.

    num_replicas: by arm, the first one first. num_streams: of closed loops, by name.
    """
    first = next(iter(num_replicas))
    of_first = {cell.load: cell.tokens_per_second for cell in cells if cell.side == first}
    by_streams = {
        num_streams[load] / num_replicas[first]: speed
        for load, speed in of_first.items()
        if load in num_streams
    }
    return [
        {
            "load": cell.load,
            "arm": cell.side,
            "num_replicas": num_replicas[cell.side],
            "tokens_per_second": cell.tokens_per_second,
            "over_first": _over(cell, of_first[cell.load]),
            "over_first_per_stream": _over(
                cell,
                by_streams.get(num_streams.get(cell.load, 0) / num_replicas[cell.side]),
            ),
        }
        for cell in cells
        if cell.side in num_replicas
    ]


def is_forced(run: LoadRun) -> bool:
    """Whether the server forced acceptance for a load test, so that no text is the model's."""
    return any(served.speculation.get("synthetic_acceptance") for served in run.served)


def fleet_course(samples: Iterable[Sample], key: str) -> tuple[list[float], list[list[float]]]:
    """Times, and at each the latest value of `key` of every replica that has told one."""
    times, values = [], []
    latest: dict[str, float] = {}
    for sample in sorted(samples, key=lambda sample: sample["time_s"]):
        if sample[key] is not None:
            latest[sample["replica"]] = sample[key]
            times.append(float(sample["time_s"]))
            values.append(list(latest.values()))
    return times, values


def _tokens_per_second(run: LoadRun, objective: Objective | None = None) -> float:
    """Of whole answers; with an objective, of those that met it."""
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
    return sum(map(statistics.fmean, sizes.values())) if sizes else None


def _speculation(whole: Sequence[Served]) -> dict[str, Any]:
    rounds: Counter[str] = Counter()
    for served in whole:
        rounds.update(served.speculation.get("rounds_by_num_steps", {}))
    total = sum(rounds.values())
    kept = sum(served.speculation.get("num_correct_drafts", 0) for served in whole)
    drafts = sum(int(num_steps) * count for num_steps, count in rounds.items())
    return {
        "accept_length": 1 + kept / total if total else None,
        "num_steps": drafts / total if total else None,
        "rounds_by_num_steps": dict(sorted(rounds.items(), key=lambda item: int(item[0]))),
    }


def _first_token_ms(runs: Sequence[LoadRun]) -> dict[str, float]:
    known = [run.first_token_ms for run in runs if run.first_token_ms]
    return {
        place: statistics.median(each[place] for each in known)
        for place in (known[0] if known else ())
    }


def _over(cell: Cell, speed: float | None) -> float | None:
    return cell.tokens_per_second / speed if speed else None


def _difference(here: dict[str, float] | None, there: dict[str, float] | None) -> float | None:
    return None if here is None or there is None else here["p50"] - there["p50"]


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.fmean(known) if known else None
