"""Figures of `serve-spec bench adaptive` from its records: by phase, and over all phases.

The speed of a phase is over the trials that every variant has; the error of a ratio is that of the
mean over trials. Totals are harmonic means over phases, which last equally long for off. The best
fixed depth, off included, is known only afterwards: the more depths there are, the more luck is in
the best of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from serve_spec.bench.harness import MeasuredStep, is_full
from serve_spec.bench.report import Panel, Record, draw, plot_title, table, variant_bars
from serve_spec.bench.variants import OFF
from serve_spec.bench.workload import Load
from serve_spec.metrics import expected_drafts, unverified_drafts


def trial_figures(
    steps: Sequence[MeasuredStep], ms: float, num_tokens: int, load: Load
) -> dict[str, Any]:
    """Return the figures of a trial; in a steady-state batch, those of full steps only.

    ms: wall time, prompts and policy included. num_tokens: tokens of the texts.
    """
    if load.is_steady:
        steps = [step for step in steps if is_full(step.record, load.batch_size)]
        ms = sum(step.ms for step in steps)
        num_tokens = sum(step.record.num_output_tokens for step in steps)
    records = [step.record for step in steps]
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


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Return the figures of a run; for an interrupted run, of its completed part."""
    run, variants = records[0], list(records[0]["variants"])
    trials: defaultdict[tuple[int, int, int], dict[str, Record]] = defaultdict(dict)
    different: defaultdict[int, int] = defaultdict(int)
    for record in records[1:]:
        if record["section"] == "trial":
            key = record["phase"], record["repetition"], record["trial"]
            trials[key][record["variant"]] = record
        else:
            different[record["phase"]] += record["texts"] - record["same_texts"]
    by_phase: defaultdict[int, list[dict[str, Record]]] = defaultdict(list)
    for (phase, _, _), by_variant in trials.items():
        if len(by_variant) == len(variants):
            by_phase[phase].append(by_variant)
    for phase, mine in list(by_phase.items()):
        if not all(any(trial[name]["tokens"] for trial in mine) for name in variants):
            del by_phase[phase]  # batches that were never full
    classes = run.get("classes") or [None] * len(run["phases"])
    found = [
        {
            "phase": run["phases"][phase],
            "class": classes[phase],
            "same_texts": not different[phase],
            **_phase(by_phase[phase], run["variants"]),
        }
        for phase in sorted(by_phase)
    ]
    return {
        "bench": "adaptive",
        "environment": run["environment"],
        "arguments": run["arguments"],
        "prompts": run.get("prompts"),
        "phases": found,
        "variants": [_totals(name, run["variants"][name], found) for name in variants if found],
        "categories": _categories(run["variants"], found) if run.get("prompts") else [],
    }


