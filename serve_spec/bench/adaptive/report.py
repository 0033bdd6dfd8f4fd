"""From measured phases to figures: cells, regret, the worst cell. JSON-able throughout.

Machines drift, so arms are compared within a repetition; what is reported is the median over
repetitions of such a ratio, and how far the ratios spread. What two arms that are alike differ by
(`off` and `off-again`) is the noise floor: less than that, nobody can tell.

Regret is against the fixed depth of every phase that was best in the *other* repetitions. Among
several that are about as good, the luckiest looks better than any is: `hindsight_regret`, against
those that were best in all repetitions, has that error in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np

from serve_spec.bench.closed_loop import MeasuredRound, PhaseRun
from serve_spec.bench.phases import Phase
from serve_spec.bench.regret import (
    best_arms,
    phase_regrets,
    relative_rates,
    trace_regret,
    trace_time,
)
from serve_spec.bench.report import table

Value = TypeVar("Value")

OFF = "off"
CONTROL = "off-again"
"""The same as off, measured as any other arm is."""
SERIES_POINTS = 60
FULL_SHARE = 7 / 8
SPREAD_PERCENTILES = (10, 90)


@dataclass(frozen=True)
class Measurement:
    """One arm in one phase, once."""

    tokens_per_second: float
    """Of decoding: what the prompts took is taken out."""
    wall_tokens_per_second: float
    """Prompts included."""
    ms_per_round: float | None
    """With the next two: of rounds that no prompt shared; None if there was none."""
    draft_ms_per_round: float | None
    verify_ms_per_round: float | None
    accept_length: float
    """Tokens per row and round."""
    rounds_by_num_steps: Mapping[int, int]
    """Rounds with decode rows, by tier."""
    time_by_num_steps: Mapping[int, float]
    """Shares of their time."""
    switches: Mapping[str, int]
    """By reason."""
    probe_share: float
    """Share of their time that rounds run to learn took, whole."""
    full_rounds: Sequence[Mapping[str, float]]
    """Of rounds with nearly as many rows as any: how many and what they take, by the tokens of
    prompts that shared them, up to powers of two."""
    over_predicted: Mapping[int, float]
    """Time of rounds that no prompt shared over what the policy expected of them, by tier."""
    series: Mapping[str, Sequence[float]]
    """What the rounds did over time, in at most `SERIES_POINTS` pieces."""


@dataclass(frozen=True)
class ArmRuns:
    """All measurements of an arm: by phase, then by repetition; None where it was skipped."""

    name: str
    is_static: bool
    measurements: Sequence[Sequence[Measurement | None]]
    same_texts: Sequence[int]
    """By phase: texts that equal those of off in every repetition."""


def measure(run: PhaseRun, prompt_ms_per_token: float) -> Measurement:
    """The figures of one phase.

    prompt_ms_per_token: the same for all arms that are compared. Where many requests come and go,
        hardly a round is without a prompt, and those that are come from the ends of the phase; so
        the time of prompts is taken out of the rounds that they share with decode rows.
    """
    rounds = run.decode_rounds
    alone = [r for r in rounds if r.record.decodes_only]
    prompt_ms = prompt_ms_per_token * sum(r.record.num_prefill_tokens for r in rounds)
    ms_by_steps: defaultdict[int, float] = defaultdict(float)
    for r in rounds:
        ms_by_steps[r.record.shape.depth] += r.ms
    ms = sum(ms_by_steps.values())
    return Measurement(
        tokens_per_second=run.num_decode_tokens / (ms - prompt_ms) * 1e3,
        wall_tokens_per_second=run.num_tokens / run.wall_ms * 1e3,
        ms_per_round=_mean(r.ms for r in alone),
        draft_ms_per_round=_mean(r.record.draft_ms for r in alone),
        verify_ms_per_round=_mean(r.record.verify_ms for r in alone),
        accept_length=run.num_decode_tokens / sum(r.record.batch_size for r in rounds),
        rounds_by_num_steps=dict(sorted(Counter(r.record.shape.depth for r in rounds).items())),
        time_by_num_steps={steps: part / ms for steps, part in sorted(ms_by_steps.items())},
        switches=dict(Counter(r.record.switch_reason for r in rounds if r.record.switch_reason)),
        probe_share=sum(r.ms for r in rounds if r.record.notes.is_probe) / ms,
        full_rounds=_full_rounds(rounds),
        over_predicted=_over_predicted(alone),
        series=_series(rounds),
    )


def _mean(values: Iterable[float]) -> float | None:
    there = list(values)
    return fmean(there) if there else None


def _full_rounds(rounds: Sequence[MeasuredRound]) -> list[dict[str, float]]:
    enough = FULL_SHARE * max(r.record.batch_size for r in rounds)
    by_tokens: defaultdict[int, list[float]] = defaultdict(list)
    for r in rounds:
        if r.record.batch_size >= enough:
            count = r.record.num_prefill_tokens
            by_tokens[1 << (count - 1).bit_length() if count else 0].append(r.ms)
    return [
        {"prompt_tokens": count, "rounds": len(ms), "ms": fmean(ms)}
        for count, ms in sorted(by_tokens.items())
    ]


def _over_predicted(rounds: Iterable[MeasuredRound]) -> dict[int, float]:
    measured: defaultdict[int, float] = defaultdict(float)
    predicted: defaultdict[int, float] = defaultdict(float)
    for r in rounds:
        if r.record.notes.predicted_ms is not None:
            measured[r.record.shape.depth] += r.record.step_ms
            predicted[r.record.shape.depth] += r.record.notes.predicted_ms
    return {steps: measured[steps] / ms for steps, ms in sorted(predicted.items())}


def _series(rounds: Sequence[MeasuredRound]) -> dict[str, list[float]]:
    """Pieces of equally many rounds: where each ends, and what it was like on average."""
    length = -(-len(rounds) // SERIES_POINTS)
    pieces = [rounds[i : i + length] for i in range(0, len(rounds), length)]
    columns: dict[str, list[float]] = defaultdict(list)
    now_ms = 0.0
    for piece in pieces:
        ms = sum(r.ms for r in piece)
        num_rows = sum(r.record.batch_size for r in piece)
        num_tokens = sum(r.record.num_output_tokens for r in piece)
        now_ms += ms
        columns["ms"].append(round(now_ms, 3))
        columns["batch_size"].append(round(num_rows / len(piece), 2))
        columns["steps_per_row"].append(
            round(sum(r.record.num_draft_tokens for r in piece) / num_rows, 3)
        )
        columns["tokens_per_second"].append(round(num_tokens / ms * 1e3, 1))
    return dict(columns)


def result_of(phases: Sequence[Phase], runs: Sequence[ArmRuns]) -> dict[str, Any]:
    """Everything there is to say: phases, cells (arm in phase), arms (whole trace)."""
    figures = _Figures(phases, runs)
    return {
        "phases": [
            {**asdict(phase), "temperatures": [kind.temperature for kind in phase.kinds]}
            for phase in phases
        ],
        "best_fixed": figures.best,
        "cells": [
            figures.cell(run, index, phase) for index, phase in enumerate(phases) for run in runs
        ],
        "arms": [figures.arm(run) for run in runs],
        "noise": figures.noise(),
    }


class _Figures:
    """Rates of all arms, repetition by repetition, and what follows from comparing them."""

    def __init__(self, phases: Sequence[Phase], runs: Sequence[ArmRuns]) -> None:
        self.num_tokens = [phase.total_tokens for phase in phases]
        num_repetitions = len(runs[0].measurements[0])
        self.by_repetition: list[dict[str, list[float | None]]] = [
            {run.name: [_rate(of_phase[r]) for of_phase in run.measurements] for run in runs}
            for r in range(num_repetitions)
        ]
        self.median = {
            run.name: [median(_there(_rate(m) for m in of_phase)) for of_phase in run.measurements]
            for run in runs
        }
        self.fixed = [run.name for run in runs if run.is_static and run.name != CONTROL]
        repetitions = range(num_repetitions)
        self.best = self._best(repetitions)
        self.best_by_repetition = [
            self._best([other for other in repetitions if other != r] or [r]) for r in repetitions
        ]
        self.ema = [name for name in self.median if name.startswith("ema")]

    def cell(self, run: ArmRuns, index: int, phase: Phase) -> dict[str, Any]:
        """One arm in one phase: medians, and the last repetition's course."""
        there = [m for m in run.measurements[index] if m is not None]
        last = asdict(there[-1])
        if run.is_static and run.name != OFF:
            del last["series"]  # always the same tier; off is what others are seen beside
        return {
            "phase": index,
            "arm": run.name,
            **last,
            "tokens_per_second": self.median[run.name][index],
            "wall_tokens_per_second": median(m.wall_tokens_per_second for m in there),
            "speed_over_off": self._over_off(run.name)[index],
            "spread": _spread(row[index] for row in self._ratios(run.name)),
            "regret": self._regrets(run.name)[index],
            "repetitions": [_rate(m) for m in run.measurements[index]],
            "same_texts": run.same_texts[index],
            "num_texts": phase.num_requests,
        }

    def arm(self, run: ArmRuns) -> dict[str, Any]:
        """One arm over the whole trace."""
        over_off, regrets = self._over_off(run.name), self._regrets(run.name)
        worst, worst_regret = over_off.index(min(over_off)), regrets.index(max(regrets))
        last = [_there(of_phase)[-1] for of_phase in run.measurements]
        walls = [
            median(m.wall_tokens_per_second for m in _there(of_phase))
            for of_phase in run.measurements
        ]
        return {
            "arm": run.name,
            "is_static": run.is_static,
            "tokens_per_second": self._trace_rate(self.median[run.name]),
            "wall_tokens_per_second": self._trace_rate(walls),
            "speed_over_off": _median(self._trace_over_off(run.name)),
            "speed_over_off_spread": _spread(self._trace_over_off(run.name)),
            "regret": _median(self._trace_regrets(run.name)),
            "regret_spread": _spread(self._trace_regrets(run.name)),
            "hindsight_regret": _median(
                trace_regret(rates, run.name, self.best, self.num_tokens)
                for rates in self.by_repetition
            ),
            "first_regret": self._trace_regrets(run.name)[0],
            "worst_over_off": over_off[worst],
            "worst_over_off_phase": worst,
            "worst_regret": regrets[worst_regret],
            "worst_regret_phase": worst_regret,
            "speed_over_ema": self._over_ema(run.name),
            "probe_share": fmean(m.probe_share for m in last),
            "switches": sum(sum(m.switches.values()) for m in last),
        }

    def _trace_rate(self, rates: Sequence[float]) -> float:
        seconds = trace_time(rates, self.num_tokens)
        assert seconds is not None, "medians leave no gaps"
        return sum(self.num_tokens) / seconds

    def _best(self, repetitions: Iterable[int]) -> list[str]:
        """The fixed depth of every phase that gained most over off in these repetitions.

        Not by rates: a machine may be slow by the time an arm that was given up is missing.
        """
        chosen = list(repetitions)
        gains = {
            arm: [_median(column) for column in zip(*self._ratios(arm, chosen), strict=True)]
            for arm in self.fixed
        }
        return best_arms(gains, self.fixed)

    def noise(self) -> dict[str, Any] | None:
        """What the measurement made of two arms that are alike; None without the second."""
        if CONTROL not in self.median:
            return None
        over_off = self._over_off(CONTROL)
        return {
            "arm": CONTROL,
            "speed_over_off": over_off,
            "largest_error": max(abs(ratio - 1) for ratio in over_off),
            "spread": _spread(ratio for row in self._ratios(CONTROL) for ratio in row),
            "trace": _median(self._trace_over_off(CONTROL)),
        }

    def _ratios(
        self, arm: str, repetitions: Iterable[int] | None = None
    ) -> list[list[float | None]]:
        """Speed over off, by repetition (all, or these), then by phase."""
        chosen = range(len(self.by_repetition)) if repetitions is None else repetitions
        return [relative_rates(self.by_repetition[r], arm, OFF) for r in chosen]

    def _over_off(self, arm: str) -> list[float]:
        return _medians(self._ratios(arm))

    def _regrets(self, arm: str) -> list[float]:
        pairs = zip(self.by_repetition, self.best_by_repetition, strict=True)
        return _medians(phase_regrets(rates, arm, best) for rates, best in pairs)

    def _trace_regrets(self, arm: str) -> list[float | None]:
        """By repetition."""
        pairs = zip(self.by_repetition, self.best_by_repetition, strict=True)
        return [trace_regret(rates, arm, best, self.num_tokens) for rates, best in pairs]

    def _trace_over_off(self, arm: str) -> list[float | None]:
        """Time of off over the arm's, whole trace, by repetition."""
        return self._time_ratios(OFF, arm)

    def _over_ema(self, arm: str) -> float | None:
        """Speed over the whole trace, against the better of the `ema` arms; None without any."""
        if not self.ema:
            return None
        times = {name: trace_time(self.median[name], self.num_tokens) or 0.0 for name in self.ema}
        better = min(self.ema, key=times.__getitem__)
        return _median(self._time_ratios(better, arm))

    def _time_ratios(self, arm: str, other: str) -> list[float | None]:
        """Time of the trace over the other's, by repetition; None where a phase is missing."""
        pairs = [
            (trace_time(rates[arm], self.num_tokens), trace_time(rates[other], self.num_tokens))
            for rates in self.by_repetition
        ]
        return [mine / theirs if mine and theirs else None for mine, theirs in pairs]


