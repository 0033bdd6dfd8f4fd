"""Measure the path from an engine to its HTTP clients: speed, gaps, CPU time by process.

PYTHONPATH=. python benchmarks/serving_path.py [--routers 1 2 4] [--streams 64] [--rounds 20]
PYTHONPATH=. python benchmarks/serving_path.py --deploy deploy/gpu.yaml --streams 1 64 256

Without --deploy the engine is `paced_engine`: it emits tokens of all streams at a fixed rate and
reports how late its rounds begin. With it, the engine of that file also runs in this process,
without HTTP, before the routers. One server takes all loads; the number of routers changes.

Ray Serve has the settings of the environment and those of `serve-spec serve`. Merged chunks count
once, so CPU time per token is given, too.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import yaml

from serve_spec import LLM
from serve_spec.bench.online.client import Clients, Target
from serve_spec.bench.online.in_process import run_offline
from serve_spec.bench.online.load import ClosedLoop, CompletionRequest, LoadRun, text_requests
from serve_spec.bench.online.server import own_server, serve_command
from serve_spec.bench.report import append_record, environment, print_record
from serve_spec.serving.deployment.app import load_config

CLIENTS = "serving_path"
"""Role of this process and of its clients."""
PACED = Path("deploy/tiny.yaml")
"""Deployment whose engine the paced engine replaces."""
SETTLED_S = 4.0
"""Seconds until HAProxy knows new routers and connections to old ones are closed."""
REPORT_S = 3.0
"""Seconds until the newest state of the engine reaches the router."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def deployment(args: argparse.Namespace) -> dict[str, Any]:
    """Return the Serve file, with the paced engine unless another deployment is asked for."""
    file: dict[str, Any] = yaml.safe_load((args.deploy or PACED).read_text())
    engine = file["applications"][0].setdefault("args", {})
    if args.deploy is None:
        engine |= {
            "engine_loop": "benchmarks.paced_engine:PacedLoop",
            "max_num_seqs": max(args.streams),
            "num_cpus": 0.1,
            "speculative_algorithm": "NGRAM",
            "speculative_draft_model_path": None,
        }
    engine |= dict(setting.split("=", 1) for setting in args.set)
    return with_routers(file, args.routers[0])


