"""The goodput policy at forced acceptance, against every fixed depth and a leading engine's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from math import prod

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.kernels.aims import (
    ACCEPT_LENGTH,
    LEADING_ADAPTIVE,
    OVER_BEST_FIXED_AIM,
    OVER_LEADING_AIM,
    Aim,
    at_least,
)
from serve_spec.bench.kernels.setting import Acceptance, LeftOut, Row, Section, Setting
from serve_spec.bench.waves import figures, run_wave
from serve_spec.metrics import StepStats

GOODPUT = "goodput"
_SMALLEST_BATCH = 32
"""Below it drafts cost next to nothing: the deepest wins."""


def adaptive(setting: Setting) -> Section:
    """Speed at every fixed depth and of the policy, batch by batch.

    The policy keeps what it learned from wave to wave; its first one at each batch size is not
    counted. Depths are compared at exactly the accept length that is forced (`per_law`), not at the
    one chance gave their rounds.
    """
    if setting.acceptance is None:
        raise LeftOut("nothing is drafted, or acceptance is not forced")
    sizes = setting.sizes.batch_sizes
    policy = setting.goodput()
    rows, aims = [], []
    for size in [size for size in sizes if size >= _SMALLEST_BATCH] or sizes[-1:]:
        found = _batch_rows(setting, setting.acceptance, policy, size)
        rows += found
        aims += _aims(found[-1], size)
    return Section(rows, aims=aims)


def expected_tokens(acceptance: Acceptance, num_steps: int) -> float:
    """Tokens a row of so many drafts emits in the mean, when acceptance is forced."""
    if isinstance(acceptance, float):
        return min(acceptance, num_steps + 1.0)
    chances = [acceptance[min(i, len(acceptance) - 1)] for i in range(num_steps)]
    return 1.0 + sum(prod(chances[: i + 1]) for i in range(num_steps))


def _batch_rows(
    setting: Setting, acceptance: Acceptance, policy: AdaptiveController, batch_size: int
) -> list[Row]:
    """The arms in turns: a wave of all fixed depths, a wave of the policy."""
    off = setting.fixed(0)
    fixed = {f"K={steps}": [setting.fixed(steps)] for steps in setting.sizes.num_steps}
    measured: dict[str, list[StepStats]] = {name: [] for name in [*fixed, GOODPUT]}
    run_wave(setting.engine, setting.wave(batch_size, seed=-1), off, {GOODPUT: [policy]})
    for repetition in range(setting.sizes.repetitions):
        wave = setting.wave(batch_size, seed=repetition)
        turns = [fixed, {GOODPUT: [policy]}]
        for arms in random.Random(repetition).sample(turns, len(turns)):
            for name, found in run_wave(setting.engine, wave, off, arms).items():
                measured[name] += found
        setting.say(f"repetition {repetition + 1}, batch {batch_size}")
    rows = [
        {
            "batch_size": batch_size,
            "arm": name,
            **figures(found),
            "per_law": _speed_per_law(found, acceptance),
            "chosen": _chosen(found),
        }
        for name, found in measured.items()
    ]
    best = max(row["per_law"] for row in rows[:-1])
    rows = [
        {**row, "over_best_fixed": row["per_law"] / best, "leading": None, "aim": None}
        for row in rows
    ]
    is_led = setting.is_reference and acceptance == ACCEPT_LENGTH
    if is_led and batch_size in LEADING_ADAPTIVE:
        leading = LEADING_ADAPTIVE[batch_size]
        rows[-1] |= {"leading": leading, "aim": leading * OVER_LEADING_AIM[batch_size]}
    return rows


def _speed_per_law(rounds: Sequence[StepStats], acceptance: Acceptance) -> float:
    """Tokens per second, had every row emitted what its number of drafts emits in the mean."""
    rows = Counter(steps for r in rounds for steps in r.live_steps)
    tokens = sum(count * expected_tokens(acceptance, steps) for steps, count in rows.items())
    return tokens / sum(r.step_ms for r in rounds) * 1e3


def _chosen(rounds: Sequence[StepStats]) -> dict[str, float]:
    """Share of rows by drafts."""
    rows = Counter(steps for r in rounds for steps in r.live_steps)
    return {str(steps): rows[steps] / rows.total() for steps in sorted(rows)}


def _aims(policy: Row, batch_size: int) -> list[Aim]:
    what = f"adaptive over the best fixed depth, batch {batch_size}"
    aims = [at_least(what, policy["over_best_fixed"], OVER_BEST_FIXED_AIM)]
    if policy["aim"] is not None:
        what = f"adaptive tokens/s, batch {batch_size}"
        aims.append(at_least(what, policy["tokens_per_second"], policy["aim"]))
    return aims