def _rate(measurement: Measurement | None) -> float | None:
    return None if measurement is None else measurement.tokens_per_second


def _there(values: Iterable[Value | None]) -> list[Value]:
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    there = _there(values)
    return median(there) if there else None


def _medians(rows: Iterable[Sequence[float | None]]) -> list[float]:
    """By column; every column has at least one value."""
    return [median(_there(column)) for column in zip(*rows, strict=True)]


def _spread(values: Iterable[float | None]) -> list[float] | None:
    """Tenth and ninetieth percentile of those that are there, interpolated."""
    there = _there(values)
    return [float(p) for p in np.percentile(there, SPREAD_PERCENTILES)] if there else None


def tables(result: Mapping[str, Any]) -> str:
    """What a person reads first: speed over off by phase, what it came from, arms, the noise."""
    parts = [_phase_table(result), _length_table(result), _arm_table(result)]
    if result.get("noise"):
        parts += [_spread_table(result), _noise_line(result["noise"])]
    return "\n\n".join(parts)


def phase_label(phase: Mapping[str, Any]) -> str:
    """Batch size, class and temperatures."""
    temperatures = "/".join(f"{t:g}" for t in phase["temperatures"])
    return f"batch {phase['batch_size']}, {phase['prompt_class']} T={temperatures}"


