"""`serve-spec bench online`: run the same loads on one or several servers and on an engine.

With --compare-offline the loads also run on an engine in this process, once the servers have
stopped, or while the server of --url is idle.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import TypeAlias

import httpx
from tqdm import tqdm

from serve_spec.bench import report
from serve_spec.bench.dataset import ChatPrompt, installed
from serve_spec.bench.online import report as figures
from serve_spec.bench.online.client import Clients, Target
from serve_spec.bench.online.in_process import run_offline
from serve_spec.bench.online.load import (
    Bursty,
    ClosedLoop,
    CompletionRequest,
    Load,
    LoadRun,
    Poisson,
    Ramp,
    Requests,
    chat_requests,
    text_requests,
)
from serve_spec.bench.online.server import (
    ServerVariant,
    own_server,
    serve_command,
    serve_file,
    server_variant,
)
from serve_spec.bench.prompts import ChatEncoder, read_chats, refuse_unused
from serve_spec.bench.variants import interleaved
from serve_spec.bench.workload import HELD_OUT_PACKAGES
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.flags import flag_values
from serve_spec.config.root import parse_override
from serve_spec.core.registry import one_line
from serve_spec.engine.llm import LLM
from serve_spec.serving.deployment.plan import read_plan

Plan: TypeAlias = dict[Load, list[CompletionRequest]]
"""The requests of each load."""
Runs: TypeAlias = dict[Load, list[LoadRun]]
"""The repetitions of each load."""


_SOURCE_FILES = ("packages", "prompt_chars", "mixed")
"""Flags that choose source files as prompts."""
PROMPT_CHARS = 400
"""Characters of a prompt from source files."""


def run(args: argparse.Namespace) -> int:
    """Run the loads or read an old result; return 1 if texts differ or a load got no answer."""
    if args.from_json is None:
        _check(args)
        records = _measured(args)
    else:
        records = list(report.read_records(args.from_json, "online"))
    head, *measurements = records
    loads = list(dict.fromkeys(each["load"] for each in measurements))
    measurements.sort(key=lambda each: loads.index(each["load"]))
    report.show(figures.tables(head, measurements), head)
    if args.plot is not None:
        figures.plot(head, measurements, args.plot)
    if args.from_json is not None or report.forced_acceptance(head) is not None:
        return 0  # of forced acceptance, texts differ by construction
    same = all(each["same_texts"] == each["num_texts"] for each in measurements)
    answered = all(each["num_texts"] for each in measurements)
    return 0 if answered and (same or args.allow_differences) else 1


def _check(args: argparse.Namespace) -> None:
    if args.set and args.compare_offline is None:
        raise ConfigError(f"--set={args.set!r}: needs --compare-offline, whose keys it overrides")
    for name in ("port", "variants", "client_cores"):
        if getattr(args, name) and args.deploy is None:
            raise ConfigError(
                f"{report.option(name)}: needs --deploy; --url names a running server"
            )
    if args.flags and args.deploy is None and args.compare_offline is None:
        flag, value = next(iter(args.flags.values()))
        raise ConfigError(f"{flag}={value!r}: needs --deploy; --url names a running server")
    refuse_unused(args, *_SOURCE_FILES)
    if args.per_replica and not args.variants:
        raise ConfigError("--per-replica: needs --variants, which give num_replicas")


def _default_dataset(args: argparse.Namespace) -> list[str] | None:
    """Return the installed datasets if --deploy has a chat template; None: source files."""
    names = installed()
    if not names or args.deploy is None or any(getattr(args, name) for name in _SOURCE_FILES):
        return None
    configs = read_plan(args.deploy, flag_values(args)).configs
    if any(ChatEncoder(config.download()).template.is_plain for config in configs):
        return None
    return names


def _measured(args: argparse.Namespace) -> list[report.Record]:
    """Return the record of the run and of every load and side; write each side when it is done."""
    config = None  # read first, so that a mistake in it does not cost the run
    if args.compare_offline is not None:
        keys = {**flag_values(args), **dict(map(parse_override, args.set))}
        config = ServeSpecConfig.load(args.compare_offline, **keys)
    if args.dataset is None:
        args.dataset = _default_dataset(args)
    variants = [server_variant(args.deploy, name, flag_values(args)) for name in args.variants]
    servers: Sequence[ServerVariant | None] = variants or [None]
    plans, warm_up = _plans(args, {1, *(each.num_replicas for each in variants)})
    objective = figures.Objective.of(args.goodput)
    texts: dict[int, str] = {}
    records: list[report.Record] = []

    def add(side: str, runs: Runs, num_replicas: int | None) -> None:
        every = [run for repetitions in runs.values() for run in repetitions]
        figures.add_texts(texts, every)
        if not records:
            head = report.run_record(
                "online", args, config, objective=asdict(objective), prompts=_prompts(args)
            )
            if any(map(figures.is_forced, every)):
                head["environment"]["synthetic_acceptance"] = True
            records.append(head)
            report.append_record(args.json, head)
        for load, mine in runs.items():
            found = figures.measure(
                *(load.name, side, mine, objective, texts),
                num_replicas=num_replicas,
                num_streams=load.num_streams,
            )
            categories = [request.category for request in plans[num_replicas or 1][load]]
            found["by_category"] = figures.by_category(mine, categories, texts)
            records.append({"section": "measurement", **found})
            report.append_record(args.json, records[-1])

    for variant in servers:
        name, count = (
            (figures.HTTP, None) if variant is None else (variant.name, variant.num_replicas)
        )
        add(name, _online(args, variant, plans[count or 1], warm_up), count)
    if config is not None:
        add(figures.OFFLINE, _offline(args, config, plans[1], warm_up), None)
    return records


def _plans(
    args: argparse.Namespace, num_replicas: Collection[int]
) -> tuple[dict[int, Plan], list[CompletionRequest]]:
    """Return the requests of each load by number of replicas, and those of the warm-up."""

    def size(load: Load) -> int:
        return int(max(args.num_requests, args.requests_per_stream * (load.num_streams or 0)))

    sizes = {n: {load: size(load) for load in _loads(args, n)} for n in num_replicas}
    most = max(max(each.values()) for each in sizes.values())
    requests = _requests(args, most + args.warm_up)
    plans = {n: {load: requests[:k] for load, k in each.items()} for n, each in sizes.items()}
    return plans, requests[most:]


def _prompts(args: argparse.Namespace) -> str | None:
    """Return what the prompts of a dataset are, in words."""
    if args.dataset is None:
        return None
    return (
        f"prompts of {' '.join(args.dataset)}, as chats; raw text if the model has no chat template"
    )


def _requests(args: argparse.Namespace, count: int) -> list[CompletionRequest]:
    texts = {"output_tokens": args.output_tokens, "temperature": args.temperature}
    if args.dataset is None:
        return text_requests(
            count,
            prompt_chars=args.prompt_chars or PROMPT_CHARS,
            packages=args.packages or HELD_OUT_PACKAGES,
            seed=args.seed,
            mixed=bool(args.mixed),
            **texts,
        )
    most, chats = args.max_prompt_chars, read_chats(args, args.dataset)
    for category, prompts in chats.items():
        chats[category] = [prompt for prompt in prompts if prompt.num_chars <= most]
        if not chats[category]:
            fix = f"raise it, or leave category {category} out"
            raise ConfigError(f"--max-prompt-chars={most}: no prompt is that short; {fix}")
    return chat_requests(chats, count, seed=args.seed, **texts)


def _loads(args: argparse.Namespace, num_replicas: int) -> list[Load]:
    of_each = num_replicas if args.per_replica else None
    loads: list[Load] = [
        *(ClosedLoop(streams, of_each) for streams in args.closed),
        *(Poisson(rate) for rate in args.poisson),
        *(Bursty(rate, args.burst_size) for rate in args.bursty),
        *(Ramp(*rates) for rates in args.ramp),
    ]
    return list(dict.fromkeys(loads)) or [ClosedLoop(1), ClosedLoop(8)]


def _repeat(
    args: argparse.Namespace, name: str, plan: Plan, run_once: Callable[..., LoadRun]
) -> Runs:
    """Run every load once per repetition, each with a seed of the repetition."""
    runs: Runs = {load: [] for load in plan}
    turns = interleaved(args.repetitions, plan)
    total = args.repetitions * sum(map(len, plan.values()))
    with tqdm(total=total, desc=name, unit="request", leave=False) as bar:
        for repetition, load in turns:
            bar.set_postfix_str(load.name)
            seed = args.seed + repetition
            runs[load].append(run_once(load, plan[load], seed=seed, on_end=bar.update))
    return runs


def _online(
    args: argparse.Namespace, variant: ServerVariant | None, plan: Plan, warm_up: Requests
) -> Runs:
    with ExitStack() as stack:
        url = args.url
        if url is None:
            file = args.deploy if variant is None else stack.enter_context(serve_file(variant))
            keys = flag_values(args) if variant is None else {}
            command = serve_command(file, args.port, keys)
            url = stack.enter_context(own_server(command, args.client_cores))
        else:
            _check_server(url)
        api_key = os.environ.get("SERVE_SPEC_API_KEY")
        target = Target(url, args.model, api_key, args.timeout_s)
        clients = stack.enter_context(Clients(target, args.clients))
        clients.run(_widest(plan), warm_up)
        run_once = partial(clients.run, poll_s=args.poll_s)
        return _repeat(args, figures.HTTP, plan, run_once)


def _check_server(url: str) -> None:
    """Raise ConfigError if no server answers HTTP there."""
    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = f"no server answers there ({one_line(error)})"
        raise ConfigError(f"--url={url}: {why}; give http://HOST:PORT of one that runs") from None


def _offline(
    args: argparse.Namespace, config: ServeSpecConfig, plan: Plan, warm_up: Requests
) -> Runs:
    llm = LLM(config)
    encoder = ChatEncoder(llm.config)
    plan = {load: _rendered(encoder, requests) for load, requests in plan.items()}
    warm_up = _rendered(encoder, warm_up)
    try:
        run_offline(llm.engine, _widest(plan), warm_up)
        return _repeat(args, figures.OFFLINE, plan, partial(run_offline, llm.engine))
    finally:
        llm.shutdown()


def _rendered(encoder: ChatEncoder, requests: Requests) -> list[CompletionRequest]:
    """Return the requests with chats as token ids."""
    chats = [ChatPrompt(request.category or "", request.messages) for request in requests]
    return [
        replace(request, prompt=encoder.encode(chat)) if chat.messages else request
        for request, chat in zip(requests, chats, strict=True)
    ]


def _widest(loads: Iterable[Load]) -> ClosedLoop:
    """Return the closed loop that warms up for all of `loads`."""
    return ClosedLoop(max(load.num_streams or 8 for load in loads))
