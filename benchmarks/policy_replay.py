"""Replay recorded drafts: compare goodput with every fixed depth, per batch and over phases.

python benchmarks/policy_replay.py [--costs h200 cpu] [--restart]
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from itertools import chain
from pathlib import Path
from statistics import fmean

from benchmarks.simulator import Phase, RoundCosts, Simulator
from serve_spec.adaptive.candidates import SMALL_TREES, AllowedShapes
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.adaptive.policy import StaticPolicy, StepPolicy
from serve_spec.bench.trace import load_traces
from serve_spec.bench.workload import CLASSES, TextKind
from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundSteps
from serve_spec.worker.graphs import token_counts
from tests.helpers.simulated_costs import H200_8B, TWO_CPU_CORES, noisy, recorded_table

TRACES = load_traces(Path("tests/data/logprob_traces.json"))
COSTS: dict[str, tuple[RoundCosts, tuple[int, ...], tuple[int, ...]]] = {
    "h200": (H200_8B, (1, 2, 4, 8, 16, 32, 64, 128, 256), token_counts(2048)),
    "cpu": (TWO_CPU_CORES, (1, 4, 16, 64), ()),
}
KINDS = {
    "code 0": (TextKind("code", 0.0),),
    "code .7": (TextKind("code", 0.7),),
    "code 1": (TextKind("code", 1.0),),
    "shuffled 1": (TextKind("shuffled", 1.0),),
    "mixture": (TextKind("code", 0.0), TextKind("shuffled", 1.0)),
}
CLASSES.update(KINDS)
DEPTHS = range(8)
NUM_TOKENS, SPREAD = 64, 0.4
FIRST_TOKENS, RESTARTS = 1000, 5


def goodput(name: str) -> GoodputPolicy:
    """Return a policy with the table of a cost model; small trees only as on a GPU."""
    costs, sizes, counts = COSTS[name]
    trees = SMALL_TREES if counts else {}
    table = recorded_table(costs, sizes, trees=sorted({*chain(*trees.values())}))
    return GoodputPolicy(table, AllowedShapes(trees=trees), min_dwell_rounds=0, token_counts=counts)


def speeds(name: str, policy: StepPolicy, phases: list[Phase], seed: int = 0) -> list[float]:
    """Return tokens per ms of every phase; the policy learns throughout and is charged for it."""
    costs = noisy(COSTS[name][0], 0.02, seed)
    simulator = Simulator(policy, TRACES, costs, charge_thinking=name == "cpu")
    return [simulator.run(phase).tokens_per_ms for phase in phases]


def cells(name: str) -> list[tuple[str, int, float, float]]:
    """Return (kind, batch size, speed over the best fixed depth, over off) of every cell."""
    found = []
    for kind in KINDS:
        for size in COSTS[name][1]:
            phase = Phase(
                kind,
                size,
                max(2, 320 // size) * size if size > 8 else 12 * size,
                NUM_TOKENS,
                SPREAD,
            )
            fixed = [speeds(name, StaticPolicy(DraftShape.chain(k)), [phase])[0] for k in DEPTHS]
            mine = speeds(name, goodput(name), [phase])[0]
            found.append((kind, size, mine / max(fixed), mine / fixed[0]))
    return found


def phases_of(name: str) -> list[Phase]:
    """Return phases of alternating kinds of text with rising and falling batch sizes."""
    sizes = COSTS[name][1]
    kinds = list(KINDS)
    order = [*sizes, *reversed(sizes)]
    return [
        Phase(kinds[(i + j) % len(kinds)], size, max(3 * size, 12), NUM_TOKENS, SPREAD)
        for i, size in enumerate(order)
        for j in (0, 2)
    ]


def restarts(name: str) -> list[tuple[str, int, dict[str, float]]]:
    """Return (kind, batch size, speeds over warm) of the first tokens of a load.

    By policies that have played the same kind before: `restarted` at this batch size, `small` one
    request at a time; and one that is `cold`.
    """
    found = []
    for kind in KINDS:
        for size in COSTS[name][1]:
            times: dict[str, list[float]] = defaultdict(list)
            for seed in range(RESTARTS):
                warm, small = goodput(name), goodput(name)
                speeds(name, warm, [Phase(kind, size, 16 * size, NUM_TOKENS, SPREAD)], seed)
                speeds(name, small, [Phase(kind, 1, 16, NUM_TOKENS, SPREAD)], seed)
                restarted = goodput(name)
                restarted.restore(json.loads(json.dumps(warm.state())))
                policies = {"restarted": restarted, "small": small, "cold": goodput(name)}
                for state, policy in {"warm": warm, **policies}.items():
                    times[state].append(first_tokens_ms(name, policy, kind, size, 100 + seed))
            warm_ms = fmean(times.pop("warm"))
            found.append((kind, size, {each: warm_ms / fmean(ms) for each, ms in times.items()}))
    return found


def first_tokens_ms(name: str, policy: StepPolicy, kind: str, size: int, seed: int) -> float:
    """Return the time per token of the first tokens of a load."""
    tokens, ms = [0], [0.0]

    def add(batch: DecodeBatch, steps: RoundSteps, record: StepRecord) -> None:
        if tokens[-1] < FIRST_TOKENS:
            tokens.append(tokens[-1] + record.num_output_tokens)
            ms.append(ms[-1] + record.step_ms)

    simulator = Simulator(policy, TRACES, noisy(COSTS[name][0], 0.02, seed), on_round=add)
    simulator.run(Phase(kind, size, max(32, 2 * size), NUM_TOKENS, SPREAD))
    return ms[-1] / tokens[-1]


def print_restarts(name: str) -> None:
    """Print the speeds after a restart, after small batches and of a policy that knows nothing."""
    found = restarts(name)
    for kind, size, over_warm in found:
        shown = ", ".join(f"{state} {speed:.3f}" for state, speed in over_warm.items())
        print(f"{name:5} {kind:10} {size:4} over warm: {shown}")
    for state in found[0][2]:
        column = [over_warm[state] for *_, over_warm in found]
        pooled = math.exp(fmean(map(math.log, column)))
        print(f"{name:5} {state}: {pooled:.3f} x warm pooled, worst {min(column):.3f}")


def main() -> None:
    """Print both tables, or that of restarts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", nargs="+", default=list(COSTS), choices=list(COSTS))
    parser.add_argument("--restart", action="store_true", help="speed after a restart over warm")
    args = parser.parse_args()
    for name in args.costs:
        if args.restart:
            print_restarts(name)
            continue
        found = cells(name)
        for kind, size, best, off in found:
            print(f"{name:5} {kind:10} {size:4} {best:.3f} x best depth {off:.3f} x off")
        for size in COSTS[name][1]:
            pooled = [math.log(best) for _, each, best, _ in found if each == size]
            print(f"{name:5} batch {size:4} {math.exp(fmean(pooled)):.3f} pooled")
        phases = phases_of(name)
        fixed = [speeds(name, StaticPolicy(DraftShape.chain(k)), phases) for k in DEPTHS]
        mine = speeds(name, goodput(name), phases)
        best = [max(column) for column in zip(*fixed, strict=True)]
        tokens = [phase.total_tokens for phase in phases]
        total = sum(n / b for n, b in zip(tokens, best, strict=True)) / sum(
            n / m for n, m in zip(tokens, mine, strict=True)
        )
        worst = min(m / o for m, o in zip(mine, fixed[0], strict=True))
        print(f"{name:5} phases: {total:.3f} x best depths, worst phase {worst:.3f} x off")


if __name__ == "__main__":
    main()
