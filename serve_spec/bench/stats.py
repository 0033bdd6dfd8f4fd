"""`serve-spec bench stats`: what the fleet's statistics cost, through Ray, however large the fleet.

Runs the real `SpecStats` actor on a Ray of its own and lets a process report for all replicas.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from serve_spec.bench.report import emit, environment, table


def main(argv: list[str]) -> int:
    """Runs the benchmark; the process exit status: 1 if the actor needed more than one core."""
    args = _parser().parse_args(argv)
    from serve_spec.serving.stats_load import measure  # loads Ray

    load_before = os.getloadavg()[0]
    figures = measure(args.replicas, args.interval_s, args.seconds, args.repetitions)
    shown = [[name, f"{value:.4g}"] for name, value in figures.items() if name != "report_us_each"]
    print(table(["figure", "value"], shown))
    result = {
        "bench": "stats",
        "environment": environment(),
        "replicas": args.replicas,
        "interval_s": args.interval_s,
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        **figures,
    }
    emit(result, args.json)
    return 0 if figures["cores"] <= 1.0 else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve-spec bench stats", description=__doc__)
    parser.add_argument("--replicas", type=int, default=10_000)
    parser.add_argument("--interval-s", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=8.0, help="of one repetition")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the result here")
    return parser
