"""`serve-spec serve MODEL`: serve a model with Ray Serve until Ctrl-C.

MODEL is a hub id, a checkpoint's folder, a GGUF file, asset:NAME, a configuration (such as
configs/tiny.yaml) or a Serve config (such as deploy/tiny.yaml), whose unknown keys are errors,
although Ray would ignore them.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import shlex
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from serve_spec.config import ConfigError, RouterConfig, ServeSpecConfig
from serve_spec.config.flags import Parser, add_flags, add_model, flags_named, read_flags
from serve_spec.config.speculative import NO_DRAFT
from serve_spec.core.errors import CheckpointError
from serve_spec.serving.deployment.plan import Plan, check_model, read_plan
from serve_spec.serving.processes import exit_now, holder_of_port, stop_signals, take_signals

_CODE: dict[str, Any] = {"prompt": "class Stack:\n    def __init__(self):"}
_CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
_POLL_S = 0.25
_CONTROLLER_POLL_S = 0.05
_END_WITHIN_S = 10.0
"""How long Ray may take to end after the last request."""
_REACH_S = 5.0
"""How long the address of a Ray may take to accept a connection."""
_JOIN_S = 9.0
"""How long a Ray that was reached may take to answer."""
_JOIN_AS_CLIENT_S = 45.0
"""The same for `ray://`: Ray starts a process for each client first, and waits 30 s for it."""
_VITAL = ("gcs_server", "raylet")
# By default, glibc keeps what requests of many sizes freed in an arena of each thread.
_FLAT_MEMORY = {"MALLOC_ARENA_MAX": "2"}


class StartFailed(RuntimeError):
    """A checkpoint is refused, Ray is not reached, or an application failed to start."""


def main(argv: list[str]) -> int:
    """Run the command; return 0, 1 if the application does not start, 2 for invalid input."""
    parser = command_parser()
    args = parser.parse_args(argv)
    # Ray reports usage statistics by default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Serve's log stays in Ray's log folder; warnings of serve_spec are shown.
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    try:
        overrides = read_flags(args)
        if args.config is None:
            parser.error("give a MODEL: a hub id, a folder, asset:tiny, or a file")
        with flags_named(args):
            plan = read_plan(args.config, overrides)
        if args.address is None:
            _check_port(plan.host, plan.port)
        else:
            _check_address(args.address)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        with _refusing(args):
            plan = replace(plan, configs=tuple(config.download() for config in plan.configs))
    except StartFailed as error:
        print(error, file=sys.stderr)
        return 1
    if plan.is_open_to_all:
        print(
            f"warning: host={plan.host!r}: every machine that reaches it can use the server; set "
            "router.api_keys, or listen on 127.0.0.1",
            file=sys.stderr,
        )
    prepare_environment(plan)
    with stop_signals() as stop:
        return _serve(plan, args, stop)


@contextmanager
def _refusing(args: argparse.Namespace) -> Iterator[None]:
    """Raise what the body finds wrong with a checkpoint as StartFailed, with flags as typed."""
    try:
        with flags_named(args):
            yield
    except (ConfigError, CheckpointError, ValueError) as error:
        raise StartFailed(str(error)) from None


def _check(plan: Plan, args: argparse.Namespace) -> None:
    """Check every checkpoint, or raise StartFailed."""
    for config in plan.configs:
        with _timed(f"checking {config.model.path}"), _refusing(args):
            check_model(config)


T = TypeVar("T")


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in another thread, for which the process does not wait when it ends."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # raised where the result is read
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


@contextmanager
def _timed(what: str) -> Iterator[None]:
    """Print what the body does, and how long it took."""
    began = time.monotonic()
    # Line ends included, because two threads print.
    print(f"{what} ...\n", end="", flush=True)
    yield
    print(f"{what}: done in {time.monotonic() - began:.1f} s\n", end="", flush=True)


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of `serve-spec serve`."""
    parser = Parser(
        prog="serve-spec serve",
        usage="serve-spec serve MODEL [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, positional=True, default=None)
    parser.add_argument(
        "--address",
        default=os.environ.get("RAY_ADDRESS"),
        help="address of a running Ray cluster (default: $RAY_ADDRESS, else a new local cluster)",
    )
    parser.add_argument("--dashboard", action="store_true", help="start the Ray dashboard")
    add_flags(parser)
    return parser


def prepare_environment(plan: Plan) -> None:
    """Set Serve's environment variables that are not set; a running cluster keeps its own."""
    from serve_spec.serving.proxy.settings import (
        CALLBACK,
        CALLBACK_VARIABLE,
        HEADER_TIMEOUT_VARIABLE,
        own_settings,
    )

    router = plan.configs[0].router if plan.configs else RouterConfig()
    settings = {**own_settings(router), CALLBACK_VARIABLE: CALLBACK, **_FLAT_MEMORY}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if plan.configs:
        os.environ[HEADER_TIMEOUT_VARIABLE] = str(router.header_timeout_s)


def _serve(plan: Plan, args: argparse.Namespace, stop: threading.Event) -> int:
    """Deploy, print the URL, wait for `stop`, and shut down; return the exit status."""
    import ray
    from ray import serve

    own_cluster = args.address is None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        dashboard = _start_ray(plan, args)
    except StartFailed as error:
        print(error, file=sys.stderr)
        return 1
    take_signals(stop)  # `ray.init` replaces the handler for SIGTERM
    has_ended = threading.Event()
    if own_cluster:
        threading.Thread(target=_watch_ray, args=(stop, has_ended), daemon=True).start()
    try:
        status, has_served = _run(plan, stop, dashboard)
        drain_s = plan.drain_s if has_served else 0.0
        _exit_after(drain_s + 2 * _END_WITHIN_S, status)
        with redirect_stdout(io.StringIO()):
            _remove(plan, waits=has_served)
    finally:
        has_ended.set()
    # Ray prints the end of its own controller as a failed task.
    with redirect_stdout(io.StringIO()):
        _exit_after(_END_WITHIN_S, status)
        if own_cluster:
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    return status


def _start_ray(plan: Plan, args: argparse.Namespace) -> str:
    """Connect to a cluster, or start one while the checkpoints are checked; return its dashboard.

    Raises StartFailed: a checkpoint is refused, there is no cluster at the address, or a new one
    lacks the GPUs.
    """
    import ray

    # Most of it is importing torch; most of a start of Ray is waiting for its processes.
    checked = _in_thread(partial(_check, plan, args))
    size: dict[str, Any] = {"num_cpus": plan.num_cpus, "include_dashboard": args.dashboard}
    if args.address is not None:
        checked.result()  # before a cluster of others is touched
        size = {}
    try:
        with _timed("starting Ray"), _joining(args.address):
            context = ray.init(args.address or "local", logging_level=logging.ERROR, **size)
    except (ConnectionError, RuntimeError) as error:
        if args.address is None:
            raise
        raise StartFailed(_no_ray(args.address, str(error).partition("\n")[0])) from None
    try:
        checked.result()
        if args.address is None:
            with _refusing(args):
                check_gpus(plan, int(ray.cluster_resources().get("GPU", 0)))  # type: ignore[no-untyped-call]
        else:
            _print_unplaced(plan)
    except StartFailed:
        ray.shutdown()
        raise
    return str(context.dashboard_url or "")


def _run(plan: Plan, stop: threading.Event, dashboard: str) -> tuple[int, bool]:
    """Serve until `stop` is set; return the exit status, and whether the applications ran.

    The status is 1 if one does not start.
    """
    try:
        with _timed("starting the replicas"):
            _deploy(plan, stop)
    except StartFailed as error:
        print(error, file=sys.stderr)
        return 1, False
    has_served = not stop.is_set()
    if has_served:
        print(announcement(plan, dashboard), flush=True)
        stop.wait()
    print("shutting down ...", flush=True)
    return 0, has_served


def _watch_ray(stop: threading.Event, has_ended: threading.Event) -> None:
    """Exit if a process of Ray ends that the others cannot do without.

    Calls of Ray's that wait for it would block the main thread for a minute, and abort.
    """
    from ray._private import worker

    node: Any = worker._global_node
    while not has_ended.wait(_POLL_S):
        for name, process in node.dead_processes():
            if name in _VITAL and not has_ended.is_set():
                why = f"Ray's {name} has ended ({_cause(process.returncode)}); so does the server"
                exit_now(0 if stop.is_set() else 1, why)


def _cause(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def _exit_after(timeout_s: float, status: int) -> None:
    """End this process if it has not ended in time, such as in a call of Ray's."""
    timer = threading.Timer(
        timeout_s, exit_now, (status, "Ray does not end; its processes are killed")
    )
    timer.daemon = True
    timer.start()


def _remove(plan: Plan, *, waits: bool) -> None:
    """Delete the applications; if `waits`, wait for running requests, until a second Ctrl-C.

    This comes before Serve's shutdown, which closes the proxies that streams pass through.
    """
    from ray import serve

    names = {app["name"] for app in plan.deployment["applications"]}
    with suppress(KeyboardInterrupt):
        for name in names:
            serve.delete(name, _blocking=False)
        while waits and names & serve.status().applications.keys():
            time.sleep(_POLL_S)


def _deploy(plan: Plan, stop: threading.Event) -> None:
    """Deploy and wait until the application answers over HTTP, or `stop` is set."""
    from ray import serve
    from ray.serve._private.api import serve_start  # as `serve run FILE` does
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(plan.deployment)
    options = schema.http_options.model_dump()
    proxies = _in_thread(partial(serve_start, options, proxy_location=schema.proxy_location))
    # The applications are built while the proxies start.
    _controller(proxies).deploy_apps(schema)
    proxies.result()
    names = {app.name for app in schema.applications}
    printed: set[str] = set()
    while not stop.wait(_POLL_S):
        apps = serve.status().applications
        _print_news([apps[name] for name in names & apps.keys()], printed)
        for name in names & apps.keys():
            if apps[name].status == "DEPLOY_FAILED":
                raise StartFailed(f"application {name!r} failed to start:\n{_reasons(apps[name])}")
        running = [name for name in names & apps.keys() if apps[name].status == "RUNNING"]
        # Applications of others may not have /health.
        if len(running) == len(names) and (not plan.configs or _answers(f"{plan.url}/health")):
            return


def _controller(starting: Future[Any]) -> Any:
    """Return the client of Serve's controller as soon as there is one."""
    from ray.serve.context import _get_global_client

    while (client := _get_global_client(raise_if_no_controller_running=False)) is None:
        if starting.done():
            starting.result()  # raises why there is none
        time.sleep(_CONTROLLER_POLL_S)
    return client


def _print_news(apps: Iterable[Any], printed: set[str]) -> None:
    """Print what Serve says of the deployments, such as missing GPUs, once."""
    for deployment in (d for app in apps for d in app.deployments.values()):
        news = deployment.message.partition("\n")[0]
        if news and news not in printed:
            printed.add(news)
            print(news, flush=True)


def _reasons(app: Any) -> str:
    messages = [app.message, *(d.message for d in app.deployments.values())]
    return "\n".join(message for message in messages if message)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def announcement(plan: Plan, dashboard: str = "") -> str:
    """Return the URLs, whether the model speculates, and a curl command to try.

    dashboard: host and port of Ray's, if it runs.
    """
    from serve_spec.engine.chat_template import ChatTemplate

    if not plan.configs:
        return f"ready: {plan.url}"
    config = plan.configs[0]
    folder, file = config.model.tokenizer_folder, config.model.chat_template
    path, asked = "chat/completions", _CHAT
    if ChatTemplate.from_folder(folder, file).is_plain:
        path, asked = "completions", _CODE
    body = {"model": config.model.names[0], **asked, "max_tokens": 64, "temperature": 0}
    key = " -H 'Authorization: Bearer YOUR_API_KEY'" if config.router.api_keys else ""
    return (
        f"\nready: {config.model.names[0]} at {plan.url}   (Ctrl-C stops it)\n"
        f"speculation: {_speculation(config)}\n"
        f"status page: {plan.url}/\n{_dashboard_line(dashboard)}\n"
        f"curl -N {plan.url}/v1/{path} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(json.dumps({**body, 'stream': True}))}\n"
    )


def _speculation(config: ServeSpecConfig) -> str:
    """Say which drafts are made, or why none are."""
    speculative = config.speculative
    if not speculative.enabled:
        return NO_DRAFT
    draft = speculative.speculative_draft_model_path
    source = "" if draft is None else f" with {draft}"
    depth = "adaptive" if speculative.speculative_adaptive else "fixed"
    return f"{speculative.speculative_algorithm}{source}, {depth} depth"


def _dashboard_line(dashboard: str) -> str:
    if not dashboard:
        return ""
    token = "; its token: ray get-auth-token" if os.environ.get("RAY_AUTH_MODE") == "token" else ""
    return f"Ray dashboard: http://{dashboard}{token}\n"


def check_gpus(plan: Plan, available: int) -> None:
    """Raise ConfigError if replicas need more GPUs than a Ray has; Serve would wait for them."""
    for config in plan.configs:
        each, replicas = config.replica.num_gpus, config.replica.num_replicas
        why, fix = f"num_gpus={each}", "lower it"
        if each is None:
            is_on_gpus, ranks = config.model.device == "cuda", config.model.tensor_parallel_size
            each, why = float(is_on_gpus * ranks), "device='cuda'"
            fix = "lower tensor_parallel_size" if available else "use device='cpu' or 'auto'"
        if each <= available < each * replicas:
            why, fix = f"num_replicas={replicas}", "lower it"
        if each * replicas > available:
            raise ConfigError(
                f"{why}: {replicas} replica(s) need {each * replicas:g} GPU(s), and Ray sees "
                f"{available} here; {fix}, or give --address of a cluster that has them"
            )


def _print_unplaced(plan: Plan) -> None:
    """Print which replicas no node of the cluster can hold; an autoscaler may still add one."""
    import ray

    from serve_spec.serving.deployment.app import with_gpus
    from serve_spec.serving.deployment.engine_actor import why_unplaced

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    for config in plan.configs:
        if (why := why_unplaced(with_gpus(config), nodes)) is not None:
            print(why, file=sys.stderr, flush=True)


def _no_ray(address: str, why: str) -> str:
    fix = "start one (ray start --head), or leave --address and RAY_ADDRESS out"
    return f"address={address!r}: {why}; {fix}"


def _check_address(address: str) -> None:
    """Raise ConfigError unless a TCP connection to HOST:PORT is accepted; Ray would try on."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # `auto` and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(_no_ray(address, f"nothing answers there ({error})")) from None


@contextmanager
def _joining(address: str | None) -> Iterator[None]:
    """End this process if the Ray at `address` does not answer to the body in time."""
    if address is None:
        yield
        return
    within_s = _JOIN_AS_CLIENT_S if address.startswith("ray://") else _JOIN_S
    why = _no_ray(address, f"what listens there did not answer as Ray within {within_s:g} s")
    timer = threading.Timer(within_s, exit_now, (1, why))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_port(host: str, port: int) -> None:
    """Raise ConfigError for a port in use; Serve would wait for it forever."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            holder = holder_of_port(port)
            why = f"{error.strerror}{f' by {holder}' if holder else ''}"
            raise ConfigError(f"port={port}: {why}; choose another --port") from None