def with_routers(file: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the Serve file with `count` routers."""
    app = file["applications"][0] | {"deployments": [{"name": "Router", "num_replicas": count}]}
    return file | {"applications": [app]}


def scale(file: dict[str, Any], count: int) -> None:
    """Give the running server `count` routers, and wait until they accept requests."""
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    if not ray.is_initialized():
        ray.init("auto", logging_level=logging.ERROR)
    client = _get_global_client()
    assert client is not None, "a server runs"
    client.deploy_apps(ServeDeploySchema.model_validate(with_routers(file, count)))
    while True:
        time.sleep(SETTLED_S)
        (app,) = serve.status().applications.values()
        states = app.deployments["Router"].replica_states
        if app.status == "RUNNING" and states == {"RUNNING": count}:
            return


def cpu_seconds() -> dict[int, tuple[str, float]]:
    """Return role and CPU seconds of this process and all its children."""
    parents, found = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            stat = (folder / "stat").read_text()
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        fields = stat[stat.rindex(")") + 2 :].split()
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        found[pid] = kind_of(title), (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
    return {pid: each for pid, each in found.items() if _is_below(pid, os.getpid(), parents)}


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor


def kind_of(title: str) -> str:
    """Return the role of a process by its title."""
    named = re.match(r"ray::(?:ServeReplica:\w+:)?(\w+)", title)
    if named:
        return named[1]
    if "spawn_main" in title:
        return CLIENTS
    others = ("raylet", "gcs_server", CLIENTS, "haproxy")
    return next((kind for kind in others if kind in title), "other")


def figures(run: LoadRun, num_streams: int) -> dict[str, Any]:
    """Return rates, gaps between chunks, and times to a first token.

    `first_together_p50_ms` is that of the first request of every stream: they arrive together.
    """
    served = [each for each in run.served if each.error is None]
    gaps = [1e3 * gap for each in served for gap in each.chunk_gaps_s]
    first = [1e3 * each.ttft_s for each in served]
    together = [1e3 * each.ttft_s for each in run.served[:num_streams] if each.error is None]
    return {
        "errors": len(run.served) - len(served),
        "seconds": round(run.seconds, 2),
        "chunks_per_second": round(sum(len(each.chunk_s) for each in served) / run.seconds, 1),
        "tokens_per_second": round(sum(each.num_tokens for each in served) / run.seconds, 1),
        "gap_p50_ms": round(median(gaps), 2),
        "gap_p99_ms": round(quantiles(gaps, n=100)[-1], 2),
        "first_token_p50_ms": round(median(first), 2),
        "first_together_p50_ms": round(median(together), 2),
        "client_cpu_share": round(run.client_cpu_fraction or 0.0, 2),
    }


def spent_figures(run: LoadRun, before: dict[int, tuple[str, float]]) -> dict[str, Any]:
    """Return CPU time per chunk and per token, by process."""
    spent: dict[str, float] = defaultdict(float)
    for pid, (kind, seconds) in cpu_seconds().items():
        spent[kind] += seconds - before.get(pid, (kind, 0.0))[1]
    chunks = sum(len(served.chunk_s) for served in run.served)
    tokens = sum(served.num_tokens for served in run.served)
    server = sum(seconds for kind, seconds in spent.items() if kind != CLIENTS)
    return {
        "cpu_us_per_chunk": round(1e6 * server / chunks, 1),
        "cpu_us_per_token": round(1e6 * server / tokens, 1),
        "by_process": {kind: round(1e6 * s / chunks, 1) for kind, s in sorted(spent.items())},
    }


def round_times(url: str) -> dict[str, Any]:
    """Return times of the newest rounds: see `shown`, or `paced_engine`."""
    time.sleep(REPORT_S)
    (state,) = httpx.get(f"{url}/server_info").raise_for_status().json()["internal_states"]
    paced = {name: state[name] for name in ("late_ms", "host_ms") if name in state}
    return paced or shown(state["speculation"])


def shown(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the fraction of the newest 1,024 rounds' time that the device waited for the host."""
    return {"idle_share": metrics["window"]["idle_share"]}


def main() -> None:
    """Print a line for every load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deploy", type=Path, help="Serve file whose engine is measured")
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 4], help="routers")
    parser.add_argument("--streams", type=int, nargs="+", default=[64], help="open requests")
    parser.add_argument(
        "--rounds", type=float, default=20.0, help="rounds per second of the paced engine"
    )
    parser.add_argument("--repetitions", type=int, default=2, help="runs of every load")
    add_load_options(parser)
    args = parser.parse_args()
    os.environ["SERVE_SPEC_PACED_ROUNDS"] = str(args.rounds)
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    file = deployment(args)
    engine = {k: v for k, v in file["applications"][0]["args"].items() if k != "engine_loop"}
    facts = environment(load_config(engine))
    append_record(args.json, {"section": "run", "environment": facts})
    for row in rows(file, args):
        print_record(args.json, section="load", **row)


def rows(file: dict[str, Any], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of every load on the engine alone, if possible, and on every server."""
    loads = [(streams, requests_of(streams, args)) for streams in args.streams]
    with ExitStack() as stack:
        alone = None
        if args.deploy is not None:
            alone = LLM(load_config(file["applications"][0]["args"]))
            run_offline(alone.engine, ClosedLoop(args.streams[-1]), loads[-1][1])
        path = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
        path.write(yaml.safe_dump(file))
        path.flush()
        url = stack.enter_context(own_server(serve_command(path.name, args.port)))
        clients = stack.enter_context(Clients(Target(url), args.clients))
        for streams, requests in loads:
            clients.run(ClosedLoop(streams), requests[:streams])
        for repetition in range(args.repetitions):
            for routers in (*([0] if alone else []), *args.routers):
                if routers:
                    scale(file, routers)
                for streams, requests in loads:
                    row = {"repetition": repetition, "routers": routers, "streams": streams}
                    load = ClosedLoop(streams)
                    if alone and not routers:
                        run = run_offline(alone.engine, load, requests)
                        yield row | figures(run, streams) | shown(alone.collector.snapshot())
                        continue
                    before = cpu_seconds()
                    run = clients.run(load, requests, poll_s=None)
                    row |= figures(run, streams) | spent_figures(run, before)
                    yield row | round_times(url)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the server, of `requests_of` and of the records."""
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="override of its engine"
    )
    parser.add_argument("--prompt-chars", type=int, default=400, help="characters per prompt")
    parser.add_argument("--output-tokens", type=int, default=192, help="tokens per request")
    parser.add_argument("--requests-per-stream", type=int, default=2, help="requests per stream")
    parser.add_argument("--fewest-requests", type=int, default=8, help="minimum requests per load")
    parser.add_argument("--clients", type=int, default=1, help="processes that share a load")
    parser.add_argument("--port", type=int, default=8123, help="HTTP port of the server")
    parser.add_argument("--json", type=Path, help="file to append every row to (JSON lines)")


def requests_of(streams: int, args: argparse.Namespace) -> list[CompletionRequest]:
    """Return the requests of a load."""
    return text_requests(
        max(streams * args.requests_per_stream, args.fewest_requests),
        prompt_chars=args.prompt_chars,
        output_tokens=args.output_tokens,
        temperature=0.0,
    )


if __name__ == "__main__":
    main()
