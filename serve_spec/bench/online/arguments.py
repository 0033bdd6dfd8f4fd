"""What `bench online` is told: a server, loads, requests, and what to report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path

from serve_spec.bench.configuration import add_allow_differences
from serve_spec.bench.online.load import Bursty, ClosedLoop, Load, Poisson, Ramp, on_replicas
from serve_spec.bench.online.record import TextRequest, text_requests
from serve_spec.bench.workload import HELD_OUT_PACKAGES

Plan = dict[Load, list[TextRequest]]
"""What each load asks."""


def parse(argv: list[str], description: str | None) -> argparse.Namespace:
    """The arguments; a wrong one ends the process as argparse does, with status 2."""
    parser = _parser(description)
    args = parser.parse_args(argv)
    if args.set and args.compare_offline is None:
        parser.error("--set changes the configuration of --compare-offline; give that, too")
    for option in ("port", "arms", "client_cores"):
        if getattr(args, option) and args.deploy is None:
            flag = option.replace("_", "-")
            parser.error(f"--{flag} is about the server of --deploy; --url names one that runs")
    if args.per_replica and not args.arms:
        parser.error("--per-replica goes by the num_replicas of --arms; give those, too")
    return args


def plans_of(
    args: argparse.Namespace, num_replicas: Collection[int]
) -> tuple[dict[int, Plan], list[TextRequest]]:
    """What each load asks of a server of so many replicas, and what warms up.

    Raises:
        ValueError: see `text_requests`.
    """
    loads = _loads(args)
    sizes = {
        n: {load: _num_requests(on_replicas(load, n), args) for load in loads} for n in num_replicas
    }
    most = max(max(of_loads.values()) for of_loads in sizes.values())
    requests = text_requests(
        most + args.warm_up,
        prompt_chars=args.prompt_chars,
        output_tokens=args.output_tokens,
        temperature=args.temperature,
        packages=args.packages,
        seed=args.seed,
        mixed=args.mixed,
    )
    plans = {
        n: {load: requests[:size] for load, size in of_loads.items()}
        for n, of_loads in sizes.items()
    }
    return plans, requests[most:]


def _num_requests(load: Load, args: argparse.Namespace) -> int:
    num_streams = load.num_streams if isinstance(load, ClosedLoop) else 0
    return max(int(args.num_requests), int(args.requests_per_stream) * num_streams)


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serve-spec bench online",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="base URL of a running server")
    source.add_argument("--deploy", metavar="FILE", help="start `serve-spec serve FILE` for it")
    source.add_argument(
        "--from-json", type=Path, metavar="FILE", help="run nothing: print and draw this result"
    )
    parser.add_argument("--port", type=int, help="of the server that --deploy starts")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=[],
        metavar="KEY=VALUE[,KEY=VALUE...]",
        help="one server after the other, with these keys of --deploy's configuration, "
        "for example num_replicas=1 num_replicas=2,routing_policy=balanced",
    )
    parser.add_argument(
        "--clients", type=_at_least(1), default=1, help="processes that share a load"
    )
    parser.add_argument(
        "--client-cores",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="keep the server of --deploy off the last N cores, and the clients on them",
    )
    parser.add_argument("--model", help="model name to ask for; default: none is sent")

    loads = parser.add_argument_group("loads (default: --closed 1 8)")
    loads.add_argument("--closed", type=_at_least(1), nargs="+", default=[], metavar="STREAMS")
    loads.add_argument(
        "--per-replica", action="store_true", help="closed loops: STREAMS for each replica"
    )
    loads.add_argument("--poisson", type=_positive, nargs="+", default=[], metavar="RATE")
    loads.add_argument("--bursty", type=_positive, nargs="+", default=[], metavar="RATE")
    loads.add_argument("--burst-size", type=_at_least(1), default=8)
    loads.add_argument("--ramp", type=_ramp, nargs="+", default=[], metavar="FROM:TO")
    loads.add_argument("--num-requests", type=_at_least(1), default=32, help="per load")
    loads.add_argument(
        "--requests-per-stream", type=_at_least(1), default=1, help="of closed loops, at least"
    )
    loads.add_argument("--repetitions", type=_at_least(1), default=3, help="interleaved")
    loads.add_argument(
        "--warm-up", type=_at_least(0), default=16, metavar="REQUESTS", help="not counted"
    )
    loads.add_argument("--seed", type=int, default=0, help="of schedules, prompts and texts")

    asked = parser.add_argument_group("requests")
    asked.add_argument("--prompt-chars", type=_at_least(1), default=400)
    asked.add_argument("--output-tokens", type=_at_least(1), default=64)
    asked.add_argument("--temperature", type=float, default=0.0)
    asked.add_argument(
        "--mixed",
        action="store_true",
        help="every other prompt is hard to draft: its words shuffled, drawn at T = 1",
    )
    asked.add_argument("--packages", nargs="+", default=list(HELD_OUT_PACKAGES))
    asked.add_argument("--timeout-s", type=_positive, default=600.0, help="of a whole request")

    judged = parser.add_argument_group("what is reported")
    judged.add_argument("--slo-ttft-ms", type=_positive, help="goodput: time to first token")
    judged.add_argument("--slo-tpot-ms", type=_positive, help="goodput: time per output token")
    judged.add_argument("--poll-s", type=_positive, default=0.5, help="between /server_info")
    judged.add_argument(
        "--split-ttft",
        action="store_true",
        help="time to first token at the server's door and at its engine, from /metrics",
    )
    judged.add_argument("--compare-offline", metavar="CONFIG", help="the engine without HTTP")
    judged.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of --compare-offline"
    )
    add_allow_differences(judged)
    judged.add_argument("--json", type=Path, help="also write the result here")
    judged.add_argument("--plot", type=Path, help="draw the result here (PNG)")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return number


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _ramp(text: str) -> tuple[float, float]:
    first, _, last = text.partition(":")
    return _positive(first), _positive(last)


def _loads(args: argparse.Namespace) -> list[Load]:
    loads: list[Load] = [
        *(ClosedLoop(num_streams, args.per_replica) for num_streams in args.closed),
        *(Poisson(rate) for rate in args.poisson),
        *(Bursty(rate, args.burst_size) for rate in args.bursty),
        *(Ramp(*rates) for rates in args.ramp),
    ]
    return list(dict.fromkeys(loads)) or [ClosedLoop(1), ClosedLoop(8)]