def _phase_table(result: Mapping[str, Any]) -> str:
    arms = [arm["arm"] for arm in result["arms"]]
    cells = {(cell["phase"], cell["arm"]): cell for cell in result["cells"]}
    rows = []
    for index, phase in enumerate(result["phases"]):
        mine = [cells[index, arm] for arm in arms]
        same = all(cell["same_texts"] == cell["num_texts"] for cell in mine)
        rows.append(
            [
                phase_label(phase),
                cells[index, OFF]["tokens_per_second"],
                *(cell["speed_over_off"] for cell in mine if cell["arm"] != OFF),
                result["best_fixed"][index],
                "yes" if same else "NO",
            ]
        )
    others = [f"{arm} x off" for arm in arms if arm != OFF]
    return table(["phase", "off tok/s", *others, "best fixed", "same texts"], rows)


def _length_table(result: Mapping[str, Any]) -> str:
    """What speed came from: tokens of a row and round, and the mean tier they were drafted at."""
    arms = [arm["arm"] for arm in result["arms"] if arm["arm"] not in (OFF, CONTROL)]
    cells = {(cell["phase"], cell["arm"]): cell for cell in result["cells"]}
    rows = [
        [phase_label(phase), *(_length(cells[index, arm]) for arm in arms)]
        for index, phase in enumerate(result["phases"])
    ]
    return table(["tokens a row and round (mean K)", *arms], rows)


