"""`serve-spec bench controller`: what a decision costs the host, per round and batch size.

Drives the controller with rounds of a made-up machine and made-up text, and times its calls alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import cache
from pathlib import Path
from typing import Any

from serve_spec.adaptive.controller import AdaptiveController, PolicySettings
from serve_spec.bench.report import emit, environment, table
from serve_spec.bench.simulated_costs import RoundShape, RowCosts, recorded_table
from serve_spec.core.round import DecodeBatch, RoundSteps, TreeShape, VerifiedRound

_TREE, _TOPK = TreeShape(5, 31), 4
ARMS: dict[str, dict[str, Any]] = {
    "static": {"strategy": "static"},
    "ema": {"strategy": "ema"},
    "per_request": {"strategy": "per_request"},
    "goodput uniform": {"strategy": "goodput", "per_sequence": False},
    "goodput per sequence": {"strategy": "goodput", "per_sequence": True},
    "goodput with trees": {"strategy": "goodput", "tree": _TREE, "topk": _TOPK},
}
_MACHINE = RowCosts(
    num_rows=(1, 256, 2048),
    verify_ms=(20.0, 21.0, 38.0),
    draft_step_ms=0.3,
    draft_row_ms=0.001,
)
"""Verified rows are cheap, so that drafts pay at every batch size: a policy at rest does less."""
_CONTEXT = 512
_ACCEPT_RATES = (0.3, 0.6, 0.9)
_TABLE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def main(argv: list[str]) -> int:
    """Runs the benchmark; the process exit status."""
    args = _parser().parse_args(argv)
    cells = [
        {"arm": arm, "batch_size": size, **measure(settings, size, args.rounds)}
        for size in args.batch_sizes
        for arm, settings in ARMS.items()
    ]
    columns = ["batch_size", "arm", "mean_us", "median_us", "p90_us", "choose_us", "observe_us"]
    print(table(columns, [[cell[name] for name in columns] for cell in cells]))
    emit({"bench": "controller", "environment": environment(), "cells": cells}, args.json)
    return 0


def measure(settings: dict[str, Any], batch_size: int, num_rounds: int) -> dict[str, float]:
    """Microseconds per round: all of it, and the means of its two calls."""
    policy = PolicySettings(3, **settings)
    costs = recorded_table(_MACHINE, _TABLE_SIZES, trees=policy.tree_shapes, topk=policy.topk)
    controller = AdaptiveController(policy, costs)
    rng = random.Random(0)
    choosing: list[float] = []
    observing: list[float] = []
    for number in range(num_rounds):
        batch = _batch(batch_size, number)
        started = time.perf_counter()
        steps = controller.choose_steps(batch)
        chosen = time.perf_counter()
        row_steps = list(steps.row_steps or [steps.num_steps] * batch_size)
        verified = _verified(batch, steps, row_steps, rng)
        verifying = time.perf_counter()
        controller.on_verify_complete(verified)
        observing.append((time.perf_counter() - verifying) * 1e6)
        choosing.append((chosen - started) * 1e6)
        if number % 4 == 0:
            controller.forget(batch.request_ids[number // 4 % batch_size])
    rounds = [a + b for a, b in zip(choosing, observing, strict=True)]
    return {
        "mean_us": statistics.fmean(rounds),
        "median_us": statistics.median(rounds),
        "p90_us": statistics.quantiles(rounds, n=10)[-1],
        "choose_us": statistics.fmean(choosing),
        "observe_us": statistics.fmean(observing),
    }


def _batch(size: int, number: int) -> DecodeBatch:
    """One request in four rounds is replaced, as when texts of some hundred tokens end."""
    return DecodeBatch(
        request_ids=[_request_id(i, (number // 4 - i - 1) // size) for i in range(size)],
        max_steps=[100] * size,
        num_tokens=size * _CONTEXT,
        num_sampled=0,
        max_draft_tokens=1 << 20,
    )


@cache
def _request_id(row: int, lap: int) -> str:
    """The same object in every round, as a sequence's is, so that it is hashed once."""
    return f"{row}-{lap}"


def _verified(
    batch: DecodeBatch, steps: RoundSteps, row_steps: list[int], rng: random.Random
) -> VerifiedRound:
    kept = [
        _kept(num_steps, _ACCEPT_RATES[i % len(_ACCEPT_RATES)], rng)
        for i, num_steps in enumerate(row_steps)
    ]
    deepest = max(row_steps)
    drafting = tuple(sum(k > depth for k in row_steps) for depth in range(deepest))
    shape = RoundShape(
        batch.size,
        drafting,
        batch.num_tokens,
        batch.num_sampled,
        num_catch_up=0,
        num_prefill_tokens=0,
        tree=steps.tree,
        topk=1 if steps.tree is None else _TOPK,
    )
    return VerifiedRound(
        num_steps=steps.num_steps,
        batch_size=batch.size,
        num_tokens=batch.num_tokens,
        num_sampled=batch.num_sampled,
        request_ids=batch.request_ids,
        row_steps=row_steps,
        num_correct_drafts=kept,
        num_drafting=drafting[0] if drafting else 0,
        deepest=deepest,
        num_draft_tokens=shape.num_rows - batch.size,
        num_output_tokens=batch.size + sum(kept),
        num_catch_up=0,
        times=_MACHINE(shape),
        tree=steps.tree,
    )


def _kept(num_steps: int, accept_rate: float, rng: random.Random) -> int:
    kept = 0
    while kept < num_steps and rng.random() < accept_rate:
        kept += 1
    return kept


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve-spec bench controller", description=__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="also write the result here")
    return parser
