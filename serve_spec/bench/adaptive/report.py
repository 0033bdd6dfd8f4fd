"""From the records of turns to figures: speed by phase, totals, the worst phase.

Speeds of a phase are over all turns and repetitions that every arm has. Ratios of a phase are of
these; their standard error is that of the mean over turns. Totals are harmonic means over phases:
in each, the work is what `off` does in a fixed time. The best fixed depth of a phase, off included,
is known only afterwards, and the more depths there are, the more it gains from chance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, harmonic_mean, stdev
from typing import Any, TypeAlias

from serve_spec.bench.adaptive.arms import OFF
from serve_spec.bench.adaptive.loads import Load
from serve_spec.bench.closed_loop import MeasuredRound
from serve_spec.bench.report import table
from serve_spec.metrics import expected_drafts, unverified_drafts

Record: TypeAlias = Mapping[str, Any]


def turn_figures(
    rounds: Sequence[MeasuredRound], ms: float, num_tokens: int, load: Load
) -> dict[str, Any]:
    """Return the record of one arm's turn.

    ms: wall time, prompts and policy included. num_tokens: tokens of the texts.
    """
    records = [r.record for r in rounds]
    full = [r for r in rounds if r.record.decodes_only and r.record.batch_size == load.batch_size]
    if load.is_steady:
        ms, num_tokens = sum(r.ms for r in full), sum(r.record.num_output_tokens for r in full)
        records = [r.record for r in full]
    predicted = [r for r in records if r.decodes_only and r.notes.predicted_ms is not None]
    expected = [(r, drafts) for r in records if (drafts := expected_drafts(r)) is not None]
    return {
        "ms": round(ms, 4),
        "tokens": num_tokens,
        "steps": len(records),
        "requests": sum(r.batch_size for r in records),
        "depth_sum": sum(r.shape.depth * r.batch_size for r in records),
        "verified": sum(r.num_draft_tokens for r in records),
        "unverified": sum(unverified_drafts(r) for r in records),
        "accepted": sum(r.num_correct_drafts for r in records),
        "expected": round(sum(drafts for _, drafts in expected), 3),
        "observed": sum(r.num_correct_drafts for r, _ in expected),
        "predicted_ms": round(sum(r.notes.predicted_ms or 0.0 for r in predicted), 4),
        "measured_ms": round(sum(r.step_ms for r in predicted), 4),
        "prompt_tokens": sum(r.num_prefill_tokens for r in records),
        "draft_ms": round(sum(r.draft_ms for r in records), 4),
        "verify_ms": round(sum(r.verify_ms for r in records), 4),
        "probe_ms": round(sum(r.step_ms for r in records if r.notes.is_probe), 4),
        "switches": sum(r.switch_reason is not None for r in records),
    }


def equal_prefixes(
    texts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> dict[str, int]:
    """Count the texts that are equal as far as both were generated."""
    pairs = list(zip(texts, expected, strict=False))
    same = sum(all(a == b for a, b in zip(*pair, strict=False)) for pair in pairs)
    return {"texts": len(pairs), "same_texts": same}


def last_run(records: Iterable[Record]) -> list[Record]:
    """Return the records of the last run among those of several."""
    last: list[Record] = []
    for record in records:
        if record["section"] == "run":
            last = []
        last.append(record)
    return last


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Return the figures of a run, also of one that was cut off."""
    run, arms = records[0], list(records[0]["arms"])
    turns: defaultdict[tuple[int, int, int], dict[str, Record]] = defaultdict(dict)
    different: defaultdict[int, int] = defaultdict(int)
    for record in records[1:]:
        if record["section"] == "turn":
            key = record["phase"], record["repetition"], record["turn"]
            turns[key][record["arm"]] = record
        else:
            different[record["phase"]] += record["texts"] - record["same_texts"]
    by_phase: defaultdict[int, list[dict[str, Record]]] = defaultdict(list)
    for (phase, _, _), of_arms in turns.items():
        if len(of_arms) == len(arms):
            by_phase[phase].append(of_arms)
    for phase, mine in list(by_phase.items()):
        if not all(any(turn[arm]["tokens"] for turn in mine) for arm in arms):
            del by_phase[phase]  # batches that were never full
    found = [
        {
            "phase": run["phases"][phase],
            "same_texts": not different[phase],
            **_phase(by_phase[phase], run["arms"]),
        }
        for phase in sorted(by_phase)
    ]
    return {
        "bench": "adaptive",
        "environment": run["environment"],
        "arguments": run["arguments"],
        "phases": found,
        "arms": [_arm(arm, run["arms"][arm], found) for arm in arms],
    }


