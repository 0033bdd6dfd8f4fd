"""What changing the tier costs, and that it neither records nor allocates."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch

from serve_spec.bench.kernels.aims import SWITCH_AIM_US, at_most
from serve_spec.bench.kernels.setting import LeftOut, Section, Setting
from serve_spec.bench.waves import run_wave
from serve_spec.metrics import StepStats

_LOOK_UPS = 2000
_BOTH = "both"
_AIMS = {
    "look_up_us": ("tier look-up, us", SWITCH_AIM_US),
    "switch_us": ("tier switch, us", SWITCH_AIM_US),
    "num_recorded": ("stages recorded by switches", 0),
    "num_bytes": ("bytes allocated by switches", 0),
}


def switch(setting: Setting) -> Section:
    """Rounds whose tier changes every time against rounds of the same two tiers alone."""
    worker = setting.lane_worker
    steps = [k for k in setting.sizes.num_steps if k]
    if len(steps) < 2:
        raise LeftOut(f"num_steps={list(setting.sizes.num_steps)}: give two depths above 0")
    tiers, size = (steps[0], steps[-1]), setting.sizes.batch_sizes[0]
    _run(setting, size, tiers, repetition=-1)  # warm-up
    recorded, allocated = worker.recorder.num_recorded, _allocated(setting)
    turns = [_run(setting, size, tiers, repetition=i) for i in range(setting.sizes.repetitions)]
    alone = fmean(_median_ms(turns, str(k), k) for k in tiers)
    alternating = fmean(_median_ms(turns, _BOTH, k) for k in tiers)
    facts: dict[str, Any] = {
        "batch_size": size,
        "tiers": list(tiers),
        "look_up_us": _look_up_us(worker, size, tiers),
        "constant_ms": alone,
        "alternating_ms": alternating,
        "switch_us": (alternating - alone) * 1e3,
        "num_recorded": worker.recorder.num_recorded - recorded,
    }
    left_out = ["bytes allocated by switches: needs a GPU"]
    if allocated is not None:
        facts["num_bytes"] = (_allocated(setting) or 0) - allocated
        left_out = []
    aims = [at_most(what, facts[key], aim) for key, (what, aim) in _AIMS.items() if key in facts]
    return Section([], facts, aims, left_out)


def _run(
    setting: Setting, batch_size: int, tiers: tuple[int, int], repetition: int
) -> dict[str, list[StepStats]]:
    """Rounds of each tier alone, and of both in turns."""
    fixed = {k: setting.fixed(k) for k in tiers}
    arms = {_BOTH: list(fixed.values()), **{str(k): [fixed[k]] for k in tiers}}
    rounds = run_wave(
        setting.engine, setting.wave(batch_size, seed=repetition), setting.fixed(0), arms
    )
    setting.say(f"repetition {repetition + 1}, K={tiers[0]} and K={tiers[1]}")
    return rounds


def _look_up_us(worker: Any, batch_size: int, tiers: tuple[int, int]) -> float:
    """What the choice of a tier itself takes."""
    started = time.perf_counter()
    for number in range(_LOOK_UPS):
        worker.recorded.tier_for(tiers[number % 2], batch_size)
    return (time.perf_counter() - started) / _LOOK_UPS * 1e6


def _median_ms(turns: Sequence[Mapping[str, list[StepStats]]], arm: str, num_steps: int) -> float:
    return median(r.step_ms for turn in turns for r in turn[arm] if r.num_steps == num_steps)


def _allocated(setting: Setting) -> int | None:
    if setting.device.type != "cuda":
        return None
    torch.cuda.synchronize(setting.device)
    return torch.cuda.memory_allocated(setting.device)
