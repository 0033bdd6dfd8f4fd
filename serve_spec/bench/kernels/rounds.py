"""Rounds of full batches, without drafts and with a fixed number: time, speed, where it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from serve_spec.bench.kernels.aims import (
    EFFICIENCY_AIM,
    IDLE_SHARE_AIM,
    LEADING_ROUND_MS,
    LEADING_STEP_MS,
    ROUND_AIM_MS,
    ROUND_STEPS,
    Aim,
    at_least,
    at_most,
)
from serve_spec.bench.kernels.setting import LeftOut, Row, Section, Setting
from serve_spec.bench.waves import figures, run_wave
from serve_spec.metrics import StepStats

Rounds = dict[int, list[StepStats]]
"""By number of drafts."""

_HOST_BATCH_SIZE = 64
"""The larger of the two batches whose idle time is looked at."""

_COMPILED_BATCH_SIZES = (1, 32, 128)


def plain(setting: Setting) -> Section:
    """Steps without drafts at every batch size."""
    measured = _fixed_rounds(setting, {size: [0] for size in setting.sizes.batch_sizes})
    rows: list[Row] = []
    aims = []
    for size, rounds in measured.items():
        row = {"batch_size": size, **figures(rounds[0])}
        aim = LEADING_STEP_MS.get(size) if setting.is_reference else None
        rows.append({**row, "aim_ms": aim})
        if aim is not None:
            aims.append(at_most(f"plain step, batch {size}, ms", row["ms"], aim))
    return Section(rows, aims=aims)


def rounds(setting: Setting) -> Section:
    """Rounds of 3 drafts at every batch size, and of 7 at the smallest, beside plain ones."""
    sizes = setting.sizes.batch_sizes
    depths = {size: [0, *setting.depths([ROUND_STEPS])] for size in sizes}
    depths[sizes[0]] = [0, *setting.depths(list(EFFICIENCY_AIM))]
    rows: list[Row] = []
    aims: list[Aim] = []
    for size, by_steps in _fixed_rounds(setting, depths).items():
        off = figures(by_steps[0])
        for num_steps, measured in by_steps.items():
            row = {"batch_size": size, "num_steps": num_steps, **figures(measured)}
            speedup = row["tokens_per_second"] / off["tokens_per_second"]
            row |= {"over_plain": speedup, "efficiency": speedup / row["accept_length"]}
            is_led = setting.is_reference and num_steps == ROUND_STEPS
            row["leading_ms"] = LEADING_ROUND_MS.get(size) if is_led else None
            row["aim_ms"] = ROUND_AIM_MS.get(size) if is_led else None
            rows.append(row)
            if setting.is_reference:
                aims += _round_aims(row)
    return Section(rows, aims=aims)


def compiled(setting: Setting) -> Section:
    """Steps without drafts and rounds of the engine's own depth, at a few batch sizes.

    The engine's layers are left to torch's compiler. `num_compiled`: graphs it made so far.
    """
    sizes = setting.sizes.batch_sizes
    chosen = [size for size in sizes if size in _COMPILED_BATCH_SIZES] or sizes[-1:]
    depths = [0, setting.llm.config.speculative.speculative_num_steps]
    rows: list[Row] = [
        {"batch_size": size, "num_steps": num_steps, **figures(measured)}
        for size, by_steps in _fixed_rounds(setting, dict.fromkeys(chosen, depths)).items()
        for num_steps, measured in by_steps.items()
    ]
    return Section(rows, {"num_compiled": torch._dynamo.utils.counters["stats"]["unique_graphs"]})


def host(setting: Setting) -> Section:
    """Share of rounds in which the device waits for the host, at a small and a large batch."""
    if setting.engine.worker.execution != "lanes":
        raise LeftOut("rounds run eagerly here; a device's idle time is known on lanes alone")
    sizes = setting.sizes.batch_sizes
    large = max((size for size in sizes if size <= _HOST_BATCH_SIZE), default=sizes[0])
    depths = [0, *setting.depths([ROUND_STEPS])]
    rows, aims = [], []
    measured = _fixed_rounds(setting, dict.fromkeys(sorted({sizes[0], large}), depths))
    for size, by_steps in measured.items():
        for num_steps, mine in by_steps.items():
            share = sum(r.idle_ms for r in mine) / sum(r.step_ms for r in mine)
            some = figures(mine)
            rows.append(
                {
                    "batch_size": size,
                    "num_steps": num_steps,
                    "idle_share": share,
                    **{name: some[name] for name in ("rounds", "ms", "idle_ms")},
                }
            )
            what = f"idle share, batch {size}, K={num_steps}"
            aims.append(at_most(what, share, IDLE_SHARE_AIM))
    return Section(rows, aims=aims)


def _round_aims(row: Row) -> list[Aim]:
    size, num_steps = row["batch_size"], row["num_steps"]
    aims = []
    if row["aim_ms"] is not None:
        aims.append(at_most(f"round, batch {size}, K={num_steps}, ms", row["ms"], row["aim_ms"]))
    if size == 1 and num_steps in EFFICIENCY_AIM:
        what = f"round efficiency, batch 1, K={num_steps}"
        aims.append(at_least(what, row["efficiency"], EFFICIENCY_AIM[num_steps]))
    return aims


def _fixed_rounds(setting: Setting, depths: Mapping[int, Sequence[int]]) -> dict[int, Rounds]:
    """Rounds of every depth at every batch size, over all repetitions."""
    off = setting.fixed(0)
    measured: dict[int, Rounds] = {
        size: {num_steps: [] for num_steps in mine} for size, mine in depths.items()
    }
    for repetition in range(setting.sizes.repetitions):
        for size, mine in depths.items():
            arms = {str(num_steps): [setting.fixed(num_steps)] for num_steps in mine}
            wave = setting.wave(size, seed=repetition)
            for name, found in run_wave(setting.engine, wave, off, arms).items():
                measured[size][int(name)] += found
            setting.say(f"repetition {repetition + 1}, batch {size}")
    return measured
