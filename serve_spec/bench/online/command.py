"""`serve-spec bench online`: load over HTTP, against a server that runs or one of its own.

    serve-spec bench online --deploy deploy/tiny.yaml --closed 1 8 --poisson 4
    serve-spec bench online --url http://127.0.0.1:8000 --ramp 1:20 --slo-ttft-ms 200

Requests are the same in every load: held-out source text, a seed each. With --arms the same loads
run on several servers, one after the other. With --compare-offline they run on an engine in this
process, too, once the servers are stopped (or beside an idle one that --url names). An API key is
taken from $SERVE_SPEC_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from serve_spec.bench.online.arguments import Plan, parse, plans_of
from serve_spec.bench.online.arms import Arm, arm_file, arm_of
from serve_spec.bench.online.figures import (
    HTTP,
    OFFLINE,
    Cell,
    Objective,
    against_first_arm,
    against_offline,
    cell,
    is_forced,
    reference_texts,
)
from serve_spec.bench.online.first_tokens import FirstTokenReader
from serve_spec.bench.online.load import ClosedLoop, Load, on_replicas
from serve_spec.bench.online.plots import plot_online
from serve_spec.bench.online.record import LoadRun, TextRequest
from serve_spec.bench.online.report import tables
from serve_spec.bench.online.server import own_server, serve_command
from serve_spec.bench.report import emit, environment, forced_acceptance, save, show
from serve_spec.config import ServeSpecConfig
from serve_spec.config.root import parse_override

Runs = dict[Load, list[LoadRun]]
"""Repetitions of each load."""
Sides = dict[str, Runs]
"""By the name of an arm, `HTTP` where there are none; and `OFFLINE`."""


def main(argv: list[str]) -> int:
    """Runs the benchmark; prints tables and, last, one JSON line.

    0, or 1 where texts differ or a load got no whole answer.
    """
    args = parse(argv, __doc__)
    result = _measured(args) if args.from_json is None else json.loads(args.from_json.read_text())
    show(tables(result), result)
    if args.plot is not None:
        plot_online(result, args.plot)
    if args.from_json is not None:
        return 0
    emit(result, args.json)
    if forced_acceptance(result) is not None:
        return 0  # texts differ by construction
    same = all(cell["same_texts"] == cell["num_texts"] for cell in result["cells"])
    answered = all(cell["num_texts"] for cell in result["cells"])
    return 0 if answered and (same or args.allow_differences) else 1


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    config = _offline_config(args)
    arms = [arm_of(Path(args.deploy), name) for name in args.arms]
    servers: Sequence[Arm | None] = arms or [None]
    plans, warm_up = plans_of(args, {1, *map(_num_replicas, servers)})
    sides: Sides = {}
    for arm in servers:
        plan = plans[_num_replicas(arm)]
        sides[HTTP if arm is None else arm.name] = _online(args, arm, plan, warm_up)
        result = _result(args, config, arms, sides)
        save(result, args.json)  # a server that fails later does not cost this one's figures
    if config is None:
        return result
    sides[OFFLINE] = _offline(args, config, plans[1], warm_up)
    return _result(args, config, arms, sides)


def _num_replicas(arm: Arm | None) -> int:
    """Those that loads go by."""
    return 1 if arm is None else arm.num_replicas


def _result(
    args: argparse.Namespace, config: ServeSpecConfig | None, arms: Sequence[Arm], sides: Sides
) -> dict[str, Any]:
    objective = Objective(args.slo_ttft_ms, args.slo_tpot_ms)
    cells = _cells(sides, objective)
    forced = any(is_forced(run) for run in _runs(sides.values()))
    outputs = ("json", "plot", "from_json")
    return {
        "bench": "online",
        "environment": {
            **environment(config),
            **({"synthetic_acceptance": True} if forced else {}),
        },
        "arguments": {k: v for k, v in vars(args).items() if k not in outputs},
        "objective": asdict(objective),
        "cells": [asdict(cell) for cell in cells],
        "against_offline": against_offline(cells),
        "against_first_arm": _against_first_arm(arms, cells, sides),
    }


def _against_first_arm(
    arms: Sequence[Arm], cells: Sequence[Cell], sides: Sides
) -> list[dict[str, Any]]:
    if not arms:
        return []
    loads = sides[arms[0].name]
    num_streams = {
        load.name: load.num_streams
        for load in loads
        if isinstance(load, ClosedLoop) and not load.per_replica
    }
    return against_first_arm(cells, {arm.name: arm.num_replicas for arm in arms}, num_streams)


def _offline_config(args: argparse.Namespace) -> ServeSpecConfig | None:
    """Read before anything runs, so that a mistake in it does not cost the run."""
    if args.compare_offline is None:
        return None
    overrides = dict(parse_override(pair) for pair in args.set)
    return ServeSpecConfig.load(args.compare_offline, **overrides)


def _online(
    args: argparse.Namespace, arm: Arm | None, plan: Plan, warm_up: Sequence[TextRequest]
) -> Runs:
    with ExitStack() as stack:
        url = args.url
        if url is None:
            file = args.deploy if arm is None else stack.enter_context(arm_file(arm))
            command = serve_command(file, args.port)
            url = stack.enter_context(own_server(command, args.client_cores))
        return _against_server(args, url, _num_replicas(arm), plan, warm_up)


def _against_server(
    args: argparse.Namespace,
    url: str,
    num_replicas: int,
    plan: Plan,
    warm_up: Sequence[TextRequest],
) -> Runs:
    # Here, because only this benchmark needs httpx.
    from serve_spec.bench.online.clients import Clients, Target

    api_key = os.environ.get("SERVE_SPEC_API_KEY")
    target = Target(url, args.model, api_key, args.timeout_s)
    reader = FirstTokenReader(url, api_key) if args.split_ttft else None
    runs: Runs = {load: [] for load in plan}
    with Clients(target, args.clients) as clients:
        loads = {load: on_replicas(load, num_replicas) for load in plan}
        _told(reader, clients.run(_widest(loads.values()), warm_up))
        for repetition, load in tqdm(_turns(plan, args.repetitions), desc=HTTP, leave=False):
            run = clients.run(
                loads[load], plan[load], seed=args.seed + repetition, poll_s=args.poll_s
            )
            runs[load].append(_told(reader, run))
    return runs


def _told(reader: FirstTokenReader | None, run: LoadRun) -> LoadRun:
    """The run, with what the server says of its first tokens."""
    if reader is None:
        return run
    num_answered = sum(bool(served.chunk_s) for served in run.served)
    return replace(run, first_token_ms=reader.after(num_answered))


def _offline(
    args: argparse.Namespace,
    config: ServeSpecConfig,
    plan: Plan,
    warm_up: Sequence[TextRequest],
) -> Runs:
    from serve_spec.bench.online.offline import run_offline
    from serve_spec.engine.llm import LLM

    runs: Runs = {load: [] for load in plan}
    llm = LLM(config)
    try:
        run_offline(llm.engine, _widest(plan), warm_up)
        for repetition, load in tqdm(_turns(plan, args.repetitions), desc=OFFLINE, leave=False):
            run = run_offline(llm.engine, load, plan[load], seed=args.seed + repetition)
            runs[load].append(run)
    finally:
        llm.shutdown()
    return runs


def _turns(loads: Collection[Load], repetitions: int) -> list[tuple[int, Load]]:
    """Every load once per repetition, in an order of its own each time."""
    return [
        (repetition, load)
        for repetition in range(repetitions)
        for load in random.Random(repetition).sample(list(loads), len(loads))
    ]


def _widest(loads: Iterable[Load]) -> ClosedLoop:
    """The closed loop that warms up for all of `loads`."""
    return ClosedLoop(
        max(load.num_streams if isinstance(load, ClosedLoop) else 8 for load in loads)
    )


def _cells(sides: Sides, objective: Objective) -> list[Cell]:
    """All sides of each load, one after the other.

    Texts are compared with the offline ones, without those with the first server's.
    """
    offline_first = sorted(sides, key=lambda side: side != OFFLINE)
    reference = reference_texts(_runs(sides[side] for side in offline_first))
    return [
        cell(load.name, side, runs[load], objective, reference)
        for load in next(iter(sides.values()))
        for side, runs in sides.items()
    ]


def _runs(sides: Iterable[Runs]) -> Iterator[LoadRun]:
    return (run for runs in sides for repetitions in runs.values() for run in repetitions)