def _categories(is_static: Mapping[str, bool], phases: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the totals of every variant over the phases of each category of a dataset."""
    by_category: dict[str, list[Record]] = {}
    for phase in phases:
        by_category.setdefault(phase["class"], []).append(phase)
    return [
        {
            "category": category,
            "same_texts": all(phase["same_texts"] for phase in mine),
            "accept_length": 1 + fmean(p["variants"][name]["accepted"] or 0.0 for p in mine),
            **_totals(name, is_static[name], mine),
        }
        for category, mine in by_category.items()
        for name in is_static
    ]


def _phase(trials: Sequence[Mapping[str, Record]], is_static: Mapping[str, bool]) -> dict[str, Any]:
    names = [name for name, value in trials[0][OFF].items() if isinstance(value, int | float)]
    sums = {
        variant: {name: sum(trial[variant][name] for trial in trials) for name in names}
        for variant in is_static
    }
    speeds = {variant: of["tokens"] / of["ms"] * 1e3 for variant, of in sums.items()}
    best = max((each for each in is_static if is_static[each]), key=lambda each: speeds[each])
    return {
        "num_trials": len(trials),
        "best_fixed": best,
        "variants": {
            variant: {
                "tokens_per_second": speed,
                "over_off": speed / speeds[OFF],
                "over_best_fixed": speed / speeds[best],
                "error": _error(trials, variant, best),
                **_per_request(sums[variant]),
            }
            for variant, speed in speeds.items()
        },
    }


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


def _error(trials: Sequence[Mapping[str, Record]], variant: str, best: str) -> float | None:
    pairs = [(trial[variant], trial[best]) for trial in trials]
    ratios = [
        mine["tokens"] / mine["ms"] / fixed["tokens"] * fixed["ms"]
        for mine, fixed in pairs
        if mine["tokens"] and fixed["tokens"]
    ]
    return stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None


def _totals(variant: str, is_static: bool, phases: Sequence[Record]) -> dict[str, Any]:
    """Return the totals of a variant over at least one phase."""
    figures = [phase["variants"][variant] for phase in phases]
    worst = min(phases, key=lambda phase: float(phase["variants"][variant]["over_off"]))
    # Times for equal work.
    mine = sum(1 / each["over_off"] for each in figures)
    best = sum(each["over_best_fixed"] / each["over_off"] for each in figures)
    return {
        "variant": variant,
        "is_static": is_static,
        "over_off": len(figures) / mine,
        "over_best_fixed": best / mine,
        "worst_over_off": worst["variants"][variant]["over_off"],
        "worst_phase": worst["phase"],
        "probe_share": fmean(each["probe_share"] or 0.0 for each in figures),
        "switches": sum(each["switches"] for each in figures),
    }


def tables(result: Record) -> str:
    """Return the tables of a result: phases, then variants."""
    if not result["phases"]:
        return "no trial of all variants was measured"
    shown = [_phase_table(result), _total_table(result)]
    if result["categories"]:
        shown = [result["prompts"], *shown, _category_table(result)]
    return "\n\n".join(shown)


def _category_table(result: Record) -> str:
    rows = [
        [
            *(each[key] for key in ("category", "variant")),
            *(each[key] for key in ("over_off", "over_best_fixed", "accept_length")),
            "yes" if each["same_texts"] else "NO",
        ]
        for each in result["categories"]
    ]
    columns = ["category", "variant", "x off", "x best fixed of each", "accept length"]
    return table([*columns, "same texts"], rows)


def _phase_table(result: Record) -> str:
    others = [variant["variant"] for variant in result["variants"] if variant["variant"] != OFF]
    adaptive = [variant["variant"] for variant in result["variants"] if not variant["is_static"]]
    rows = []
    for phase in result["phases"]:
        figures = phase["variants"]
        rows.append(
            [
                phase["phase"],
                f"{figures[OFF]['tokens_per_second']:.0f}",
                *(f"{figures[variant]['tokens_per_second']:.0f}" for variant in others),
                phase["best_fixed"],
                *(_with_error(figures[variant]) for variant in adaptive),
                *(f"{figures[variant]['verified']:.2f}" for variant in adaptive),
                "yes" if phase["same_texts"] else "NO",
            ]
        )
    ratios = [f"{variant} / best" for variant in adaptive]
    drafts = [f"{variant} drafts" for variant in adaptive]
    columns = ["tokens/s", OFF, *others, "best fixed", *ratios, *drafts, "same texts"]
    return table(columns, rows)


def _with_error(figure: Record) -> str:
    error = "" if figure["error"] is None else f" ± {figure['error']:.3f}"
    return f"{figure['over_best_fixed']:.3f}{error}"


def _total_table(result: Record) -> str:
    rows = [
        [
            variant["variant"],
            f"{variant['over_off']:.3f}",
            f"{variant['over_best_fixed']:.3f}",
            f"{variant['worst_over_off']:.3f}",
            variant["worst_phase"],
            f"{variant['probe_share']:.1%}",
            variant["switches"],
        ]
        for variant in result["variants"]
    ]
    columns = ["all phases", "x off", "x best fixed of each", "worst x off", "in", "probes"]
    return table([*columns, "switches"], rows)


def plot(result: Record, path: Path) -> None:
    """Draw drafts verified per request and step, and speed over off, by phase.

    Fixed depths are grey, deeper ones darker.
    """
    phases, variants = result["phases"], result["variants"]
    num_fixed = sum(each["is_static"] for each in variants)
    greys = [str(0.8 - 0.6 * number / num_fixed) for number in range(num_fixed)]
    styles: list[dict[str, Any]] = [{"color": grey, "linewidth": 1} for grey in greys]
    styles += [{"color": f"C{number}"} for number in range(num_fixed, len(variants))]
    panels = []
    for title, key, first, mark in (
        ("drafts per request and step", "verified", num_fixed, "_"),
        ("tokens/s relative to off", "over_off", 0, ""),
    ):
        labels = [
            f"{mark}{each['variant']}: {each['over_off']:.2f} x off, "
            f"worst {each['worst_over_off']:.2f}"
            for each in variants
        ]
        curves = [
            [phase["variants"][each["variant"]][key] for phase in phases] for each in variants
        ]
        series = {labels[at]: [*enumerate(curves[at])] for at in range(first, len(variants))}
        by_label = dict(zip(labels, styles, strict=True))
        ticks = [phase["phase"] for phase in phases]
        panels.append(Panel(title, series, ticks=ticks, styles=by_label))
    if result["categories"]:
        bars = [(each["category"], each) for each in result["categories"]]
        title = "tokens/s relative to off, by category; accept length above"
        panels.append(variant_bars(title, bars, "over_off", ""))
    draw(panels, path, plot_title(result), columns=1)