def _length(cell: Mapping[str, Any]) -> str:
    rounds = {int(steps): count for steps, count in cell["rounds_by_num_steps"].items()}
    mean = sum(steps * count for steps, count in rounds.items()) / sum(rounds.values())
    return f"{cell['accept_length']:.2f} ({mean:.1f})"


def _arm_table(result: Mapping[str, Any]) -> str:
    rows = []
    for arm in result["arms"]:
        worst, regretted = (
            phase_label(result["phases"][arm[key]])
            for key in ("worst_over_off_phase", "worst_regret_phase")
        )
        rows.append(
            [
                arm["arm"],
                f"{arm['tokens_per_second']:.0f}",
                f"{arm['wall_tokens_per_second']:.0f}",
                _ratio(arm.get("speed_over_off")),
                _percent(arm["regret"]),
                _percent(arm.get("hindsight_regret")),
                _percent(arm["first_regret"]),
                f"{_percent(arm['worst_regret'])} {regretted}",
                f"{arm['worst_over_off']:.2f} {worst}",
                _ratio(arm["speed_over_ema"]),
                _percent(arm["probe_share"]),
                arm["switches"],
            ]
        )
    columns = [
        "arm",
        "tok/s",
        "with prompts",
        "x off",
        "regret",
        "in hindsight",
        "first pass",
        "worst regret",
        "worst / off",
    ]
    return table([*columns, "x ema", "probing", "switches"], rows)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _spread_table(result: Mapping[str, Any]) -> str:
    """How far repetitions differ: one row per arm, one column per phase."""
    cells = {(cell["arm"], cell["phase"]): cell for cell in result["cells"]}
    phases = range(len(result["phases"]))
    rows = [
        [
            arm["arm"],
            *(_range(cells[arm["arm"], phase]["spread"]) for phase in phases),
            _range(arm["speed_over_off_spread"]),
        ]
        for arm in result["arms"]
        if arm["arm"] != OFF
    ]
    columns = [f"batch {p['batch_size']}, {p['prompt_class']}" for p in result["phases"]]
    return table(["x off, p10 to p90", *columns, "whole trace"], rows)


def _range(spread: Sequence[float] | None) -> str:
    return "" if spread is None else f"{spread[0]:.2f} to {spread[1]:.2f}"


def _noise_line(noise: Mapping[str, Any]) -> str:
    return (
        f"noise floor: {noise['arm']} / off is {min(noise['speed_over_off']):.3f} to "
        f"{max(noise['speed_over_off']):.3f} by phase, {noise['trace']:.3f} over the trace; single "
        f"repetitions of a phase {_range(noise['spread'])} (p10 to p90)"
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