def _phase(turns: Sequence[Mapping[str, Record]], is_static: Mapping[str, bool]) -> dict[str, Any]:
    sums = {arm: _sums([turn[arm] for turn in turns]) for arm in is_static}
    speeds = {arm: of["tokens"] / of["ms"] * 1e3 for arm, of in sums.items()}
    best = max((arm for arm in is_static if is_static[arm]), key=lambda arm: speeds[arm])
    return {
        "num_turns": len(turns),
        "best_fixed": best,
        "arms": {
            arm: {
                "tokens_per_second": speed,
                "over_off": speed / speeds[OFF],
                "over_best_fixed": speed / speeds[best],
                "error": _error(turns, arm, best),
                **_per_request(sums[arm]),
            }
            for arm, speed in speeds.items()
        },
    }


def _sums(turns: Sequence[Record]) -> dict[str, float]:
    names = [name for name, value in turns[0].items() if isinstance(value, int | float)]
    return {name: sum(turn[name] for turn in turns) for name in names}


def _per_request(sums: Mapping[str, float]) -> dict[str, float | None]:
    """Return means per request and step, and ratios of sums; None if unknown."""

    def ratio(part: str, whole: str) -> float | None:
        return sums[part] / sums[whole] if sums[whole] else None

    return {
        "depth": ratio("depth_sum", "requests"),
        "verified": ratio("verified", "requests"),
        "accepted": ratio("accepted", "requests"),
        "observed_to_expected": ratio("observed", "expected"),
        "measured_to_predicted": ratio("measured_ms", "predicted_ms"),
        "probe_share": ratio("probe_ms", "ms"),
        "switches": sums["switches"],
    }


def _error(turns: Sequence[Mapping[str, Record]], arm: str, best: str) -> float | None:
    """Return the standard error of the speed over that of the best fixed depth."""
    pairs = [(turn[arm], turn[best]) for turn in turns]
    ratios = [
        mine["tokens"] / mine["ms"] / fixed["tokens"] * fixed["ms"]
        for mine, fixed in pairs
        if mine["tokens"] and fixed["tokens"]
    ]
    return stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None


def _arm(arm: str, is_static: bool, phases: Sequence[Record]) -> dict[str, Any]:
    """Return the totals of an arm; None while no phase was measured."""
    cells = [phase["arms"][arm] for phase in phases]
    worst = min(phases, key=lambda phase: float(phase["arms"][arm]["over_off"]), default=None)
    return {
        "arm": arm,
        "is_static": is_static,
        "over_off": harmonic_mean([c["over_off"] for c in cells]) if cells else None,
        "over_best_fixed": _over_best(cells),
        "worst_over_off": worst and worst["arms"][arm]["over_off"],
        "worst_phase": worst and worst["phase"],
        "probe_share": fmean(c["probe_share"] or 0.0 for c in cells) if cells else None,
        "switches": sum(c["switches"] for c in cells),
    }


def _over_best(cells: Sequence[Record]) -> float | None:
    """Return the time of the best fixed depth of each phase over the arm's, for equal work."""
    if not cells:
        return None
    best = sum(float(cell["over_best_fixed"] / cell["over_off"]) for cell in cells)
    return best / sum(float(1 / cell["over_off"]) for cell in cells)


def tables(result: Record) -> str:
    """Return the tables of a result: phases, then arms."""
    if not result["phases"]:
        return "no turn of all arms was measured"
    return f"{_phase_table(result)}\n\n{_arm_table(result)}"


def _phase_table(result: Record) -> str:
    others = [arm["arm"] for arm in result["arms"] if arm["arm"] != OFF]
    adaptive = [arm["arm"] for arm in result["arms"] if not arm["is_static"]]
    rows = []
    for phase in result["phases"]:
        cells = phase["arms"]
        rows.append(
            [
                phase["phase"],
                f"{cells[OFF]['tokens_per_second']:.0f}",
                *(f"{cells[arm]['tokens_per_second']:.0f}" for arm in others),
                phase["best_fixed"],
                *(_with_error(cells[arm]) for arm in adaptive),
                *(f"{cells[arm]['verified']:.2f}" for arm in adaptive),
                "yes" if phase["same_texts"] else "NO",
            ]
        )
    ratios = [f"{arm} / best" for arm in adaptive]
    drafts = [f"{arm} drafts" for arm in adaptive]
    columns = ["tokens/s", OFF, *others, "best fixed", *ratios, *drafts, "same texts"]
    return table(columns, rows)


def _with_error(cell: Record) -> str:
    error = "" if cell["error"] is None else f" ± {cell['error']:.3f}"
    return f"{cell['over_best_fixed']:.3f}{error}"


def _arm_table(result: Record) -> str:
    rows = [
        [
            arm["arm"],
            f"{arm['over_off']:.3f}",
            f"{arm['over_best_fixed']:.3f}",
            f"{arm['worst_over_off']:.3f}",
            arm["worst_phase"],
            f"{arm['probe_share']:.1%}",
            arm["switches"],
        ]
        for arm in result["arms"]
    ]
    columns = ["all phases", "x off", "x best fixed of each", "worst x off", "in", "probes"]
    return table([*columns, "switches"], rows)
