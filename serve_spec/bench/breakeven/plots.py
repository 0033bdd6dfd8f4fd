"""Plots of the throughput equation, drawn from the JSON of `serve-spec breakeven` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_spec.bench.plots import pyplot, save_figure
from serve_spec.bench.throughput import speedup


def plot_breakeven(result: Mapping[str, Any], path: Path) -> None:
    """What speculation gives over the batch size; for a single one, over the accept rate.

    result: what `serve-spec breakeven` prints.
    """
    plt = pyplot()
    batches: Sequence[Mapping[str, Any]] = result["batches"]
    num_panels = 3 if len(batches) > 1 else 1
    figure, axes = plt.subplots(
        1, num_panels, figsize=(1.5 + 4 * num_panels, 3.8), squeeze=False, layout="constrained"
    )
    if len(batches) > 1:
        _over_batch_sizes(axes[0], batches)
    else:
        _over_accept_rates(axes[0][0], batches[0])
    measured_on = result["measured_on"]
    if measured_on is not None:
        figure.suptitle(measured_on["hardware"], fontsize=9)
    save_figure(figure, path)


def _over_batch_sizes(axes: Any, batches: Sequence[Mapping[str, Any]]) -> None:
    sizes = [batch["batch_size"] for batch in batches]
    for index, first in enumerate(batches[0]["at_rates"]):
        here = [batch["at_rates"][index] for batch in batches]
        best = [at_rate["best_num_steps"] for at_rate in here]
        label = f"accept rate {first['accept_rate']:g}"
        axes[0].plot(sizes, best, marker="o", markersize=3, label=label)
        fastest = [at_rate["speedup"][k] for at_rate, k in zip(here, best, strict=True)]
        axes[1].plot(sizes, fastest, marker="o", markersize=3, label=label)
    # A rate above 1 does not exist: a batch size at which drafts never pay leaves a gap.
    lowest = [
        float("nan") if batch["break_even"] is None else batch["break_even"]["accept_rate"]
        for batch in batches
    ]
    axes[2].plot(sizes, lowest, marker="o", markersize=3, color="black")
    axes[1].axhline(1.0, color="black", linewidth=0.8)
    axes[2].set_ylim(0, 1)
    titles = ("best K", "speedup over off at the best K", "accept rate above which drafts pay")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_xlabel("batch size")
        axis.set_title(title, fontsize=9)
    axes[0].legend(fontsize=7)


def _over_accept_rates(axis: Any, batch: Mapping[str, Any]) -> None:
    rates = [index / 100 for index in range(101)]
    for num_steps in range(1, len(batch["round_ms"])):
        curve = [speedup(rate, num_steps, batch["round_ms"]) for rate in rates]
        axis.plot(rates, curve, label=f"K={num_steps}")
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xlabel("accept rate")
    axis.set_ylabel("speedup over off")
    axis.set_title(f"batch {batch['batch_size']}", fontsize=9)
    axis.legend(fontsize=7)
