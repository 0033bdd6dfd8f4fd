"""Measure the speed of every depth and draft budget, and what the planner predicts for it.

python benchmarks/budgets.py --config FILE --cells 64:0 128:1 --depths 2 3 4 --tokens 1.5 2 3 \\
    [--repetitions 2] [--json FILE]

The best of them is the limit of any constant choice. Batches are full, of held-out code; their
first steps do not count.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.bench.harness import ClosedLoop, engine_beside, is_full
from serve_spec.bench.report import append_record, environment, print_record
from serve_spec.bench.workload import STEADY_TOKENS, Load, held_out_prompts
from serve_spec.config import ServeSpecConfig
from serve_spec.core.draft import DraftShape
from serve_spec.core.round import DecodeBatch, RoundNotes
from serve_spec.engine.llm import LLM

SETTLE_STEPS = 2
MEASURED_FRACTION = 0.9
"""Measured fraction of a batch; at its end some requests have finished."""


class ForcedPolicy(GoodputPolicy):
    """A goodput policy with a fixed depth and budget."""

    depth = 0
    budget: int | None = None

    def _plan(self, batch: DecodeBatch, at: int) -> None:
        super()._plan(batch, at)
        size, shape = batch.size, DraftShape.chain(self.depth)
        self._trial, self._shape = None, shape
        drafts = self.depth * size if self.budget is None else self.budget
        survivals = self.drafts.survivals(size)[:, : self.depth]
        ranked, each = np.sort(survivals.ravel())[::-1], size / len(survivals)
        counts = np.arange(len(ranked) + 1) * each
        expected = np.interp(drafts, counts, np.cumsum([0.0, *ranked]) * each)
        ms = self.costs.ms(self._load.work._replace(shape=shape, drafts=float(drafts)))
        notes = RoundNotes(predicted_ms=ms, expected_drafts=float(expected))
        self._answer = replace(self._answer, shape=shape, budget=self.budget, notes=notes)


def measured(loop: ClosedLoop, size: int) -> dict[str, float]:
    """Return sums over the steps in which all requests decode."""
    loop.fill()
    rounds = loop.advance(loop.num_emitted + int(MEASURED_FRACTION * size * STEADY_TOKENS))
    loop.close()
    full = [r for r in rounds if is_full(r.record, size)]
    full = full[SETTLE_STEPS:-1]
    return {
        "steps": len(full),
        "ms": sum(r.ms for r in full),
        "tokens": sum(r.record.num_output_tokens for r in full),
        "accepted": sum(r.record.num_correct_drafts for r in full),
        "predicted_ms": sum(r.record.notes.predicted_ms or 0.0 for r in full),
        "predicted_accepted": sum(r.record.notes.expected_drafts or 0.0 for r in full),
    }


def choices(size: int, depths: Sequence[int], tokens: Sequence[float]) -> list[tuple[int, Any]]:
    """Return depths with budgets: plain decoding, every depth without a budget and with each."""
    found: list[tuple[int, Any]] = [(0, None), *((depth, None) for depth in depths)]
    budgets = [round((each - 1.0) * size) for each in tokens]
    return found + [(depth, b) for depth in depths for b in budgets if 0 < b < depth * size]


def main() -> None:
    """Print the figures of every choice, the fastest first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="configuration (YAML)")
    sizes = "batch sizes and temperatures to measure"
    parser.add_argument("--cells", nargs="+", required=True, metavar="SIZE:T", help=sizes)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4], help="draft steps")
    tokens = "budgets, in verified tokens per request"
    budgets = [1.5, 2.0, 2.5, 3.0, 4.0]
    parser.add_argument("--tokens", type=float, nargs="+", default=budgets, help=tokens)
    parser.add_argument("--repetitions", type=int, default=2, help="batches of every choice")
    parser.add_argument("--json", type=Path, help="file to append every row to (JSON lines)")
    args = parser.parse_args()
    cells = [(int(size), float(t)) for size, t in (each.split(":") for each in args.cells)]
    largest, deepest = max(size for size, _ in cells), max(args.depths)
    llm = LLM(
        ServeSpecConfig.load(args.config),
        max_num_seqs=largest,
        max_num_batched_tokens=max(2048, 2 * largest * (deepest + 1)),
    )
    append_record(args.json, {"section": "run", "environment": environment(llm.config)})
    prompts = {"code": held_out_prompts(llm.engine.tokenizer.encode, count=256, num_tokens=64)}
    policy = llm.engine.controller._policy
    assert isinstance(policy, GoodputPolicy), "costs are needed"
    gc.collect()
    gc.freeze()
    for size, temperature in cells:
        load = Load("predictable", size, STEADY_TOKENS, temperature, is_steady=True)
        engines = {}
        sums: dict[tuple[int, Any], dict[str, float]] = {}
        for choice in choices(size, args.depths, args.tokens):
            controller = copy.deepcopy(llm.engine.controller)
            forced = copy.deepcopy(policy)
            forced.__class__ = ForcedPolicy
            forced.depth, forced.budget = choice  # type: ignore[attr-defined]
            controller._policy = forced
            engines[choice] = engine_beside(llm.engine, controller)
        for repetition in range(args.repetitions):
            for choice, engine in engines.items():
                requests = load.requests(1000 * repetition, prompts)
                found = measured(ClosedLoop(engine, requests, size), size)
                before = sums.get(choice, {})
                sums[choice] = {key: before.get(key, 0.0) + x for key, x in found.items()}
        speed = {choice: s["tokens"] / s["ms"] for choice, s in sums.items()}
        for depth, budget in sorted(speed, key=speed.__getitem__, reverse=True):
            each = sums[depth, budget]
            row: dict[str, Any] = {
                "batch_size": size,
                "temperature": temperature,
                "depth": depth,
                "budget": budget,
                "tokens_per_second": round(1e3 * speed[depth, budget], 1),
                "step_ms": round(each["ms"] / each["steps"], 3),
                "predicted_ms": round(each["predicted_ms"] / each["steps"], 3),
                "accepted": round(each["accepted"] / each["steps"] / size, 3),
                "predicted_accepted": round(each["predicted_accepted"] / each["steps"] / size, 3),
            }
            print_record(args.json, section="choice", **row)


if __name__ == "__main__":
    main()
