"""PNG plots of a run: loss curves and survival by draft position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from recipes.training.loop import read_log

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_PHASES = ("target", "eagle3", "eagle", "medusa", "standalone")


def plot_losses(logs: Path, out: Path) -> None:
    """Draw one panel per phase with a log: training and held-out loss over tokens seen."""
    found = [name for name in _PHASES if (logs / f"{name}.jsonl").exists()]
    if not found:
        raise FileNotFoundError(f"logs={logs}: holds no phase log (*.jsonl); train a phase first")
    figure, axes = plt.subplots(
        1, len(found), figsize=(3.6 * len(found), 3.2), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], found, strict=True):
        rows = list(read_log(logs / f"{name}.jsonl"))
        axis.plot(*_curve(rows, "loss"), lw=0.7, label="training batch")
        axis.plot(*_curve(rows, "heldout_loss"), "o-", ms=3, label="held-out text")
        axis.set_title(name)
        axis.set_xlabel("tokens seen (millions)")
        axis.set_ylabel("loss (nats)")
        losses = _curve(rows, "loss")[1]
        if losses:
            # The losses of the first steps are far above all others.
            bulk = sorted(losses)[: max(1, int(0.9 * len(losses)))]
            axis.set_ylim(top=max([bulk[-1], *_curve(rows, "heldout_loss")[1]]) * 1.05)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _curve(rows: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    points = [(row["tokens"] / 1e6, row[key]) for row in rows if key in row]
    return [x for x, _ in points], [y for _, y in points]


def plot_survival(record: dict[str, Any], out: Path) -> None:
    """Draw the fraction of rounds that accept at least k drafts, at the lowest and highest T."""
    temperatures = list(record["temperatures"])
    shown = [temperatures[0], temperatures[-1]]
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True, layout="constrained")
    for axis, temperature in zip(axes, shown, strict=True):
        for name, modes in record["temperatures"][temperature]["drafters"].items():
            mode = "coupled" if "coupled" in modes else "greedy"
            survival = modes[mode]["all"][-1]["survival"]
            axis.plot(range(1, len(survival) + 1), survival, "o-", ms=3, label=name)
        axis.set_title(f"T = {temperature}, {mode} drafts")
        axis.set_xlabel("draft position k")
        axis.grid(alpha=0.3)
        axis.set_ylim(0, 1)
    axes[0].set_ylabel("rounds accepting at least k drafts")
    axes[0].legend(fontsize=8)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def plot_accept_lengths(measurements: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw the accept length over the depth by category, at the lowest and highest T.

    measurements: of `serve-spec bench offline`, at one batch size.
    """
    chains = [m for m in measurements if m["variant"].startswith("K=")]
    temperatures = sorted({m["temperature"] for m in chains})
    shown = [temperatures[0], temperatures[-1]]
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True, layout="constrained")
    for axis, temperature in zip(axes, shown, strict=True):
        for category in sorted({m["category"] for m in chains}):
            points = sorted(
                (int(m["variant"].removeprefix("K=")), m["accept_length"])
                for m in chains
                if (m["category"], m["temperature"]) == (category, temperature)
            )
            axis.plot(*zip(*points, strict=True), "o-", ms=3, label=category)
        axis.set_title(f"T = {temperature}")
        axis.set_xlabel("depth")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accept length (tokens a round)")
    axes[0].legend(fontsize=8)
    figure.savefig(out, dpi=110)
    plt.close(figure)
